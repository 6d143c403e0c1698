"""Random programs: edits of object graphs, and calls of transforms with programs inside them.

A step is a name and numbers, which choose among what is there when the step runs; so the same program
does the same to the real objects and to those of the slow model, or to a copy of them.  A call has a
kind (the transform) and a program of its own.
"""

from __future__ import annotations

import collections
import functools
import typing as tp
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import nnxlite as nnx
from tests.laws import model, objects
from tests.laws.graphs import NAMES, Box, Pair, Pool, graphs
from tests.laws.model import changeable, pick, put, references, take_away
from tests.laws.worlds import (
    Broken,
    Real,
    Refused,
    Slow,
    World,
    form,
    is_float,
    on_read,
    on_write,
    undone_on_failure,
    values_in,
    variables,
)


class Step(tp.NamedTuple):
    name: str
    a: int = 0
    b: int = 0
    c: int = 0
    program: tuple[Step, ...] = ()


Program = tuple[Step, ...]

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

STATICS = (0, 1, "text", None, True, (1, "a"), 0.5)
KINDS = ("Param", "BatchStat", "Count", "Cell", "Intermediate")
OBJECTS = ("Node", "Twin", "Loose", "List", "Dict", "Stream")
SHAPES = ((2,), (), (2, 2), (2,), (2, 2))

# Steps that edit ----------------------------------------------------------------------------------


def dtype(value: tp.Any) -> tp.Any:
    """The dtype that a value has under every transform: an int64 of NumPy is an int32 there."""
    return jax.typeof(value).dtype


def write(w: World, here: tp.Any, a: int, b: int, c: int) -> None:
    if found := variables(here):
        chosen = pick(found, a)
        new = w.computed(chosen.get_value(), c)
        fits = dtype(new) == dtype(chosen.get_value())  # else JAX warns of `[...] =`
        if b % 3 == 0 and isinstance(chosen, nnx.Variable) and fits:
            chosen[...] = new
        elif b % 3 == 1 and isinstance(chosen, nnx.Variable):
            chosen.value = new
        else:
            chosen.set_value(new)


def write_raw(w: World, here: tp.Any, a: int, b: int, c: int) -> None:
    """The same past the hooks."""
    if found := variables(here):
        chosen = pick(found, a)
        chosen.set_raw_value(w.computed(chosen.get_raw_value(), c))


def hook(w: World, here: tp.Any, a: int, b: int, c: int) -> None:
    """Let a function see what is read from a Variable, or written to it."""
    if found := [x for x in variables(here) if dtype(x.get_raw_value()) in (np.float32, np.int32)]:
        given = pick(
            [{"on_get_value": (on_read,)}, {"on_set_value": (on_write,)}, {"on_get_value": ()}], b
        )
        pick(found, a).set_metadata(**given)


def draw(w: World, here: tp.Any, a: int, b: int, c: int) -> None:
    """Draw a key from a stream, and write it where there is one already."""
    if found := streams(here):
        key = w.draw(pick(found, a))
        pick([x for x in variables(here) if objects.is_key(x.get_raw_value())], b).set_value(key)


def fork(w: World, here: tp.Any, a: int, b: int, c: int) -> None:
    if found := streams(here):
        put(pick(changeable(here), a), b, w.fork(pick(found, c)))


def streams(here: tp.Any) -> list[tp.Any]:
    return [x for x in references(here) if isinstance(x, (nnx.RngStream, objects.Stream))]


def copy_value(w: World, here: tp.Any, a: int, b: int, c: int) -> None:
    if found := variables(here):
        target, source = pick(found, a), pick(found, b)
        value = source.get_value()
        if dtype(target.get_value()) == dtype(value):
            target.set_value(value if target is source else w.copy(value))  # the same: no write


def copy_alike(w: World, here: tp.Any, a: int, b: int, c: int) -> None:
    """The same where the shape stays what it was."""
    if found := variables(here):
        target, source = pick(found, a), pick(found, b)
        if target.get_value().shape == source.get_value().shape:
            copy_value(w, here, a, b, c)


def tag(w: World, here: tp.Any, a: int, b: int, c: int) -> None:
    if found := [x for x in references(here) if model.is_variable(x)]:
        pick(found, a).set_metadata(tag=b % 3)


