"""Exceptions of the library, and how messages show paths, filters and values.

Also, at the end: whose method counts where a user's class has other bases beside one of the library.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import types
import typing as tp
import warnings

import jax

from nnxlite._base.config import LOG_WARNINGS
from nnxlite._base.jax import describe_trace, trace_state

T = tp.TypeVar("T")


class NnxError(Exception):
    """Base of exceptions for which no builtin class is suitable.

    >>> import nnxlite as nnx
    >>> issubclass(nnx.TraceContextError, nnx.NnxError)
    True
    """

    def __reduce__(self) -> tuple[tp.Any, ...]:
        # Exception would call the class with the message, whatever the arguments of `__init__` are.
        return _rebuilt, (getattr(type(self), "_declared", type(self)), self.args), self.__dict__


def _rebuilt(cls: type[NnxError], args: tuple[tp.Any, ...]) -> NnxError:
    """An exception from a pickle or a copy, without its fields."""
    error = cls.__new__(cls)
    error.args = args
    return error


def under_own_name(cls: type, *names: str) -> None:
    """Give a class copies of methods that it inherits from a private base.

    Python names a function by where it was defined: an error about its arguments would name the base.
    """
    for name in names:
        inherited = getattr(cls, name)
        method = types.FunctionType(
            inherited.__code__,
            inherited.__globals__,
            name,
            inherited.__defaults__,
            inherited.__closure__,
        )
        method.__doc__, method.__annotations__ = inherited.__doc__, inherited.__annotations__
        method.__module__, method.__kwdefaults__ = inherited.__module__, inherited.__kwdefaults__
        method.__qualname__ = f"{cls.__qualname__}.{name}"
        setattr(cls, name, method)


class TraceContextError(NnxError):
    """An object was changed from a trace level other than the one it belongs to.

    Attributes:
        owner: class name of the object.
        attribute: the attribute, or None for the object itself.

    The argument `variable` says that the owner is a Variable; one argument alone is the message.
    If the reference has been imported, its class of the same name catches the exception as well.

    >>> import nnxlite as nnx, jax
    >>> count = nnx.Variable(0)
    >>> def step(x):
    ...     count.value = x
    >>> try:
    ...     jax.make_jaxpr(step)(1.0)
    ... except nnx.TraceContextError as error:
    ...     print(error.owner, error.attribute)
    Variable value
    """

    def __new__(cls, *args: tp.Any, **kwargs: tp.Any) -> tp.Self:
        other = getattr(sys.modules.get("flax.errors"), "TraceContextError", cls)
        return super().__new__(cls if issubclass(cls, other) else _of_both(cls, other))

    def __init__(
        self,
        owner: str,
        attribute: str | None = None,
        belongs: str | None = None,
        running: str | None = None,
        *,
        variable: bool = False,
    ) -> None:
        self.owner = owner
        self.attribute = attribute
        if running is None:  # the text alone: Keras and others add to it, and raise the same class
            self.owner = ""
            Exception.__init__(self, owner)
            return
        what = f"{owner} from a" if variable else f"'{owner}' from"
        write = "write" if attribute is None else f"write of {attribute!r}"
        Exception.__init__(
            self,
            f"Cannot mutate {what} different trace level: it belongs to {belongs}, and the {write} "
            f"happens inside {running}. Pass the object to the transformed function as an argument "
            "(nnxlite transforms write its changes back), or return the new value and assign it "
            "outside." + (_OF_A_STATE if variable else ""),
        )


_OF_A_STATE = (
    " If nnx.merge has put it into an object, from a state that the function captures, "
    "nnx.merge(graphdef, state, copy=True) makes a new one."
)


@functools.cache
def _of_both(cls: type, reference: type) -> tp.Any:
    """A subclass of both, the same one each time."""
    return type(cls.__name__, (cls, reference), {"__module__": cls.__module__, "_declared": cls})


def check_level(
    node: tp.Any, belongs: tp.Any, attribute: str | None = None, *, variable: bool = False
) -> None:
    """Raise TraceContextError where a node belongs to another trace than the one running."""
    running = trace_state.value
    if belongs is not running:
        sides = describe_trace(belongs), describe_trace(running)
        raise TraceContextError(type(node).__name__, attribute, *sides, variable=variable)


class RuntimeCheckError(NnxError, jax.errors.JaxRuntimeError):
    """A condition given to `error_if` was true.

    It is raised in eager code and by the transforms of this library. Under JAX's own `jax.jit` the
    error is JAX's: `jax.errors.JaxRuntimeError`, of which this is one, with the message at its end.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> positive = nnx.jit(lambda x: nnx.error_if(x, x < 0, "x is negative"))
    >>> try:
    ...     positive(jnp.array(-1.0))
    ... except nnx.RuntimeCheckError as error:
    ...     print(error)
    x is negative
    """


def path_text(path: tp.Iterable[tp.Any]) -> str:
    """A path as text: `layers.0.kernel`; the root is `<root>`.

    >>> from nnxlite._base.errors import path_text
    >>> path_text(("layers", 0, "kernel"))
    'layers.0.kernel'
    """
    return ".".join(str(part) for part in path) or "<root>"


MOST_PATHS = 8
"""How many paths a message lists."""


def listed(
    items: tp.Sequence[T],
    most: int = MOST_PATHS,
    text: tp.Callable[[T], str] = str,
    between: str = ", ",
) -> str:
    """The first few of some items as text, and how many more there are.

    >>> from nnxlite._base.errors import listed
    >>> listed(["a", "b", "c", "d"], most=2)
    'a, b and 2 more'
    """
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return between.join(map(text, items[:most])) + more


def short_type(value: tp.Any) -> str:
    """A value in a few words for a message: arrays by shape and dtype, the rest by type."""
    shape = getattr(value, "shape", None)
    dtype = getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{dtype}{list(shape)}"
    return type(value).__name__


def filter_text(filter: tp.Any) -> str:
    """A filter for a message: a class by its name.

    >>> from nnxlite._base.errors import filter_text
    >>> filter_text(int), filter_text(...)
    ('int', 'Ellipsis')
    """
    return filter.__name__ if isinstance(filter, type) else repr(filter)


@contextlib.contextmanager
def importing(remedy: str, name: str | None = None) -> tp.Iterator[None]:
    """A block that imports an optional package; ImportError with the remedy if that is missing."""
    try:
        yield
    except ImportError as error:
        raise ImportError(remedy, name=name) from error


def warn_user(message: str) -> None:
    """Warn (UserWarning) at the user's line: the innermost one outside this library and JAX.

    Under `nnxlite.flax` the message is logged instead.
    """
    if LOG_WARNINGS.get():
        logging.getLogger("nnxlite").warning(message)
        return
    frame = sys._getframe(1)
    level = 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)


_OURS = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    os.path.dirname(jax.__file__) + os.sep,
    tp.cast(str, contextlib.__file__),
    tp.cast(str, functools.__file__),
)
"""Paths whose files are not part of a user's program."""


