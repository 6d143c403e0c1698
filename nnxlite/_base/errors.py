"""Settings and messages: what every other file needs.

One primitive is behind every configurable default: a `Setting` has a process-wide default and a
per-context override.  Called with a value it sets the default of the current scope; the result is also a
context manager that restores the previous value on exit, and a decorator.

Then: exceptions of the library, how messages show paths, filters and values, and whose method counts
where a user's class has other bases beside one of the library.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
import sys
import types
import typing as tp
import warnings

import jax

from nnxlite._base.jax import describe_trace, trace_state

T = tp.TypeVar("T")
F = tp.TypeVar("F", bound=tp.Callable[..., tp.Any])


class _Scope:
    """The overrides of one context: for each setting the values pushed, innermost last."""

    __slots__ = ("key", "stacks")

    def __init__(self, stacks: dict[str, tuple[tp.Any, ...]]) -> None:
        self.stacks = stacks
        self.key = tuple(sorted((name, stack[-1]) for name, stack in stacks.items()))


_UNCHANGED = _Scope({})  # scopes are never edited, only replaced
_scope: contextvars.ContextVar[_Scope] = contextvars.ContextVar("nnxlite", default=_UNCHANGED)


def context_key() -> tuple[tuple[str, tp.Any], ...]:
    """The overrides in force, as a hashable value: part of the key of every compiled program."""
    return _scope.get().key


class Setting(tp.Generic[T]):
    """One named default that can be changed for a scope.

    >>> from nnxlite._base.errors import Setting
    >>> mode = Setting("mode", "a")
    >>> with mode.scope("b"):
    ...     mode.get()
    'b'
    >>> mode.get()
    'a'
    """

    def __init__(self, name: str, default: T) -> None:
        self.name = name
        self.default = default

    def get(self) -> T:
        """The value in force."""
        stack = _scope.get().stacks.get(self.name)
        return stack[-1] if stack else self.default

    def given(self, value: T | None) -> T:
        """A value that an argument gives, or the one in force where it is None."""
        return self.get() if value is None else value

    def stack(self) -> tuple[T, ...]:
        """The overrides in force, outermost first."""
        return _scope.get().stacks.get(self.name, ())

    @contextlib.contextmanager
    def scope(self, value: T) -> tp.Iterator[None]:
        """Override the value inside a `with` block."""
        self.restore((*self.stack(), value))
        try:
            yield
        finally:
            self.restore(self.stack()[:-1])

    def restore(self, stack: tuple[T, ...]) -> None:
        """Make the overrides in force exactly these."""
        stacks = {**_scope.get().stacks, self.name: stack}
        _scope.set(_Scope({name: values for name, values in stacks.items() if values}))


def flag_from_environment(name: str, default: bool) -> bool:
    """A boolean environment variable; raises ValueError on anything but true or false.

    >>> from nnxlite._base.errors import flag_from_environment
    >>> flag_from_environment("NNXLITE_SURELY_UNSET", True)
    True
    """
    text = os.environ.get(name)
    if text is None:
        return default
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"Environment variable {name} must be true or false, got {text!r}.")


class BooleanSetting(contextlib.ContextDecorator):
    """Base of the public boolean settings, such as `set_graph_mode`.

    `set_x(True)` sets the value of the current scope immediately. As a context manager it restores the
    former value at the end of the block; as a decorator it applies to each call of the function.
    """

    _setting: tp.ClassVar[Setting[bool]]

    def __init__(self, value: bool, /) -> None:
        if not isinstance(value, bool):
            raise TypeError(f"{type(self).__name__} takes a bool, got {type(value).__name__}.")
        self._value = value
        self._former: tuple[bool, ...] | None = self._setting.stack()  # until it is entered
        self._setting.restore((*self._former[:-1], value))

    def __enter__(self) -> tp.Any:
        outer = self._setting.stack() if self._former is None else self._former
        self._setting.restore((*outer, self._value))
        self._former = None

    def __exit__(self, *exc: tp.Any) -> None:
        self._setting.restore(self._setting.stack()[:-1])

    def __call__(self, fun: F) -> F:
        if self._former is not None:  # used as a decorator: the value holds during calls only
            self._setting.restore(self._former)
            self._former = None
        return super().__call__(fun)

    @classmethod
    def current_value(cls) -> bool:
        """The value in force."""
        return cls._setting.get()

    @classmethod
    def get_default(cls) -> bool:
        """The process-wide default, used where nothing overrides it."""
        return cls._setting.default

    @classmethod
    def get_stack(cls) -> list[bool]:
        """The overrides in force, outermost first."""
        return list(cls._setting.stack())


def _flag(name: str) -> Setting[bool]:
    """A setting that is True by default, or what its environment variable says."""
    return Setting(name, flag_from_environment(f"NNXLITE_{name.upper()}", True))


GRAPH_MODE = _flag("graph_mode")
GRAPH_UPDATES = _flag("graph_updates")
EAGER_SHARDING = _flag("eager_sharding")
NAMED_SCOPES = _flag("named_scopes")
REF_VARIABLES: Setting[bool] = Setting("ref_variables", False)
SOW_ONLY_IN_CAPTURE: Setting[bool] = Setting("sow_only_in_capture", False)
TEXT_DEPTH: Setting[int] = Setting("text_depth", 32)  # deeper levels of a text form are collapsed
# Warnings go to the logger "nnxlite": `nnxlite.flax` sets it, since Flax has none of them and a program
# written for it may make an error of each.
LOG_WARNINGS: Setting[bool] = Setting("log_warnings", False)
# Whether `vmap` and `scan` add None to the annotations of what they build, for their axis. Flax adds
# nothing without `transform_metadata`, and programs written for it add the None by hand:
# `nnxlite.flax` clears it.
UNNAMED_AXES: Setting[bool] = Setting("unnamed_axes", True)
# Whether classes of objects are pytrees where they do not say. Flax's variable is read here, because
# the layers are defined before `nnxlite.flax` is imported.
PYTREES: Setting[bool] = Setting("pytrees", flag_from_environment("FLAX_PYTREE_MODULE", True))


class Modes(tp.NamedTuple):
    """How a transform treats objects: its `graph=` and `graph_updates=`, or the defaults in force.

    Attributes:
        graph: whether objects may be shared and cyclic; if not they are trees.
        updates: whether structure changes propagate, and not values of Variables only; never in trees.

    >>> from nnxlite._base.errors import Modes
    >>> Modes.of(None, False), Modes.of(False, None)
    (Modes(graph=True, updates=False), Modes(graph=False, updates=False))
    """

    graph: bool
    updates: bool

    @classmethod
    def of(cls, graph: bool | None, graph_updates: bool | None) -> Modes:
        """The modes in force now, where these arguments are given."""
        graph = GRAPH_MODE.given(graph)
        return cls(graph, graph and GRAPH_UPDATES.given(graph_updates))


class set_graph_mode(BooleanSetting):
    """Set the default of every `graph=` argument: True allows sharing and cycles, False refuses.

    Args:
        value: whether objects may share parts and form cycles.

    >>> import nnxlite as nnx
    >>> with nnx.set_graph_mode(False):
    ...     nnx.set_graph_mode.current_value()
    False
    >>> nnx.set_graph_mode.current_value()
    True
    """

    _setting = GRAPH_MODE


class set_graph_updates(BooleanSetting):
    """Set the default of every `graph_updates=` argument: whether structure changes propagate.

    Args:
        value: True propagates changes of structure out of a transform, False only values of
            Variables.

    >>> import nnxlite as nnx
    >>> with nnx.set_graph_updates(False):
    ...     nnx.set_graph_updates.current_value()
    False
    """

    _setting = GRAPH_UPDATES


class use_eager_sharding(BooleanSetting):
    """Set whether a Variable with a sharding annotation is placed on the mesh when created.

    Args:
        value: False leaves new values where JAX puts them.

    >>> import nnxlite as nnx
    >>> with nnx.use_eager_sharding(False):
    ...     nnx.using_eager_sharding()
    False
    """

    _setting = EAGER_SHARDING


class use_named_scopes(BooleanSetting):
    """Set whether calls of modules name the operations they record, in profiles and HLO.

    The default is True, or the environment variable `NNXLITE_NAMED_SCOPES`. The names cost nothing in a
    compiled program.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    >>> def scopes():
    ...     program = jax.make_jaxpr(lambda x: layer(x))(jnp.ones((1, 2)))
    ...     return {str(eqn.source_info.name_stack) for eqn in program.eqns}
    >>> scopes()
    {'Linear'}
    >>> with nnx.use_named_scopes(False):
    ...     scopes()
    {''}
    """

    _setting = NAMED_SCOPES


def using_eager_sharding() -> bool:
    """Whether Variables with a sharding annotation are placed on the mesh at creation.

    Returns:
        What `use_eager_sharding` has set; True by default.

    >>> import nnxlite as nnx
    >>> nnx.using_eager_sharding()
    True
    """
    return EAGER_SHARDING.get()


# Exceptions ----------------------------------------------------------------------------------


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
        old = getattr(cls, name)
        method: tp.Any = types.FunctionType(
            old.__code__, old.__globals__, name, old.__defaults__, old.__closure__
        )
        del functools.update_wrapper(method, old).__wrapped__
        method.__kwdefaults__ = old.__kwdefaults__
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
        instead = ""
        if belongs == running:  # often a loop of JAX in a transform of this library
            running = running.replace("a ", "another ", 1)
            instead = ", nnx.scan in place of jax.lax.scan for example,"
        Exception.__init__(
            self,
            f"Cannot mutate {what} different trace level: it belongs to {belongs}, and the {write} "
            f"happens inside {running}. Pass the object to the transformed function as an argument "
            f"(nnxlite transforms{instead} write its changes back), or return the new value and "
            "assign it outside." + (_OF_A_STATE if variable else ""),
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
    if isinstance(shape, tuple) and dtype is not None:  # every name is an attribute of Rngs
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