def share(w: World, here: tp.Any, a: int, b: int, c: int) -> None:
    put(pick(changeable(here), a), b, pick(references(here), c))


def new_variable(w: World, here: tp.Any, a: int, b: int, c: int) -> None:
    kind, found = pick(KINDS[:4], c), variables(here)
    number = 0 if kind == "Param" else c
    value = w.full(pick(SHAPES, b), number)
    if found and a % 2 and (kind != "Param" or is_float(pick(found, c).get_value())):
        value = w.computed(pick(found, c).get_value(), c)
    put(pick(changeable(here), a), b, w.variable(kind, value, note="new"))


def new_object(w: World, here: tp.Any, a: int, b: int, c: int) -> None:
    new = w.new(pick(OBJECTS, b))
    put(new, c, pick(references(here), c))
    if c % 2 and type(new).__name__ in ("Node", "Twin"):
        new.flag = bool(c % 3)
    put(pick(changeable(here), a), a + b, new)


def container(w: World, here: tp.Any, a: int, b: int, c: int) -> None:
    """A plain container, with an array in it, a reference and a static value."""
    some, static = pick(references(here), c), pick(STATICS, c)
    array = w.full(pick(SHAPES, a), c)
    new = [
        [array, some, static],
        (some, static, array),
        {"b": array, "a": some, 3: static},
        Pair(array, some),
        Box([array, some], "label"),
        [array, [some]],
    ]
    put(pick(changeable(here), a), a + c, pick(new, b))


def array(w: World, here: tp.Any, a: int, b: int, c: int) -> None:
    put(pick(changeable(here), a), b, w.full(pick(SHAPES, c), c))


def static(w: World, here: tp.Any, a: int, b: int, c: int) -> None:
    owner, value = pick(changeable(here), a), pick(STATICS, c)
    put(owner, b, nnx.static(value) if model.is_object(owner) else value)


def delete(w: World, here: tp.Any, a: int, b: int, c: int) -> None:
    take_away(pick(changeable(here), a), b)


def sow(w: World, here: tp.Any, a: int, b: int, c: int) -> None:
    modules = [x for x in references(here) if type(x).__name__ in ("Node", "Twin")]
    if modules and (found := variables(here)):
        w.sow(pick(modules, a), pick(NAMES, b % 2), w.computed(pick(found, c).get_value(), c))


def pop(w: World, here: tp.Any, a: int, b: int, c: int) -> None:
    w.pop(pick([x for x in references(here) if model.is_object(x)], a), pick(KINDS, -1 - b % 3))


def mode(w: World, here: tp.Any, a: int, b: int, c: int) -> None:
    modules = [x for x in references(here) if type(x).__name__ in ("Node", "Twin")]
    if modules:
        w.mode(pick(modules, a), bool(b % 2))


def clone(w: World, here: tp.Any, a: int, b: int, c: int) -> None:
    put(pick(changeable(here), a), b, w.clone(pick(references(here), c)))


def merged(w: World, here: tp.Any, a: int, b: int, c: int) -> None:
    things = [x for x in references(here) if model.is_object(x)]
    put(pick(changeable(here), a), b, w.merged(pick(things, c), b))


def update(w: World, here: tp.Any, a: int, b: int, c: int) -> None:
    w.update(pick([x for x in references(here) if model.is_object(x)], a), b)


def outer(w: World, here: tp.Any, a: int, b: int, c: int) -> None:
    """Write to something from outside of the call, which raises."""
    if w.outer and (found := variables(w.outer[-1])):
        if isinstance(w, Slow):
            raise Refused
        chosen = pick(found, a)
        if b % 2:
            # A constant: JAX's cache of an inner jit may not depend on what is outside of it.
            chosen.set_value(jnp.zeros(chosen.get_raw_value().shape))
        else:
            chosen.set_metadata(tag="from inside")
        raise AssertionError("a write from the wrong trace level went through")


def fail(w: World, here: tp.Any, a: int, b: int, c: int) -> None:
    if b % 3 == 0 and not isinstance(w, Slow):
        jnp.zeros(2) + jnp.zeros(3)
    raise Broken(0 if b % 3 == 0 else a % 2)


