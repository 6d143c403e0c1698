"""The layout of a picture, and the picture as SVG.

Sizes are worked out from the innermost boxes outwards, with a monospace font whose width is known, so
that text never leaves its box; positions from the root inwards.  Boxes flow in rows; those that are
called are below one another, in order, with the shapes of their inputs on the arrows.  References run
along lanes to the right of everything, one for each box that is referred to.
"""

from __future__ import annotations

import re
import typing as tp
import unicodedata
import zlib
from xml.sax.saxutils import escape

from nnxlite._base.text import clip
from nnxlite.inspect._picture import ARRAY, Item, Picture, Reference, inputs_of

FONT, SMALL = 12, 10  # px
CHARACTER = 0.62  # width of a character, in sizes of the font
PAD, GAP, LINE, CHIP, ARROW = 10, 8, 18, 20, 30  # px
ROW_WIDTH = 760  # of boxes that flow in rows
CHIPS_WIDTH = 420
LANE = 10

COLOURS = {
    "Param": "#cfe2ff",
    "BatchStat": "#d1f0d6",
    "Cache": "#ffe5b4",
    "Intermediate": "#fde2e4",
    "RngState": "#e6dcf7",
    "RngKey": "#e6dcf7",
    "RngCount": "#e6dcf7",
    "OptState": "#fff3b0",
    ARRAY: "#e9ecef",
    "": "#ffffff",
}
_PALETTE = ("#ffd6a5", "#caffbf", "#bde0fe", "#ffc8dd", "#d8e2dc", "#f1faee", "#e2ece9", "#fbf8cc")


def colour_of(kind: str) -> str:
    """The colour of a kind of Variable, the same one in every picture."""
    return COLOURS.get(kind) or _PALETTE[zlib.crc32(kind.encode()) % len(_PALETTE)]


def text_width(text: str, size: float = FONT) -> float:
    """The width of a text in pixels; characters of East Asia take two columns."""
    columns = sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
    return columns * CHARACTER * size


# Layout --------------------------------------------------------------------------------------


def arrange(root: Item) -> None:
    """Give every item and reference its size and its absolute position."""
    for item in reversed([*root.walk()]):
        _measure(item)
    root.x, root.y = PAD, PAD + (ARROW if root.inputs is not None else 0)
    for item in root.walk():  # parents come before their children
        for part in (*item.children, *item.references):
            part.x += item.x
            part.y += item.y


def _measure(item: Item) -> None:
    """The size of an item, and the positions of what is in it, relative to it."""
    if item.kind is not None:
        item.width, item.height = text_width(item.label) + 2 * PAD, CHIP
        return
    y: float = PAD / 2 + LINE
    width = text_width(item.label) * 1.05
    if item.settings:
        item.settings = clip(item.settings, 90)
        width = max(width, text_width(item.settings, SMALL))
        y += LINE - 4
    for reference in item.references:
        reference.width, reference.height = text_width(reference.label) + 2 * PAD + 12, CHIP
    chips = [child for child in item.children if child.kind is not None]
    boxes = [child for child in item.children if child.kind is None and child.order is None]
    for parts, limit in ((chips, CHIPS_WIDTH), (item.references, 0), (boxes, ROW_WIDTH)):
        if parts:
            inner, y = _flow(parts, y + GAP / 2, limit)
            width = max(width, inner)
    called = [child for child in item.called if child.kind is None]
    for child in called:
        width = max(width, child.width, text_width(inputs_of(child), SMALL) * 2 + 3 * PAD)
    for child in called:
        y += ARROW
        child.x, child.y = PAD + (width - child.width) / 2, y
        y += child.height + _behind(child)
    item.width, item.height = width + 2 * PAD, y + PAD


def _flow(parts: tp.Sequence[Item | Reference], y: float, limit: float) -> tuple[float, float]:
    """Put parts in rows; returns the width they take, and where the next thing may start."""
    x, widest, row = 0.0, 0.0, 0.0
    for part in parts:
        behind = _behind(part)
        if x and x + part.width > limit:
            x, y, row = 0.0, y + row + GAP, 0.0
        part.x, part.y = PAD + x, y
        x += part.width + behind + GAP
        widest, row = max(widest, x - GAP), max(row, part.height + behind)
    return widest, y + row + GAP / 2


def _behind(part: Item | Reference) -> int:
    """The room for the edges of the boxes behind one that represents several."""
    return 8 if isinstance(part, Item) and part.kind is None and part.count > 1 else 0


# Drawing -------------------------------------------------------------------------------------


def svg_of(picture: Picture) -> str:
    """The picture as an SVG document."""
    root = picture.root
    arrange(root)
    body = _boxes(root)
    body += _calls(root)
    lanes = _lanes(picture)
    body += lanes
    targets = {id(r.target) for _, r in picture.references if r.target is not None}
    right = root.x + root.width + _behind(root) + PAD + LANE * (len(targets) + 1) * bool(targets)
    bottom = root.y + root.height + _behind(root) + (ARROW if root.outputs is not None else 0)
    legend, right, bottom = _legend(picture.kinds, right, bottom + PAD)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{right:.0f}" height="{bottom:.0f}" '
        f'viewBox="0 0 {right:.0f} {bottom:.0f}" font-size="{FONT}" '
        'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace">'
    )
    marker = (
        '<marker id="{}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{}"/></marker>'
    )
    defs = f"<defs>{marker.format('call', _CALL)}{marker.format('ref', _REFERENCE)}</defs>"
    ground = f'<rect width="{right:.0f}" height="{bottom:.0f}" fill="white"/>'
    return "\n".join([head, defs, ground, *body, *legend, "</svg>"])


