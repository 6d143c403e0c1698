"""Random programs over object graphs: what a function may do to its arguments, as plain data.

A step is a name and a few numbers that choose among what the graph holds when the step runs, so one
program does the same to two graphs of the same form.  The arithmetic is exact in float32, so values
can be compared exactly, whatever order a compiler chooses.
"""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import nnxlite as nnx
from tests.laws import model
from tests.laws.graphs import KINDS, NAMES, Node, Pool, graphs

Step = tuple[str, int, int, int]

STATICS = (0, 1, "text", None, True, (1, "a"), 0.5)


class Broken(Exception):
    """What a failing program raises."""


# The graph as the steps see it --------------------------------------------------------------------


def references(value: tp.Any) -> list[tp.Any]:
    """Every object and Variable, in the order of a traversal."""
    found: dict[int, tp.Any] = {}
    opened: set[int] = set()

    def visit(here: tp.Any) -> None:
        if model.is_reference(here):
            if id(here) in found:
                return
            found[id(here)] = here
        if model.is_branch(here) and id(here) not in opened:
            opened.add(id(here))
            for _, child, data in model.children(here):
                if data:
                    visit(child)

    visit(value)
    return list(found.values())


def variables(value: tp.Any) -> list[nnx.Variable]:
    return [x for x in references(value) if model.is_variable(x)]


def changeable(value: tp.Any) -> list[tp.Any]:
    """The objects, lists and dicts that take new content."""
    return [x for x in model.owners(value) if model.is_object(x) or type(x) in (list, dict)]


def pick(options: tp.Sequence[tp.Any], number: int) -> tp.Any:
    return options[number % len(options)]


def put(owner: tp.Any, number: int, value: tp.Any) -> None:
    """Give an object or container some content under a name, or at a place, that a number chooses."""
    if model.is_list(owner):
        if number % 2 and len(owner):
            owner[number % len(owner)] = value
        else:
            owner.append(value)
    elif hasattr(type(owner), "__setitem__"):
        owner[pick(NAMES, number)] = value
    else:
        setattr(owner, pick(NAMES, number), value)


def take_away(owner: tp.Any, number: int) -> None:
    keys = [k for k, _, _ in model.children(owner)]
    if not keys:
        return
    model.remove(owner, pick(keys, number))


def computed(value: tp.Any, number: int = 0) -> tp.Any:
    """Another array of the same form."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.fold_in(value, 1)
    if value.dtype == bool:
        return jnp.logical_not(value)
    if jnp.issubdtype(value.dtype, jnp.integer):
        return jnp.asarray(value) + 1
    return pick([lambda x: 2 * x + 1, lambda x: x * x, lambda x: 3 - x], number)(jnp.asarray(value))


# The steps ----------------------------------------------------------------------------------------


def write(here: tp.Any, a: int, b: int, c: int) -> None:
    if found := variables(here):
        chosen = pick(found, a)
        if b % 2:
            chosen.value = computed(chosen.value, c)
        else:
            chosen[...] = computed(chosen[...], c)


def copy_value(here: tp.Any, a: int, b: int, c: int) -> None:
    if found := variables(here):
        pick(found, a).set_value(pick(found, b).get_value())


def tag(here: tp.Any, a: int, b: int, c: int) -> None:
    if found := variables(here):
        pick(found, a).set_metadata(tag=b % 3)


def share(here: tp.Any, a: int, b: int, c: int) -> None:
    put(pick(changeable(here), a), b, pick(references(here), c))


def new_variable(here: tp.Any, a: int, b: int, c: int) -> None:
    value = pick(variables(here), c).get_value() if variables(here) and c % 2 else jnp.ones(2)
    put(pick(changeable(here), a), b, pick(KINDS, c)(computed(value, c), note="new"))


def new_object(here: tp.Any, a: int, b: int, c: int) -> None:
    new = pick([Node, nnx.List, nnx.Dict], b)()
    put(new, c, pick(references(here), c))
    put(pick(changeable(here), a), b, new)


def array(here: tp.Any, a: int, b: int, c: int) -> None:
    put(pick(changeable(here), a), b, jnp.full(c % 3, 2.0))


def static(here: tp.Any, a: int, b: int, c: int) -> None:
    owner, value = pick(changeable(here), a), pick(STATICS, c)
    put(owner, b, nnx.static(value) if isinstance(owner, nnx.Pytree) else value)


def delete(here: tp.Any, a: int, b: int, c: int) -> None:
    take_away(pick(changeable(here), a), b)


STEPS: dict[str, tp.Callable[[tp.Any, int, int, int], None]] = {
    step.__name__: step
    for step in (
        write,
        copy_value,
        tag,
        share,
        new_variable,
        new_object,
        array,
        static,
        delete,
    )
}

REFUSALS = (ValueError, TypeError, AttributeError, KeyError, IndexError)

numbers = st.integers(0, 11)
programs = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), numbers, numbers, numbers), max_size=6
)
"""Random programs."""


def run(program: tp.Sequence[Step], here: tp.Any) -> list[str]:
    """Run the steps; the refusals they met."""
    refused = []
    for name, a, b, c in program:
        try:
            STEPS[name](here, a, b, c)
        except REFUSALS as error:
            refused.append(f"{name}: {type(error).__name__}")
    return refused


# Graphs whose leaves JAX can take -----------------------------------------------------------------


def crossing(made: tuple[tp.Any, Pool]) -> tuple[tp.Any, tp.Any]:
    """The root and something it shares, with arrays in place of the leaves JAX does not know."""
    root, pool = made
    for owner in [root, *changeable(root), *changeable(pool.known)]:
        for key, child, data in model.children(owner):
            if data and child is not None and not model.in_container(child):
                if isinstance(owner, (nnx.List, nnx.Dict)):
                    owner[key] = jnp.ones(())
                elif isinstance(owner, nnx.Pytree):
                    setattr(owner, key, jnp.ones(()))
    return root, pool.known[-1]


pairs = graphs(depth=2).map(crossing)
"""Two arguments that share, or hold one another."""

crossing_roots = pairs.map(lambda pair: pair[0])
"""Root objects."""


# Comparison ---------------------------------------------------------------------------------------


def content(leaf: tp.Any) -> tp.Any:
    """A leaf as something whose `==` compares values."""
    if not model.is_array(leaf):
        return type(leaf), leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return "key", jax.random.key_data(leaf).tolist()
    kind = jax.dtypes.canonicalize_dtype(leaf.dtype)
    return kind, leaf.shape, np.asarray(leaf).tolist()