GROWING = (new_variable, new_object, container, clone, merged, fork)
VALUES = (draw, write, write_raw, copy_alike, update)
EDITS = (
    *(copy_value, tag, hook, share, array, static, delete, sow, pop, mode, outer),
    *GROWING,
    *VALUES,
)
EDIT = {step.__name__: step for step in EDITS}
VALUE_STEPS = tuple(step.__name__ for step in VALUES)


def run(w: World, program: Program, here: tuple[tp.Any, ...]) -> list[Exception]:
    """Run the steps; why some were refused."""
    refused: list[Exception] = []
    for step in program:
        numbers = step.a, step.b, step.c
        if step.name == "fail":
            fail(w, here, *numbers)
        try:
            if step.name in CALLS:
                call(w, step, here)
            else:
                edit = EDIT[step.name]
                if edit in GROWING and len(references(here)) >= LARGEST:
                    edit = delete
                edit(w, here, *numbers)
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
"""How often each program was run: under `jit`, how often it was traced."""

REAL_CALLS: dict[str, tp.Callable[..., tp.Any]] = {}
SLOW_CALLS: dict[str, tp.Callable[..., tp.Any]] = {}
INSIDE: list[tp.Any] = []
"""Called with what functions of the library's world got as arguments."""


REAL = Real()


def enter(program: Program, b: int, *here: tp.Any) -> tp.Any:
    """The function that every transform is given: runs a program, returns one of the references."""
    ENTERED[program, b] += 1
    for notify in INSIDE:
        notify(here)
    run(REAL, program, here)
    return pick(references(here), b)


def values_only(program: Program, b: int, *here: tp.Any) -> tuple[tp.Any, ...]:
    """The same for loops: returns the arguments."""
    enter(program, b, *here)
    return here


def call(w: World, step: Step, here: tuple[tp.Any, ...]) -> None:
    """Call a transform with some of the objects, and put what it returns into one of them."""
    targets = targets_of(w, step, here)
    if step.name in DONATING:  # an array that is in two places cannot be donated in one of them
        w.own(targets)
        if any(model.is_array(leaf) for _, leaf in model.leaves(targets)):
            step = step._replace(name="jit")
    plain = step.name == "plain"  # which is no transform: a failure does not undo what was done
    if not plain:
        w.outer.append(targets)
    try:
        if isinstance(w, Slow):
            with undone_on_failure(() if plain else targets):
                result = SLOW_CALLS[step.name](w, step.program, step.b, *targets)
        else:
            result = REAL_CALLS[step.name](step.program, step.b, *targets)
    finally:
        if not plain:
            w.outer.pop()
    if result is not None:
        put(targets[0], step.c, result)


def targets_of(w: World, step: Step, here: tuple[tp.Any, ...]) -> tuple[tp.Any, ...]:
    """The objects that a call gets."""
    things = [x for x in references(here) if model.is_object(x)]
    if step.name in LOOPS or step.c % 3 == 0:
        return (pick(things, step.a),)
    return pick(things, step.a), pick(things, step.a + step.c)


def real(name: str) -> tp.Callable[..., tp.Any]:
    return lambda f: REAL_CALLS.setdefault(name, f)


def slow(*names: str) -> tp.Callable[..., tp.Any]:
    return lambda f: [SLOW_CALLS.setdefault(name, f) for name in names][0]


DONATING = ("donated", "donated_argnums")
REAL_CALLS["plain"] = enter
REAL_CALLS["jit"] = nnx.jit(enter, static_argnums=(0, 1))
REAL_CALLS["filter_jit"] = nnx.filter_jit(enter)


def ignoring(message: str) -> tp.Callable[[tp.Any], tp.Any]:
    """A decorator: the call without a warning that starts like this."""

    def decorator(f: tp.Any) -> tp.Any:
        def g(program, b, *here):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message)
                return f(program, b, *here)

        return g

    return decorator


# A buffer for a value of another shape is not used again.
donating = ignoring("Some donated buffers were not usable")

for _name, _donated in (
    ("donated", nnx.jit(enter, static_argnums=(0, 1), donate="written")),
    ("donated_argnums", nnx.jit(enter, static_argnums=(0, 1), donate_argnums=2)),
):
    REAL_CALLS[_name] = donating(_donated)


@real("remat")
def _(program, b, *here):
    return nnx.remat(functools.partial(enter, program, b))(*here)


@slow("plain", "jit", *DONATING, "filter_jit", "remat")
def run_in_place(w, program, b, *here):
    run(w, program, here)
    return pick(references(here), b)


