"""Scoped settings: one primitive behind every configurable default.

A `Setting` has a process-wide default and a per-context override.  Called with a value it sets the
default of the current scope; the result is also a context manager that restores the previous value
on exit, and a decorator.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import typing as tp

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

    >>> from nnxlite._base.config import Setting
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
    """A boolean environment variable; raises ValueError on anything but a truth word.

    >>> from nnxlite._base.config import flag_from_environment
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


class switch(contextlib.ContextDecorator):
    """Base of the public boolean settings, such as `set_graph_mode`.

    `set_x(True)` sets the value of the current scope immediately. As a context manager it restores the
    former value at the end of the block; as a decorator it applies to each call of the function.
    """

    _setting: tp.ClassVar[Setting[bool]]

    def __init__(self, value: bool, /) -> None:
        if not isinstance(value, bool):
            raise TypeError(f"{type(self).__name__} takes a bool, got {type(value).__name__}.")
        self._value = value
        self._former = self._setting.stack()
        self._setting.restore((*self._former[:-1], value))
        self._entered = False

    def __enter__(self) -> tp.Any:
        self._setting.restore(
            (*(self._setting.stack() if self._entered else self._former), self._value)
        )
        self._entered = True

    def __exit__(self, *exc: tp.Any) -> None:
        self._setting.restore(self._setting.stack()[:-1])

    def __call__(self, fun: F) -> F:
        if not self._entered:  # used as a decorator: the value holds during calls only
            self._setting.restore(self._former)
            self._entered = True
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

    >>> from nnxlite._base.config import Modes
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


class set_graph_mode(switch):
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


class set_graph_updates(switch):
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


class use_eager_sharding(switch):
    """Set whether a Variable with a sharding annotation is placed on the mesh when created.

    Args:
        value: False leaves new values where JAX puts them.

    >>> import nnxlite as nnx
    >>> with nnx.use_eager_sharding(False):
    ...     nnx.using_eager_sharding()
    False
    """

    _setting = EAGER_SHARDING


class use_named_scopes(switch):
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
