"""Compiled programs of eager loops and branches, found by the content of what was traced.

Outside every transform JAX would compile a loop again in each call, as its bodies are new functions each
time.  Here the bodies are traced in each call, so that whatever they read is what it is now, and the
compiled program is found by the content of the traces: equations, parameters and types, compared down
into inner programs.  What a body captured is an operand of the program, not part of it.

Custom rules of derivatives do not count: the program runs outside every transform, so that nothing
differentiates it.  Where a trace contains something that cannot be compared, such as a callback, JAX
compiles in each call.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing as tp

import jax
import numpy as np

from nnxlite._base.interning import Bounded
from nnxlite._base.jax import (
    EAGER,
    RULES,
    Literal,
    inner_consts,
    is_compiling,
    is_typed_literal,
    jaxpr_as_fun,
    opened,
    trace_state,
    without_rules,
)
from nnxlite.boundary._body import Body

S = tp.TypeVar("S", bound=tp.Hashable)

Run: tp.TypeAlias = tp.Callable[
    [S, list[tp.Callable[..., list[tp.Any]]], list[tp.Any]], list[tp.Any]
]
"""JAX's control flow between flat lists of arrays: from settings, bodies and inputs to outputs.

It must depend on nothing else: the settings and the content of the bodies are the key.
"""


def run_bodies(
    run: Run[S], settings: S, bodies: tp.Sequence[Body], inputs: list[tp.Any]
) -> list[tp.Any]:
    """Run traced bodies under JAX's control flow; outside every transform as one compiled program."""
    if trace_state.value is EAGER and is_compiling():
        program = _program(run, settings, bodies)
        if program is not None:
            return program([body.consts for body in bodies], inputs)
    return run(settings, [body.flat for body in bodies], inputs)


# Key: the control flow, its settings, the content of its bodies; `jax.jit` adds types of operands and
# JAX's own settings. Nothing invalidates an entry: another content is another key. Bound: the last
# 256 stay. Threads: two may compile one program. It contains no constants, functions or objects
# of the user. Without it each eager loop compiles in each call: 100 times as long (bench `eager`).
_programs: Bounded[tp.Any, tp.Any] = Bounded(256)


def _program(run: Run[S], settings: S, bodies: tp.Sequence[Body]) -> tp.Any:
    """The compiled program of a control flow; None where the bodies cannot be compared."""
    try:
        key = (run, _content(settings), *[content(body.jaxpr) for body in bodies])
    except Incomparable:
        return None
    return _programs.found(key, lambda: _compiled(run, settings, bodies))


def _compiled(run: Run[S], settings: S, bodies: tp.Sequence[Body]) -> tp.Any:
    jaxprs = [without_rules(opened(body.jaxpr)) for body in bodies]

    def program(consts: list[list[tp.Any]], inputs: list[tp.Any]) -> list[tp.Any]:
        return run(settings, [*map(jaxpr_as_fun, jaxprs, consts)], inputs)

    program.__name__ = program.__qualname__ = run.__name__.strip("_")
    return jax.jit(program)


# Content ------------------------------------------------------------------------------------------


class Incomparable(Exception):
    """A program contains something of which nobody knows whether it is the same."""


_MOST_BYTES = 1024
_BY_EQUALITY = (
    type, np.dtype, enum.Enum, jax.sharding.Sharding, jax.sharding.Mesh, jax.sharding.AbstractMesh,
)  # fmt: skip
_ATOMS = (bool, int, str, bytes, types.NoneType, types.EllipsisType)


def content(jaxpr: tp.Any) -> tuple[tp.Any, ...]:
    """A key of a program: what it computes from its inputs and constants.

    Raises Incomparable.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    numbers: dict[tp.Any, int] = {}

    def read(atom: tp.Any) -> tp.Any:
        return _literal(atom) if type(atom) is Literal else numbers[atom]

    def define(variables: list[tp.Any]) -> tuple[tp.Any, ...]:
        for variable in variables:
            numbers[variable] = len(numbers)
        return tuple([variable.aval for variable in variables])

    inputs = define([*jaxpr.constvars, *jaxpr.invars])
    equations = [
        (
            eqn.primitive,
            eqn.ctx,
            tuple([read(atom) for atom in eqn.invars]),
            _parameters(eqn) if eqn.params else (),
            define(eqn.outvars),
        )
        for eqn in jaxpr.eqns
    ]
    return len(jaxpr.constvars), inputs, *equations, tuple([read(atom) for atom in jaxpr.outvars])


def _parameters(eqn: tp.Any) -> tuple[tp.Any, ...]:
    rules = RULES.get(eqn.primitive.name, ())
    return tuple([(name, _content(x)) for name, x in eqn.params.items() if name not in rules])


def _literal(literal: tp.Any) -> tp.Any:
    return literal.aval, np.asarray(literal.val).tobytes()


def _content(value: tp.Any) -> tp.Any:
    """A key of a parameter of an equation: equal for values that are interchangeable in a program."""
    kind: tp.Any = type(value)
    if kind in _ATOMS:
        return kind, value
    if isinstance(value, tuple | list):
        return kind, *map(_content, value)
    if kind is dict:
        return kind, *[(_content(k), _content(v)) for k, v in value.items()]
    if kind in (set, frozenset):
        return kind, frozenset(map(_content, value))
    if hasattr(value, "eqns"):
        return content(value), *map(_constant, inner_consts(value))
    if isinstance(value, float | complex):
        return kind, np.asarray(value).tobytes()
    if isinstance(value, np.ndarray | np.generic) or is_typed_literal(value):
        return kind, *_constant(value)
    if isinstance(value, _BY_EQUALITY):
        return value
    module = kind.__module__.partition(".")[0]
    if isinstance(value, types.FunctionType):
        if value.__module__.partition(".")[0] != "jax" or value.__closure__ is not None:
            raise Incomparable
        return value
    if module not in ("jax", "jaxlib") or isinstance(value, jax.tree_util.PyTreeDef | jax.Array):
        raise Incomparable
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value)]
        return kind, *[_content(getattr(value, name)) for name in fields]
    if callable(value):
        raise Incomparable
    try:
        hash(value)
    except TypeError:
        raise Incomparable from None
    return kind, value


def _constant(value: tp.Any) -> tuple[tp.Any, ...]:
    """A key of an array among the constants of an inner program, which are part of the outer one."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        raise Incomparable
    if isinstance(value, jax.Array) and not isinstance(value.dtype, np.dtype):  # keys
        raise Incomparable
    array = np.asarray(value) if getattr(value, "nbytes", 0) <= _MOST_BYTES else None
    if array is None or array.dtype == object:
        raise Incomparable
    return jax.typeof(value), array.tobytes()