@real("vmap")
def _(program, b, *here):
    return nnx.vmap(functools.partial(enter, program, b), axis_size=2)(*here)


@slow("vmap")
def _(w, program, b, *here):
    if any(x.ndim <= w.depth for x in values_in(here)):
        raise Refused
    w.depth += 1
    try:
        return run_in_place(w, program, b, *here)
    finally:
        w.depth -= 1


@real("vmap_none")
def _(program, b, *here):
    def f(x, *here):
        return enter(program, b, *here)

    return nnx.vmap(f, in_axes=(0, *[None] * len(here)), out_axes=None)(jnp.zeros(2), *here)


SLOW_CALLS["vmap_none"] = run_in_place


def dropped(f):
    """A function without its result."""

    def g(*here):
        f(*here)

    return g


@real("cond")
def _(program, b, *here):
    half = program[: b % 3]
    pred = jnp.array(bool(b % 2))
    first, second = (functools.partial(enter, p, b) for p in (program, half))
    nnx.cond(pred, dropped(first), dropped(second), *here)


@real("switch")
def _(program, b, *here):
    half = program[: b % 3]
    first, second = (functools.partial(enter, p, b) for p in (program, half))
    branches = [dropped(second), dropped(first)]
    nnx.switch(b % 2, branches, *here)


@slow("cond", "switch")
def _(w, program, b, *here):
    part, came_in = (
        program[: b % 3],
        references(here),
    )  # none of these by another one like it, either
    left = form_after(w, part if b % 2 else program, here, came_in)
    run(w, program if b % 2 else part, here)
    if form((here, came_in)) != left:
        raise Refused


class Undo(Exception):
    """Raised to end `undone_on_failure` in any case."""


def form_after(w, program, here, came_in=()):
    """The structure a program would leave, with what became of some references.

    It is undone, but what it would write has a new array with the old value afterwards: it is an output
    of the compiled program.
    """
    before = [(x, x.value) for x in references(here) if model.is_variable(x)]
    left, written = None, []
    try:
        with undone_on_failure(here):
            run(w, program, here)
            left = form((here, came_in))
            written = [x for x, value in before if x.value is not value]
            raise Undo
    except Undo:
        for x in written:
            x.value = jax.tree.map(w.copy, x.value)
    return left


@real("fori_loop")
def _(program, b, *here):
    def body(i, here):
        return values_only(program, b, *here)

    nnx.fori_loop(0, b % 3, body, here)


@slow("fori_loop")
def _(w, program, b, *here):
    repeat(w, program, here, b % 3)


def repeat(w, program, here, times):
    """Run a program several times; the structure must stay, even where it never runs."""
    came_in = references(here)
    before = form((here, ())), [form(x) for x in came_in]
    if form_after(w, program, here) != before[0]:
        raise Refused
    for _ in range(times):
        run(w, program, here)
        # An object that another one has replaced must not have changed, either.
        if (form((here, ())), [form(x) for x in came_in]) != before:
            raise Refused


@real("while_loop")
def _(program, b, *here):
    def body(carry):
        return carry[0] + 1, values_only(program, b, *carry[1])

    nnx.while_loop(lambda carry: carry[0] < b % 3, body, (jnp.int32(0), here))


SLOW_CALLS["while_loop"] = SLOW_CALLS["fori_loop"]


@real("scan")
def _(program, b, here):
    def body(here, x):
        enter(program, b, here)
        return here

    nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(here, jnp.zeros(1 + b % 2))


@slow("scan")
def _(w, program, b, here):
    repeat(w, program, (here,), 1 + b % 2)


CALLS = tuple(REAL_CALLS)
LOOPS = ("scan",)
"""Calls whose program has nothing but steps that write values."""
KEEPING = ("cond", "switch", "fori_loop", "while_loop", *LOOPS)
"""Calls in which the structure may not change."""

assert set(REAL_CALLS) == set(SLOW_CALLS)


# Strategies ---------------------------------------------------------------------------------------

numbers = st.integers(0, 11)
steps = st.tuples(st.sampled_from(sorted(EDIT)), numbers, numbers, numbers)
programs = st.lists(steps.map(lambda step: Step(*step)), max_size=6)
"""Random programs without calls."""


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
