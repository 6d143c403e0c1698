"""`tree_pformat`: any tree as text of a given width, arrays by shape."""

from __future__ import annotations

import typing as tp

import jax
import numpy as np

from nnxlite._base.text import Style, Text, expanded, laid_out, open_up, short
from nnxlite.filtered._specs import is_array

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def _never(leaf: tp.Any) -> bool:
    return False


def array_text(array: tp.Any) -> str:
    """An array by dtype and shape: `f32[2,3]`.

    >>> import jax.numpy as jnp
    >>> from nnxlite.filtered._pretty import array_text
    >>> array_text(jnp.zeros((2, 3)))
    'f32[2,3]'
    """
    name = str(array.dtype)
    letters = name.rstrip("0123456789")
    kind = _SHORT.get(letters, letters) + name[len(letters) :]
    owner = "(numpy)" if isinstance(array, (np.ndarray, np.generic)) else ""
    return f"{kind}[{','.join(map(str, array.shape))}]{owner}"


def tree_pformat(
    pytree: tp.Any,
    *,
    width: int = 80,
    indent: int = 2,
    short_arrays: bool = True,
    struct_as_array: bool = False,
    truncate_leaf: tp.Callable[[tp.Any], bool] = _never,
) -> str:
    """A tree as text, with arrays by dtype and shape.

    Args:
        pytree: any pytree, or a graph object.
        width: the number of characters that a line may have, if possible.
        indent: of each level, in characters.
        short_arrays: False writes arrays out.
        struct_as_array: writes `jax.ShapeDtypeStruct`s like arrays.
        truncate_leaf: parts for which it is true are written as `Type(...)`.

    Returns:
        A string, of several lines where one is not enough.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.tree_pformat({"w": jnp.zeros((2, 3)), "name": "head"})
    "{'w': f32[2,3], 'name': 'head'}"
    """

    def shown_by_type(value: tp.Any) -> bool:
        return bool(struct_as_array and isinstance(value, jax.ShapeDtypeStruct)) or (
            short_arrays and is_array(value)
        )

    def leaf(value: tp.Any) -> str:
        if truncate_leaf(value):
            return f"{type(value).__name__}(...)"
        if shown_by_type(value):
            return array_text(value)
        return repr(value) if _is_array_like(value) else short(value)

    def opened(value: tp.Any) -> Text | None:
        return None if _is_array_like(value) or truncate_leaf(value) else open_up(value)

    style = Style(leaf, opened, width, indent)
    with expanded(pytree, style) as order:
        return laid_out(order, style)


def _is_array_like(value: tp.Any) -> bool:
    return is_array(value) or isinstance(value, jax.ShapeDtypeStruct)


def tree_pprint(
    pytree: tp.Any,
    *,
    width: int = 80,
    indent: int = 2,
    short_arrays: bool = True,
    struct_as_array: bool = False,
    truncate_leaf: tp.Callable[[tp.Any], bool] = _never,
) -> None:
    """Print a tree; arguments as for `tree_pformat`.

    Args:
        pytree: any pytree, or a graph object.
        width, indent, short_arrays, struct_as_array, truncate_leaf: as for `tree_pformat`.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.tree_pprint([jnp.zeros(3), "a"])
    [f32[3], 'a']
    """
    text = tree_pformat(
        pytree,
        width=width,
        indent=indent,
        short_arrays=short_arrays,
        struct_as_array=struct_as_array,
        truncate_leaf=truncate_leaf,
    )
    print(text)
