"""The functions on graphs beside the reference: roots that are leaves, GraphStates, rebuilding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
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


@pytest.mark.parametrize("run", program.found)
def test_program(run):
    compare(run)
