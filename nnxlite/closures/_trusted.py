"""What is trusted not to change: packages, and values of some types; and what is still checked.

Everything that `closures` assumes, without reading it in code, is listed here.
"""

from __future__ import annotations

import operator
import sys
import types
import typing as tp

import jax
import numpy as np

from nnxlite._statics import ById

TRUSTED = {
    "_functools", "_operator", "abc", "builtins", "chex", "collections", "dataclasses", "einops",
    "enum", "functools", "itertools", "jax", "jaxlib", "jaxtyping", "math", "nnxlite", "numpy",
    "operator", "optax", "string", "types", "typing",
}  # fmt: skip
"""Packages whose functions depend on nothing that changes, except `numpy.random`; see `trust`."""

LAYERS = "nnxlite.nn"
"""The trusted package whose classes are followed: layers call functions that are their attributes."""

WRAPPERS = "nnxlite."
"""Where the transformed functions that compare by content are nothing but function and attributes."""

IMPURE = frozenset(
    {"breakpoint", "eval", "exec", "globals", "input", "locals", "open", "vars", "__import__"}
)
"""Builtins that depend on more than their arguments."""

BY_NAME = (getattr, hasattr, setattr, delattr, operator.attrgetter, operator.methodcaller)
"""Functions that look up attributes by names that the code does not mention."""

CONSTANTS = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented)}
)
"""Types whose values are compared by `static_key`."""

IMMUTABLE = (
    np.number, np.bool_, np.dtype, np.ufunc, jax.lax.Precision, jax.sharding.Mesh,
    jax.sharding.AbstractMesh, jax.sharding.PartitionSpec, jax.sharding.Sharding,
    types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType,
    types.MemberDescriptorType, tp.TypeVar,
)  # fmt: skip
"""Other types whose values cannot be edited; they are compared by `==`."""

JITTED = type(jax.jit(abs))
"""The type of a function under `jax.jit`."""

DERIVED = frozenset({"bound", "fun", "jitted_fn"})
"""Attributes that a transformed function has because of its function and options."""

SETTINGS = frozenset({"nnxlite", "optax"})
"""Packages whose objects do not change once they are made."""

CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__"})
"""Special methods that run only where a class is called."""

UNUSED = CONSTRUCTORS | {"__repr__"}
"""Special methods that are followed only where code mentions them."""

UNCOMPUTED = ("__", "_abc_", "_nnx_")
"""Prefixes of entries of classes to which no computed name refers."""

ADDING = frozenset({"append"})
"""Methods by which functions only add to a list, so that its items are no part of what they see."""


def trust(*packages: str) -> None:
    """Add packages whose functions depend on nothing that changes, by their top-level names.

    Eager loops and branches that call their functions are then compiled once, without reading the
    functions' code. It holds for the whole process, in all threads, since it says what a package is and
    not how a program runs.

    >>> from nnxlite.closures import TRUSTED, trust
    >>> trust("colorsys")
    >>> "colorsys" in TRUSTED
    True
    """
    TRUSTED.update(packages)


def is_trusted(module: tp.Any) -> bool:
    """Whether the functions of a module, given by name, depend on nothing that changes."""
    return (
        isinstance(module, str)
        and module.partition(".")[0] in TRUSTED
        and not f"{module}.".startswith("numpy.random.")
    )


def is_trusted_class(cls: type) -> bool:
    """Whether a class is one of a trusted package.

    `cls.__module__` alone misleads: a class made by calling a metaclass has the module of that call.
    """
    module, name = cls.__module__, cls.__qualname__
    namespace = sys.modules.get(module) if is_trusted(module) else None
    return namespace is not None and ("." in name or getattr(namespace, name, None) is cls)


# Functions of JAX that somebody may replace ---------------------------------------------------------

_NAMESPACES = [vars(module) for module in (jax.lax, jax.numpy, jax.nn, jax.random)]
_READERS = [
    (space, operator.itemgetter(*[name for name, value in space.items() if callable(value)]))
    for space in _NAMESPACES
]


def _functions() -> list[tp.Any]:
    return [function for space, read in _READERS for function in read(space)]


_FUNCTIONS = _functions()
_PLAIN = [function for function in _FUNCTIONS if isinstance(function, types.FunctionType)]
_code_of = operator.attrgetter("__code__")
_CODES = [*map(_code_of, _PLAIN)]
KNOWN = frozenset(map(id, _FUNCTIONS))
"""The public functions of JAX, by id; they live as long as the process."""


def replaced_functions() -> tuple[tp.Any, ...]:
    """A key of the functions of JAX that are not what they were at import; empty, as a rule.

    Libraries replace some for a while, also by swapping their `__code__`.  What was traced before is
    another program.  To find out takes about 35 us: too long for each call of a compiled function.
    """
    now, codes = _functions(), [*map(_code_of, _PLAIN)]
    if now == _FUNCTIONS and codes == _CODES:
        return ()
    pairs = zip((*_FUNCTIONS, *_CODES), (*now, *codes))
    return tuple((i, ById(new)) for i, (old, new) in enumerate(pairs) if new is not old)
