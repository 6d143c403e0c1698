"""How treescope draws the library's objects: foldable, coloured, with pictures of arrays.

Every object that has a text form (`__nnx_text__`) is drawn from it, so that both show the same
attributes, brackets and counts; treescope adds folding, colours, pictures of arrays and marks on
repeated objects, to which their first path is added.
"""

from __future__ import annotations

import contextvars
import typing as tp

from treescope import formatting_util
from treescope import rendering_parts as parts

from nnxlite._base.text import Atom, Entry, comment_of, expanded

Drawing: tp.TypeAlias = parts.RenderableAndLineAnnotations
Renderer = tp.Callable[..., Drawing]


def render(obj: tp.Any, path: str | None, subtree_renderer: Renderer) -> Drawing:
    """The drawing of one object, for its `__treescope_repr__`.

    Args:
        obj: an object with a text form.
        path: where it is, as an expression, or None.
        subtree_renderer: draws a child, given `path=`.
    """
    shared = _shared.get()
    if shared is not None:
        return _rendered(obj, path, subtree_renderer, shared)
    with expanded(obj) as order:
        shared = {
            (id(node.parent.value), node.key): node.first.path()
            for node in order
            if node.first is not None and node.parent is not None
        }
    token = _shared.set(shared)
    try:
        return _rendered(obj, path, subtree_renderer, shared)
    finally:
        _shared.reset(token)


Shared = dict[tuple[int, tp.Any], str]

_shared: contextvars.ContextVar[Shared | None] = contextvars.ContextVar("shared", default=None)
"""In the object that is being drawn, by owner and name of an attribute: the path of what it shares."""


def _rendered(obj: tp.Any, path: str | None, renderer: Renderer, shared: Shared) -> Drawing:
    text = obj.__nnx_text__()
    opening = text.name + text.opening
    with expanded(obj) as order:
        comment = comment_of(order[0])
    if not text.entries:
        return parts.build_one_line_tree_node(opening + text.closing, path)
    return parts.build_foldable_tree_node_from_children(
        prefix=parts.siblings(
            opening, parts.fold_condition(expanded=parts.comment_color(parts.text(comment)))
        ),
        children=[
            _child(entry, path, renderer, shared.get((id(obj), entry.key)))
            for entry in text.entries
        ],
        suffix=text.closing,
        comma_separated=True,
        path=path,
        background_color=formatting_util.color_from_string(text.name) if text.name else None,
    )


def _child(entry: Entry, path: str | None, renderer: Renderer, shared: str | None) -> Drawing:
    if isinstance(entry.child, Atom):
        return parts.siblings_with_annotations(entry.label, parts.text(entry.child))
    below = None
    if path is not None:
        is_attribute = entry.label.endswith("=")
        below = f"{path}.{entry.key}" if is_attribute else f"{path}[{entry.key!r}]"
    remark = parts.comment_color(parts.text(f"  # shared with `{shared}`"))
    note = [] if shared is None else [remark]
    child = renderer(entry.child, path=below)
    return parts.siblings_with_annotations(entry.label, child, extra_annotations=note)
