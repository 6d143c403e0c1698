"""Programs in tree mode (`graph=False`, `set_graph_mode(False)`), in both libraries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.parity.programs import Programs, attempt, compare, mesh_of, models

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference warns of its own plans

program = Programs()

P = jax.sharding.PartitionSpec
X = jnp.arange(4.0)
XS = jnp.arange(6.0).reshape(3, 2)


def net(lib, n=4):
    """A module with a vector, a scalar, and a list of modules."""
    return lib.Dict(
        w=lib.Param(jnp.arange(float(n))),
        c=lib.BatchStat(jnp.zeros(())),
        inner=lib.List([lib.Dict(b=lib.Param(jnp.full(n, float(i)))) for i in range(2)]),
    )


def mlp(lib, seed):
    """Layers with parameters and statistics."""
    rngs = lib.Rngs(seed)
    return lib.Sequential(
        lib.Linear(2, 3, rngs=rngs),
        jnp.tanh,
        lib.BatchNorm(3, epsilon=1.0, rngs=rngs),
        lib.Linear(3, 1, rngs=rngs),
    )


def use(m, x):
    """Reads everything, writes `w` and the first `b`."""
    m.w[...] = m.w * 2
    m.inner[0].b[...] = m.inner[0].b + x
    return m.w * x + m.c + m.inner[1].b


def chosen(lib, some, other, make=net):
    """A module of settings, for the module that `make` makes."""
    return lib.prefix(make(lib), {lib.BatchStat: other, ...: some}, graph=False)


# Modules as prefixes -------------------------------------------------------------------------------


@program()
def what_prefix_gives(lib):
    m = net(lib)
    seen = []

    def note(path, x):
        seen.append((path, type(x).__name__.removesuffix("Impl")))
        return len(seen)

    tree = {"m": m, "k": jnp.ones(2), "s": lib.state(m)}
    out = lib.prefix(tree, note, graph=False)
    shared = lib.Dict(a=m, b=m)
    axes = chosen(lib, 0, None)
    return [
        seen,
        out["m"].w,
        out["k"],
        out["m"].inner[1].b,
        out["s"]["inner"][1]["b"],
        type(out["m"]).__name__,
        type(out["s"]).__name__,
        (axes.w, axes.c, axes.inner[0].b),
        lib.prefix(shared, {...: 0}, graph=False).b.w,
        lib.prefix(m.w, {lib.Param: 3}, graph=False),
        attempt(lambda: lib.prefix(m, {lib.Param: 0}, graph=False)),
        jax.tree.structure(jax.tree.map(lambda x: 0, axes, is_leaf=lambda x: x is None))
        == jax.tree.structure(jax.tree.map(lambda x: 0, lib.prefix(m, {...: 1}, graph=False))),
    ]


@program()
def prefix_for_plain_jax(lib):
    m, mesh = net(lib), mesh_of(2)
    read = lambda m, x: m.w * x + m.inner[1].b
    sharding = lambda *p: jax.NamedSharding(mesh, P(*p))
    state = lib.state(m)
    by_path = {lib.PathContains("c"): None, ...: 0}
    return [
        jax.vmap(read, in_axes=(chosen(lib, 0, None), 0))(m, X),
        jax.vmap(lambda s: s["w"] * 2, in_axes=(lib.prefix(state, by_path, graph=False),))(state),
        jax.vmap(lambda x: net(lib, 2), out_axes=chosen(lib, 1, None))(X).w,
        jax.jit(read, in_shardings=(chosen(lib, sharding("data"), sharding()), None))(m, X),
        jax.shard_map(
            read,
            mesh=mesh,
            in_specs=(chosen(lib, P("data"), P()), P("data")),
            out_specs=P("data"),
        )(m, X),
    ]


@program("both")
def prefix_for_vmap_and_pmap(lib, mode):
    m, n = net(lib), net(lib, 2)
    axes = chosen(lib, 0, None)
    partial = chosen(lib, 0, None)
    partial.inner = 0
    with_array = lib.Dict(a=X, v=lib.BatchStat(2.0))
    array = lib.prefix(with_array, {lib.BatchStat: None, ...: 0}, graph=False)
    nested = lambda d: use(d["m"], d["x"][0])
    return [
        lib.vmap(use, in_axes=(axes, 0), **mode)(m, X),
        lib.vmap(use, in_axes=(partial, None), **mode)(m, 3.0),
        lib.vmap(nested, in_axes=({"m": axes, "x": [0]},), **mode)({"m": m, "x": [X]}),
        lib.pmap(use, in_axes=(axes, 0), **mode)(n, X[:2]),
        lib.vmap(lambda x: net(lib, 3), out_axes=chosen(lib, 1, None), **mode)(X),
        lib.vmap(lambda x: (x, net(lib, 3)), out_axes=(0, axes), **mode)(X),
        lib.vmap(lambda t: t.a * t.v, in_axes=(array,), **mode)(with_array),
        m,
        n,
    ]


@program("tree")
def prefix_for_scan(lib, mode):
    m = net(lib)
    axes = chosen(lib, 0, None)
    return [
        lib.scan(use, in_axes=(axes, 0), out_axes=0, **mode)(m, X),
        lib.scan(
            lambda c, m, x: (c + 1, use(m, x)),
            in_axes=(lib.Carry, axes, 0),
            out_axes=(lib.Carry, 0),
            **mode,
        )(0.0, m, X),
        lib.scan(lambda x: net(lib, 3), in_axes=0, out_axes=chosen(lib, 1, 0), **mode)(X),
        lib.scan(
            lambda x: net(lib, 3), in_axes=0, out_axes=chosen(lib, 0, 0), reverse=True, **mode
        )(X),
        attempt(
            lambda: lib.scan(
                lambda m, x: (m, x),
                in_axes=(chosen(lib, lib.Carry, None), 0),
                out_axes=(lib.Carry, 0),
                **mode,
            )(m, X)
        ),
        m,
    ]


@program("tree")
def prefix_for_jit_and_shard_map(lib, mode):
    m, mesh = net(lib), mesh_of(2)
    rows, whole = (jax.NamedSharding(mesh, P(*p)) for p in (("data",), ()))
    where = lambda v: v.get_raw_value().sharding.is_equivalent_to(rows, 1)
    shards = chosen(lib, rows, whole)
    out = [lib.jit(use, in_shardings=(shards, None), **mode)(m, X), where(m.w), where(m.inner[0].b)]
    new = lib.jit(lambda x: net(lib), out_shardings=shards, **mode)(X)
    out += [where(new.w), where(new.inner[1].b), new]
    specs = chosen(lib, P("data"), P())
    f = lib.shard_map(use, mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"), **mode)
    g = lib.shard_map(lambda x: net(lib), mesh=mesh, in_specs=P("data"), out_specs=specs, **mode)
    return [*out, f(m, X), m, g(X)]


@program("updates", "plain", "tree", "both")
def states_as_prefixes(lib, mode):
    m = net(lib)
    state = lib.state(m)
    pure = lib.as_pure(state)
    axes = lib.State({"w": 0, "c": None, "inner": 0})
    full = lib.prefix(pure, lambda path, x: 0 if x.ndim else None, graph=False)
    read = lambda s, x: s["w"] * x + s["inner"][0]["b"]
    return [
        lib.vmap(read, in_axes=(axes, 0), **mode)(state, X),
        lib.vmap(read, in_axes=(axes, 0), **mode)(pure, X),
        lib.vmap(read, in_axes=(full, 0), **mode)(pure, X),
        lib.vmap(read, in_axes=(full, 0), **mode)(state, X),
        lib.scan(read, in_axes=(full, 0), out_axes=0, **mode)(state, X),
        lib.vmap(lambda x: lib.state(net(lib, 3)), out_axes=axes, **mode)(X)["w"],
    ]


@program("tree", newer=True)
def prefixes_that_do_not_fit(lib, mode):
    m = net(lib)
    other = lib.prefix(lib.Dict(w=lib.Param(1.0)), {...: 0}, graph=False)
    more = lib.prefix(lib.Dict(m=m, z=lib.Param(1.0)), {...: 0}, graph=False)
    run = lambda axes: attempt(lambda: lib.vmap(use, in_axes=(axes, 0), **mode)(m, X))
    return [
        run(other),
        run(more),
        run(lib.Param(0)),
        run(lib.State({"w": 0})),
        attempt(lambda: lib.vmap(use, in_axes=(None, other), **mode)(m, X)),
        attempt(lambda: lib.vmap(lambda x: m, out_axes=other, **mode)(X)),
        m,
    ]


# Programs ------------------------------------------------------------------------------------------


@program("tree")
def what_grad_returns(lib, mode):
    m = models(lib).Counted()
    grads = lib.grad(lambda m, x: m(x) * 3, **mode)(m, 2.0)
    both = lib.grad(lambda m, x: m(x) * 3, argnums=(0, 1), **mode)(m, 2.0)
    wrt = lib.grad(lambda v, x: v * x, **mode)(m.w, 2.0)
    state = lib.grad(lambda s: s["w"][...] ** 2 * s["c"][...], **mode)(lib.state(m))
    tree = lib.grad(lambda t: t["m"].w * t["x"][0], **mode)({"m": m, "x": [4.0]})
    return type(grads).__name__, grads, both, wrt, state, tree, m


@program("tree")
def grads_that_are_modules_go_on(lib, mode):
    m = mlp(lib, 0)
    grads = lib.grad(lambda m: (m(XS) ** 2).mean(), **mode)(m)
    leaves = jax.tree.leaves(lib.state(grads))
    scaled = jax.tree.map(lambda g: g * 2, grads)
    return [
        type(grads).__name__,
        len(leaves),
        sorted(map(str, dict(lib.to_flat_state(lib.state(grads, lib.Param))))),
        lib.state(scaled, lib.Param),
        lib.as_pure(lib.state(grads, lib.Param)),
    ]


@program("tree")
def what_grad_of_diff_state_does(lib, mode):
    m = models(lib).Counted()
    diff = lib.DiffState(0, lib.Param)
    return [
        attempt(lambda: jax.tree.leaves(lib.grad(lambda m: m(2.0), argnums=0, **mode)(m))),
        attempt(lambda: lib.grad(lambda m: m(2.0), argnums=3, **mode)(m)),
        attempt(lambda: lib.grad(lambda m: (m(2.0), 1.0), **mode)(m)),
        attempt(lambda: lib.grad(lambda m: jnp.ones(2) * m(2.0), **mode)(m)),
        diff.argnum,
        m,
    ]


@program("tree")
def branches_that_differ(lib, mode):
    m = models(lib).Counted()
    run = lambda a, b: attempt(lambda: lib.cond(True, a, b, m, **mode))
    return [
        run(lambda m: m.w * 1, lambda m: (m.w * 1,)),
        run(lambda m: m.w * 1, lambda m: jnp.ones(2)),
        run(lambda m: models(lib).Counted(1.0), lambda m: models(lib).Vector()),
        m,
    ]


@program("tree")
def random_streams(lib, mode):
    rngs = lib.Rngs(0, dropout=1)
    draw = lib.jit(lambda rngs: rngs.dropout.uniform((2,)), **mode)
    forked = rngs.fork(split=3)
    each = lib.vmap(lambda rngs: rngs.normal((2,)), **mode)(forked)
    drop = lib.Dropout(0.5, rngs=rngs)
    scanned = lib.scan(
        lambda rngs, x: (rngs, rngs.uniform()),
        in_axes=(lib.Carry, 0),
        out_axes=(lib.Carry, 0),
        **mode,
    )(rngs, X)[1]
    return (
        draw(rngs),
        draw(rngs),
        each,
        lib.jit(lambda d, x: d(x), **mode)(drop, jnp.ones(6)),
        (
            scanned,
            rngs.dropout.count,
            rngs.default.count,
        ),
    )


@program("tree")
def split_streams(lib, mode):
    rngs = lib.Rngs(0)
    node = lib.Dict(drop=lib.Dropout(0.5, rngs=rngs))
    split = attempt(lambda: lib.split_rngs(rngs, splits=2, graph=False))
    out = attempt(lambda: rngs.params.count)
    backups = attempt(lambda: lib.fork_rngs(node, graph=False))
    lib.reseed(node, default=3, graph=False)
    return type(split).__name__, out, type(backups).__name__, node.drop.rngs


@program("tree")
def sharing_is_refused(lib, mode):
    m = models(lib).Pair()
    v = lib.Param(jnp.ones(2))
    two = lambda a, b: a[...] + b[...]
    loop = lambda run: attempt(lambda: run())
    return [
        loop(lambda: lib.jit(lambda m: 1, **mode)(m)),
        loop(lambda: lib.jit(two, **mode)(v, v)),
        loop(lambda: lib.grad(lambda a, b: two(a, b).sum(), **mode)(v, v)),
        loop(lambda: lib.vmap(two, **mode)(v, v)),
        loop(lambda: lib.scan(lambda c, a: (c, a[...]), **mode)(v, v)),
        loop(lambda: lib.cond(True, two, two, v, v, **mode)),
        loop(lambda: lib.remat(two, **mode)(v, v)),
        loop(lambda: lib.vjp(two, v, v, **mode)[0]),
        loop(lambda: lib.eval_shape(two, v, v, **mode)),
        loop(lambda: lib.checkify(two, **mode)(v, v)),
        loop(lambda: lib.split(m, graph=False)),
        loop(lambda: lib.state(m, graph=False)),
        loop(lambda: lib.clone(m, graph=False)),
        loop(lambda: list(lib.iter_modules(m, graph=False))),
    ]


@program("both")
def results_that_alias(lib, mode):
    m = models(lib).Counted()
    tree = {"graph": False} == mode
    run = lambda f: attempt(lambda: f())
    return [
        tree,
        run(lambda: lib.jit(lambda m: m, **mode)(m).w),
        run(lambda: lib.jit(lambda m: (m, m), **mode)(m)),
        run(lambda: lib.jit(lambda m: m.w, **mode)(m)),
        run(lambda: lib.jit(lambda m: [m.w * 1, m.c], **mode)(m)),
        run(lambda: lib.vmap(lambda m, x: m, in_axes=(None, 0), out_axes=None, **mode)(m, X).w),
        run(lambda: lib.remat(lambda m: m, **mode)(m).w),
        run(lambda: lib.cond(True, lambda m: m.w, lambda m: m.w, m, **mode)),
        run(lambda: lib.grad(lambda m: (m.w * 1, m), has_aux=True, **mode)(m)[1].w),
        run(lambda: lib.vjp(lambda m: m.w, m, **mode)[0]),
    ]


@program("tree")
def structure_does_not_propagate(lib, mode):
    m = lib.Dict(w=lib.Param(jnp.ones(2)), c=lib.BatchStat(jnp.zeros(())))

    def f(m):
        m.new = lib.Param(jnp.ones(3))
        m.c[...] += 1
        m.name = "x"
        return m.w * 1

    out = lib.jit(f, **mode)(m)
    old = lib.jit(lambda m: delattr(m, "c"), **mode)(m)
    return out, old, sorted(vars(m).keys() - {"_pytree__state", "_pytree__nodes"}), m


@program("tree")
def arrays_written_to_attributes(lib, mode):
    m = lib.Dict(a=jnp.ones(2), v=lib.Param(jnp.zeros(2)))

    def f(m):
        m.a = m.a + 1
        m.v[...] = m.a
        return m.a * 1

    out = [lib.jit(f, **mode)(m), lib.remat(f, **mode)(m), lib.vmap(f, **mode)(m)]
    arrays = lib.Dict(a=jnp.ones(2))

    def grow(m):
        m.a = m.a + 1
        m.name = "grown"
        return m, [m]

    for transform in (lib.jit, lib.remat, lib.vmap):
        new, (again,) = transform(grow, **mode)(arrays)
        out += [new.a, again.a, new.name, new is arrays, arrays.a, hasattr(arrays, "name")]
    new = lib.cond(True, lambda m: grow(m)[0], lambda m: grow(m)[0], arrays, **mode)
    same = lib.vmap(lambda m: m, in_axes=None, out_axes=0, axis_size=2, **mode)(arrays)
    state = lib.jit(lambda s: s, **mode)(lib.State({"a": jnp.ones(2)}))
    return out, m.a, m.v, new.a, new.name, arrays.a, same.a, state


@program("both")
def functions_of_the_graph(lib, mode):
    m = net(lib)
    tree = {"graph": False}
    graphdef, params, rest = lib.split(m, lib.Param, ..., **tree)
    back = lib.merge(graphdef, params, rest)
    return [
        back,
        lib.state(m, lib.Param, **tree),
        lib.clone(m, **tree),
        lib.map(lambda path, x: x if path[-1] != "w" else x[...] * 2, m, **tree).w,
        [str(path) for path, _ in lib.iter_children(m, **tree)],
        [type(x).__name__ for _, x in lib.iter_modules(m, **tree)],
        [
            (path, type(x).__name__)
            for path, x in lib.iter_graph(m, **tree)
            if isinstance(x, lib.Variable)
        ],
        attempt(lambda: lib.recursive_map(lambda path, x: x, m, **tree).w),
        lib.graphdef(m, **tree) == lib.split(m, **tree)[0],
    ]


@program()
def walks_of_static_attributes_and_none(lib):
    m = lib.Dict(
        a=lib.Param(jnp.ones(2)), n=3, t=(1, 2), none=None, some=lib.data([None, 5, "x"]), z=None
    )
    found = []
    for graph in (True, False):
        for root in (m, [m, 3, None, "x"]):
            seen = []
            lib.recursive_map(
                lambda path, x, seen=seen: (seen.append(path), x)[1], root, graph=graph
            )
            walk = [(p, type(v).__name__) for p, v in lib.iter_graph(root, graph=graph)]
            found += [
                [path for path in seen if "_pytree" not in str(path)],
                [(p, name) for p, name in walk if "_pytree" not in str(p) and "Array" not in name],
            ]
        again = lib.recursive_map(lambda path, x: 7 if path[-1:] == ("n",) else x, m, graph=graph)
        found += [again["n"], again["t"], again["none"]]
        for leaf in (m["a"], jnp.ones(1), 3):
            found += [
                attempt(lambda leaf=leaf, graph=graph: list(lib.iter_children(leaf, graph=graph))),
                attempt(
                    lambda leaf=leaf, graph=graph: list(lib.iter_module_children(leaf, graph=graph))
                ),
            ]
    return found


@program()
def the_mode_of_a_block(lib):
    m, shared = models(lib).Counted(), models(lib).Pair()
    out = []
    with lib.set_graph_mode(False):
        out.append(attempt(lambda: lib.jit(lambda m: 1)(shared)))
        out.append(attempt(lambda: lib.jit(lambda m: 1, graph=True)(shared)))
        out.append(lib.jit(lambda m: m(1.0))(m))
        out.append(lib.grad(lambda m: m(1.0))(m))
        out.append(attempt(lambda: lib.split(shared)))
        out.append(type(lib.prefix(m, {...: None})).__name__)
        out.append(lib.vmap(lambda m, x: m.w * x, in_axes=(lib.prefix(m, {...: None}), 0))(m, X))
    out.append(attempt(lambda: lib.jit(lambda m: 1)(shared)))
    with lib.set_graph_updates(False):
        out.append(lib.jit(lambda m: m(1.0))(m))
        out.append(type(lib.grad(lambda m: m(1.0))(m)).__name__)
        out.append(attempt(lambda: lib.jit(lambda m: m.w)(m)))
        with lib.set_graph_mode(False):
            out.append(lib.jit(lambda m: m(1.0))(m))
    return out, m


@program()
def functions_made_before_the_mode_is_set(lib):
    shared = models(lib).Pair()
    f = lib.jit(lambda m: m.a.sum())
    g = lib.vmap(lambda m, x: m.a * x, in_axes=(None, 0))
    out = [f(shared), g(shared, X)]
    with lib.set_graph_mode(False):
        made = lib.jit(lambda m: m.a.sum())
        out += [attempt(lambda: f(shared)), attempt(lambda: g(shared, X))]
    return [*out, attempt(lambda: made(shared))]


@pytest.mark.parametrize("run", program.found)
def test_program(run):
    compare(run)
