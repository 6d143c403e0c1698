"""Cores: the compiled side of a transformed function, shared by equal wrappers.

JAX caches traces by the identity of the function it is given.  For its caches to hit, a user function
under one set of options has one *core*, which lives as long as the function; what JAX is given is made
from the core and the interned `CallDef` alone.

Loops and branches run as one compiled program where no program is being recorded around them: outside
every transform, or in an eager `grad` or `vmap`.  So the second call does not trace.  That is valid
only while everything that the functions see besides their arguments is unchanged since the trace:
`surroundings` computes a key for it.
"""

from __future__ import annotations

import collections
import functools
import itertools
import types
import typing as tp

import jax

from nnxlite._jax import EAGER, is_staging, trace_state
from nnxlite.boundary import (
    ArgumentNames,
    CallDef,
    Crossing,
    Inputs,
    NamedCall,
    Naming,
    argument_names,
    describe,
    of_arguments,
    parameter_names,
    refuse_non_arrays,
    replay_crossing,
)
from nnxlite.closures import (
    Surroundings,
    common_owner,
    replaced_functions,
    surroundings,
    surroundings_of_call,
)
from nnxlite.transforms._wrapper import KEPT_PER_FUNCTION, PerFunction, unwrapped, weakly

C = tp.TypeVar("C", bound="Core")

_next_number = itertools.count().__next__


class Core:
    """Base of the compiled side of a transformed function.

    Attributes:
        funs: the user functions, behind weak references where possible.
        options: all other arguments of the transform; hashable where possible.
        seen: what the functions see besides their arguments, or None if that may change.
        warned: random streams that the user was warned of; see `warn_of_streams`.
        name: of the transform, for messages.
    """

    traced_late = False
    """Whether a trace may come long after `seen`, when captured values may have been rebound."""

    def __init__(
        self,
        funs: tuple[tp.Callable[..., tp.Any], ...],
        options: tp.Any,
        seen: Surroundings | None = None,
    ) -> None:
        self.name: str = getattr(options, "name", type(self).__name__.lower())
        self.hold(funs)
        self.options = options
        self.seen = seen
        self.warned: set[str] = set()
        self._numbers: dict[tp.Any, int] = {}
        self._make_jitted(funs[0])

    def _make_jitted(self, fun: tp.Callable[..., tp.Any]) -> None:
        """Make what JAX is given; the function is named in messages, and must not be kept alive."""
        self.jitted = jax.jit(describe(self._run, fun, self.name), static_argnums=(0, 1))

    def hold(self, funs: tuple[tp.Callable[..., tp.Any], ...]) -> None:
        """Trace these functions from now on: equal functions may by now see something else."""
        self._funs = tuple(map(weakly, funs))

    @property
    def fun(self) -> tp.Callable[..., tp.Any]:
        """The (first) user function."""
        return self._funs[0]()

    @property
    def funs(self) -> list[tp.Callable[..., tp.Any]]:
        """The user functions."""
        return [fun() for fun in self._funs]

    def run(self, call: CallDef, leaves: list[tp.Any]) -> Crossing:
        """Apply the transform to the leaves of a call."""
        raise NotImplementedError  # pragma: no cover - abstract

    def _run(self, seen: int, call: CallDef, leaves: list[tp.Any]) -> Crossing:
        return self.run(call, leaves)

    def _number_of(self, seen: Surroundings) -> int:
        """A number that stands in JAX's key for what the functions see.

        JAX keeps static arguments long after the function is gone, and what a function sees may be a
        large array. Key: `seen`. Bound: KEPT_PER_FUNCTION; a number is never used again. Threads: two
        may get two numbers for one content, which costs one more trace.
        """
        number = self._numbers.get(seen)
        if number is None:
            if len(self._numbers) >= KEPT_PER_FUNCTION:
                self._numbers.pop(next(iter(tuple(self._numbers)), None), None)
            number = self._numbers[seen] = _next_number()
        return number

    def constants(self, call: CallDef, values: list[tp.Any]) -> Surroundings | None:
        """The constants that a trace for a call may contain; None where any of them may change."""
        return (
            None if self.seen is None else surroundings_of_call(self.funs, self.seen, call, values)
        )

    def explain(self, call: CallDef, inputs: Inputs) -> None:
        """Raise TypeError naming an argument that is not an array, after JAX refused the arguments."""
        name, remedy = self.name, "Pass an array, or let the function capture the value."
        refuse_non_arrays(name, self.in_words(call), inputs.leaves, remedy)

    def in_words(self, call: CallDef) -> CallDef:
        """A call for messages, with the user's names for its arguments."""
        return NamedCall(call, self.naming)

    def names(self, call: CallDef) -> ArgumentNames:
        """The same names, as expressions."""
        return argument_names(call, self.naming())

    def naming(self) -> Naming:
        """The names of the arguments."""
        return of_arguments(parameter_names(self.fun))

    def __call__(self, inputs: Inputs, call: CallDef) -> tp.Any:
        """Run the transform on the caller's objects and write back what it changed."""
        staging = trace_state.value is not EAGER and is_staging()
        seen = None if staging else self.constants(call, inputs.values)
        try:
            if seen is None:
                out = self.run(call, inputs.leaves)
            else:
                out = self.jitted(self._number_of(seen), call, inputs.leaves)
        except TypeError:
            self.explain(call, inputs)
            raise
        return replay_crossing(inputs, out)


# Two caches of cores. Without them, an eager loop or branch traces and compiles in each call: hundreds
# of times as long (`benchmarks --only eager`).
# Key: class, options, what the functions see, replaced functions of JAX. Nothing invalidates an entry:
# what changes gives another key. Threads may make two equal cores; either serves.
# Cores live as long as the function that owns what they captured, at most KEPT_PER_FUNCTION of it ...
_cores: PerFunction[Core] = PerFunction()
# ... but where functions refer to constants only, the last CONSTANT_CORES stay, with their functions, so
# that a body that is defined in each call is compiled once.
_constant_cores: collections.OrderedDict[tp.Any, tuple[Core, tp.Any]] = collections.OrderedDict()
CONSTANT_CORES = 256


def core_for(kind: type[C], funs: tuple[tp.Callable[..., tp.Any], ...], options: tp.Any) -> C:
    """The core for some functions and options; the same one as before where that is possible."""
    seen = surroundings(funs)
    make = functools.partial(kind, funs, options, seen)
    if seen is None and funs[1:]:
        return make()
    replaced = replaced_functions() if kind.traced_late else ()  # else their calls have them
    key = (kind, options, seen, replaced)
    if seen is None or not seen.constant or not all(_can_be_kept(kind, fun) for fun in funs):
        owner = funs[0]
        if seen is not None and not kind.traced_late:  # else the key does not tell bodies apart
            owner = common_owner([unwrapped(fun)[0] for fun in funs]) or owner
        core = _cores.get(owner, key, make)
    else:
        try:
            core, _ = _constant_cores.pop(key, None) or (make(), None)
        except TypeError:  # unhashable options
            return make()
        _constant_cores[key] = core, funs  # at the end: those used last stay
        if len(_constant_cores) > CONSTANT_CORES:
            _constant_cores.popitem(last=False)
    core.hold(funs)
    return tp.cast(C, core)


def _can_be_kept(kind: type[Core], fun: tp.Any) -> bool:
    """Whether a function can be cached with its core: nobody can rebind what a late trace reads."""
    return type(fun) is types.FunctionType and not (kind.traced_late and fun.__closure__)