def non_exhaustive(
    filters: tp.Sequence[tp.Any], rest: list[tuple[tuple[tp.Any, ...], tp.Any]]
) -> str:
    """The message for leaves that no filter matches."""
    shown = listed(rest, text=lambda pair: f"{path_text(pair[0])} ({type(pair[1]).__name__})")
    return (
        f"Non-exhaustive filters, got a non-empty remainder: none of "
        f"{listed(filters, text=filter_text)} matches {shown}. Add a filter for them, or `...` as "
        "the last one to match all remaining elements."
    )


# Classes ---------------------------------------------------------------------------------------


def is_ours(method: tp.Any) -> bool:
    """Whether a method or class is one of this library."""
    return (getattr(method, "__module__", None) or "").partition(".")[0] == "nnxlite"


def give_way(cls: type, ours: type, names: tp.Iterable[str]) -> None:
    """Give a class the methods of these names that bases behind `ours` have, if it has ours as yet.

    For methods that the reference does not have: there, those of a base behind it count.
    """
    behind = cls.__mro__[cls.__mro__.index(ours) + 1 : -1]
    for name in names:
        if getattr(cls, name) is getattr(ours, name):
            found = (b.__dict__[name] for b in behind if name in b.__dict__ and not is_ours(b))
            if (method := next(found, None)) is not None:
                setattr(cls, name, method)
