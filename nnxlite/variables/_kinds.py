"""The kinds of Variables, with the registry of their collection names, and array references.

A kind is a subclass of `Variable`; filters select by it.  Each kind that corresponds to a named
collection of other libraries ("params", "batch_stats", ...) has a registered name.

Array references, JAX's own `Ref`, can be written in place and shared.  One may be wherever an array may:
in an attribute, in a plain container, inside a Variable (`ref=True`).  Two places that hold one
reference share its content, inside transforms too.
"""

from __future__ import annotations

import dataclasses
import functools
import typing as tp

import jax.numpy as jnp

from nnxlite._base.errors import REF_VARIABLES, BooleanSetting
from nnxlite._base.interning import LOCK
from nnxlite._base.jax import Ref, is_ref, new_ref
from nnxlite.variables._definition import MISSING, Hook, VariableMetadata, as_hooks, refuse_hijax
from nnxlite.variables._variable import T, Variable

__all__ = ["ArrayRef", "BatchStat", "Cache", "Intermediate", "Param", "Perturbation", "RngCount"]
__all__ += ["RngKey", "RngState", "VarDefaults", "VariableState", "array_ref", "is_array_ref"]
__all__ += ["register_variable_name", "var_defaults", "variable_name_from_type"]
__all__ += ["variable_type_from_name", "with_metadata"]

_types: dict[str, type[Variable[tp.Any]]] = {}

C = tp.TypeVar("C", bound=type[Variable[tp.Any]])
P = tp.ParamSpec("P")
Hooks = Hook | tp.Sequence[Hook]


@tp.overload
def register_variable_name(name: str, typ: C, *, overwrite: bool = False) -> C: ...
@tp.overload
def register_variable_name(name: str, *, overwrite: bool = False) -> tp.Callable[[C], C]: ...
def register_variable_name(name: str, typ: tp.Any = MISSING, *, overwrite: bool = False) -> tp.Any:
    """Register a name for a Variable class; without `typ`, a class decorator.

    Args:
        name: the name.
        typ: the class.
        overwrite: whether a name that is taken gets the new class.

    Returns:
        The class, or a decorator.

    Raises:
        ValueError: when the name is taken and `overwrite` is False.

    >>> import nnxlite as nnx
    >>> @nnx.register_variable_name("momenta")
    ... class Momentum(nnx.Variable): ...
    >>> nnx.variable_name_from_type(Momentum)
    'momenta'
    """
    if typ is MISSING:
        return lambda cls: register_variable_name(name, cls, overwrite=overwrite)
    if not (isinstance(typ, type) and issubclass(typ, Variable)):
        raise TypeError(f"Expected a Variable class for the name {name!r}, got {typ!r}.")
    with LOCK:
        if name in _types and not overwrite:
            raise ValueError(
                f"Name {name} already mapped to type {_types[name].__name__}. To map it to "
                f"{typ.__name__} instead, pass overwrite=True."
            )
        _types[name] = typ
    return typ


def variable_type_from_name(
    name: str, /, *, base: type[Variable[tp.Any]] = Variable, allow_register: bool = False
) -> type[Variable[tp.Any]]:
    """The Variable class of a registered name.

    Args:
        name: the name.
        base: superclass for a class made here.
        allow_register: make and register a class for an unknown name.

    Returns:
        The class.

    Raises:
        ValueError: for an unknown name, unless `allow_register` is True.

    >>> import nnxlite as nnx
    >>> nnx.variable_type_from_name("params") is nnx.Param
    True
    """
    if name not in _types:
        if not allow_register:
            raise ValueError(
                f"Name {name} is not registered in the registry. Register it with "
                "register_variable_name, or pass allow_register=True."
            )
        _types.setdefault(name, type(name, (base,), {}))  # another thread may have been faster
    return _types[name]


def variable_name_from_type(typ: type[Variable[tp.Any]], /, *, allow_register: bool = False) -> str:
    """The registered name of a Variable class, the first one if it has several.

    Args:
        typ: the class.
        allow_register: register the name of the class itself where it has none.

    Returns:
        The name, as it is used for collections of Flax Linen.

    Raises:
        ValueError: for a class without a name, unless `allow_register` is True.

    >>> import nnxlite as nnx
    >>> nnx.variable_name_from_type(nnx.Param), nnx.variable_name_from_type(nnx.BatchStat)
    ('params', 'batch_stats')
    """
    for name, registered in tuple(_types.items()):  # another thread may register one
        if registered is typ:
            return name
    if not allow_register:
        raise ValueError(
            f"Type {typ.__name__} is not registered in the registry. Give it a name with "
            "register_variable_name, or pass allow_register=True."
        )
    with LOCK:
        name, number = typ.__name__, 0
        while name in _types:
            number += 1
            name = f"{typ.__name__}_{number}"
        register_variable_name(name, typ)
    return name


