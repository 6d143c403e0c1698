"""Captures, what modules record in one call, and views, copies of a model in other modes.

While a captured function runs, every module of its subject (the module that is called, or the first
argument) has a record: an object, in the attribute `__captures__` (in a tuple, since it is not one of
the module's children).  `sow` and `perturb` make their
Variables there instead of in the module.  A record is ordinary state, so it passes through the
transforms inside the function; and it is part of the structure, so a program compiled with captures is
never used without them.

With `method_outputs`, the methods of these modules are observed, and their results are added to the
record of their own object; objects outside the capture are not affected.

`view` sets modes through the `set_view` methods of layers, `with_attributes` sets attributes
directly.  Both leave the model unchanged; but writing to a Variable of the copy writes to the
model's, since it is the same Variable.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import re
import threading
import typing as tp

import jax

from nnxlite._base.errors import path_text, short_type
from nnxlite._base.interning import LOCK
from nnxlite._base.jax import NUMBERS
from nnxlite._state._definition import State
from nnxlite._state._flat import sort_key
from nnxlite.filters import Filter, to_predicate
from nnxlite.graph._functional import clone, flat_pairs
from nnxlite.graph._kinds import GraphNode
from nnxlite.graph._rebuild import Path
from nnxlite.graph._walk import iter_graph
from nnxlite.objects._containers import Dict, List
from nnxlite.objects._module import CAPTURES, Kind, Module, is_kind, iter_modules, set_existing
from nnxlite.objects._pytree import Object, Pytree
from nnxlite.variables._variable import Variable

__all__ = ["capture", "view", "view_info", "with_attributes"]

A = tp.TypeVar("A")
P = tp.ParamSpec("P")
R = tp.TypeVar("R")

AnyState: tp.TypeAlias = State[tp.Any, tp.Any]


class Record(Pytree):
    """The Variables of some kinds that a module records, by name."""

    def __init__(
        self, kinds: tuple[Kind, ...], outputs: Kind | None, init: dict[str, Variable[tp.Any]]
    ) -> None:
        self.__kinds__ = kinds
        self.__outputs__ = outputs  # the kind for the outputs of methods
        for name, variable in init.items():
            setattr(self, name, variable)


class _Options(tp.TypedDict, total=False):
    init: AnyState | None
    method_outputs: Kind | None


@tp.overload
def capture(  # pyright: ignore[reportOverlappingOverload] - a class can be called like a function
    fn: Kind, *var_types: Kind, **options: tp.Unpack[_Options]
) -> tp.Callable[[tp.Callable[P, R]], tp.Callable[P, tuple[R, *tuple[AnyState, ...]]]]: ...
@tp.overload
def capture(fn: tp.Callable[P, R], **options: tp.Unpack[_Options]) -> tp.Callable[P, R]: ...
@tp.overload
def capture(
    fn: tp.Callable[P, R], var_type: Kind, /, **options: tp.Unpack[_Options]
) -> tp.Callable[P, tuple[R, AnyState]]: ...
@tp.overload
def capture(
    fn: tp.Callable[P, R], *var_types: Kind, **options: tp.Unpack[_Options]
) -> tp.Callable[P, tuple[R, *tuple[AnyState, ...]]]: ...
def capture(
    fn: tp.Any, *var_types: Kind, init: AnyState | None = None, method_outputs: Kind | None = None
) -> tp.Any:
    """A function that returns the result of `fn` and what its modules recorded.

    Inside, `Module.sow` and `Module.perturb` record only the kinds asked for, and leave nothing in
    the modules.  The modules are those in `fn` itself, if it is a module or a bound method of one
    (which may be under a transform), else those in the first positional argument, or in the first
    with any that a `partial` has.

    Args:
        fn: a module, or a function. Without it (`capture(nnx.Intermediate)`), a decorator.
        var_types: kinds of Variables to capture.
        init: initial Variables for `perturb` and `sow`, by path, such as perturbations that an
            earlier capture returned.
        method_outputs: record also what every public method (and `__call__`) of the modules
            returns, under the method's name, as Variables of this kind; results that are not
            arrays are skipped.

    Returns:
        A function with the arguments of `fn` that returns `(result, state_1, ..., state_n)`, one
        State for each of `var_types`; the bare result if there are none. A captured Variable goes
        to the first of `var_types` that it is an instance of.

    Raises:
        TypeError: if an argument is not a function, a kind of Variable, or a State of Variables.
        ValueError: if `init` names a module that does not exist, or a recorded name is also the
            name of a module with records of its own.
        TraceContextError: for a module from outside the transform in which the call runs.
        RuntimeError: while another thread captures one of the modules.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> class Block(nnx.Module):
    ...     def __init__(self, rngs):
    ...         self.linear = nnx.Linear(2, 3, rngs=rngs)
    ...     def __call__(self, x):
    ...         x = self.linear(x)
    ...         self.sow(nnx.Intermediate, "mean", x.mean())
    ...         return x
    >>> block = Block(nnx.Rngs(0))
    >>> y, seen = nnx.capture(block, nnx.Intermediate)(jnp.ones((1, 2)))
    >>> seen["mean"].value[0].shape, hasattr(block, "mean")
    ((), False)
    """
    if is_kind(fn):
        return lambda fun: capture(fun, fn, *var_types, init=init, method_outputs=method_outputs)
    if not callable(fn):
        raise TypeError(f"capture takes a module or a function, got {type(fn).__name__}.")
    given = (*var_types, *([] if method_outputs in (None, False) else [method_outputs]))
    for kind in given:
        if not is_kind(kind):
            raise TypeError(
                f"capture takes classes of Variables, such as nnx.Intermediate, got {kind!r}."
            )
    first = _init_leaves(init)

    def wrapper(*args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        subject = _subject(fn, args)
        kinds = tuple(dict.fromkeys((*var_types, *map(type, first.values()))))
        outputs = method_outputs if method_outputs in var_types else None
        with _recording(subject, kinds, first, outputs) as modules:
            result = fn(*args, **kwargs)
            states = _collect(modules, var_types)
        return (result, *states) if var_types else result

    return functools.update_wrapper(wrapper, fn, updated=())


def _init_leaves(init: tp.Any) -> dict[Path, Variable[tp.Any]]:
    """The Variables of an initial state, by path."""
    leaves = {} if init is None else dict(flat_pairs(init))
    for path, leaf in leaves.items():
        if not isinstance(leaf, Variable):
            raise TypeError(
                f"capture: `init` contains {short_type(leaf)} at '{path_text(path)}', but "
                "must contain Variables, such as the perturbations that an earlier capture returned."
            )
    return leaves


def _subject(fn: tp.Any, args: tuple[tp.Any, ...]) -> tp.Any:
    """The object whose modules record: the module that is called, or the first argument with any.

    The call's own first argument comes before those of a partial.
    """
    args = (*getattr(getattr(fn, "bound", None), "args", ()), *args[:1])  # a transform of a method
    while isinstance(fn, functools.partial):
        args = (*args, *fn.args)
        fn = fn.func
    if isinstance(fn, GraphNode):
        return fn
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, GraphNode):
        return owner
    if not args:
        raise TypeError(
            "A captured function takes the model as its first positional argument, and got no "
            "positional argument. Call it as captured(model, ...)."
        )
    return next((one for one in args if any(iter_modules(one))), args[0])


_capturing: dict[int, int] = {}
"""The thread in which each module is being captured, by their ids."""


@contextlib.contextmanager
def _recording(
    subject: tp.Any,
    kinds: tuple[Kind, ...],
    first: dict[Path, Variable[tp.Any]],
    outputs: Kind | None,
) -> tp.Iterator[list[tuple[Path, Module]]]:
    """Give every module of `subject` a record while the block runs, then the one that it had before."""
    with LOCK:  # two threads neither edit nor walk the same modules
        modules = _to_record(subject, first)
        outer = {id(m): m._nnx_dict[CAPTURES] for _, m in modules if CAPTURES in m._nnx_dict}
        mine = {id(m) for _, m in modules} - _capturing.keys()
        _capturing.update(dict.fromkeys(mine, threading.get_ident()))
    try:
        with LOCK:
            for path, module in modules:
                given = {p[-1]: v.replace() for p, v in first.items() if p[:-1] == path}
                module._nnx_assign(CAPTURES, (Record(kinds, outputs, given),))
        classes = {type(m) for _, m in modules} if outputs else ()
        methods = [(base, name) for base, name in public_methods(*classes) if name not in _OWN]
        with observed(methods, _record_output):
            yield modules
    finally:
        with LOCK:
            # Modules that the call removed have a record, and so have those it made copies of.
            for number, module in {id(m): m for _, m in (*modules, *iter_modules(subject))}.items():
                if number in outer:
                    module._nnx_assign(CAPTURES, outer[number])
                elif CAPTURES in module._nnx_dict:
                    module._nnx_discard(CAPTURES)
            for number in mine:
                _capturing.pop(number, None)


def _to_record(subject: tp.Any, first: dict[Path, Variable[tp.Any]]) -> list[tuple[Path, Module]]:
    """The modules of `subject`.

    Raises ValueError for an initial value of none of them, and RuntimeError where another thread
    captures one. (A lock would have to be held while the user's function runs, which may wait for it.)
    """
    modules = list(iter_modules(subject))
    known = {path for path, _ in modules}
    for path in first:
        if path[:-1] not in known:
            raise ValueError(
                f"capture: `init` has a value for '{path_text(path)}', but no module has the "
                f"path '{path_text(path[:-1])}'. The paths are those of the captured states."
            )
    here = threading.get_ident()
    for path, module in modules:
        if _capturing.get(id(module), here) != here:
            raise RuntimeError(
                f"capture: another thread is capturing the {type(module).__name__} at "
                f"'{path_text(path)}', and a capture records in the modules themselves. "
                "Give each thread a view of its own (nnx.view(model)), or take a lock "
                "around the calls."
            )
    return modules


def _collect(modules: list[tuple[Path, Module]], var_types: tuple[Kind, ...]) -> list[AnyState]:
    """The recorded values, one State for each kind asked for."""
    groups: list[dict[Path, Variable[tp.Any]]] = [{} for _ in var_types]
    for path, module in modules:
        records = module._nnx_dict.get(CAPTURES, ())
        for name, variable in [pair for record in records for pair in vars(record).items()]:
            if isinstance(variable, Variable) and type(variable) in var_types:
                group = next(g for g, k in zip(groups, var_types) if isinstance(variable, k))
                group[*path, name] = variable
    return [State.from_flat_path(_in_order(group)) for group in groups]


def _in_order(group: dict[Path, Variable[tp.Any]]) -> dict[Path, Variable[tp.Any]]:
    """Recorded values, sorted by path; raises ValueError if one has the path of a module with others."""
    ordered = sorted(group, key=lambda path: tuple(map(sort_key, path)))
    for path, following in itertools.pairwise(ordered):
        if following[: len(path)] == path:
            raise ValueError(
                f"capture: '{path_text(path)}' is the name of a recorded value and of "
                f"a module that recorded '{path_text(following)}', so one State cannot contain both. "
                "Record under another name."
            )
    return {path: group[path] for path in ordered}


# Outputs of methods ------------------------------------------------------------------------------

_BASES = frozenset({*Module.__mro__, *List.__mro__, *Dict.__mro__, Object})
_OWN = frozenset(dir(Module))  # methods of the library: not recorded where a subclass defines them
_NOT_METHODS = (type, staticmethod, classmethod, property, functools.cached_property, Variable)


def public_methods(*classes: type) -> tp.Iterator[tuple[type, str]]:
    """`__call__` and the public methods that users define in some classes and their bases.

    Each comes once, with the class that defines it.
    """
    for base in dict.fromkeys(base for cls in classes for base in cls.__mro__):
        for name, member in vars(base).items() if base not in _BASES else ():
            is_method = callable(member) and hasattr(member, "__get__")
            if is_method and not isinstance(member, _NOT_METHODS):
                if name == "__call__" or not name.startswith("_"):
                    yield base, name


def _record_output(call: tp.Any, owner: tp.Any, name: str, args: tp.Any, kwargs: tp.Any) -> tp.Any:
    """Make a call, and record its result if its object has a record for outputs."""
    result = call(owner, *args, **kwargs)
    (record,) = getattr(owner, "__dict__", {}).get(CAPTURES, (None,))
    if record is not None and record.__outputs__:
        if all(isinstance(leaf, NUMBERS) for leaf in jax.tree.leaves(result)):
            Module.sow(owner, record.__outputs__, name, result)
    return result


# Observation of calls ----------------------------------------------------------------------------
# While a method of a class is observed, another function replaces it, which passes each call through
# all observers and finally to the method itself. Nothing else in the library edits users' classes.

Call: tp.TypeAlias = tp.Callable[..., tp.Any]
"""A method as a function of its object and its arguments."""

Observer: tp.TypeAlias = tp.Callable[
    [Call, tp.Any, str, tuple[tp.Any, ...], dict[str, tp.Any]], tp.Any
]
"""A function that makes a call in place of the caller, and returns its result.

Its arguments are the method, the object, the name, and the arguments of the call.
"""

_observed: dict[tuple[type, str], tuple[list[Observer], tp.Callable[[], None]]] = {}
"""The observers of each replaced method, and a function that restores it."""


def _replace(cls: type, name: str) -> tuple[list[Observer], tp.Callable[[], None]]:
    """Replace a method by one that passes calls through observers, unless `super()` makes them."""
    observers: list[Observer] = []
    is_own = name in vars(cls)
    original = inspect.getattr_static(cls, name)

    @functools.wraps(getattr(cls, name))
    def method(obj: tp.Any, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        def call(obj: tp.Any, /, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
            return original.__get__(obj, type(obj))(*args, **kwargs)

        if getattr(type(obj), name, None) is method:
            for observer in dict.fromkeys(observers):  # each once, also in nested blocks
                call = _through(observer, call, name)
        return call(obj, *args, **kwargs)

    setattr(cls, name, method)
    return observers, lambda: setattr(cls, name, original) if is_own else delattr(cls, name)


def _through(observer: Observer, call: Call, name: str) -> Call:
    return lambda obj, /, *args, **kwargs: observer(call, obj, name, args, kwargs)


@contextlib.contextmanager
def observed(methods: tp.Iterable[tuple[type, str]], observer: Observer) -> tp.Iterator[None]:
    """Pass the calls of some methods through an observer while the block runs.

    This includes calls in other threads.

    >>> import nnxlite as nnx
    >>> from nnxlite.objects._capture import observed
    >>> class Double(nnx.Module):
    ...     def __call__(self, x):
    ...         return 2 * x
    >>> def show(call, obj, name, args, kwargs):
    ...     print(name, args)
    ...     return call(obj, *args, **kwargs)
    >>> with observed([(Double, "__call__")], show):
    ...     Double()(3)
    __call__ (3,)
    6
    """
    keys = dict.fromkeys(methods)
    with LOCK:  # no entry without observers: a signal handler that does the same would remove it
        for key in keys:
            entry = _observed.get(key) or _observed.setdefault(key, _replace(*key))
            entry[0].append(observer)
    try:
        yield
    finally:
        with LOCK:
            for key in keys:
                observers, restore = _observed[key]
                observers.remove(observer)
                if not observers:
                    del _observed[key]
                    restore()


# Views ------------------------------------------------------------------------------------------


def view(
    node: A,
    /,
    *,
    only: Filter = ...,
    raise_if_not_found: bool = True,
    graph: bool | None = None,
    **kwargs: tp.Any,
) -> A:
    """A copy of a model in other modes, with the same Variables.

    The method `set_view` of every object that has one is called with those of the keyword arguments
    that it accepts; `view_info` lists them.

    Args:
        node: a model, or any pytree of graph objects.
        only: a filter that selects objects; by default all.
        raise_if_not_found: whether each keyword must be accepted by some object.
        graph: False refuses shared references.
        kwargs: the modes, such as `deterministic=True`.

    Returns:
        A pytree of the same structure, with new objects.

    Raises:
        ValueError: for a keyword that no object accepts.

    >>> import nnxlite as nnx
    >>> model = nnx.Dict(drop=nnx.Dropout(0.5), linear=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> still = nnx.view(model, deterministic=True)
    >>> still.drop.deterministic, model.drop.deterministic
    (True, False)
    >>> still.linear.kernel is model.linear.kernel
    True
    """
    copy = clone(node, variables=False, graph=graph)
    unused = set(kwargs)
    for viewed in _viewed(copy, only, None):
        accepted = _keywords(viewed, kwargs)
        unused -= accepted.keys()
        viewed.set_view(**accepted)
    if unused and raise_if_not_found:
        raise ValueError(
            f"Unused keys found in nnx.view: {sorted(unused)}. No set_view method in this "
            f"{type(node).__name__} takes them; nnx.view_info(model) lists what can be set. "
            "Correct the names, or pass raise_if_not_found=False."
        )
    return copy


def _viewed(node: tp.Any, only: Filter, graph: bool | None) -> list[tp.Any]:
    """The objects with a `set_view` method that a filter matches."""
    matches = to_predicate(only)
    return [
        value
        for path, value in iter_graph(node, graph=graph)
        if isinstance(value, Pytree)
        and callable(getattr(value, "set_view", None))
        and matches(path, value)
    ]


def _keywords(viewed: tp.Any, kwargs: dict[str, tp.Any]) -> dict[str, tp.Any]:
    """Those of the keyword arguments that an object's `set_view` accepts."""
    parameters = inspect.signature(viewed.set_view).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return kwargs
    names = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    return {name: value for name, value in kwargs.items() if name in names}


def view_info(node: tp.Any, /, *, only: Filter = ..., graph: bool | None = None) -> str:
    """The modes that `view` can set, as text: by class, with types, defaults and meaning.

    Args:
        node: a model, or any pytree of graph objects.
        only: a filter that selects objects; by default all.
        graph: False refuses shared references.

    Returns:
        A string; empty where nothing can be set.

    >>> import nnxlite as nnx
    >>> print(nnx.view_info(nnx.Dict(drop=nnx.Dropout(0.5))))
    Dropout:
      deterministic: bool | None = None
        if True, the layer gives its input back unchanged.
    """
    classes = {type(viewed) for viewed in _viewed(node, only, graph)}
    return "\n".join(
        line
        for cls in sorted(classes, key=lambda c: (c.__qualname__, c.__module__))
        for line in _describe(cls)
    )


def _describe(cls: tp.Any) -> tp.Iterator[str]:
    yield f"{cls.__qualname__}:"
    method = cls.set_view
    meanings = _meanings(inspect.getdoc(method) or "")
    _, *parameters = inspect.signature(method).parameters.values()
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        text, note = str(parameter), parameter.annotation
        # An annotation that is text, without quotes: as it is written in the source.
        yield "  " + (text.replace(repr(note), note, 1) if isinstance(note, str) else text)
        yield from (f"    {line}" for line in meanings.get(parameter.name, ()))


_SECTION = re.compile(r"^ *(?:Args|Arguments|Parameters):\n((?:[ \t]+.*\n?|\n)*)", re.M)
_ENTRY = re.compile(r"^([ \t]+)\*{0,2}(\w+)[^:\n]*:(.*(?:\n+\1[ \t]+.*)*)", re.M)


def _meanings(doc: str) -> dict[str, list[str]]:
    """The lines of the section "Args:" of a docstring, by name of the argument."""
    section = _SECTION.search(doc)
    entries = _ENTRY.findall(section.group(1)) if section else []
    return {name: [*filter(None, map(str.strip, text.splitlines()))] for _, name, text in entries}


def with_attributes(
    node: A,
    /,
    *,
    only: Filter = ...,
    raise_if_not_found: bool = True,
    graph: bool | None = None,
    **attributes: tp.Any,
) -> A:
    """A copy of a model with other attributes, with the same Variables.

    The attributes are set on those modules that have them already, as by `Module.set_attributes`.

    Args:
        node: a model, or any pytree of graph objects.
        only: a filter that selects modules; by default all.
        raise_if_not_found: whether each attribute must exist in some module.
        graph: False refuses shared references.
        attributes: names and new values.

    Returns:
        A pytree of the same structure, with new objects.

    Raises:
        ValueError: for an attribute that no module has.

    >>> import nnxlite as nnx
    >>> model = nnx.Dict(drop=nnx.Dropout(0.5))
    >>> nnx.with_attributes(model, rate=0.1).drop.rate, model.drop.rate
    (0.1, 0.5)
    """
    copy = clone(node, variables=False, graph=graph)
    set_existing(copy, only, attributes, raise_if_not_found)
    return copy
