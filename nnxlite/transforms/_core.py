"""Cores: the compiled side of a transformed function, shared by equal wrappers.

JAX caches traces by the identity of the function it is given.  So that its caches hit, a user
function under one set of options has one *core*, kept as long as the function lives; what JAX is
given is made from the core and the interned `CallDef` alone.

Loops and branches run as one compiled program where no program is being recorded around them:
outside every transform, or in an eager `grad` or `vmap`.  So the second call does not trace.  That
is right only while everything that the functions see besides their arguments is what it was when
they were traced: `surroundings` has a key for it.
"""

from __future__ import annotations

import collections
import functools
import types
import typing as tp
import weakref

import jax

from nnxlite._jax import EAGER, is_staging, trace_state
from nnxlite._statics import replaced_functions
from nnxlite.boundary import CallDef, Crossing, Inputs, refuse_non_arrays, replay_crossing
from nnxlite.transforms._surroundings import Surroundings, of_call, surroundings
from nnxlite.transforms._wrapper import unwrapped, weakly

C = tp.TypeVar("C", bound="Core")


class Core:
    """Base of what stands behind a transformed function.

    Attributes:
        funs: the user functions, behind weak references where possible.
        options: everything else the transform was given; hashable where it can be.
        seen: what the functions see besides their arguments, or None if that may change.
        warned: random streams that the user was warned of; see `warn_of_streams`.
        name: of the transform, for messages.
        skip: how many names at the front of an argument's path mean nothing to the user.
        first: names of the first leaves, where they are no arguments of the functions.
    """

    skip = 1
    first: tuple[str, ...] = ()
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
        run = functools.partial(self._run)
        run.__name__ = self.name  # type: ignore[attr-defined]
        self.jitted = jax.jit(run, static_argnums=(0, 1))

    def hold(self, funs: tuple[tp.Callable[..., tp.Any], ...]) -> None:
        """Trace these functions from now on: equal ones may since have come to see something else."""
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

    def _run(self, seen: Surroundings, call: CallDef, leaves: list[tp.Any]) -> Crossing:
        return self.run(call, leaves)

    def constants(self, call: CallDef, values: list[tp.Any]) -> Surroundings | None:
        """What a trace for a call may keep; None where anything may change that it would keep."""
        return None if self.seen is None else of_call(self.funs, self.seen, call, values)

    def explain(self, call: CallDef, inputs: Inputs) -> None:
        """Raise TypeError naming an argument that is no array, after JAX refused the arguments."""
        name, remedy = self.name, "Pass an array, or let the function capture the value."
        refuse_non_arrays(name, call, inputs.leaves, remedy, self.skip, self.first)

    def __call__(self, inputs: Inputs, call: CallDef) -> tp.Any:
        """Run the transform on the caller's objects and write back what it changed."""
        staging = trace_state.value is not EAGER and is_staging()
        seen = None if staging else self.constants(call, inputs.values)
        try:
            if seen is None:
                out = self.run(call, inputs.leaves)
            else:
                out = self.jitted(seen, call, inputs.leaves)
        except TypeError:
            self.explain(call, inputs)
            raise
        return replay_crossing(inputs, out)


Cores = collections.OrderedDict[tp.Any, tuple[Core, tp.Any]]
_by_function: weakref.WeakKeyDictionary[tp.Any, Cores] = weakref.WeakKeyDictionary()
_by_content: Cores = collections.OrderedDict()
CONTENT_CORES = 256
"""How many cores of functions are kept that hold nothing but constants."""
CORES_PER_FUNCTION = 16
"""How many cores of one function are kept, for different companions, options and surroundings."""


def core_for(kind: type[C], funs: tuple[tp.Callable[..., tp.Any], ...], options: tp.Any) -> C:
    """The core for some functions and options; the same one as before where that is possible."""
    seen = surroundings(funs)
    if seen is None and funs[1:]:
        return kind(funs, options, None)
    closed = seen is not None and seen.shared and all(_is_closed(kind, fun) for fun in funs)
    owner, layers = unwrapped(funs[0])
    if seen is not None and not kind.traced_late:  # else the key does not tell bodies apart
        inner = [_anchor(unwrapped(fun)[0]) for fun in funs]
        anchors = {id(fun): fun for fun in inner if not _is_constant(fun)}
        if len(anchors) == 1:
            (owner,) = anchors.values()
    replaced = replaced_functions() if kind.traced_late else ()  # others have them in their calls
    key = (kind, options, layers, seen, replaced)
    try:
        hash(key)
        cores = _by_content if closed else _by_function.setdefault(owner, Cores())
    except TypeError:  # unhashable options, or a function without weak references
        return kind(funs, options, seen)
    core, _ = cores.get(key, (None, None))
    if core is None:
        core = kind(funs, options, seen)
    else:
        core.hold(funs)
    # Functions that hold nothing but constants are kept alive beside the core.
    cores[key] = core, funs if closed else None
    if len(cores) > (CONTENT_CORES if closed else CORES_PER_FUNCTION):
        cores.popitem(last=False)
    return tp.cast(C, core)


def _anchor(fun: tp.Any) -> tp.Any:
    """The function that holds all that a function captures, but for constants: often itself.

    A body that is defined in every call, around one that stays, is found again as long as that lives.
    """
    passed: set[int] = set()  # functions may hold themselves, or each other
    while type(fun) is types.FunctionType and not (fun.__defaults__ or fun.__kwdefaults__):
        passed.add(id(fun))
        held = [x for x in map(_content, fun.__closure__ or ()) if not _is_constant(x)]
        if len(held) != 1 or type(held[0]) is not types.FunctionType or id(held[0]) in passed:
            break
        fun = held[0]
    return fun


def _content(cell: types.CellType) -> tp.Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _is_constant(value: tp.Any) -> bool:
    kind = type(value)
    return kind in _CONSTANTS or (kind is types.FunctionType and not value.__closure__)


_CONSTANTS = frozenset({bool, int, float, complex, str, type(None)})


def _is_closed(kind: type[Core], fun: tp.Any) -> bool:
    return type(fun) is types.FunctionType and not (kind.traced_late and fun.__closure__)