VariableState = Variable
"""The former name of the Variables in a State."""


class Param(Variable[T]):
    """A trainable parameter.

    Gradients and optimizers find it by its class, wherever it is in a model.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> class Scale(nnx.Module):
    ...     def __init__(self, size):
    ...         self.factor = nnx.Param(jnp.ones(size))
    ...         self.calls = nnx.Variable(0)
    ...     def __call__(self, x):
    ...         return self.factor * x
    >>> list(nnx.state(Scale(2), nnx.Param))
    ['factor']

    It is used like its value. Write with an index, or with `.value`; metadata stays:

    >>> weight = nnx.Param(jnp.ones((2, 3)), sharding=(None, "model"))
    >>> (jnp.ones(2) @ weight).tolist(), weight.T.shape
    ([2.0, 2.0, 2.0], (3, 2))
    >>> weight[0] = jnp.zeros(3)
    >>> weight.value = 0.5 * weight
    >>> float(weight.sum()), weight.sharding_names
    (1.5, (None, 'model'))
    """

    __slots__ = ()


class BatchStat(Variable[T]):
    """A running statistic of a normalisation layer.

    >>> import nnxlite as nnx
    >>> sorted(nnx.state(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), nnx.BatchStat))
    ['mean', 'var']
    """

    __slots__ = ()


class Cache(Variable[T]):
    """Values kept between calls, such as the keys and values of autoregressive decoding.

    >>> import nnxlite as nnx
    >>> layer = nnx.MultiHeadAttention(1, 4, decode=True, rngs=nnx.Rngs(0))
    >>> layer.init_cache((1, 8, 4))
    >>> sorted(nnx.state(layer, nnx.Cache))
    ['cache_index', 'cached_key', 'cached_value']
    """

    __slots__ = ()


class Intermediate(Variable[T]):
    """A value recorded during a call, see `Module.sow`.

    >>> import nnxlite as nnx
    >>> class Halve(nnx.Module):
    ...     def __call__(self, x):
    ...         self.sow(nnx.Intermediate, "seen", x)
    ...         return x / 2
    >>> model = Halve()
    >>> _ = model(6.0)
    >>> nnx.pop(model, nnx.Intermediate)["seen"].value
    (6.0,)
    """

    __slots__ = ()


class Perturbation(Intermediate[T]):
    """A zero added to an intermediate value so that its gradient can be taken.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> class Square(nnx.Module):
    ...     def __call__(self, x):
    ...         return self.perturb("before", x) ** 2
    >>> model = Square()
    >>> _ = model(jnp.array(3.0))
    >>> wrt = nnx.DiffState(0, nnx.Perturbation)
    >>> float(nnx.grad(lambda m: m(jnp.array(3.0)), argnums=wrt)(model)["before"][...])
    6.0
    """

    __slots__ = ()


class RngState(Variable[T]):
    """State of a random stream.

    >>> import nnxlite as nnx
    >>> sorted(nnx.state(nnx.Rngs(0), nnx.RngState)["default"])
    ['count', 'key']
    """

    __slots__ = ()

    _nnx_counted_as = "RngState"  # in totals, keys and counts are one kind


class RngKey(RngState[T]):
    """The key of a random stream.

    >>> import nnxlite as nnx
    >>> isinstance(nnx.Rngs(0).default.key, nnx.RngKey)
    True
    """

    __slots__ = ()


class RngCount(RngState[T]):
    """How many keys a random stream has given.

    >>> import nnxlite as nnx
    >>> rngs = nnx.Rngs(0)
    >>> _ = rngs(), rngs()
    >>> int(nnx.state(rngs, nnx.RngCount)["default"]["count"][...])
    2
    """

    __slots__ = ()


for _name, _type in {
    "params": Param,
    "batch_stats": BatchStat,
    "cache": Cache,
    "intermediates": Intermediate,
    "perturbations": Perturbation,
}.items():
    register_variable_name(_name, _type)


