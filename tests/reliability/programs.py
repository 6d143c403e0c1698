"""Random programs: edits of object graphs, and calls of transforms with programs inside them.

A step is a name and numbers, which choose among what is there when the step runs; so the same program
does the same to the real objects and to those of the slow model.  A call has a kind (the transform)
and a program of its own.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import typing as tp
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from tests.laws import model, objects
from tests.laws.graphs import NAMES, Box, Pair
from tests.laws.programs import STATICS, changeable, pick, put, references, take_away
from tests.reliability.worlds import (
    Broken,
    Dual,
    Real,
    Refused,
    Sliced,
    Slow,
    World,
    arithmetic,
    form,
    frozen,
    has_array,
    in_slices,
    is_float,
    is_tree,
    on_read,
    on_write,
    static_items,
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

KINDS = ("Param", "BatchStat", "Count", "Cell", "Intermediate")
OBJECTS = ("Node", "Twin", "Loose", "List", "Dict", "Stream")
SHAPES = ((2,), (), (2, 2), (2,), (2, 2))

# Steps that edit ----------------------------------------------------------------------------------


def write(w: World, here: tp.Any, a: int, b: int, c: int) -> None:
    if found := variables(here):
        chosen = pick(found, a)
        new = w.computed(chosen.get_value(), c)
        if b % 3 == 0 and isinstance(chosen, nnx.Variable):
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
    if found := [x for x in variables(here) if x.get_raw_value().dtype in (np.float32, np.int32)]:
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
        if target.get_value().dtype == value.dtype:
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
ALWAYS = (AssertionError,)


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
    if step.name in TREES and static_items(targets):  # which are arrays there
        step = step._replace(name="jit_values")
    if step.name in DONATING:  # an array that is in two places cannot be donated in one of them
        w.own(targets)
        if any(model.is_array(leaf) for _, leaf in model.leaves(targets)):
            step = step._replace(name="jit")
    if step.name in PLACING:  # also what is only read is on the devices afterwards
        w.own(targets)
    if step.name not in PLAIN:  # the rules of a custom_vjp may run where the caller does
        w.outer.append(() if step.name == "custom_vjp" else targets)
    try:
        if isinstance(w, Slow):
            with undone_on_failure(() if step.name in PLAIN else targets):
                result = SLOW_CALLS[step.name](w, step.program, step.b, *targets)
        else:
            result = REAL_CALLS[step.name](step.program, step.b, *targets)
    finally:
        if step.name not in PLAIN:
            w.outer.pop()
    if result is not None:
        put(targets[0], step.c, result)


def targets_of(w: World, step: Step, here: tuple[tp.Any, ...]) -> tuple[tp.Any, ...]:
    """The objects that a call gets."""
    things = [x for x in references(here) if model.is_object(x)]
    if step.b % 4:
        things = [x for x in things if is_wanted(w, step.name, x)] or things
    if step.name in ONE_TARGET or step.c % 3 == 0:
        return (pick(things, step.a),)
    return pick(things, step.a), pick(things, step.a + step.c)


def is_wanted(w: World, name: str, x: tp.Any) -> bool:
    """Whether a call with some object has a chance not to be refused."""
    if name in SPLITTING:
        return bool(streams(x))
    if name in OPTIONS:
        return any(fits(w, settings, x) for settings in options_of(w, name))
    return name not in TREES or is_tree(x)


def real(name: str) -> tp.Callable[..., tp.Any]:
    return lambda f: REAL_CALLS.setdefault(name, f)


def slow(*names: str) -> tp.Callable[..., tp.Any]:
    return lambda f: [SLOW_CALLS.setdefault(name, f) for name in names][0]


DONATING = ("donated", "donated_argnums")
SPLITTING = ("split_rngs", "with_split_rngs")
PLAIN = ("plain", *SPLITTING)
"""Calls that are no transforms: a failure in them does not undo what was done before it."""

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


@functools.lru_cache(maxsize=100)
def with_program(program: Program, b: int) -> tp.Callable[..., tp.Any]:
    """`enter` for one program: one function, since what was compiled belongs to a function."""
    return functools.partial(enter, program, b)


@real("jit_partial")
def _(program, b, *here):
    return nnx.jit_partial(with_program(program, b), *here)()


@real("cached_partial")
def _(program, b, *here):
    nnx.cached_partial(nnx.jit(functools.partial(values_only, program, b)), *here)()


@real("remat")
def _(program, b, *here):
    return nnx.remat(functools.partial(enter, program, b))(*here)


@real("filter_checkpoint")
def _(program, b, *here):
    return nnx.filter_checkpoint(functools.partial(enter, program, b))(*here)


@slow("plain", "jit", *DONATING, "filter_jit", "jit_partial", "remat", "filter_checkpoint")
def run_in_place(w, program, b, *here):
    run(w, program, here)
    return pick(references(here), b)


@real("contexts")
def _(program, b, *here):
    """What `jit` does, by hand."""
    tag = "machine"

    @jax.jit
    def f(graphdef, state):
        with nnx.merge_context(tag, inner=True) as context:
            inside = context.merge(graphdef, state)
        with nothing_cut_off(inside):
            result = enter(program, b, *inside)
        with nnx.split_context(tag) as context:
            return context.split((inside, result))

    with nnx.update_context(tag):
        with nnx.split_context(tag) as context:
            parts = context.split(here)
        parts = f(*parts)
        with nnx.merge_context(tag, inner=False) as context:
            return context.merge(*parts)[1]


@real("split_rngs")
def _(program, b, *here):
    return nnx.split_rngs(splits=2)(enter)(program, b, *here)


@real("with_split_rngs")
def _(program, b, *here):
    with nnx.split_rngs(here, splits=2):
        return enter(program, b, *here)


@slow(*SPLITTING)
def _(w, program, b, *here):
    with w.split(here):
        return run_in_place(w, program, b, *here)


@slow("contexts")
def _(w, program, b, *here):
    w.own(here)  # all values are outputs
    with nothing_cut_off(here):
        return run_in_place(w, program, b, *here)


@contextlib.contextmanager
def nothing_cut_off(here: tp.Any) -> tp.Iterator[None]:
    """Refuse a program that cuts something off: no result would carry its later changes outside."""
    before = references(here)
    yield
    left = {id(x) for x in references(here)}
    if any(id(x) not in left for x in before):
        raise Refused


@slow("cached_partial")
def _(w, program, b, *here):
    keep_form(w, program, here)


def keep_form(w, program, here):
    """Run a program that must not change the structure."""
    before = form(here)
    run(w, program, here)
    if form(here) != before:
        raise Refused


@real("vmap")
def _(program, b, *here):
    return nnx.vmap(functools.partial(enter, program, b), axis_size=2)(*here)


@real("filter_vmap")
def _(program, b, *here):
    return nnx.filter_vmap(functools.partial(enter, program, b), axis_size=2)(*here)


@real("scan_over")
def _(program, b, *here):
    body = functools.partial(enter, program, b)
    return nnx.scan(body, in_axes=0, out_axes=0, length=2)(*here)


@slow("vmap", "filter_vmap", "scan_over")
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


# Some Variables are mapped, others are not

AXES = (
    {"RngKey": 0, "RngCount": 0},
    {"Param": 0},
    {"Count": 0, "BatchStat": 0},
    {"RngKey": 0, "RngCount": 0, "BatchStat": 1},
    {"Param": -1, "RngKey": None, "RngCount": None, "Cell": 0},
)
"""For `vmap`: an axis for each kind of Variable, None for all others."""

DEVICE_AXES = AXES[:4]
"""The same for `pmap`, which takes no negative ones."""

LOOP_AXES = (
    {"RngCount": nnx.Carry, "Param": None, "Cell": nnx.Carry},
    {"Param": 0, "BatchStat": nnx.Carry},
    {"Param": nnx.Carry, "BatchStat": -1},
    {"RngKey": 0, "RngCount": 0, "BatchStat": 0, "Cell": nnx.Carry},
    {"Count": 0, "RngKey": None, "RngCount": None, "Cell": nnx.Carry},
)
"""The same for `scan`."""

SPECS = (
    {"Param": 0},
    {"Count": 0, "BatchStat": 0},
    {"Param": 0, "RngKey": None, "RngCount": None, "Cell": 1},
)
"""The same for `shard_map`: the axis that is divided among two devices."""

MESH = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


OPTIONS = {"vmap_axes": AXES, "pmap": DEVICE_AXES, "scan_axes": LOOP_AXES, "shard_map": SPECS}


def options_of(w: World, name: str) -> list[dict[type, tp.Any]]:
    """The settings for a call, with the classes of a world."""
    kinds = objects.REAL if isinstance(w, Real) else {kind: kind for kind in objects.REAL}
    return [
        {kinds[getattr(objects, kind)]: setting for kind, setting in settings.items()}
        for settings in OPTIONS[name]
    ]


def fits(w: World, settings: dict[type, tp.Any], here: tp.Any) -> bool:
    """Whether some Variables have a setting, and those that have an axis have room for it."""
    found = [x for x in references(here) if model.is_variable(x)]
    chosen = [(x, setting_of(settings, x)) for x in found]
    return any(setting is not None for _, setting in chosen) and all(
        value.shape[w.depth :][axis:][:1] == (2,)
        for x, axis in chosen
        if isinstance(axis, int)
        for value in jax.tree.leaves(x.get_raw_value())
    )


def settings_of(w: World, name: str, b: int, here: tp.Any) -> dict[type, tp.Any]:
    """One of the settings for a call, if possible one that fits."""
    options = options_of(w, name)
    fitting = [settings for settings in options if fits(w, settings, here)]
    return pick(fitting if fitting and b % 4 else options, b)


def setting_of(settings: dict[type, tp.Any], x: tp.Any) -> tp.Any:
    return next((setting for kind, setting in settings.items() if isinstance(x, kind)), None)


def state_axes(name: str, b: int, here: tp.Any) -> nnx.StateAxes:
    return nnx.StateAxes({**settings_of(REAL, name, b, here), ...: None})


@real("vmap_axes")
def _(program, b, *here):
    axes = state_axes("vmap_axes", b, here)
    f = functools.partial(enter, program, b)
    return nnx.vmap(f, in_axes=axes, out_axes=axes, axis_size=2)(*here)


@real("pmap")
def _(program, b, *here):
    def f(x, *here):
        return enter(program, b, *here)

    axes = state_axes("pmap", b, here)
    return nnx.pmap(f, in_axes=(0, *[axes] * len(here)), out_axes=axes)(jnp.zeros(2), *here)


@real("shard_map")
@ignoring("The random stream .* is replicated")
def _(program, b, *here):
    given = settings_of(REAL, "shard_map", b, here).items()
    specs = {kind: P() if axis is None else P(*[None] * axis, "a") for kind, axis in given}
    specs = nnx.StateSharding({**specs, ...: P()})
    f = functools.partial(enter, program, b)
    mapped = nnx.shard_map(f, mesh=MESH, in_specs=specs, out_specs=specs)
    return (nnx.jit(mapped) if b % 4 else mapped)(*here)


@slow("vmap_axes")
def _(w, program, b, *here):
    return run_in_slices(w, program, b, here, settings_of(w, "vmap_axes", b, here), item, "stack")


@slow("pmap")
def _(w, program, b, *here):
    settings = settings_of(w, "pmap", b, here)
    return run_in_slices(w, program, b, here, settings, item, "stack", checked=False)


@slow("shard_map")
def _(w, program, b, *here):
    settings = settings_of(w, "shard_map", b, here)
    return run_in_slices(w, program, b, here, settings, half, "concatenate")


def run_in_slices(w, program, b, here, settings, cut, join, checked=True):
    """Run a program for two slices at once.

    What differs between them must not be left where there is no axis; not `checked`, one of them is.
    """
    call, everything = len(w.outer), references(here)
    before = {id(x): (x.value, x.value) for x in everything if model.is_variable(x)}

    def enter_slices(value: tp.Any, axis: int) -> Sliced:
        def part(number: int) -> tp.Any:
            return in_slices(lambda v: cut(v, axis, number, w.depth), value)

        return Sliced((part(0), part(1)), call)

    def leave_slices(value: tp.Any, axis: int | None) -> tp.Any:
        sliced = isinstance(value, Sliced) and value.call == call
        if axis is None:
            if sliced and checked:
                raise Refused
            return value.slices[0] if sliced else value
        pair = value.slices if sliced else (value, value)
        return in_slices(lambda *pair: joined(join, pair, axis, w.depth), *pair)

    for x in everything:
        axis = setting_of(settings, x) if model.is_variable(x) else None
        if axis is not None:
            old, x.value = x.value, jax.tree.map(lambda v, k=axis: enter_slices(v, k), x.value)
            before[id(x)] = old, x.value
    result = run_in_place(w, program, b, *here)
    for x in references((here, result, *everything)):
        if model.is_variable(x):
            old, inside = before.get(id(x), (None, None))
            axis = setting_of(settings, x)
            new = jax.tree.map(lambda v, k=axis: leave_slices(v, k), x.value)
            x.value = old if x.value is inside else new
    return result


def joined(how: str, parts: tp.Sequence[tp.Any], axis: int, depth: int) -> tp.Any:
    """Parts of a value as one: "stack" or "concatenate"."""
    f = getattr(jnp if objects.is_key(parts[0]) else np, how)
    return objects.frozen(f(parts, position(parts[0], axis, depth, int(how == "stack"))))


def position(value: tp.Any, axis: int, depth: int, more: int = 0) -> int:
    """An axis, counted with those that are mapped already."""
    rank = value.ndim - depth + more
    if not -rank <= axis < rank:
        raise Refused
    return axis % rank + depth


def item(value: tp.Any, axis: int, number: int, depth: int) -> tp.Any:
    """One of two slices."""
    place = position(value, axis, depth)
    if value.shape[place] != 2:
        raise Refused
    return value[(slice(None),) * place + (number,)]


def half(value: tp.Any, axis: int, number: int, depth: int) -> tp.Any:
    place = position(value, axis, depth)
    size, odd = divmod(value.shape[place], 2)
    if odd:
        raise Refused
    return value[(slice(None),) * place + (slice(number * size, (number + 1) * size),)]


def total(here: tp.Any) -> tp.Any:
    values = [x.get_value() for x in variables(here)]
    return sum(((x * x).sum() for x in values if is_float(x)), jnp.zeros(()))


def chosen(here: tp.Any, kind: type) -> list[tp.Any]:
    found = [leaf for _, leaf in model.leaves(here) if isinstance(leaf, kind) and has_array(leaf)]
    return [x for x in found if is_float(x.get_raw_value())]


def total_and_result(program: tp.Any, b: tp.Any) -> tp.Any:
    """The function that is differentiated: what a program returns is auxiliary."""

    def f(here):
        result = enter(program, b, here)
        return total((here,)), result

    return f


@real("grad")
def _(program, b, here):
    params = chosen(here, nnx.Param)
    f = total_and_result(program, b)
    transform = nnx.grad(f, argnums=nnx.DiffState(0, nnx.Param), has_aux=True)
    grads, result = transform(here)
    set_remainders(REAL, params, [x for _, x in nnx.to_flat_state(grads)])
    return result


@real("filter_grad")
def _(program, b, here):
    params = chosen(here, nnx.Param)
    f = total_and_result(program, b)
    grads, result = nnx.filter_grad(f, arg=nnx.Param, has_aux=True)(here)
    set_remainders(REAL, params, chosen(grads, nnx.Param))
    return result


@real("vjp")
def _(program, b, here):
    found = chosen(here, nnx.Variable)
    _, pull, result = nnx.vjp(total_and_result(program, b), here, has_aux=True)
    (cotangents,) = pull(jnp.float32(3))
    set_remainders(REAL, found, chosen(cotangents, nnx.Variable))
    return result


@real("jvp")
def _(program, b, here):
    def f(here):
        result = enter(program, b, here)
        return [x.get_value() for x in chosen(here, nnx.Variable)], result

    params = nnx.state(here, nnx.Param)
    tangents = jax.tree.map(lambda x: arithmetic(x, b), params)
    _, tangents, result = nnx.jvp(f, (here,), (tangents,), has_aux=True)
    set_remainders(REAL, chosen(here, nnx.Variable), tangents)
    return result


def set_remainders(w: World, found: list[tp.Any], derivatives: list[tp.Any]) -> None:
    """Write derivatives into Variables, as numbers that stay small."""
    for x, derivative in zip(found, derivatives, strict=True):
        value = derivative.get_raw_value() if model.is_variable(derivative) else derivative
        x.set_value(w.copy(value % 16))


@slow("grad", "filter_grad")
def _(w, program, b, here):
    found = chosen(here, objects.Param)
    result, gradients = differentiated(w, program, b, here, found, gradients_of_total)
    set_remainders(w, found, gradients)
    return result


@slow("vjp")
def _(w, program, b, here):
    found = chosen(here, objects.Cell)
    result, gradients = differentiated(w, program, b, here, found, gradients_of_total)
    set_remainders(w, found, [3 * x for x in gradients])
    return result


@slow("jvp")
def _(w, program, b, here):
    def of_values(old, here, factors):
        tangents = [arithmetic(x, b) for x in old]
        return [
            sum((tangents[k] * f for k, f in factors(x).items()), start=0 * x.value)
            for x in chosen(here, objects.Cell)
        ]

    found = chosen(here, objects.Param)
    result, tangents = differentiated(w, program, b, here, found, of_values)
    set_remainders(w, chosen(here, objects.Cell), tangents)
    return result


def gradients_of_total(old, here, factors):
    """The gradient of the sum of squares, with respect to each of the old values."""
    gradients = [0 * value for value in old]
    for x in chosen(here, objects.Cell):
        for number, factor in factors(x).items():
            gradients[number] = gradients[number] + x.get_value().value * (2 * factor)
    return gradients


def differentiated(w, program, b, here, params, derivatives):
    """What a program returns, and the derivatives by the values that some Variables came in with."""
    the_call = object()
    everything = references((here,))
    old = [x.value for x in params]
    for number, x in enumerate(params):
        x.value = Dual(x.value, {number: 1.0}, the_call)
    wrapped = [x.value for x in params]

    def factors(x: tp.Any) -> dict[int, float]:
        value = x.get_value()
        return value.factors if getattr(value, "call", None) is the_call else {}

    try:
        result = run_in_place(w, program, b, here)
        found = derivatives(old, here, factors)
    finally:
        for x, before, value in zip(params, wrapped, old, strict=True):
            if x.value is before:
                x.value = value  # not written
        for x in references((here, *everything)):
            if model.is_variable(x):
                x.value = jax.tree.map(lambda v: without_derivative(v, the_call), x.value)
    return result, [without_derivative(x, the_call) for x in found]


def without_derivative(value: tp.Any, the_call: object) -> tp.Any:
    if isinstance(value, Dual) and value.call is the_call:
        return frozen(value.value)
    return value


@real("optimizer")
def _(program, b, here):
    """Two updates by an optimizer that crosses `jit`, and one outside, each with its momentum."""
    optimizer = nnx.Optimizer(here, optax.sgd(1.0, momentum=1.0), wrt=nnx.Param)

    def update(here, optimizer):
        params = nnx.state(here, nnx.Param)
        optimizer.update(here, jax.tree.map(lambda x: arithmetic(x, b), params))

    @nnx.jit
    def f(here, optimizer):
        update(here, optimizer)
        keep_form(REAL, program, (here,))

    for _ in range(2):
        f(here, optimizer)
    update(here, optimizer)
    for x in chosen(here, nnx.Param):
        x.set_raw_value(x.get_raw_value() + optimizer.step.value.astype(jnp.float32))


@slow("optimizer")
def _(w, program, b, here):
    momentum = [0 * x.value for x in chosen(here, objects.Param)]

    def update():
        for number, x in enumerate(chosen(here, objects.Param)):
            momentum[number] = arithmetic(x.value, b) + momentum[number]
            x.set_raw_value(w.copy(x.value + momentum[number] * -1))

    for _ in range(2):
        update()
        keep_form(w, program, (here,))
    update()
    for x in chosen(here, objects.Param):
        x.set_raw_value(w.copy(x.value + np.float32(3)))


@real("custom_vjp")
def _(program, b, *here):
    """A function whose derivative is three times that of one that writes nothing."""

    def f(*here):
        keep_form(REAL, program, here)

    def backward(_, cotangent):
        return jax.tree.map(lambda x: x * 3 if x.dtype == jnp.float32 else x, cotangent[0])

    custom = nnx.custom_vjp(f)
    custom.defvjp(lambda *here: (f(*here), None), backward)
    custom(*here)


@slow("custom_vjp")
def _(w, program, b, *here):
    before = [(x, x.value) for x in references(here) if model.is_variable(x)]
    inside = [(x, jax.tree.map(without_derivatives, value)) for x, value in before]
    for x, value in inside:
        x.value = value
    keep_form(w, program, here)
    for (x, old), (_, value) in zip(before, inside, strict=True):
        x.value = old if x.value is value else jax.tree.map(tripled, old, x.value)


def without_derivatives(value: tp.Any) -> tp.Any:
    while isinstance(value, Dual):
        value = value.value
    return value


def tripled(old: tp.Any, new: tp.Any) -> tp.Any:
    """A new value with three times the derivatives of the old one."""
    if not isinstance(old, Dual):
        return new
    factors = {key: 3 * factor for key, factor in old.factors.items()}
    return Dual(tripled(old.value, new), factors, old.call)


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


@real("scan_axes")
def _(program, b, *here):
    def body(*here):
        enter(program, b, *here)

    axes = state_axes("scan_axes", b, here)
    nnx.scan(body, in_axes=(axes,) * len(here), out_axes=0, length=2)(*here)


@slow("scan_axes")
def _(w, program, b, *here):
    settings = settings_of(w, "scan_axes", b, here)
    found = [(x, setting_of(settings, x)) for x in references(here) if model.is_variable(x)]
    scanned = [(x, axis, x.value, []) for x, axis in found if isinstance(axis, int)]
    constants = [(x, x.value) for x, setting in found if setting is None]
    written = False
    for number in (0, 1):
        for x, axis, value, _ in scanned:
            cut = functools.partial(item, axis=axis, number=number, depth=w.depth)
            x.value = jax.tree.map(lambda v, f=cut: w.copy(f(v)), value)
        inside, structure = [x.value for x, *_ in scanned], form(here)
        run(w, program, here)
        if form(here) != structure:
            raise Refused
        for x, value in constants:
            if x.value is not value and not isinstance(x, (objects.RngKey, objects.RngCount)):
                raise Refused
            x.value = value  # every iteration draws the same keys
        written = [x.value is not value for (x, *_), value in zip(scanned, inside, strict=True)]
        for x, _, _, pieces in scanned:
            pieces.append(x.value)
    for (x, axis, value, pieces), new in zip(scanned, written, strict=True):
        stack = functools.partial(joined, "stack", axis=axis, depth=w.depth)
        x.value = jax.tree.map(lambda *parts, f=stack: f(parts), *pieces) if new else value


# Without graph updates


def enter_apart(program: Program, b: int, *here: tp.Any) -> tp.Any:
    """`enter`, with a copy of its result: what came in cannot be returned."""
    result = enter(program, b, *here)
    return None if static_items(result) else nnx.clone(result)


def apart(tree: bool, f: tp.Callable[..., tp.Any]) -> tp.Callable[..., tp.Any]:
    """A call on copies, of which only values come back to the Variables; with `tree` without sharing."""

    def g(w, program, b, *here):
        if tree and not is_tree(here):
            raise Refused
        copies: list[tuple[tp.Any, tp.Any]] = []

        def variable(x: tp.Any) -> tp.Any:
            copies.append((x, model.copied_variable(x)))
            return copies[-1][1]

        result = f(w, program, b, *model.copied(here, variable=variable))
        if tree and not static_items(result) and not is_tree(result):
            raise Refused
        for x, copy in copies:
            x.value = copy.value
        return None if result is None or static_items(result) else w.clone(result)

    return g


def without_updates(name: str, tree: bool, **mode: bool) -> None:
    """`jit`, `vmap` and `scan` in a mode."""

    @real(f"vmap_{name}")
    def _(program, b, *here):
        return nnx.vmap(functools.partial(enter_apart, program, b), axis_size=2, **mode)(*here)

    @real(f"scan_{name}")
    def _(program, b, here):
        def body(here, x):
            enter(program, b, here)
            return here

        axes = nnx.Carry, 0
        nnx.scan(body, in_axes=axes, out_axes=nnx.Carry, **mode)(here, jnp.zeros(1 + b % 2))

    REAL_CALLS[f"jit_{name}"] = nnx.jit(enter_apart, static_argnums=(0, 1), **mode)
    for call in ("jit", "vmap", "scan"):
        SLOW_CALLS[f"{call}_{name}"] = apart(tree, SLOW_CALLS[call])


without_updates("values", tree=False, graph_updates=False)
without_updates("tree", tree=True, graph=False)

CALLS = tuple(REAL_CALLS)
TREES = ("jit_tree", "vmap_tree", "scan_tree")
DIFFERENTIATED = ("grad", "filter_grad", "vjp", "jvp")
LOOPS = ("scan", "scan_axes", "scan_values", "scan_tree")
"""Calls whose program has nothing but steps that write values."""
ONE_TARGET = (*DIFFERENTIATED, "optimizer", "scan", "scan_values", "scan_tree")
KEEPING = (
    "optimizer",
    "cached_partial",
    "custom_vjp",
    "cond",
    "switch",
    "fori_loop",
    "while_loop",
    *LOOPS,
)
"""Calls in which the structure may not change."""
PLACING = ("pmap", "shard_map")
THROUGH = (*PLAIN, "jit", "filter_jit", "jit_partial", "jit_values")
"""Calls in and around which several devices are used."""
NOT_INSIDE: dict[str, set[str]] = {
    # A derivative may need an array that a call in it has donated.
    **dict.fromkeys(DIFFERENTIATED, {"while_loop", *DONATING, "vmap_axes", "scan_axes"}),
    "jvp": {"while_loop", "custom_vjp", *DONATING, "vmap_axes", "scan_axes"},
    "vmap_axes": {*KEEPING, *LOOPS},  # there JAX maps what it may have to, the model what it must
    **{name: {*CALLS} - {*THROUGH} for name in PLACING},
}
"""What JAX, or the model, cannot do inside of a call."""
for _name in CALLS:
    if _name not in THROUGH:
        NOT_INSIDE[_name] = NOT_INSIDE.get(_name, set()) | {*PLACING}

assert set(REAL_CALLS) == set(SLOW_CALLS)
