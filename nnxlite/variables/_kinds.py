"""The kinds of Variables, and the registry of their collection names.

A kind is a subclass of `Variable`; filters select by it.  Each kind that corresponds to a named
collection of other libraries ("params", "batch_stats", ...) has a registered name.
"""

from __future__ import annotations

import typing as tp

from nnxlite._base.interning import LOCK
from nnxlite.variables._variable import MISSING, T, Variable

_types: dict[str, type[Variable[tp.Any]]] = {}

C = tp.TypeVar("C", bound=type[Variable[tp.Any]])


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
