"""`draw`: a model as a picture."""

from __future__ import annotations

import functools
import os
import pathlib
import typing as tp

from nnxlite.inspect._calls import trace_calls
from nnxlite.inspect._graphviz import dot_of, mermaid_of
from nnxlite.inspect._picture import Picture, picture_of
from nnxlite.inspect._svg import svg_of
from nnxlite.inspect._tabulate import filter_rng_streams


class Drawing:
    """A picture of a model, as `draw` returns it; a notebook shows it.

    Args:
        picture: the boxes that `draw` found.

    Attributes:
        svg: the picture as an SVG document.
        dot: the same boxes and arrows in the language of Graphviz.
        mermaid: the same as a flowchart of Mermaid.

    >>> import nnxlite as nnx
    >>> drawing = nnx.draw(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> "kernel" in drawing.svg, drawing.dot.split()[0]
    (True, 'digraph')
    """

    def __init__(self, picture: Picture) -> None:
        self._picture = picture

    @functools.cached_property
    def svg(self) -> str:
        """The picture as an SVG document."""
        return svg_of(self._picture)

    @functools.cached_property
    def dot(self) -> str:
        """The boxes and arrows in the language of Graphviz."""
        return dot_of(self._picture)

    @functools.cached_property
    def mermaid(self) -> str:
        """The boxes and arrows as a flowchart of Mermaid."""
        return mermaid_of(self._picture)

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write the picture to a file: `.svg`, `.dot` or `.gv`, `.mmd` or `.mermaid`.

        Args:
            path: the file, which is replaced if it exists.

        Returns:
            The path.

        Raises:
            ValueError: for another suffix.
        """
        path = pathlib.Path(path)
        form = _FORMS.get(path.suffix.lower())
        if form is None:
            raise ValueError(
                f"Drawing.save: no format for the suffix {path.suffix!r} of {str(path)!r}. Use one of "
                f"{', '.join(_FORMS)}."
            )
        path.write_text(getattr(self, form), encoding="utf-8", errors="replace")
        return path

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        boxes = sum(1 for _ in self._picture.root.walk())
        return f"Drawing({self._picture.root.title}, {boxes:,} boxes)"


_FORMS = {
    ".svg": "svg",
    ".dot": "dot",
    ".gv": "dot",
    ".mmd": "mermaid",
    ".mermaid": "mermaid",
}


def draw(
    model: tp.Any, *input_args: tp.Any, method: str = "__call__", **input_kwargs: tp.Any
) -> Drawing:
    """A picture of a model: objects as nested boxes, Variables in the colour of their kind.

    Equal neighbours, such as the blocks of a transformer, are one box ("24 x Block"); an object or
    Variable with several paths is one box, too, with an arrow from each further attribute that refers
    to it. With inputs, one call is traced for its shapes: boxes that are called are below one another,
    in the order of their first calls, with the shapes of their inputs on the arrows.

    Args:
        model: a module, or anything else with objects in it.
        input_args, input_kwargs: arguments of the call, if there is to be one; arrays may be
            `jax.ShapeDtypeStruct`.
        method: the method to call.

    Returns:
        A `Drawing`: `svg`, `dot` and `mermaid` are texts, `save` writes a file, and notebooks show it.

    Raises:
        ValueError: with inputs, if `model` is not a graph object.
        AttributeError: with inputs, if it does not have this method.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> model = nnx.Sequential(*[nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(24)])
    >>> drawing = nnx.draw(model, jnp.ones((1, 2)))
    >>> drawing
    Drawing(Sequential, 5 boxes)
    >>> print(drawing.mermaid)
    flowchart TD
      subgraph n0["Sequential"]
        subgraph n1["layers: List"]
          subgraph n2["0-23: 24 x Linear"]
            n3["kernel: Param float32[2,2]"]:::kind0
            n4["bias: Param float32[2]"]:::kind0
          end
        end
      end
      classDef kind0 fill:#cfe2ff,stroke:#8d99ae,color:#000
    <BLANKLINE>
    """
    rows = []
    if input_args or input_kwargs:
        calls = trace_calls(model, method, input_args, input_kwargs)
        rows = [row for row in calls if filter_rng_streams(row)]
    return Drawing(picture_of(model, rows))