def with_metadata(
    initializer: tp.Callable[P, T],
    on_set_value: Hooks = (),
    on_get_value: Hooks = (),
    on_create_value: Hooks = (),
    on_add_axis: Hooks = (),
    on_remove_axis: Hooks = (),
    **metadata: tp.Any,
) -> tp.Callable[P, VariableMetadata[T]]:
    """An initializer whose result carries metadata into the Variable that is made of it.

    Args:
        initializer: any function that returns an initial value.
        on_set_value, on_get_value, on_create_value, on_add_axis, on_remove_axis: callbacks
            `(variable, ...)`, one or several for each event.
        metadata: further entries for `Variable.get_metadata`.

    Returns:
        An initializer of the same arguments, which returns a `VariableMetadata`.

    >>> import nnxlite as nnx, jax
    >>> init = nnx.with_metadata(nnx.initializers.zeros_init(), tag="head")
    >>> nnx.Param(init(jax.random.key(0), (3,))).get_metadata("tag")
    'head'
    """
    given = (on_set_value, on_get_value, on_create_value, on_add_axis, on_remove_axis)
    hooks = tuple(map(as_hooks, given))

    @functools.wraps(initializer)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> VariableMetadata[T]:
        return VariableMetadata(initializer(*args, **kwargs), *hooks, metadata=dict(metadata))

    return wrapper


# Array references ------------------------------------------------------------------------------


ArrayRef = Ref
"""The class of array references; `isinstance(x, ArrayRef)` is true for traced ones as well."""


def array_ref(value: tp.Any) -> tp.Any:
    """A new array reference with the content of an array or a number.

    Reading and writing go through indexing: `ref[...]`, `ref[0] = 1.0`.

    Args:
        value: an array or a number.

    Returns:
        A reference of the same shape and dtype.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> ref = nnx.array_ref(jnp.zeros(2))
    >>> ref[0] = 1.0
    >>> ref[...]
    Array([1., 0.], dtype=float32)
    """
    return new_ref(jnp.asarray(value))


def is_array_ref(value: tp.Any) -> bool:
    """Whether a value is an array reference.

    Args:
        value: anything.

    Returns:
        A bool.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.is_array_ref(nnx.array_ref(1.0)), nnx.is_array_ref(jnp.array(1.0))
    (True, False)
    """
    return is_ref(value)


@dataclasses.dataclass(frozen=True)
class VarDefaults(tp.Mapping[str, bool]):
    """The defaults of `Variable(hijax=..., ref=...)`; a mapping as well.

    Args:
        hijax: accepted for compatibility; False.
        ref: whether new Variables hold their values in array references.

    >>> from nnxlite.variables import VarDefaults
    >>> VarDefaults(ref=True)["ref"], dict(VarDefaults())
    (True, {'hijax': False, 'ref': False})
    """

    hijax: bool = False
    ref: bool = False

    def __getitem__(self, name: str) -> bool:
        return dataclasses.asdict(self)[name]

    def __iter__(self) -> tp.Iterator[str]:
        return iter(("hijax", "ref"))

    def __len__(self) -> int:
        return 2


class VarDefaultsContext(BooleanSetting):
    """What `var_defaults(...)` gives: leaving its `with` block brings the former defaults back.

    As a decorator it sets the defaults for each call of the function, and for nothing else.
    """

    _setting = REF_VARIABLES

    def __enter__(self) -> VarDefaults:
        super().__enter__()
        return var_defaults()


@tp.overload
def var_defaults() -> VarDefaults: ...  # pyright: ignore[reportOverlappingOverload]
@tp.overload
def var_defaults(*, hijax: bool | None = ..., ref: bool | None = ...) -> VarDefaultsContext: ...
def var_defaults(
    *, hijax: bool | None = None, ref: bool | None = None
) -> VarDefaults | VarDefaultsContext:
    """Set the defaults of `Variable(ref=...)`, at once, for a `with` block or a function; or read them.

    They hold for the present context: other threads and tasks have their own.

    Args:
        hijax: accepted for compatibility; True raises ValueError.
        ref: the new default of `ref`.

    Returns:
        Without arguments the `VarDefaults` in force, otherwise a context manager, which is also a
        decorator.

    >>> import nnxlite as nnx
    >>> with nnx.var_defaults(ref=True):
    ...     v = nnx.Param(nnx.initializers.ones_init()(None, (2,)))
    >>> v.ref, nnx.var_defaults().ref
    (True, False)
    >>> @nnx.var_defaults(ref=True)
    ... def make():
    ...     return nnx.Param(1.0).ref
    >>> make(), nnx.var_defaults().ref
    (True, False)
    """
    if hijax is None and ref is None:
        return VarDefaults(ref=REF_VARIABLES.get())
    if hijax:
        refuse_hijax("var_defaults")
    return VarDefaultsContext(bool(REF_VARIABLES.given(ref)))
