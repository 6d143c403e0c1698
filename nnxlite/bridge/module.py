"""`bridge.Module`: a module in the manner of Linen, whose Variables are made by its first call.

A class declares fields, and makes parameters and submodules in `setup` or in a method under
`compact`. An instance has no Variables: `init` makes a copy, binds it to a `Scope` (random streams, and
whether this is `init`), calls it, and returns its Variables as Linen's collections; `apply` puts such
collections at their paths before the call. Binding goes from parents to children: a submodule takes
its Variables from the attribute of the parent that it is assigned to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import threading
import typing as tp
from collections import Counter

import jax
from flax.core import FrozenDict, freeze, meta

from nnxlite import objects
from nnxlite._base.jax import own_annotations
from nnxlite._state._definition import State
from nnxlite.bridge.variables import (
    Tree,
    as_collections,
    linen_vars_to_nnx_attrs,
    named_leaves,
    to_nnx_var,
)
from nnxlite.graph._functional import clone
from nnxlite.graph._kinds import Kind, is_node, kind_of
from nnxlite.graph._walk import children_of_node
from nnxlite.objects._fields import Data, dataclass
from nnxlite.objects._pytree import Pytree, PytreeMeta
from nnxlite.objects._rngs import Rngs
from nnxlite.variables._kinds import Param, variable_type_from_name
from nnxlite.variables._variable import Variable, is_variable

__all__ = ["AttrPriority", "Module", "Scope", "compact", "current_context", "current_module"]

F = tp.TypeVar("F", bound=tp.Callable[..., tp.Any])

_OWN = frozenset({"scope", "attr_priorities"})


class AttrPriority(enum.IntEnum):
    """Which attribute names a Variable that several have: the one with the lowest number.

    >>> import nnxlite as nnx
    >>> nnx.bridge.AttrPriority.HIGH < nnx.bridge.AttrPriority.DEFAULT
    True
    """

    HIGH = 0
    INIT_PARENT = 20
    DEFAULT = 50
    LOW = 100


class Scope(Pytree):
    """The random streams of a bound module, and what it may change.

    Args:
        rngs: the streams.
        mutable: the collections that `apply` returns.
        initializing: whether Variables are being made.

    >>> import nnxlite as nnx
    >>> nnx.bridge.Scope(nnx.Rngs(0), mutable=True).copy().mutable
    True
    """

    def __init__(self, rngs: Rngs, mutable: tp.Any, initializing: bool = False) -> None:
        self.rngs = rngs
        self.mutable = mutable
        self.initializing = initializing

    def copy(self) -> Scope:
        """A scope with streams that move on by themselves."""
        return clone(self)


@dataclasses.dataclass
class ModuleStackEntry:
    """A module whose `setup`, or method under `compact`, is running.

    Args:
        module: the module; None outside of all.
        in_compact: whether submodules made now get a name of their own.
        type_counter: how many submodules have one, by the name of their class.
        in_setup: whether assigned Variables take over the values of `apply`.

    >>> import nnxlite as nnx
    >>> nnx.bridge.current_context() is None
    True
    """

    module: Module
    in_compact: bool
    type_counter: Counter[str] = dataclasses.field(default_factory=Counter)
    in_setup: bool = False


@dataclasses.dataclass
class ModuleContext(threading.local):
    """What runs in this thread.

    Args:
        module_stack: the modules, the innermost last; None stands for nothing.

    >>> import nnxlite as nnx
    >>> nnx.bridge.module.MODULE_CONTEXT.module_stack
    [None]
    """

    module_stack: list[ModuleStackEntry | None] = dataclasses.field(default_factory=lambda: [None])


MODULE_CONTEXT = ModuleContext()


def current_context() -> ModuleStackEntry | None:
    """The innermost running `setup`, `compact` method or `apply`, or None.

    >>> import nnxlite as nnx
    >>> nnx.bridge.current_context()
    """
    return MODULE_CONTEXT.module_stack[-1]


def current_module() -> Module | None:
    """The module of `current_context`, or None.

    >>> import nnxlite as nnx
    >>> nnx.bridge.current_module()
    """
    entry = current_context()
    return None if entry is None else entry.module


@contextlib.contextmanager
def _entered(entry: ModuleStackEntry) -> tp.Iterator[None]:
    MODULE_CONTEXT.module_stack.append(entry)
    try:
        yield
    finally:
        MODULE_CONTEXT.module_stack.pop()


def compact(f: F) -> F:
    """A decorator for methods that make submodules: each gets the name of its class and a number.

    Args:
        f: a method of a `bridge.Module`.

    Returns:
        The method.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> class Dense(nnx.bridge.Module):
    ...     size: int
    ...     @nnx.bridge.compact
    ...     def __call__(self, x):
    ...         return x @ self.param("w", nnx.initializers.ones_init(), (x.shape[-1], self.size))
    >>> class Net(nnx.bridge.Module):
    ...     @nnx.bridge.compact
    ...     def __call__(self, x):
    ...         return Dense(2)(Dense(4)(x))
    >>> sorted(Net().init(0, jnp.ones((1, 3)))["params"])
    ['Dense_0', 'Dense_1']
    """

    @functools.wraps(f)
    def wrapper(self: Module, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        entry = ModuleStackEntry(self, True)
        outer = current_context()
        if outer is not None and outer.module is self and outer.in_compact:
            entry.type_counter = outer.type_counter  # one `compact` method calls another
        with _entered(entry):
            return f(self, *args, **kwargs)

    return tp.cast(F, wrapper)


class ModuleMeta(PytreeMeta):
    """Gives a submodule that is made under `compact` its name and its parent."""

    if not tp.TYPE_CHECKING:

        def __call__(cls, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
            """A new module, which the running `compact` method takes as its submodule."""
            module = super().__call__(*args, **kwargs)
            entry = current_context()
            return adopted(entry, module, cls) if entry is not None and entry.in_compact else module


def adopted(entry: ModuleStackEntry, module: tp.Any, cls: type, name: str | None = None) -> tp.Any:
    """A new submodule as an attribute of the running module; the one of an earlier call if there is one.

    Raises ValueError if the name is that of another attribute.
    """
    parent = entry.module
    if name is None:
        name = f"{cls.__name__}_{entry.type_counter[cls.__name__]}"
        entry.type_counter[cls.__name__] += 1
    old = vars(parent).get(name, {})
    taken = name not in parent.attr_priorities or type(old) is not type(module)
    if type(old) is not dict and taken:
        raise ValueError(
            f"{type(parent).__name__} has an attribute {name!r}, which is also the name of a submodule "
            f"made under `compact`: a {cls.__name__}. Give the attribute another name."
        )
    if isinstance(module, Module) or type(old) is dict:
        module = given(module, old, parent.scope)
    else:
        module = old  # it has its Variables
    parent.set_attr_priority(name, AttrPriority.INIT_PARENT)
    objects.Module.__setattr__(parent, name, module)
    return module


def given(
    value: tp.Any, state: tp.Any, scope: Scope | None = None, seen: set[int] | None = None
) -> tp.Any:
    """`value` with the Variables of `state` at its paths, and with the modules in it bound to a scope.

    Variables that exist take over the values, others are added; containers are copied for it.
    """
    if value is None:
        return state if is_variable(state) or state else value
    if is_variable(value):
        if is_variable(state) and state.get_raw_value() is not value.get_raw_value():
            value.set_raw_value(state.get_raw_value())
        return value
    if kind_of(value) == Kind.ARRAY:
        return state.get_raw_value() if is_variable(state) else value
    seen = set() if seen is None else seen
    if not is_node(value) or id(value) in seen:
        return value
    seen.add(id(value))
    entries = _entries(state)
    is_new = isinstance(value, Module) and value.scope is None
    if is_new:
        value.scope = scope
    if isinstance(value, Module):
        old = {n: v for n, v in vars(value).items() if n not in _OWN and (is_new or n in entries)}
    else:
        old = dict(children_of_node(value))
    new = {n: given(old.get(n), entries.get(n, {}), scope, seen) for n in {**old, **entries}}
    changed = {n: v for n, v in new.items() if v is not old.get(n)}
    value = put(value, changed) if changed else value
    if is_new and scope is not None and hasattr(value, "setup"):
        with _entered(ModuleStackEntry(value, False, in_setup=True)):
            value.setup()
    return value


def _entries(state: tp.Any) -> Tree:
    """The parts of a state; of a module what an earlier call under `compact` has made."""
    if isinstance(state, Module):
        made = state.attr_priorities
        return {n: v for n, v in vars(state).items() if is_variable(v) or n in made}
    return dict(state.items()) if isinstance(state, (dict, State)) else {}


def put(node: tp.Any, changed: Tree) -> tp.Any:
    """A container with other children, or the same object with other attributes."""
    if isinstance(node, (list, tuple)):
        return type(node)([changed.get(n, v) for n, v in enumerate(node)])
    if type(node) is dict:
        return {**node, **changed}
    for name, value in changed.items():
        if isinstance(name, int):
            node[name] = value
        elif issubclass(type(node), Module):  # without the bindings of an assignment
            objects.Module.__setattr__(node, name, value)
        else:
            setattr(node, name, value)
    return node


class Module(objects.Module, metaclass=ModuleMeta):
    """A module in the manner of Linen: fields, `setup` or `compact`, `init` and `apply`.

    Annotations of the class are its fields, as in a dataclass. Parameters are made by `param`, in a
    method under `compact` or in `setup`; submodules of any kind may be attributes.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> class Dense(nnx.bridge.Module):
    ...     size: int
    ...     @nnx.bridge.compact
    ...     def __call__(self, x):
    ...         w = self.param("w", nnx.initializers.ones_init(), (x.shape[-1], self.size))
    ...         calls = self.variable("counts", "calls", lambda: jnp.zeros((), int))
    ...         calls[...] += 1
    ...         return x @ w
    >>> dense, x = Dense(2), jnp.ones((1, 3))
    >>> variables = dense.init(0, x)
    >>> y, updates = dense.apply(variables, x, mutable=["counts"])
    >>> y.tolist(), int(updates["counts"]["calls"])
    ([[3.0, 3.0]], 2)
    """

    scope: Data[tp.Any]
    attr_priorities: dict[str, AttrPriority]

    def __new__(cls, *args: tp.Any, **kwargs: tp.Any) -> tp.Self:
        """An object that is not bound yet."""
        new = super().__new__(cls, *args, **kwargs)
        new.scope = None
        new.attr_priorities = {}
        return new

    def __init_subclass__(cls, **kwargs: tp.Any) -> None:
        super().__init_subclass__(**kwargs)
        if own_annotations(cls):  # else it has the fields, or the `__init__`, of its base
            dataclass(eq=False)(cls)

    if not tp.TYPE_CHECKING:

        def __setattr__(self, name: str, value: tp.Any) -> None:
            holds = is_node(value) or is_variable(value)
            if holds and name not in _OWN and vars(self).get("scope") is not None:
                entry, old = current_context(), vars(self).get(name, {})
                in_setup = entry is not None and entry.module is self and entry.in_setup
                takes = type(old) is dict or (in_setup and is_variable(old))
                value = given(value, old if takes else {}, self.scope)
            super().__setattr__(name, value)

    @classmethod
    def _nnx_ordered(cls, module: Module) -> list[tuple[tp.Any, tp.Any]]:
        """The (name, child) pairs of a module in order of priority."""
        rank, last = module.attr_priorities, AttrPriority.DEFAULT
        pairs = [(n, child) for n, child in children_of_node(module) if n not in _OWN]
        return sorted(pairs, key=lambda pair: rank.get(pair[0], last))

    def set_attr_priority(self, name: str, value: AttrPriority) -> None:
        """Set which name comes first for a Variable that several attributes have."""
        self.attr_priorities = {**self.attr_priorities, name: value}

    def is_initializing(self) -> bool:
        """Whether `init` is running."""
        return self.scope is not None and self.scope.initializing

    def make_rng(self, name: str = "default") -> jax.Array:
        """The next key of a stream.

        Raises:
            ValueError: outside of `init` and `apply`.
            KeyError: where they were given neither this stream nor a default one.
        """
        if self.scope is None:
            raise ValueError(
                f"{type(self).__name__}.make_rng({name!r}): Can't use RNGs on unbound modules; call "
                "it inside `init` or `apply`, with rngs=..."
            )
        return self.scope.rngs[name]()

    def param(
        self,
        name: str,
        init_fn: tp.Callable[..., tp.Any],
        *init_args: tp.Any,
        unbox: bool = True,
        **init_kwargs: tp.Any,
    ) -> Param[tp.Any]:
        """The parameter of a name, which `init` makes.

        Args:
            name: the name of its attribute.
            init_fn: called with a key of the stream `params` and the other arguments.
            init_args, init_kwargs: for `init_fn`.
            unbox: whether a box of Linen becomes metadata; else the box is the value.

        Returns:
            A `Param`.

        Raises:
            ValueError: for a module that is not bound.
        """
        make = lambda: init_fn(self.make_rng("params"), *init_args, **init_kwargs)
        return tp.cast("Param[tp.Any]", self.variable("params", name, make, unbox=unbox))

    def variable(
        self,
        col: str,
        name: str,
        init_fn: tp.Callable[..., tp.Any] | None = None,
        *init_args: tp.Any,
        unbox: bool = True,
        **init_kwargs: tp.Any,
    ) -> Variable[tp.Any]:
        """The Variable of a name, made by `init_fn` if there is none.

        Args:
            col: its collection, which says its kind.
            name: the name of its attribute.
            init_fn: returns the first value; called with the other arguments.
            init_args, init_kwargs: for `init_fn`.
            unbox: as for `param`.

        Raises:
            ValueError: for a module that is not bound, or without `init_fn` where the value is missing.
        """
        if self.scope is None:
            raise ValueError(
                f"{type(self).__name__} is not bound, and makes {name!r}. Parameters must be "
                "initialized in `setup()` or in a method wrapped in `@compact`, by `init` or `apply`."
            )
        kind = variable_type_from_name(col, allow_register=True)
        found = vars(self).get(name)
        if is_variable(found):
            return tp.cast("Variable[tp.Any]", found)
        if found:  # a value that is a dict looks like a tree of Variables
            made = kind(jax.tree.map(lambda v: v.get_raw_value(), found, is_leaf=is_variable))
        elif init_fn is None:
            raise ValueError(
                f"{type(self).__name__} has no variable {name!r} in the collection {col!r}. Expected "
                "'init_fn' to be a callable that makes it, got None."
            )
        else:
            value = init_fn(*init_args, **init_kwargs)
            boxed = isinstance(value, meta.AxisMetadata) and unbox
            made = to_nnx_var(col, value) if boxed else kind(value)
        setattr(self, name, made)
        return made

    @property
    def variables(self) -> FrozenDict[str, tp.Any]:
        """The Variables of this module and all below it, as Linen's collections."""
        return freeze(as_collections(named_leaves(self)))

    def apply(
        self,
        variables: tp.Mapping[str, tp.Any],
        *args: tp.Any,
        rngs: tp.Any = None,
        method: tp.Callable[..., tp.Any] | str = "__call__",
        mutable: tp.Any = False,
        _initialize: bool = False,
        **kwargs: tp.Any,
    ) -> tp.Any:
        """Call the module with these variables.

        Args:
            variables: Linen's collections.
            args, kwargs: for the method.
            rngs: a seed, a key, `Rngs`, or a mapping from stream to key.
            method: a method or its name; or a function of the module and the arguments.
            mutable: False returns the output alone.

        Returns:
            What the method returns; with all collections after the call unless `mutable` is False.
        """
        module = clone(self)
        streams = rngs if isinstance(rngs, Rngs) else Rngs(rngs)
        scope = Scope(streams, mutable, _initialize)
        given(module, linen_vars_to_nnx_attrs(variables), scope)
        with _entered(ModuleStackEntry(module, False)):
            if isinstance(method, str):
                out = getattr(module, method)(*args, **kwargs)
            else:
                out = getattr(method, "__func__", method)(module, *args, **kwargs)
        return out if mutable is False else (out, as_collections(named_leaves(module)))

    def init(
        self,
        rngs: tp.Any = None,
        *args: tp.Any,
        method: tp.Callable[..., tp.Any] | str = "__call__",
        **kwargs: tp.Any,
    ) -> Tree:
        """Make the variables by one call; arguments as for `apply`.

        Returns:
            Linen's collections.
        """
        return self.init_with_output(rngs, *args, method=method, **kwargs)[1]

    def init_with_output(
        self,
        rngs: tp.Any = None,
        *args: tp.Any,
        method: tp.Callable[..., tp.Any] | str = "__call__",
        mutable: tp.Any = False,
        **kwargs: tp.Any,
    ) -> tuple[tp.Any, Tree]:
        """The same as `init`, with what the call returns before the variables.

        Args:
            rngs, args, method, kwargs: as for `apply`.
            mutable: accepted for compatibility; every collection is returned.
        """
        del mutable
        return self.apply(
            {}, *args, rngs=rngs, method=method, mutable=True, _initialize=True, **kwargs
        )
