"""A Linen module as one of ours, `ToNNX`; a module of ours as one of Linen, `ToLinen`.

`ToNNX` calls `init` and `apply` of the Linen module: its Variables are attributes at Linen's paths, and
go in and out as collections. `ToLinen` makes its module again in each call, and gives it the values
of the collections of its scope. `linen_in_bridge_mdl` and `nnx_in_bridge_mdl` make submodules of a
running `bridge.Module`.
"""

from __future__ import annotations

import contextvars
import functools
import types
import typing as tp

import jax
from flax import linen
from flax.core import FrozenDict

from nnxlite.bridge.module import Scope, adopted, current_context, current_module, given
from nnxlite.bridge.variables import (
    as_collections,
    linen_vars_to_nnx_attrs,
    named_leaves,
    nnx_attrs_to_linen_vars,
    to_linen_var,
)
from nnxlite.graph._kinds import Kind, is_graph_node, kind_of
from nnxlite.objects._fields import static
from nnxlite.objects._module import Module, iter_modules
from nnxlite.objects._pytree import INITIALIZING, set_initializing
from nnxlite.objects._rngs import Rngs
from nnxlite.transforms._compiles import eval_shape
from nnxlite.wrappers import Functional as Functional
from nnxlite.wrappers import functional as functional

__all__ = ["Functional", "ToLinen", "ToNNX", "functional", "lazy_init", "linen_in_bridge_mdl"]
__all__ += ["nnx_in_bridge_mdl", "to_linen"]

M = tp.TypeVar("M", bound=Module)

_LEAVES = frozenset({Kind.ARRAY, Kind.VARIABLE})
_OWN = frozenset({"to_nnx__module", "to_nnx__rngs", INITIALIZING})

_RUNNING: contextvars.ContextVar[linen.Module | None] = contextvars.ContextVar(
    "nnxlite_to_linen", default=None
)
"""The innermost `ToLinen` that runs: what Linen lets it change, a `ToNNX` in it may change."""


def _keys(rngs: tp.Any) -> dict[str, jax.Array]:
    """The next key of each stream by name, as Linen takes them; a default stream is for `params`."""
    if rngs is None:
        return {}
    if not isinstance(rngs, Rngs):
        return dict(rngs) if isinstance(rngs, tp.Mapping) else {"params": rngs}
    keys = {name: stream() for name, stream in rngs.items()}
    if "params" not in keys and "default" in keys:
        keys["params"] = keys.pop("default")
    return keys


