"""The kinds of Variables, and the registry of their collection names.

A kind is a subclass of `Variable`; filters select by it.  Each kind that corresponds to a named
collection of other libraries ("params", "batch_stats", ...) has a registered name.
"""

from __future__ import annotations

import re
import typing as tp

from nnxlite.variables._variable import MISSING, T, Variable

_types: dict[str, type[Variable[tp.Any]]] = {}
_names: dict[type[Variable[tp.Any]], str] = {}

C = tp.TypeVar("C", bound=type[Variable[tp.Any]])


@tp.overload
def register_variable_name(name: str, typ: C, *, overwrite: bool = False) -> C: ...
@tp.overload
def register_variable_name(name: str, *, overwrite: bool = False) -> tp.Callable[[C], C]: ...
def register_variable_name(name: str, typ: tp.Any = MISSING, *, overwrite: bool = False) -> tp.Any:
    """Register a name for a Variable class; without `typ`, a class decorator.

    Raises ValueError when the name is taken and `overwrite` is False.

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
    if name in _types and not overwrite:
        raise ValueError(
            f"Name {name} already mapped to type {_types[name].__name__}. To map it to "
            f"{typ.__name__} instead, pass overwrite=True."
        )
    _types[name] = typ
    _names[typ] = name
    return typ


def variable_type_from_name(
    name: str, /, *, base: type[Variable[tp.Any]] = Variable, allow_register: bool = False
) -> type[Variable[tp.Any]]:
    """The Variable class of a registered name.

    Args:
        base: superclass for a class made here.
        allow_register: make and register a class for an unknown name.

    Raises ValueError for an unknown name otherwise.
    """
    if name not in _types:
        if not allow_register:
            raise ValueError(
                f"Name {name} is not registered in the registry. Register it with "
                "register_variable_name, or pass allow_register=True."
            )
        register_variable_name(name, type(name, (base,), {}))
    return _types[name]


def variable_name_from_type(typ: type[Variable[tp.Any]], /, *, allow_register: bool = False) -> str:
    """The registered name of a Variable class.

    Args:
        allow_register: register the name of the class itself where it has none.

    Raises ValueError for a class without a name otherwise.
    """
    if typ not in _names:
        if not allow_register:
            raise ValueError(
                f"Type {typ.__name__} is not registered in the registry. Give it a name with "
                "register_variable_name, or pass allow_register=True."
            )
        name = typ.__name__
        if name in _types:
            name = _free_name(name)
        register_variable_name(name, typ)
    return _names[typ]


def _free_name(name: str) -> str:
    taken = [n for n in _types if re.fullmatch(re.escape(name) + r"_\d+", n)]
    return f"{name}_{len(taken) + 1}"


VariableState = Variable
"""The former name of the Variables in a State."""


class Param(Variable[T]):
    """A trainable parameter."""

    __slots__ = ()


class BatchStat(Variable[T]):
    """A running statistic of a normalisation layer."""

    __slots__ = ()


class Cache(Variable[T]):
    """Values kept between calls, such as the keys and values of autoregressive decoding."""

    __slots__ = ()


class Intermediate(Variable[T]):
    """A value recorded during a call, see `Module.sow`."""

    __slots__ = ()


class Perturbation(Intermediate[T]):
    """A zero added to an intermediate value so that its gradient can be taken."""

    __slots__ = ()


class RngState(Variable[T]):
    """State of a random stream."""

    __slots__ = ()

    _nnx_counted_as = "RngState"  # in totals, keys and counts are one kind


class RngKey(RngState[T]):
    """The key of a random stream."""

    __slots__ = ()


class RngCount(RngState[T]):
    """How many keys a random stream has given."""

    __slots__ = ()


for _name, _type in {
    "params": Param,
    "batch_stats": BatchStat,
    "cache": Cache,
    "intermediates": Intermediate,
    "perturbations": Perturbation,
}.items():
    register_variable_name(_name, _type)
