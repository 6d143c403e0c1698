"""Tensor parallelism for the layers of the library: which axis of a parameter is divided.

A linear layer is divided by columns (its output features; the result is divided too) or by rows (its
input features; the partial results are summed).  A pair of them, up by columns and down by rows, needs
one sum and nothing else; so do attention heads with the projection after them.  See M. Shoeybi and
others, "Megatron-LM: training multi-billion parameter language models using model parallelism"
(2019).

Axes are counted from the end, so that stacked layers are divided like one of them.
"""

from __future__ import annotations

import math
import typing as tp

from nnxlite.nn import Conv, Embed, Linear, LinearGeneral, MultiHeadAttention

ROW_NAMES = frozenset(
    "out out_proj o_proj proj c_proj projection output down down_proj w2 wo fc2 fc_out".split()
)
"""Names of linear layers that end a block; they decide where a kernel is square. The layout says so."""


class Choice(tp.NamedTuple):
    """One way to divide a parameter.

    Attributes:
        axis: from the end; None where each device has the whole parameter.
        why: in words.
    """

    axis: int | None
    why: str

    def because(self, reason: str) -> Choice:
        """The same with a reason."""
        return self._replace(why=f"{self.why} ({reason})")


def choices(
    name: str, layer: tp.Any, layer_name: tp.Any, parent: tp.Any, shape: tuple[int, ...]
) -> list[Choice]:
    """The ways to divide a parameter of a layer, best first; none where the layer is not known.

    Args:
        name: the attribute of the layer that is the parameter.
        layer: the object that contains the parameter.
        layer_name: the attribute of the parent that is the layer.
        parent: the object that contains the layer.
        shape: of the parameter.
    """
    if isinstance(parent, MultiHeadAttention) and isinstance(layer, LinearGeneral):
        if layer_name == "out":
            return [by_rows(name, layer, "heads")]
        return [by_columns(name, layer, "heads")]
    if isinstance(layer, Embed):
        return [Choice(-2, "vocabulary"), Choice(-1, "features")] if name == "embedding" else []
    if not is_linear(layer) or name not in ("kernel", "bias"):
        return []
    columns, rows = by_columns(name, layer), by_rows(name, layer)
    if isinstance(layer, Conv) and layer.feature_group_count != 1:
        return [columns]
    inputs, outputs = _product(layer.in_features), _product(layer.out_features)
    if inputs != outputs:
        return [rows, columns] if outputs < inputs else [columns, rows]
    if str(layer_name) in ROW_NAMES:
        why = f"square, and named {layer_name!r}"
        return [rows.because(why), columns]
    why = (
        "square"
        if isinstance(layer_name, int)
        else f"square, and {layer_name!r} names no last layer"
    )
    return [columns.because(why), rows]


def by_columns(name: str, layer: tp.Any, what: str = "columns") -> Choice:
    """A parameter divided along the (first) axis of output features."""
    outputs = len(layer.out_features) if isinstance(layer, LinearGeneral) else 1
    return Choice(-outputs, what)


def by_rows(name: str, layer: tp.Any, what: str = "rows") -> Choice:
    """A parameter divided along the (first) axis of input features."""
    if name == "bias":
        return Choice(None, f"{what}: the bias is added to the sum")
    general = isinstance(layer, LinearGeneral)
    outputs = len(layer.out_features) if general else 1
    return Choice(-outputs - (len(layer.axis) if general else 1), what)


def is_linear(layer: tp.Any) -> bool:
    """Whether a layer can be divided by columns and rows."""
    return isinstance(layer, (Linear, LinearGeneral, Conv))


def _product(sizes: tp.Any) -> int:
    return math.prod(sizes if isinstance(sizes, (tuple, list)) else (sizes,))
