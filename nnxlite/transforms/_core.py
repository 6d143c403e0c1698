"""Cores: the compiled side of a transformed function, shared by equal wrappers.

JAX caches traces by the identity of the function it is given.  So that its caches hit, a user
function under one set of options has one *core*, kept as long as the function lives; what JAX is
given is made from the core and the interned `CallDef` alone.

Loops and branches run as one compiled program where no program is being recorded around them:
outside every transform, or in an eager `grad` or `vmap`.  So the second call does not trace.  That
is right only while everything that the functions see besides their arguments is what it was when
they were traced; `Surroundings` tell.
"""

from __future__ import annotations

import collections
import functools
import types
import typing as tp
import weakref

import jax

from nnxlite._jax import EAGER, is_staging, trace_state
from nnxlite.boundary import CallDef, Crossing, Inputs, replay_crossing
from nnxlite.boundary._prefixes import refuse_non_arrays
from nnxlite.transforms._callables import unwrapped, weakly
from nnxlite.transforms._surroundings import Surroundings, look, surroundings_of

C = tp.TypeVar("C", bound="Core")


class Core:
    """Base of what stands behind a transformed function.

    Attributes:
        funs: the user functions, behind weak references where possible.
        options: everything else the transform was given; hashable where it can be.
        seen: what the functions see besides their arguments, or None if that may change.
        warned: random streams of which the user was told; see `warn_of_streams`.
        name: of the transform, for messages.
        skip: how many names at the front of an argument's path mean nothing to the user.
        first: names of the first plain leaves, where they are no arguments of the functions.
    """

    skip = 1
    first: tuple[str, ...] = ()

    def __init__(
        self,
        funs: tuple[tp.Callable[..., tp.Any], ...],
        options: tp.Any,
        seen: Surroundings | None = None,
    ) -> None:
        self.name: str = getattr(options, "name", type(self).__name__.lower())
        self._funs = tuple(map(weakly, funs))
        self.options = options
        self.seen = seen
        self.warned: set[str] = set()
        run = functools.partial(self._run)
        run.__name__ = self.name  # type: ignore[attr-defined]
        self.jitted = jax.jit(run, static_argnums=(0, 1))

    @property
    def fun(self) -> tp.Callable[..., tp.Any]:
        """The (first) user function."""
        return self._funs[0]()

    @property
    def funs(self) -> list[tp.Callable[..., tp.Any]]:
        """The user functions."""
        return [fun() for fun in self._funs]

    def run(self, call: CallDef, plain: list[tp.Any], values: list[tp.Any]) -> Crossing:
        """Apply the transform to the leaves of a call."""
        raise NotImplementedError  # pragma: no cover - abstract

    def _run(
        self, seen: Surroundings, call: CallDef, plain: list[tp.Any], values: list[tp.Any]
    ) -> Crossing:
        return self.run(call, plain, values)

    def constants(self, call: CallDef) -> Surroundings | None:
        """What a trace for a call may keep: the surroundings of everything that runs in it.

        None where something may change that a trace would keep.
        """
        if self.seen is None:
            return None
        found = call.cache.get((self, Core.constants))
        if found is None or not found.hold():
            found = surroundings_of(call, self.seen.attributes)
            call.cache[self, Core.constants] = found
        return found

    def explain(self, call: CallDef, inputs: Inputs) -> None:
        """Raise TypeError naming an argument that is no array, after JAX refused the arguments."""
        name, remedy = self.name, "Pass an array, or let the function capture the value."
        refuse_non_arrays(name, call, inputs.plain, inputs.values, remedy, self.skip, self.first)

    def __call__(self, inputs: Inputs, call: CallDef) -> tp.Any:
        """Run the transform on the caller's objects and write back what it changed."""
        staging = trace_state.value is not EAGER and is_staging()
        seen = None if staging else self.constants(call)
        try:
            if seen is None:
                out = self.run(call, inputs.plain, inputs.values)
            else:
                out = self.jitted(seen, call, inputs.plain, inputs.values)
        except TypeError:
            self.explain(call, inputs)
            raise
        return replay_crossing(inputs, out)


class _Known(tp.NamedTuple):
    """The cores of one function under one set of options, by what the function saw."""

    latest: list[Core]
    by_seen: collections.OrderedDict[Surroundings | None, Core]


_by_function: weakref.WeakKeyDictionary[tp.Any, dict[tp.Any, _Known]] = weakref.WeakKeyDictionary()
_by_content: collections.OrderedDict[tp.Any, tuple[Core, tp.Any]] = collections.OrderedDict()
CONTENT_CORES = 256
"""How many cores of short-lived functions (lambdas, closures over scalars) are kept."""
CORES_PER_FUNCTION = 16
"""How many cores of one function are kept, for different companions, options and surroundings."""


def core_for(kind: type[C], funs: tuple[tp.Callable[..., tp.Any], ...], options: tp.Any) -> C:
    """The core for some functions and options; the same one as before where that is possible."""
    owner, layers = unwrapped(funs[0])
    key = (kind, layers, tuple(map(id, funs[1:])), options)
    try:
        hash(key)
        known = _by_function.get(owner)
    except TypeError:
        return kind(funs, options, look(funs))
    mine = known.get(key) if known is not None else None
    if mine is not None and mine.latest:
        core = mine.latest[0]
        if core.seen is not None and core.seen.hold() and _same(core, funs):
            return tp.cast(C, core)
    seen = look(funs)
    if seen is not None and seen.self_contained and all(map(_is_function, funs)):
        return tp.cast(C, _by_its_content(kind, funs, options, seen))
    if mine is None:
        mine = _Known([], collections.OrderedDict())
        try:
            known = _by_function.setdefault(owner, {})
        except TypeError:  # not weakly referable
            return kind(funs, options, seen)
        known[key] = mine
        if len(known) > CORES_PER_FUNCTION:
            del known[next(iter(known))]
    core = mine.by_seen.get(seen)
    if core is None or not _same(core, funs):
        core = mine.by_seen[seen] = kind(funs, options, seen)
        if len(mine.by_seen) > CORES_PER_FUNCTION:
            mine.by_seen.popitem(last=False)
    mine.latest[:] = [core]
    return tp.cast(C, core)


def _by_its_content(
    kind: type[Core],
    funs: tuple[tp.Callable[..., tp.Any], ...],
    options: tp.Any,
    seen: Surroundings,
) -> Core:
    found = _by_content.get((kind, seen, options))
    if found is None:
        # The functions are kept alive beside the core: they hold on to nothing but plain values.
        found = _by_content[kind, seen, options] = (kind(funs, options, seen), funs)
        if len(_by_content) > CONTENT_CORES:
            _by_content.popitem(last=False)
    return found[0]


def _is_function(fun: tp.Any) -> bool:
    return type(fun) is types.FunctionType


def _same(core: Core, funs: tuple[tp.Callable[..., tp.Any], ...]) -> bool:
    return all(ref() is fun or ref() == fun for ref, fun in zip(core._funs, funs))
