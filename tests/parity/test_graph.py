"""The functions on graphs beside the reference: roots that are leaves, GraphStates, rebuilding."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.parity.programs import Programs, attempt, compare

pytestmark = pytest.mark.filterwarnings("ignore")  # the reference warns of its own plans

program = Programs()


def shared(lib, size=3):
    """A module with a Variable at two places, another one, and something static."""
    first = lib.Param(jnp.ones(2))
    rest = lib.List([first, 5])
    return lib.Dict(a=first, rest=rest, b=lib.BatchStat(jnp.zeros(3)), size=size)


def keys(tree):
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def doubled(tree):
    return jax.tree.map(lambda x: 2 * x, tree)


# Roots that are leaves -----------------------------------------------------------------------------

ROOTS = {
    "variable": lambda lib: lib.Param(jnp.arange(3.0), tag="x"),
    "array": lambda lib: jnp.arange(3.0),
    "mapping": lambda lib: lib.Cache({"k": jnp.ones(2)}),
    "number": lambda lib: 2.5,
}


@program("updates", "tree")
def leaves_as_roots(lib, mode):
    graph = {k: v for k, v in mode.items() if k == "graph"}
    out = []
    for make in ROOTS.values():
        root = make(lib)
        graphdef, flat = lib.flatten(root, **graph)
        bare, leaves = lib.flatten(root, with_paths=False, **graph)
        out += [list(flat), lib.unflatten(graphdef, flat), lib.merge(graphdef, flat)]
        out += [lib.unflatten(bare, leaves), lib.merge(*lib.split(root, **graph))]
        out.append(lib.merge(*lib.split(root, lib.BatchStat, ..., **graph)))
    return out


@program()
def variables_as_roots_in_contexts(lib):
    v = lib.Param(jnp.arange(3.0))

    def there_and_back(split, merge):
        @jax.jit
        def double(*parts):
            with lib.merge_context("step", inner=True) as ctx:
                inside = getattr(ctx, merge)(*parts)
            inside[...] = 2 * inside[...]
            with lib.split_context("step") as ctx:
                return getattr(ctx, split)(inside)

        with lib.update_context("step"):
            with lib.split_context("step") as ctx:
                parts = getattr(ctx, split)(v)
            parts = double(*parts)
            with lib.merge_context("step", inner=False) as ctx:
                return getattr(ctx, merge)(*parts) is v, v[...]

    out = [there_and_back("split", "merge"), there_and_back("flatten", "unflatten")]
    with lib.split_context() as ctx:
        graphdef, *groups = ctx.flatten(v, lib.BatchStat, ...)
    with lib.merge_context() as ctx:
        return out, ctx.unflatten(graphdef, *groups) is v, list(groups[1])


@program()
def contexts_share_or_copy_variables(lib):
    """`merge` of a context makes Variables, `unflatten` takes those of the state."""
    m, out = shared(lib), []
    for tag in (None, "step"):
        for split, merge in (("split", "merge"), ("flatten", "unflatten")):
            with lib.update_context("step"):
                with lib.split_context(tag) as ctx:
                    parts = getattr(ctx, split)(m)
                with lib.merge_context(tag, inner=True) as ctx:
                    inside = getattr(ctx, merge)(*parts)
            out.append((inside.a is m.a, inside.a is inside.rest[0], inside is m))
    return out


@program()
def updates_of_a_variable(lib):
    out = []
    for filters in ((lib.Param, ...), (lib.BatchStat, ...), (...,)):
        v = lib.Param(jnp.arange(3.0))
        states = lib.split(v, *filters)[1:]
        lib.update(v, *doubled(states))
        out.append((len(states), v))
    held = lib.Cache({"k": jnp.ones(2)})
    lib.update(held, {"k": jnp.zeros(2)})
    lib.update(held, lib.State({}))
    out.append(attempt(lambda: lib.update(v, jnp.ones(3), jnp.zeros(3))))
    return out, held, v


# GraphStates ---------------------------------------------------------------------------------------


@program()
def graph_states_that_do_not_belong_together(lib):
    params, rest = lib.unpack(shared(lib), lib.Param, ...)
    other = lib.unpack(shared(lib, size=4), lib.Param, ...)[1]
    equal = lib.unpack(shared(lib), lib.Param, ...)[1]
    state = lib.state(shared(lib), lib.BatchStat)
    graphdef = lib.graphdef(shared(lib))
    return [
        attempt(lambda: lib.merge(params, other)),
        attempt(lambda: lib.merge(params, state)),
        attempt(lambda: lib.merge(params, equal)),
        attempt(lambda: lib.merge(graphdef, params, state)),
        attempt(lambda: lib.merge(state, params)),
        attempt(lambda: lib.merge(rest, params).rest[1]),
    ]


@program()
def key_paths_of_a_graph_state(lib):
    packed, state = lib.unpack(shared(lib)), lib.state(shared(lib))

    def only_a(path, x):
        return 2 * x if path[0].key == "a" else x

    masked = jax.tree_util.tree_map_with_path(only_a, packed)
    closed = jax.tree_util.tree_leaves_with_path(
        packed, is_leaf=lambda x: isinstance(x, lib.Variable)
    )
    return (
        keys(packed),
        keys(packed) == keys(state),
        lib.merge(masked),
        [jax.tree_util.keystr(path) for path, _ in closed],
        lib.merge(jax.jit(doubled)(packed)),
    )


@program()
def graph_states_are_edited_like_states(lib):
    packed = lib.unpack(shared(lib))
    packed.b = lib.BatchStat(jnp.ones(3))
    packed["a"] = lib.Param(jnp.zeros(2))
    first = lib.merge(packed)
    taken = packed.pop("b")
    del packed["a"]
    return (
        first,
        taken,
        dict(packed),
        attempt(lambda: packed.nothing),
        attempt(lambda: lib.merge(packed)),
    )


@program()
def update_puts_a_variable_in_the_place_of_a_value(lib):
    v, shared = lib.BatchStat(jnp.ones(2), tag="t"), lib.Param(jnp.zeros(2))
    m = lib.Dict(
        a=jnp.zeros(3), b=lib.data(2.0), c=shared, d=np.zeros(2), n=lib.List([jnp.ones(2)])
    )
    lib.update(m, {"a": v, "b": shared, "c": v, "d": shared, "n": {0: v}})
    pair = {"a": 3, "b": shared}
    lib.update(pair, {"a": v})
    inside = lib.Dict(a=jnp.zeros(3))
    lib.jit(lambda m: lib.update(m, {"a": lib.Param(jnp.ones(2))}))(inside)
    same = m.a is v, m.b is shared, m.c is shared, m.d is shared, m.n[0] is v, pair["a"] is v
    return same, m.a, m.b, m.c, inside.a


@program()
def later_states_count_with_their_metadata(lib):
    """Also where they bring the metadata that the Variable has, or a value without metadata."""

    def brought(x, **metadata):
        return lib.State({"a": lib.Param(jnp.full(2, x), **metadata)})

    out = []
    later = [brought(2.0, tag=0), brought(2.0, tag=2), brought(2.0), {"a": jnp.full(2, 2.0)}]
    for last in [*later, None]:
        m = lib.Dict(a=lib.Param(jnp.zeros(2), tag=0), c=jnp.ones(1))
        last = lib.state(m, lib.Param) if last is None else last
        lib.update(m, brought(1.0, tag=1, note="x"), {"c": jnp.zeros(1)}, last)
        out.append((m, dict(m.a.get_metadata())))
    return out


@program()
def keys_are_cloned_under_checkify(lib):
    rngs = lib.Rngs(0)
    _, clone = lib.checkify(lambda rngs: lib.clone(rngs, arrays=True))(rngs)
    return jax.random.key_data(clone.default.key[...]), clone is rngs


@program()
def prefixes_are_pytrees(lib):
    """Of their settings; a shared leaf counts once, and what is mapped is a prefix again."""
    both = lib.Param(jnp.ones((3, 2)))
    m = lib.Dict(x=both, y=lib.List([both, lib.BatchStat(jnp.ones((3, 2)))]), z=jnp.ones(3))
    tree = [m, jnp.ones(3)]
    out = []
    for chosen in ({lib.Param: 0, ...: 1}, {lib.BatchStat: None, ...: 0}):
        axes = lib.prefix(tree, chosen, graph=True)
        pairs = jax.tree_util.tree_leaves_with_path(axes, is_leaf=lambda x: x is None)
        out += [(jax.tree_util.keystr(path), setting) for path, setting in pairs]
        mapped = jax.tree.map(lambda axis: 0, axes)
        out.append(jax.tree.leaves(mapped))
        out.append(jax.tree.structure(mapped) == jax.tree.structure(axes))
    axes = jax.tree.map(lambda axis: 0, lib.prefix(m, {...: 1}, graph=True))
    f = lib.vmap(lambda m: m.x[...].sum() + m.z, in_axes=(axes,), graph_updates=False)
    return out, f(m)


# recreate_variables --------------------------------------------------------------------------------


@program()
def values_in_the_place_of_variables(lib):
    m = shared(lib)
    graphdef, state = lib.split(m)
    flat_def, leaves = lib.flatten(m, with_paths=False)
    out = []
    for kwargs in ({}, {"recreate_variables": True}, {"recreate_variables": False}):
        merged = lib.merge(graphdef, lib.pure(state), **kwargs)
        whole = lib.merge(graphdef, state, **kwargs)
        flat = lib.unflatten(flat_def, leaves, **kwargs)
        mapped = lib.map(lambda path, v: 2 * v[...], m, **kwargs)
        tree = lib.map(lambda path, v: 2 * v[...], lib.Dict(a=m.a), graph=False, **kwargs)
        made = [merged, whole, flat, mapped]
        out += [(type(x.a).__name__, x.a is x.rest[0], x, lib.state(x)) for x in made]
        out += [whole.a is m.a, tree]
        given = lib.map(lambda path, v: lib.Cache(v[...]), m, **kwargs)
        out += [given, jax.tree.leaves(lib.clone(mapped))]
    return out


# What is static in plain containers ----------------------------------------------------------------

Point = collections.namedtuple("Point", "x y")


@jax.tree_util.register_pytree_node_class
class Listed:
    """A pytree node that JAX knows by number only."""

    def __init__(self, *parts):
        self.parts = parts

    def tree_flatten(self):
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, aux, parts):
        return cls(*parts)


CONTAINERS = {
    "dict": lambda x, y: {"x": x, "y": y},
    "list": lambda x, y: [x, y],
    "nested": lambda x, y: {"a": [x, (y,)]},
    "named": Point,
    "node": Listed,
}
STATIC_ITEMS = ("text", jnp.float32, range(3))
"""Static in the data of a module, also to JAX and with `graph=False`; the reference has leaves there."""
ITEMS = (0.5, 3, True, np.float32(2), np.ones(2), None, *STATIC_ITEMS, 1j)


def holding(lib, value, wrap=lambda x: x):
    """A module with something in an attribute, beside a Variable."""

    class Holder(lib.Module):
        def __init__(self):
            self.held = wrap(value)
            self.w = lib.Param(jnp.ones(1))

    return Holder()


@program("updates", "tree")
def items_of_containers(lib, mode):
    out = []
    for make in CONTAINERS.values():
        for item in ITEMS:
            for other in (lib.Param(jnp.ones(2)), 7):
                roots = [make(item, other), holding(lib, make(item, other), lib.data)]
                differs = any(item is static for static in STATIC_ITEMS)
                for root in roots[:1] if differs and "graph" in mode else roots:
                    graphdef, state = lib.split(root, **mode)
                    merged = lib.merge(graphdef, state)
                    if not differs:
                        out.append(jax.tree.leaves(merged, is_leaf=lambda x: x is None))
                    out += [state, lib.state(root, ..., **mode), lib.state(merged, **mode)]
                    out += [lib.state(lib.clone(root, **mode), **mode)]
                    flat = lib.flatten(root, with_paths=False, **mode)[1]
                    out += [list(lib.flatten(root, **mode)[1]), flat]
    return out


@program("updates", "tree")
def states_as_attributes(lib, mode):
    """With data they are containers like others; without they are static."""
    out = []
    for item in (item for item in ITEMS if not isinstance(item, np.ndarray)):
        if "graph" in mode and any(item is static for static in STATIC_ITEMS):
            continue
        for more in ({}, {"v": lib.Param(jnp.ones(2))}):
            state = lib.State({"a": item, "n": {"b": item, **more}})
            m = holding(lib, state, lib.data if more else lambda x: x)
            out += [lib.state(m, **mode), lib.state(lib.clone(m, **mode), **mode)]
            out.append([str(path) for path, _ in jax.tree_util.tree_leaves_with_path(m)])
            seen = []

            def look(m, item=item, seen=seen):
                seen.append(type(m.held["a"]) is type(item))

            refused = attempt(lambda m=m, look=look: lib.jit(look, **mode)(m))
            out.append((refused, seen))
    return out


@program("updates", "tree", "plain")
def a_learning_rate_in_a_container(lib, mode):
    """A leaf with graph=False: traced, differentiated, and no reason to trace again."""
    traces = []

    def step(m):
        traces.append(isinstance(m.held["lr"], jax.Array))
        return m.held["lr"] * m.w[...].sum()

    f, out = lib.jit(step, **mode), []
    for rate in (0.5, 0.25, 0.5):
        out.append(f(holding(lib, {"lr": rate, "v": lib.Param(1.0)}, lib.data)))
    out.append(list(traces))
    m = holding(lib, {"lr": 0.5, "n": {"v": lib.Param(1.0)}}, lib.data)
    grads = lib.grad(step, **mode)(m)
    out += [jax.tree.leaves(grads), lib.state(m)]
    out.append(lib.vmap(lambda m, x: x * step(m), in_axes=(None, 0), **mode)(m, jnp.ones(2)))
    out.append(lib.remat(step, **mode)(m))
    carry = lib.scan(lambda m, x: (m, step(m) * x), in_axes=(lib.Carry, 0), **mode)
    out.append(carry(m, jnp.ones(2))[1])
    out.append(lib.eval_shape(lambda: holding(lib, {"lr": 0.5}, lib.data), **mode).held)
    out.append(lib.jit(lambda: holding(lib, {"lr": 0.5}, lib.data), **mode)().held)
    return out, m.held["lr"]


@program("tree")
def cotangents_of_numbers_in_containers(lib, mode):
    def step(m, x):
        return m.held["lr"] * m.w[...].sum() * x

    def make():
        return holding(lib, {"lr": 0.5, "n": [None]}, lib.data)

    rule = lib.custom_vjp(step, **mode)

    def backward(residual, g):
        m, _ = residual
        return jax.tree.map(lambda v: 0 * v + 7.0, m), 3 * g

    rule.defvjp(lambda m, x: (rule(m, x), (m, x)), backward)
    out, pull = lib.vjp(step, make(), 2.0, **mode)
    found = [pull(1.0), lib.grad(rule, argnums=(0, 1), **mode)(make(), 2.0)]
    primal = make()
    tangent = jax.tree.map(lambda v: 0 * v + 1.0, primal)
    found.append(lib.jvp(step, (primal, 2.0), (tangent, 1.0), **mode))
    # The reference leaves a cotangent that is a number as it is; here it becomes an array.
    return out, [list(map(jnp.asarray, jax.tree.leaves(part))) for part in found]


@program()
def updates_of_what_is_no_variable(lib):
    roots = [
        ({"lr": 0.1, "w": lib.Param(1.0), "s": "x"}, {"lr": 0.2, "s": "y"}),
        ([0.1, lib.Param(1.0)], {0: 0.2}),
        (holding(lib, {"lr": 0.1, "t": ["x"]}, lib.data), {"held": {"lr": 0.2, "t": {0: "y"}}}),
    ]
    for root, state in roots:
        lib.update(root, state)
    out = [root for root, _ in roots]
    with lib.set_graph_mode(False):
        root = {"lr": 0.1, "w": lib.Param(1.0)}
        state = lib.state(root)
        state["lr"] = 0.5
        lib.update(root, state)
        out += [root, lib.clone(root), lib.graphdef([1, "x"]) == lib.graphdef([2, "y"])]
    different = lib.graphdef([1, "x"]) == lib.graphdef([2, "x"])
    return out[:2], out[2].held, out[3:], different


@program()
def updates_with_other_shapes(lib):
    out = []
    for stack in (lambda x: jnp.stack([x, x]), lambda x: x[:1], jnp.sum, lambda x: np.ones(3)):
        m = shared(lib)
        lib.update(m, jax.tree.map(stack, lib.state(m)))
        out += [m, m.a is m.rest[0]]

        def inside(m, stack=stack):
            lib.update(m, jax.tree.map(stack, lib.state(m)))

        for mode in ({}, {"graph_updates": False}):
            m = shared(lib)
            lib.jit(inside, **mode)(m)
            out.append(m)
    held = lib.Dict(a=lib.Variable({"x": jnp.ones(2)}), b=lib.Variable(0), c=jnp.ones(2))
    lib.update(held, {"a": {"y": jnp.ones(3)}, "b": jnp.ones(3), "c": jnp.ones((2, 2))})
    reference = lib.Dict(a=lib.Variable(jnp.ones(2), ref=True))
    refused = attempt(lambda: lib.update(reference, {"a": jnp.ones(3)}))
    return out, held, refused


@pytest.mark.parametrize("run", program.found)
def test_program(run):
    compare(run)
