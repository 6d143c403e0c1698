"""Random programs: edits of object graphs, and calls of transforms with programs inside them.

A step is a name and numbers, which choose among what is there when the step runs; so the same program
does the same to a copy of the objects. A call has a kind (the transform) and a program of its own. In
the world `PLAIN` its function runs in place, as plain Python, and what fails is undone.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import typing as tp
import warnings

import jax
import jax.numpy as jnp
from hypothesis import strategies as st

import nnxlite as nnx
from tests.laws import model
from tests.laws.edits import (
    EDIT,
    EDITS,
    GROWING,
    PLAIN,
    REAL,
    VALUES,
    Broken,
    Refused,
    World,
    all_of,
    delete,
    fail,
    own,
    pick,
    put,
    values_in,
    widen,
)
from tests.laws.graphs import Pool, graphs
from tests.laws.model import changeable, references


class Step(tp.NamedTuple):
    name: str
    a: int = 0
    b: int = 0
    c: int = 0
    program: tuple[Step, ...] = ()


REFUSALS = (
    Refused,
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    IndexError,
    nnx.TraceContextError,
    jax.errors.JAXTypeError,
)
LARGEST = 20
"""References in a graph from which on nothing is added."""


def run(w: World, program: tp.Iterable[Step], here: tuple[tp.Any, ...]) -> list[Exception]:
    """Run the steps; why some were refused."""
    refused: list[Exception] = []
    for step in program:
        if step.name == "fail":
            fail(w, here, step.a, step.b, step.c)
        try:
            if step.name in CALLS:
                call(w, step, here)
            else:
                edit = EDIT[step.name]
                if edit in GROWING and len(references(here)) >= LARGEST:
                    edit = delete
                edit(w, here, step.a, step.b, step.c)
        except REFUSALS as error:
            refused.append(error)
        except Broken as error:
            if error.levels:
                error.levels -= 1
                raise
            refused.append(error)
    return refused


# Calls --------------------------------------------------------------------------------------------

ENTERED: collections.Counter[tp.Any] = collections.Counter()
"""How often each program was run in `REAL`: under `jit`, how often it was traced."""
INSIDE: list[tp.Any] = []
"""Called with what functions under transforms got as arguments."""


def enter(program, b, *here):
    """The function that every transform is given: runs a program, returns one of the references."""
    ENTERED[program, b] += 1
    for notify in INSIDE:
        notify(here)
    run(REAL, program, here)
    return pick(references(here), b)


def call(w: World, step: Step, here: tuple[tp.Any, ...]) -> None:
    """Call a transform with some of the objects, and put what it returns into one of them."""
    name, targets = step.name, targets_of(step, here)
    if name == "vmap":
        widen(w, all_of(targets, nnx.Variable))
    if name in DONATING:  # an array that is in two places cannot be donated in one of them
        own(all_of(targets, nnx.Variable))
        if any(model.is_array(leaf) for _, leaf in model.leaves(targets)):
            name = "jit"
    transform, in_place = CALLS[name]
    w.outer.append(targets)
    try:
        if w is REAL:
            result = transform(step.program, step.b, *targets)
        else:
            with undone_on_failure(targets):
                result = in_place(step.program, step.b, *targets)
    finally:
        w.outer.pop()
    if result is not None:
        put(targets[0], step.c, result)


def targets_of(step: Step, here: tuple[tp.Any, ...]) -> tuple[tp.Any, ...]:
    """The objects that a call gets."""
    things = all_of(here, nnx.Pytree)
    if step.name == "scan" or step.c % 3 == 0:
        return (pick(things, step.a),)
    return pick(things, step.a), pick(things, step.a + step.c)


def form(here):
    """The structure of a graph with shapes and dtypes, without values."""

    def shape(value):
        parts, treedef = jax.tree.flatten(value)
        return treedef, tuple((x.dtype, x.shape) for x in parts)

    return model.canonical(here, shape)


@contextlib.contextmanager
def undone_on_failure(here):
    """Put everything back as it was when a call fails."""
    before = [(x, x.__getstate__()) for x in references(here)]
    plain = [(x, x.copy()) for x in model.owners(here) if type(x) in (list, dict)]
    try:
        yield
    except BaseException:
        for x, state in before:
            x.__setstate__(state)
        for x, content in plain:
            x.clear()
            (x.extend if type(x) is list else x.update)(content)
        raise


def in_place(program, b, *here):
    run(PLAIN, program, here)
    return pick(references(here), b)


class Undo(Exception):
    """Raised to end `undone_on_failure` in any case."""


def form_after(program, here, came_in=()):
    """The structure a program would leave, with what became of some references.

    It is undone, but what it would write has a new array with the old value afterwards: it is an output
    of the compiled program.
    """
    before = [(x, x.get_raw_value()) for x in all_of(here, nnx.Variable)]
    left, written = None, []
    with contextlib.suppress(Undo), undone_on_failure(here):
        run(PLAIN, program, here)
        left = form((here, came_in))
        written = [x for x, value in before if x.get_raw_value() is not value]
        raise Undo
    own(written)
    return left


def donating(**options):
    """A `jit` that donates. A buffer for a value of another shape is not used again."""
    jitted = nnx.jit(enter, static_argnums=(0, 1), **options)

    def f(program, b, *here):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            return jitted(program, b, *here)

    return f


def remat(program, b, *here):
    return nnx.remat(functools.partial(enter, program, b))(*here)


def grad(program, b, *here):
    def f(x, *here):
        return x * x, enter(program, b, *here)

    return nnx.grad(f, has_aux=True)(1.0, *here)[1]


def vmap(program, b, *here):
    return nnx.vmap(functools.partial(enter, program, b), axis_size=2)(*here)


def vmap_in_place(program, b, *here):
    if any(x.ndim <= PLAIN.depth for x in values_in(here)):
        raise Refused
    PLAIN.depth += 1
    try:
        return in_place(program, b, *here)
    finally:
        PLAIN.depth -= 1


def vmap_none(program, b, *here):
    def f(x, *here):
        return enter(program, b, *here)

    return nnx.vmap(f, in_axes=(0, *[None] * len(here)), out_axes=None)(jnp.zeros(2), *here)


def branches(program, b):
    """Functions without results: with all of the program, and with its first steps."""

    def branch(program):
        def f(*here):
            enter(program, b, *here)

        return f

    return branch(program), branch(program[: b % 3])


def cond(program, b, *here):
    nnx.cond(jnp.array(bool(b % 2)), *branches(program, b), *here)


def switch(program, b, *here):
    nnx.switch(b % 2, branches(program, b)[::-1], *here)


def branch_in_place(program, b, *here):
    """Both branches must leave one structure, in which no reference became another one."""
    taken, other = (program, program[: b % 3])[:: 1 if b % 2 else -1]
    came_in = references(here)
    left = form_after(other, here, came_in)
    run(PLAIN, taken, here)
    if form((here, came_in)) != left:
        raise Refused


def values_only(program, b, here):
    enter(program, b, *here)
    return here


def fori_loop(program, b, *here):
    nnx.fori_loop(0, b % 3, lambda i, here: values_only(program, b, here), here)


def while_loop(program, b, *here):
    body = lambda carry: (carry[0] + 1, values_only(program, b, carry[1]))
    nnx.while_loop(lambda carry: carry[0] < b % 3, body, (jnp.int32(0), here))


def scan(program, b, *here):
    body = lambda here, x: values_only(program, b, here)
    nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(here, jnp.zeros(1 + b % 2))


def loop_in_place(program, b, *here):
    repeat(program, here, b % 3)


def scan_in_place(program, b, *here):
    repeat(program, here, 1 + b % 2)


def repeat(program, here, times):
    """Run a program several times; the structure must stay, even where it never runs."""
    came_in = references(here)
    before = form((here, ())), [form(x) for x in came_in]
    if form_after(program, here) != before[0]:
        raise Refused
    for _ in range(times):
        run(PLAIN, program, here)
        # An object that another one has replaced must not have changed, either.
        if (form((here, ())), [form(x) for x in came_in]) != before:
            raise Refused


CALLS = {
    "jit": (nnx.jit(enter, static_argnums=(0, 1)), in_place),
    "filter_jit": (nnx.filter_jit(enter), in_place),
    "donated": (donating(donate="written"), in_place),
    "donated_argnums": (donating(donate_argnums=2), in_place),
    "remat": (remat, in_place),
    "grad": (grad, in_place),
    "vmap": (vmap, vmap_in_place),
    "vmap_none": (vmap_none, in_place),
    "cond": (cond, branch_in_place),
    "switch": (switch, branch_in_place),
    "fori_loop": (fori_loop, loop_in_place),
    "while_loop": (while_loop, loop_in_place),
    "scan": (scan, scan_in_place),
}
"""Each transform, and what it does to the objects as plain Python."""
DONATING = ("donated", "donated_argnums")
KEEPING = ("cond", "switch", "fori_loop", "while_loop", "scan")
"""Calls in which the structure may not change."""

# Strategies ---------------------------------------------------------------------------------------

numbers = st.integers(0, 11)


NO_PROGRAM = st.just(())


def steps(names, program=NO_PROGRAM):
    return st.builds(Step, st.sampled_from(sorted(names)), numbers, numbers, numbers, program)


NAMES_OF_EDITS = [step.__name__ for step in EDITS]
edits = steps(NAMES_OF_EDITS)
value_programs = st.lists(steps(step.__name__ for step in VALUES), max_size=3).map(tuple)
programs = st.lists(edits, max_size=6)
"""Random programs without calls."""


def calls(depth: int) -> st.SearchStrategy[Step]:
    """Calls with programs inside; where the structure may not change, these mostly write values."""
    inside = steps([*NAMES_OF_EDITS, "fail"])
    if depth > 1:
        inside |= calls(depth - 1)
    program = st.lists(inside, max_size=4).map(tuple)
    return st.one_of(
        steps(CALLS.keys() - set(KEEPING), program),
        steps(KEEPING, value_programs),
        steps(CALLS.keys() - {"scan"}, program),
    )


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
