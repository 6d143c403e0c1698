"""Transforms beside the reference: lines and programs that give the same with both, in every mode."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

import nnxlite as nnx
from tests.parity.layers import ref
from tests.parity.programs import Lines, Programs, models

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference warns of its own plans

lines, program = Lines(), Programs()
PLAIN = ("plain", "tree")
TWO = ("updates", "plain")
ALL = ("updates", *PLAIN)


def small(lib):
    """Modules, functions that do something wrong with one, and other arguments."""
    made = models(lib)

    def adds(m, *rest):
        m.new = lib.Param(1.0)
        return (m, *rest) if rest else m

    def shape(m, *rest):
        m.w[...] = jnp.ones(2)
        return (m, *rest) if rest else m

    def drift(m, *rest):
        m.c[...] = m.c + 0.5 > 0
        return (m, *rest) if rest else m

    def marks(m):
        m.w.set_metadata(note=1)
        return m.w * 1

    def noted(x):
        """Its documentation."""
        return x

    noted.note = "text"

    def grows(m):
        m.a = m.a + 1
        m.name = "grown"
        return m, [m]

    m, n, pair, single = made.Counted(), made.Counted(3.0), made.Pair(), made.Vector()
    m.note = "text"
    vec, v, i = made.Vector(c=jnp.zeros(3)), lib.Param(jnp.ones(2)), lib.Variable(jnp.array(1))
    a, rngs, xs = lib.Dict(a=jnp.ones(2)), lib.Rngs(0, dropout=1), jnp.ones(3)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    st = lib.State({"w": jnp.ones((3, 2)), "b": {"c": jnp.arange(3.0)}})
    Counted, Vector, C, P = made.Counted, made.Vector, lib.Carry, jax.sharding.PartitionSpec
    names = lambda f: (f.note, f.__name__, f.__qualname__, f.__module__, f.__doc__)
    call, one, read = lambda m, x: m(x), lambda m: 1.0, lambda m, x: m.w * x
    step, two = lambda c, x: (c, x), lambda a, b: a[...] + b[...]
    axes = lambda m, some, rest: lib.prefix(m, {lib.BatchStat: rest, ...: some}, graph=False)
    return {"checkify": checkify, **{k: x for k, x in locals().items() if k != "lib"}}


lines(
    "metadata",
    small,
    """
    lib.jit(marks, **mode)(m)
    lib.grad(marks, **mode)(m)
    lib.vjp(marks, m, **mode)[0]
    lib.cond(True, marks, marks, m, **mode)
    lib.cond(True, marks, one, m, **mode)
    lib.vmap(marks, **mode)(vec)
    lib.scan(marks, in_axes=0, out_axes=0, **mode)(vec)
    lib.eval_shape(marks, m, **mode)
    """,
    *PLAIN,
)
lines(
    "jit",
    small,
    """
    lib.jit(lambda m, x=2.0, *a, k=3.0, **r: m(x) + k + sum(a) + sum(r.values()), **mode)(m, 1.0, 2.0, z=2.0)
    lib.jit(fun=lambda m: m.w * 1, **mode)(m)
    lib.remat(f=lambda m: m.w * 1, **mode)(m)
    lib.checkify(Counted.__call__, **mode)(m, 1.0)[1]
    lib.checkify(lambda v, i: v[...][i], errors=checkify.index_checks, **mode)(v, 5)[0].throw()
    lib.grad(lambda s: s['w'][...] ** 2, **mode)(lib.state(m))
    """,
    *ALL,
)
lines(
    "structure",
    small,
    """
    (lambda x: (x.a is pair.a, x.b[0] is x.a, x.b is pair.b, x))(lib.clone(pair, variables=False))
    lib.pop([m, n], lib.BatchStat, lib.Param)
    lib.pop(m, lib.Cache, lib.Param)
    lib.pop(m, lib.Param, ...)
    lib.pop(m)
    lib.jit(Counted)(3.0)  # newer
    lib.jit(Counted.make)(3.0)
    lib.make_jaxpr(call, graph_updates=False)(m, 2.0).jaxpr.eqns[0].primitive.name
    lib.cached_partial(lib.jit(lambda m, n, x: (m, n(x))), m)(n, 2.0)[0] is m
    lib.cached_partial(lib.jit(lambda m: setattr(m, 'size', 3)), m)()
    lib.cached_partial(lib.jit(adds), m)()
    (lambda f: (f(m, 2.0), f.jitted_fn._cache_size(), lib.cached_partial(f, m).jitted_fn is f.jitted_fn))(lib.jit(call))
    lib.cached_partial(lib.vmap(read, in_axes=(None, 0)), m)(xs)
    lib.custom_vjp(lambda m: m.w * 1.0)(m)
    lib.grad(lambda a: a[0] * a[1].w)([m.w, m])
    lib.grad(lambda v, m: v * m.w, argnums=(0, 1))(m.w, m)
    lib.grad(lambda ms: ms[0].w * ms[1].w, argnums=lib.DiffState(0, lib.Param))([m, m])
    lib.grad(lambda x, a, b: x * a * b * 3, argnums=(2, 1))(1.0, m.w, m.w)
    lib.grad(lambda s: s['a'] * s['b'])(lib.State({'a': m.w, 'b': m.w}))
    lib.fori_loop(0, 2, lambda i, c: (n, c[1] + i), (m, 0))[0] is n
    lib.fori_loop(0, 2, lambda i, m: adds(m), m)
    lib.fori_loop(0, 2, lambda i, m: (setattr(m, 'size', 3), m)[1], m)
    lib.while_loop(lambda m: False, adds, m)
    lib.fori_loop(0, 2, lambda i, c: Counted(c.w * 2), m) is m
    [lib.cond(f, lambda: m, lambda: n).w[...] for f in (True, False)]
    lib.scan(lambda c, x: (lib.Param(c + 1), x))(lib.Cache(1.0), xs)
    lib.scan(lambda m, x: adds(m, x))(m, xs)
    lib.scan(lambda c, x: (c, m))(0.0, xs)
    lib.cond(True, adds, one, m)
    lib.cond(True, lambda _: n, lambda m: m, m)
    lib.split_rngs(splits=3)(lib.vmap(lambda r: r.dropout.normal(())))(rngs)
    lib.vmap(lambda m: m.w * 1, in_axes=(lib.StateAxes({lib.Param: 0}),))(single)
    lib.vmap(lambda a, b: 1.0, in_axes=(lib.StateAxes({lib.Param: 0, ...: None}), 0))(vec, vec)
    lib.scan(lambda c, x: (jax.tree.map(lambda a: a + x, c), x))(lib.Cache(1.0), xs)
    lib.scan(lambda c, x: (lib.Cache(c + 1, note=2), x))(lib.Cache(1.0), xs)
    lib.scan(lambda c, x: (c + 1, x))(lib.Cache(1.0), xs)
    lib.scan(lambda c, k: (c + 1, lib.Linear(2, 2, rngs=lib.Rngs(k))))(0, jax.random.split(rngs(), 3))
    lib.scan(lambda c: c, in_axes=C, out_axes=C, length=3)(1.0, 2.0)
    lib.scan(lambda c, x=1: c, in_axes=C, out_axes=C, length=3)(1.0, x=2)
    lib.jit(lambda m: lib.cond(m.w[...] > 0, lambda: m, lambda: m))(m) is m
    """,
)
lines(
    "without updates",
    small,
    """
    lib.jvp(lambda x, y: (x * y, {'y': y * 2}), (2.0, 3.0), (1.0, 0.5), has_aux=True, **mode)
    lib.jvp(lambda m, x: (m.w * x, m(x)), (m, 2.0), (jax.tree.map(jnp.ones_like, m), 0.5), has_aux=True, **mode)
    lib.vjp(lambda m, x: (m.w * x, m(x)), m, 2.0, has_aux=True, **mode)[::2]
    lib.jit(lambda m: (m, m), **mode)(m)
    lib.grad(lambda a, b: two(a, b).sum(), **mode)(v, v)
    lib.remat(two, **mode)(v, v)
    lib.vjp(two, v, v, **mode)[0]
    lib.vmap(lambda m: m, in_axes=None, axis_size=2, **mode)(m)
    lib.grad(lambda m: (m.w * 1.0, m), has_aux=True, **mode)(m)
    lib.fori_loop(0, 2, lambda i, c: m, n, **mode)
    lib.jit(grows, **mode)(a)[0].name
    lib.remat(grows, **mode)(a)[1][0].a
    lib.vmap(grows, **mode)(a)[0].a
    lib.vmap(lambda m: m, in_axes=None, out_axes=0, axis_size=2, **mode)(a).a
    lib.cond(True, lambda m: grows(m)[0], lambda m: grows(m)[0], a, **mode).name
    lib.jit(adds, **mode)(n)
    """,
    *PLAIN,
)
lines(
    "tree mode",
    small,
    """
    lib.eval_shape(two, v, v, graph=False)
    lib.split(pair, graph=False)
    [x.w is m.w for x in (lib.clone(m, variables=False, graph=False), lib.clone(m, graph=False))]
    [(p, type(x).__name__) for p, x in lib.iter_graph(m, graph=False) if isinstance(x, lib.Variable)]
    lib.split_rngs(rngs, splits=2, graph=False) is rngs
    lib.reseed(rngs, default=3, graph=False)
    lib.prefix(m, {lib.Param: 0}, graph=False)
    axes(m, 0, None).w, axes(m, 0, None).c
    lib.prefix({'m': m, 'k': xs}, lambda path, x: len(path), graph=False)['m'].w
    jax.vmap(read, in_axes=(axes(vec, 0, 0), 0))(vec, xs)
    lib.vmap(read, in_axes=(axes(vec, 0, 0), 0), graph=False)(vec, xs)
    lib.vmap(read, in_axes=(axes(vec, None, 0), 0), graph=False)(vec, xs)
    lib.scan(read, in_axes=(axes(vec, 0, 0), 0), out_axes=0, graph=False)(vec, xs)
    lib.vmap(read, in_axes=(lib.Param(0), 0), graph=False)(vec, xs)
    lib.vmap(read, in_axes=(axes(pair.b, 0, 0), 0), graph=False)(vec, xs)
    lib.vmap(lambda s: s['w'] * 2, in_axes=(lib.State({'w': 0, 'b': None}),), graph=False)(st)
    jax.tree.leaves(lib.grad(lambda m: m(2.0), argnums=0, graph=False)(m))
    lib.cond(True, lambda m: m.w * 1, lambda m: (m.w * 1,), m, graph=False)
    """,
)
lines(
    "branches",
    small,
    """
    lib.cond(pred=True, true_fun=lambda: 1.0, false_fun=lambda: 2.0, **mode)
    lib.switch(index=0, branches=[lambda: 1.0, lambda: 2.0], **mode)
    lib.while_loop(lambda m: False, shape, m, **mode)
    lib.while_loop(lambda m: False, drift, m, **mode)
    lib.fori_loop(0, 2, lambda i, m: drift(m), m, **mode)
    lib.fori_loop(lower=0, upper=2, body_fun=lambda i, m: (m(1.0), m)[1], init_val=m, **mode).c
    lib.while_loop(lambda c: (c[1].normal() > -3.0) & (c[0] < 4.0), lambda c: (c[0] + 1.0, c[1]), (0.0, rngs), **mode)
    """,
    "updates",
    "plain",
    "tree",
)
lines(
    "mapped",
    small,
    """
    lib.vmap(lambda m, x: setattr(m.c, 'value', x), in_axes=(None, 0), **mode)(single, xs)
    lib.vmap(lambda a, b: jnp.ones(()), in_axes=(0, None), axis_size=3, **mode)(vec, vec)
    lib.vmap(lambda m, d: m.w * d['a'] + d['b'][0], in_axes=(None, {'a': 0, 'b': [1]}), **mode)(vec, {'a': xs, 'b': [jnp.ones((3, 3))]})
    lib.vmap(lambda x: (x, 1.0), out_axes=(0, None), **mode)(xs)
    lib.vmap(lambda: 1.0, axis_size=2, **mode)()
    lib.vmap(lambda m, x, k=0.0: m(x) + k, **mode)(vec, x=xs, k=xs)
    lib.vmap(lambda s: s, out_axes=1, **mode)(lib.State({'a': jnp.ones((2, 3))}))
    lib.pmap(lambda x, k, y: x * k + y, static_broadcasted_argnums=1, in_axes=(0, None, 0), **mode)(xs, 3, xs)
    lib.shard_map(lambda m, x: x * m.w, mesh=mesh, in_specs=(P(), P('data')), out_specs=P('data'), **mode)(m, jnp.ones(4))
    lib.scan(lambda c, x: (c > 0, x), **mode)(0.0, xs)
    lib.scan(lambda m, x: shape(m, x), **mode)(single, xs)
    lib.scan(lambda m, x, c: (m.w * x, c + x, jnp.stack([c, x])), in_axes=(None, 0, C), out_axes=(0, C, 1), **mode)(single, xs, 0.0)
    lib.scan(lambda c, x: (c + 1, None), **mode)(0, xs)
    lib.scan(step, **mode)(0.0, None)
    lib.scan(lambda c, x: (c + 1, x), **mode)(0.0, jnp.ones(0))
    lib.scan(lambda c, r, x: (c + r.normal(), r.fork().normal() + x), in_axes=(C, None, 0), **mode)(0.0, rngs, xs)
    """,
    *TWO,
)

CAPTURING = {
    "cond": "lib.cond(True, lambda *_: {x}, lambda *_: {x}, xs, **mode)",
    "cond of nothing": "lib.cond(False, lambda: {x}, lambda: {x}, **mode)",
    "switch": "lib.switch(1, [lambda *_: {x}, lambda *_: {x}], xs, **mode)",
    "eval_shape": "lib.eval_shape(lambda *_: {x}, xs, **mode)",
    "remat": "lib.remat(lambda *_: {x}, **mode)(xs)",
    "checkify": "lib.checkify(lambda *_: {x}, **mode)(xs)[1]",
    "jit": "lib.jit(lambda *_: {x}, **mode)(xs)",
    "vmap": "lib.vmap(lambda *_: {x}, **mode)(xs)",
    "grad": "lib.grad(lambda x: (x.sum(), {x}), has_aux=True, **mode)(xs)",
    "scan": "lib.scan(lambda c, x: (c, {x}), **mode)(0.0, xs)",
}
for _call in CAPTURING.values():
    lines("captured", small, _call.format(x="m"), *ALL)
    for _held in ("m.w", "[m, jnp.float32(1.0)]", "lib.List([m])"):
        lines("captured", small, _call.format(x=_held))

CARRYING = """
    lib.jit({f})
    lib.jit({f}, graph=False)
    lib.vmap({f})
    lib.pmap({f})
    lib.scan({f})
    lib.remat({f})
    lib.checkify({f})
    lib.make_jaxpr({f}, graph_updates=False)
    lib.jit_partial({f}, xs, graph=False)
    lib.cached_partial(lib.jit({f}), xs)
    lib.cached_partial({f}, xs)
    lib.split_rngs(splits=2)({f})
    lib.shard_map({f}, mesh=mesh, in_specs=P(), out_specs=P())