def lazy_init(fn: tp.Any, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
    """Make the Variables of every `ToNNX` in a module, by calling it.

    Args:
        fn: the module, or one of its methods.
        args, kwargs: for the call.

    Returns:
        `fn`.

    Raises:
        ValueError: if `fn` is neither.

    >>> import nnxlite as nnx, flax.linen as nn, jax.numpy as jnp
    >>> model = nnx.Sequential(nnx.bridge.ToNNX(nn.Dense(4), nnx.Rngs(0)), nnx.relu)
    >>> model = nnx.bridge.lazy_init(model, jnp.ones((1, 3)))
    >>> model.layers[0].kernel.shape
    (3, 4)
    """
    method = fn
    while isinstance(method, functools.partial):
        method = method.func
    module = method if isinstance(method, Module) else getattr(method, "__self__", None)
    if not isinstance(module, Module):
        raise ValueError(
            f"lazy_init: fn = {fn!r} needs to be an nnx.Module or one of its methods: the call "
            "initializes the ToNNX modules in it."
        )
    modules = [m for _, m in iter_modules(module)]  # of any class: others wrap Linen as well
    try:
        for each in modules:
            set_initializing(each, True)
        fn(*args, **kwargs)
    finally:
        for each in modules:
            set_initializing(each, False)
    return fn


class ToNNX(Module):
    """A Linen module as an `nnx.Module`, with its variables as attributes.

    They are made by `lazy_init`, at the paths that Linen gives them: `kernel`, or `Dense_0["kernel"]`.
    Their kind follows from the collection. A call applies the Linen module to them, and methods of
    the Linen module are methods here.

    Args:
        module: the Linen module.
        rngs: streams, which are forked; or a key or seed, for the stream `params`.

    >>> import nnxlite as nnx, flax.linen as nn, jax.numpy as jnp
    >>> x = jnp.ones((1, 3))
    >>> layer = nnx.bridge.ToNNX(nn.Dense(4), rngs=nnx.Rngs(0)).lazy_init(x)
    >>> layer(x).shape, type(layer.kernel).__name__, layer.kernel.shape
    ((1, 4), 'Param', (3, 4))
    >>> nnx.grad(lambda m: m(x).sum())(layer)["bias"].value.tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    def __init__(self, module: linen.Module, rngs: Rngs | jax.Array | int | None = None) -> None:
        bound = isinstance(module, linen.Module) and module.scope is not None
        self.to_nnx__module = static(module.clone(parent=None) if bound else module)
        if isinstance(rngs, Rngs):
            rngs = rngs.fork()
        self.to_nnx__rngs = rngs if rngs is None or isinstance(rngs, Rngs) else Rngs(params=rngs)

    def lazy_init(self, *args: tp.Any, **kwargs: tp.Any) -> tp.Self:
        """Make the variables by a call with these arguments; returns the module itself."""
        return lazy_init(self, *args, **kwargs)

    def __getattr__(self, name: str) -> tp.Any:
        module = vars(self).get("to_nnx__module")
        if name == "module":
            return module
        if name == "rngs":
            return self.to_nnx__rngs
        method = None if name.startswith("__") else getattr(type(module), name, None)
        if not callable(method):
            raise AttributeError(
                f"'{type(self).__name__}' object has no attribute {name!r}: neither a variable of "
                f"{type(module).__name__} (lazy_init makes them), nor one of its methods."
            )
        return functools.partial(self.__call__, method=method)

    def __call__(
        self,
        *args: tp.Any,
        rngs: Rngs | jax.Array | tp.Mapping[str, jax.Array] | None = None,
        method: tp.Callable[..., tp.Any] | str | None = None,
        mutable: tp.Any = None,
        **kwargs: tp.Any,
    ) -> tp.Any:
        """Apply the Linen module to the variables.

        Args:
            args, kwargs: for its method.
            rngs: streams, keys by name, or a key for `params`, in place of the module's own.
            method: its method, or a name of one; `__call__` by default.
            mutable: the collections whose changes are written to the attributes: True, a name, a list
                of names. By default none, and in a `bridge.Module` or a `ToLinen` those of its `apply`.

        Returns:
            What the method returns.

        Raises:
            flax.errors.FlaxError: as `apply` of the Linen module.
            ValueError: in `init` of a `ToLinen`, if this call makes the variables.
        """
        module, keys = self.to_nnx__module, _keys(self.to_nnx__rngs if rngs is None else rngs)
        if vars(self).get(INITIALIZING):
            out, updates = module.init_with_output(keys, *args, method=method, **kwargs)
        else:
            named = vars(self).items()
            attrs = {k: v for k, v in named if type(v) is dict or kind_of(v) in _LEAVES}
            variables = nnx_attrs_to_linen_vars(attrs)
            if mutable is None:
                parent = _RUNNING.get() if current_module() is None else current_module()
                mutable = parent is not None and parent.scope is not None and parent.scope.mutable
            out = module.apply(
                variables, *args, rngs=keys, method=method, mutable=mutable, **kwargs
            )
            if mutable is False:
                return out
            out, updates = out
            running = _RUNNING.get()
            if not attrs and updates and running is not None and running.is_initializing():
                raise ValueError(
                    f"ToNNX of {type(module).__name__} has no variables yet, and `init` of the ToLinen "
                    "around it would not return those that this call makes. Call lazy_init where the "
                    f"ToNNX is made: ToNNX({type(module).__name__}(...), rngs).lazy_init(x)."
                )
        for name, state in linen_vars_to_nnx_attrs(updates).items():
            if name in _OWN:
                raise ValueError(
                    f"{type(module).__name__} has a variable {name!r}, which is an attribute of ToNNX "
                    "itself. Give the variable another name."
                )
            old = vars(self).get(name)
            new = given(old, state)
            if new is not old:
                setattr(self, name, new)
        return out


def linen_rngs_dict(linen_module: linen.Module, add_default: bool = False) -> dict[str, jax.Array]:
    """The next key of each stream that a bound Linen module has.

    Args:
        linen_module: the module.
        add_default: whether a stream `default` that is missing is that of the seed 0.
    """
    scope = linen_module.scope
    keys = {} if scope is None else {name: linen_module.make_rng(name) for name in scope.rngs}
    return {"default": jax.random.key(0), **keys} if add_default else keys


class ToLinen(linen.Module):
    """A module of ours as a Linen module, with its Variables in Linen's collections.

    Each call makes the module, with keys from Linen's streams, and gives it the variables; changes go to
    the collections that are mutable. Methods of the class are methods here.

    Args:
        nnx_class: a class of modules, or a function that makes one.
        args, kwargs: its arguments, beside `rngs`.
        skip_rng: whether it takes no `rngs`.
        metadata_fn: makes the leaf of a collection from a Variable; None leaves all metadata out.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> layer, x = nnx.bridge.ToLinen(nnx.Linear, args=(3, 4)), jnp.ones((1, 3))
    >>> variables = layer.init(jax.random.key(0), x)
    >>> layer.apply(variables, x).shape, variables["params"]["kernel"].shape
    ((1, 4), (3, 4))
    """

    nnx_class: tp.Callable[..., tp.Any]
    args: tp.Sequence[tp.Any] = ()
    kwargs: tp.Mapping[str, tp.Any] = FrozenDict({})
    skip_rng: bool = False
    metadata_fn: tp.Callable[[tp.Any], tp.Any] | None = to_linen_var

    @linen.compact
    def __call__(
        self,
        *args: tp.Any,
        nnx_method: tp.Callable[..., tp.Any] | str | None = None,
        **kwargs: tp.Any,
    ) -> tp.Any:
        """Call the module.

        Args:
            args, kwargs: for its method.
            nnx_method: its method, or the name of one; `__call__` by default.
        """
        token = _RUNNING.set(self)
        try:
            return self._nnx_call(nnx_method, *args, **kwargs)
        finally:
            _RUNNING.reset(token)

    def _nnx_call(self, nnx_method: tp.Any, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        starts = self.is_initializing()
        module = self._nnx_module(starts)
        if starts:
            self._nnx_store(module)
        else:
            for attrs in map(linen_vars_to_nnx_attrs, ({c: t} for c, t in self.variables.items())):
                given(module, attrs)
        if isinstance(nnx_method, str):
            nnx_method = getattr(type(module), nnx_method)
        if nnx_method is None:
            out = module(*args, **kwargs)
        elif callable(nnx_method):
            out = getattr(nnx_method, "__func__", nnx_method)(module, *args, **kwargs)
        else:
            raise TypeError(
                f"nnx_method={nnx_method!r} must be a callable or the name of a method, got "
                f"{type(nnx_method)}."
            )
        if not starts:
            self._nnx_store(module)
        return out

    def _nnx_module(self, starts: bool) -> tp.Any:
        kwargs = dict(self.kwargs)
        if not self.skip_rng:
            kwargs["rngs"] = Rngs(linen_rngs_dict(self, add_default=not starts))
        if isinstance(self.nnx_class, Module):
            raise TypeError(
                f"ToLinen makes its module in each call, and got a {type(self.nnx_class).__name__} that "
                "exists. Give it the class and its arguments: to_linen(nnx.Linear, 3, 4)."
            )
        module = self.nnx_class(*self.args, **kwargs)
        if not is_graph_node(module):
            raise TypeError(
                f"ToLinen: {self.nnx_class!r} returned a {type(module).__name__}, not an nnx.Module."
            )
        return module

    def _nnx_store(self, module: tp.Any) -> None:
        """Put the Variables of the module into the collections that are mutable."""
        collections = as_collections(named_leaves(module), self.metadata_fn)
        for col, tree in collections.items():
            if self.is_mutable_collection(col):
                for name, leaf in tree.items():
                    self.put_variable(col, name, leaf)

    def __getattr__(self, name: str) -> tp.Any:
        method = getattr(vars(self).get("nnx_class"), name, None)
        if name.startswith("_") or not isinstance(method, types.FunctionType):
            return super().__getattr__(name)
        return functools.partial(self.__call__, nnx_method=method)


def to_linen(
    nnx_class: tp.Callable[..., tp.Any],
    *args: tp.Any,
    metadata_fn: tp.Callable[[tp.Any], tp.Any] | None = to_linen_var,
    name: str | None = None,
    skip_rng: bool = False,
    abstract_init: bool = True,
    **kwargs: tp.Any,
) -> ToLinen:
    """A `ToLinen` for a class and its arguments.

    Args:
        nnx_class, args, kwargs, metadata_fn, skip_rng: as for `ToLinen`.
        name: the name of the Linen module.
        abstract_init: accepted for compatibility.

    Returns:
        A Linen module.

    >>> import nnxlite as nnx, flax.linen as nn, jax, jax.numpy as jnp
    >>> class Net(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         return nn.Dense(2)(nnx.bridge.to_linen(nnx.Linear, 3, 4, name="first")(x))
    >>> variables = Net().init(jax.random.key(0), jnp.ones((1, 3)))
    >>> sorted(variables["params"])
    ['Dense_0', 'first']
    """
    del abstract_init
    return ToLinen(
        nnx_class, args, FrozenDict(kwargs), skip_rng=skip_rng, metadata_fn=metadata_fn, name=name
    )


# Submodules of another kind inside a `bridge.Module` ------------------------------------------------


def _add(
    make: tp.Callable[[Scope], Module], name: str | None, what: str, cls: type | None = None
) -> tp.Any:
    """A submodule of the running module, with a name of its own under `compact`."""
    entry = current_context()
    if entry is None:
        raise ValueError(
            f"{what}() only needed inside bridge Module: call it in `setup` or under `compact`."
        )
    scope = entry.module.scope
    if scope is None:
        raise ValueError(
            f"{what}: {type(entry.module).__name__} is not bound; call it by `init` or `apply`."
        )
    module = make(scope)
    if name is None and not entry.in_compact:
        return module  # the attribute that it is assigned to names it
    return adopted(entry, module, cls or type(module), name)


def linen_in_bridge_mdl(linen_module: linen.Module, name: str | None = None) -> ToNNX:
    """A Linen module as a submodule of the running `bridge.Module`.

    Args:
        linen_module: the Linen module.
        name: the attribute; by default the one it is assigned to in `setup`, or class and number.

    Returns:
        A `ToNNX`, which the first call in `init` initializes.

    Raises:
        ValueError: outside of a `bridge.Module`.

    >>> import nnxlite as nnx, flax.linen as nn, jax.numpy as jnp
    >>> class Net(nnx.bridge.Module):
    ...     @nnx.bridge.compact
    ...     def __call__(self, x):
    ...         return nnx.bridge.interop.linen_in_bridge_mdl(nn.Dense(4))(x)
    >>> Net().init(0, jnp.ones((1, 3)))["params"]["Dense_0"]["kernel"].shape
    (3, 4)
    """

    def make(scope: Scope) -> ToNNX:
        module = ToNNX(linen_module, scope.rngs)
        set_initializing(module, scope.initializing)
        return module

    return _add(make, name, "linen_in_bridge_mdl", type(linen_module))


def nnx_in_bridge_mdl(factory: tp.Callable[[Rngs], Module], name: str | None = None) -> Module:
    """An `nnx.Module` as a submodule of the running `bridge.Module`.

    Args:
        factory: makes it from random streams.
        name: as for `linen_in_bridge_mdl`.

    Returns:
        The module. Where `apply` has no streams, it has the variables of `apply` alone.

    Raises:
        ValueError: outside of a `bridge.Module`.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> class Net(nnx.bridge.Module):
    ...     def setup(self):
    ...         make = lambda rngs: nnx.Linear(3, 4, rngs=rngs)
    ...         self.head = nnx.bridge.interop.nnx_in_bridge_mdl(make)
    ...     def __call__(self, x):
    ...         return self.head(x)
    >>> Net().init(0, jnp.ones((1, 3)))["params"]["head"]["kernel"].shape
    (3, 4)
    """

    def make(scope: Scope) -> Module:
        return factory(scope.rngs) if len(scope.rngs) else eval_shape(lambda: factory(Rngs(0)))

    return _add(make, name, "nnx_in_bridge_mdl")
