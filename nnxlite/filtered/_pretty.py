"""`tree_pformat`: any tree as text of a given width, arrays by shape."""

from __future__ import annotations

import math
import typing as tp

import jax
import numpy as np

from nnxlite._text import Text, open_up, short
from nnxlite.filtered._predicates import is_array

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def _never(leaf: tp.Any) -> bool:
    return False


class _Style(tp.NamedTuple):
    """The options of `tree_pformat`."""

    width: float
    indent: int
    short_arrays: bool
    struct_as_array: bool
    truncate_leaf: tp.Callable[[tp.Any], bool]

    def on_one_line(self) -> _Style:
        """The same without a limit of the width."""
        return self._replace(width=math.inf)


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


def _leaf_text(leaf: tp.Any, style: _Style) -> str:
    if style.truncate_leaf(leaf):
        return f"{type(leaf).__name__}(...)"
    struct = isinstance(leaf, jax.ShapeDtypeStruct)
    if (is_array(leaf) and style.short_arrays) or (struct and style.struct_as_array):
        return array_text(leaf)
    return repr(leaf) if is_array(leaf) or struct else short(leaf)


def _opened(value: tp.Any, style: _Style) -> Text | None:
    if is_array(value) or isinstance(value, jax.ShapeDtypeStruct) or style.truncate_leaf(value):
        return None
    return open_up(value)


def _lines(value: tp.Any, style: _Style, used: int, outer: tuple[int, ...]) -> str:
    """The text of a value that starts `used` characters into its line.

    It is one line if that fits, and always where the width is infinite; `outer` are the ids of the
    values around it.
    """
    text = _opened(value, style)
    if text is None:
        return _leaf_text(value, style)
    if id(value) in outer:
        return f"<{type(value).__name__} that contains it>"

    def entries(style: _Style) -> list[str]:
        inside = (*outer, id(value))
        return [
            entry.label + _lines(entry.child, style, style.indent + len(entry.label), inside)
            for entry in text.entries
        ]

    line = f"{text.name}{text.opening}{', '.join(entries(style.on_one_line()))}{text.closing}"
    if style.width == math.inf or (used + len(line) <= style.width and "\n" not in line):
        return line
    margin = " " * style.indent
    body = ",\n".join(entries(style)).replace("\n", "\n" + margin)
    return f"{text.name}{text.opening}\n{margin}{body}\n{text.closing.lstrip(',')}"


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
    style = _Style(width, indent, short_arrays, struct_as_array, truncate_leaf)
    return _lines(pytree, style, 0, ())


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