def _escaped(text: str) -> str:
    return escape(_NOT_IN_XML.sub("?", text))


_NOT_IN_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_CALL, _REFERENCE, _EDGE, _MUTED = "#1d3557", "#b5179e", "#8d99ae", "#5c677d"


def _rect(x: float, y: float, width: float, height: float, fill: str, extra: str = "") -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="5" '
        f'fill="{fill}" stroke="{_EDGE}"{extra}/>'
    )


def _text(x: float, y: float, text: str, size: int = FONT, extra: str = "") -> str:
    length = f' textLength="{text_width(text, size) * 0.97:.1f}"' if text else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}"{length}{extra} '
        f'xml:space="preserve">{_escaped(text)}</text>'
    )


def _boxes(root: Item) -> list[str]:
    out: list[str] = []
    levels = {id(root): 0}
    for item in root.walk():
        level = levels[id(item)]
        for child in item.children:
            levels[id(child)] = level + 1
        tip = f"<title>{_escaped(f'{item.path}: {item.title}({item.settings})')}</title>"
        if item.kind is not None:
            chip = _rect(item.x, item.y, item.width, item.height, colour_of(item.kind))
            out.append(f"<g>{tip}{chip}{_text(item.x + PAD, item.y + 14, item.label)}</g>")
            continue
        fill = "#ffffff" if level % 2 else "#f4f6fb"
        parts = [
            _rect(item.x + shift, item.y + shift, item.width, item.height, fill)
            for shift in (_behind(item), _behind(item) / 2)
            if shift
        ]
        parts.append(_rect(item.x, item.y, item.width, item.height, fill))
        y = item.y + LINE
        parts.append(_text(item.x + PAD, y, item.label, extra=' font-weight="bold"'))
        if item.settings:
            colour = f' fill="{_MUTED}"'
            parts.append(_text(item.x + PAD, y + LINE - 4, item.settings, SMALL, colour))
        for reference in item.references:
            x, y = reference.x, reference.y
            dashed = ' stroke-dasharray="4 3"'
            parts.append(_rect(x, y, reference.width, reference.height, "#ffffff", dashed))
            parts.append(_text(x + PAD, y + 14, reference.label))
        out.append(f"<g>{tip}{''.join(parts)}</g>")
    return out


def _calls(root: Item) -> list[str]:
    out: list[str] = []
    for item in root.walk():
        above = None
        for child in (child for child in item.called if child.kind is None):
            middle = child.x + child.width / 2
            start = child.y - ARROW + 4 if above is None else above
            out.append(_arrow(middle, start, child.y, inputs_of(child)))
            above = child.y + child.height + _behind(child)
    middle, bottom = root.x + root.width / 2, root.y + root.height + _behind(root)
    if root.inputs is not None:
        out.append(_arrow(middle, root.y - ARROW + 4, root.y, root.inputs))
    if root.outputs is not None:
        out.append(_arrow(middle, bottom, bottom + ARROW - 4, root.outputs))
    return out


def _arrow(x: float, start: float, end: float, label: str) -> str:
    line = (
        f'<path d="M{x:.1f},{start:.1f} V{end:.1f}" stroke="{_CALL}" fill="none" '
        'marker-end="url(#call)"/>'
    )
    return line + _text(x + PAD / 2, end - ARROW / 2 + 6, label, SMALL, f' fill="{_CALL}"')


def _lanes(picture: Picture) -> list[str]:
    """The arrows of references: to the right, along a lane, and back to the top of the box."""
    out: list[str] = []
    lanes: dict[int, float] = {}
    start = picture.root.x + picture.root.width + _behind(picture.root) + LANE
    for _, reference in picture.references:
        target = reference.target
        if target is None:
            continue
        lane = lanes.setdefault(id(target), start + LANE * len(lanes))
        x, y = reference.x + reference.width, reference.y + reference.height / 2
        end, above = target.x + target.width - 12, target.y - GAP + 2
        out.append(
            f'<path d="M{x:.1f},{y:.1f} H{lane:.1f} V{above:.1f} H{end:.1f} V{target.y:.1f}" '
            f'fill="none" stroke="{_REFERENCE}" stroke-opacity="0.75" stroke-dasharray="5 3" '
            f'stroke-linejoin="round" marker-end="url(#ref)">'
            f"<title>{_escaped(f'{reference.name} is {reference.path}')}</title></path>"
        )
    return out


def _legend(kinds: dict[str, str], right: float, top: float) -> tuple[list[str], float, float]:
    """The kinds of Variables with their totals, and the size of the document with them."""
    out: list[str] = []
    x: float = PAD
    for kind, text in kinds.items():
        width = text_width(text, SMALL) + 18
        if x > PAD and x + width > max(right, ROW_WIDTH / 2):
            x, top = PAD, top + LINE
        out.append(_rect(x, top, 12, 12, colour_of(kind)))
        out.append(_text(x + 17, top + 10, text, SMALL))
        x += width + 2 * PAD
        right = max(right, x)
    return out, right, top + (LINE + PAD / 2 if kinds else 0)