"""
for _wrapped in CARRYING.strip().splitlines():
    lines("carrying", small, f"names({_wrapped.strip().format(f='noted')})")
    lines("carrying", small, f"{_wrapped.strip().format(f='m')}.note")


def references(lib):
    m = lib.Dict(w=lib.Param(jnp.arange(3.0)), r=lib.data(jax.new_ref(jnp.zeros(3))))

    def attach(m, by=2.0):
        m.cache = lib.Cache(m.w * by, ref=True)
        m.cache[...] = m.cache[...] + 1
        return m.w.sum()

    def double(r):
        r[...] = r[...] * 2
        return r

    def product(r, x):
        r[...] = r * x
        return (r * 3.0 + x).sum()

    v = lib.Variable(jnp.array(0.0), ref=True)
    pair = [lib.Param(jnp.ones(2), ref=True), lib.Param(jnp.ones(2))]
    along = lib.Param(jnp.full(2, 2.0), ref=True), lib.Param(jnp.ones(2))
    names = {"attach": attach, "double": double, "product": product, "along": along}
    return {"m": m, "r": jax.new_ref(jnp.arange(3.0)), "v": v, "pair": pair, **names}


lines(
    "references",
    references,
    """
    lib.jit(attach)(m); lib.jit(attach)(m); m.cache[...] += 1
    lib.remat(attach)(m); m.cache[...] += 1
    lib.cond(False, attach, lambda m: attach(m, 3.0), m)
    lib.vmap(lambda i: attach(lib.Dict(w=lib.Param(jnp.arange(3.0)))))(jnp.arange(2))
    lib.jit(lambda m: setattr(m, 'new', lib.data(jax.new_ref(m.w * 2))))(m)
    lib.jit(lambda m: lib.Cache(m.w * 2, ref=True))(m)
    lib.jit(double)(r) is r, r[...]
    lib.jit(lambda m: [double(m.r), m])(m)[0] is m.r
    lib.vmap(lambda r, x: (r[...] + x))(r, jnp.arange(3.0))
    lib.jvp(product, tuple(pair), along, graph_updates=False)
    lib.vjp(lambda r, x: x.sum(), *pair, graph_updates=False)[0]
    lib.jit(lambda x: v.set_value(v + x))(1.0), v[...]
    lib.scan(lambda c, x: (v.set_value(v + 1), (c, x))[1])(1.0, jnp.arange(3.0)), v[...]
    lib.fori_loop(0, 3, lambda i, x: (v.set_value(v + 1), x)[1], 1.0), v[...]
    lib.cond(True, lambda: v.set_value(v + 1), lambda: None), v[...]
    """,
)


def test_compat_has_the_names_of_the_reference():
    names = [
        {n for n, f in vars(lib.compat).items() if isinstance(f, functools.partial)}
        for lib in (nnx, ref)
    ]
    assert names[1] <= names[0]


test_line = lines.test()


@program("tree", "plain")
def numbers_count_the_arguments_of_a_partial_as_one(lib, mode):
    m, X = models(lib).Counted(), jnp.ones(2)
    out = []
    for given in ((m,), (m, X)):
        partial = lib.jit_partial(
            lambda m, *args: m(args[0] * args[-2]) + args[-1], *given, static_argnums=1, **mode
        )
        out += [partial(2, X), partial.lower(3, X).compile()(X), m]
    donated = [X + i for i in range(4)]
    add = lambda *xs: [x + 1 for x in xs]
    lib.jit_partial(add, *donated[:2], donate_argnums=(0, 2), **mode)(*donated[2:])
    return out, [x.is_deleted() for x in donated]


@program("tree")
def cotangents_of_numbers_in_containers(lib, mode):
    def make():
        return lib.Dict(held=lib.data({"lr": 0.5, "n": [None]}), w=lib.Param(jnp.ones(1)))

    step = lambda m, x: m.held["lr"] * m.w[...].sum() * x
    out, pull = lib.vjp(step, make(), 2.0, **mode)
    tangent = jax.tree.map(lambda v: 0 * v + 1.0, make())
    found = [pull(1.0), lib.jvp(step, (make(), 2.0), (tangent, 1.0), **mode)]
    # The reference leaves a cotangent that is a number as it is; here it becomes an array.
    return out, [list(map(jnp.asarray, jax.tree.leaves(part))) for part in found]


@program(*PLAIN)
def a_rule_gets_the_cotangents_of_what_is_written(lib, mode):
    """By name or with what else there is; a number that is not differentiated has none."""
    out, seen = [], []
    sevens = lambda residual: jax.tree.map(lambda x: jnp.full_like(x, 7), residual)
    for bwd in (
        lambda k, residual, g, updates_g: (seen.append((k, g, updates_g)), sevens(residual))[1],
        lambda k, residual, g, **more: (seen.append((k, g, more)), sevens(residual))[1],
    ):

        @lib.custom_vjp(nondiff_argnums=(0,), **mode)
        def f(k, m, x, d):
            m.c[...] += k * m.w * x
            d["v"][...] = x * 2
            return m.w * x

        m, x = models(lib).Counted(), jnp.asarray(3.0)
        d = {"v": lib.Param(jnp.asarray(2.0)), "u": lib.Param(jnp.asarray(2.0))}
        f.defvjp(lambda k, m, x, d, f=f: (f(k, m, x, d), (m, x, d)), bwd)
        loss = lambda m, x, d, f=f: f(2, m, x, d) + 10 * m.c[...] + 100 * d["v"][...]
        out += [lib.grad(loss, argnums=(0, 1, 2), **mode)(m, x, d), m, d]
    return out, seen


@program()
def custom_vjp_cotangents_of_inputs(lib):
    seen = []

    @lib.custom_vjp
    def f(m, x, d):
        m.w[...] = m.w[...] * 2
        return {"y": m.w * x, "v": lib.Param(m.c * 3)}

    def bwd(residual, g):
        seen.append(g)
        (d_m, none, d_d), d_out = g
        return d_m, None, {"m": d_d["m"], "k": None}

    f.defvjp(lambda m, x, d: (f(m, x, d), None), bwd)
    m, other = models(lib).Counted(), models(lib).Counted(1.0, 3.0)

    def loss(m, other):
        out = f(m, 3.0, {"m": other, "k": 2.0})
        return out["y"] + out["v"] * 5 + m.w * 7

    return lib.grad(loss, argnums=(0, 1))(m, other), seen, m


@program()
def scan_that_replaces_a_part_by_one_with_other_settings(lib):
    def part(value, size):
        return lib.Dict(value=lib.Param(jnp.asarray(value)), size=size)

    def body(m, x):
        m.seen[...] += m.part.value * m.part.size
        m.part = part(m.part.value[...] + x, m.part.size + 1)
        return m, m.part.value[...]

    m = lib.Dict(part=part(1.0, 1), seen=lib.Param(jnp.asarray(0.0)))
    before = m.part
    out, ys = lib.scan(body)(m, jnp.arange(1.0, 4.0))
    return out is m, m.part is before, m, m.part.size, before, before.size, ys


test_program = program.test()
