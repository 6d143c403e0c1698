"""What a picture of a model contains, before it is laid out: boxes in boxes, references and calls.

An `Item` is one box: an object, a container, a Variable or an array.  Equal neighbours are one box, as
in the outline that `print` shows, from which items are made.  An object that is reached twice is one
item; the second attribute is a `Reference` to it, which also ends cycles.
"""

from __future__ import annotations

import dataclasses
import itertools
import typing as tp

from nnxlite._base.outline import MAX_CHILDREN, Part, count_text, group_name, part_of
from nnxlite._base.text import Text, clip, expanded, totals_text
from nnxlite.inspect._calls import CallInfo, layout

MAX_ITEMS = 1_500  # of a picture; further ones are counted, not shown
MAX_LEVELS = 16  # deeper levels are not shown
ARRAY = "Array"


@dataclasses.dataclass(eq=False, kw_only=True)
class Box:
    """Where a part of the picture is drawn, once it is laid out."""

    x: float = 0
    y: float = 0
    width: float = 0
    height: float = 0


@dataclasses.dataclass(eq=False)
class Item(Box):
    """One box.

    Attributes:
        key: its name in the texts for Graphviz and Mermaid.
        name: the attribute, key or index it is under; empty for the root.
        title: the class, after the number of equal boxes; of an array, dtype and shape too.
        settings: settings that are not defaults, as text.
        path: where it is, as text.
        kind: the kind of a Variable, `Array` for an array without one, None for a box with others.
        count: how many equal boxes it represents.
        children: the boxes in it.
        references: attributes that refer to a box elsewhere.
        order: the number of its first call, or of one below it.
        inputs, outputs: of its first call, as text.
    """

    key: str
    name: str = ""
    title: str = ""
    settings: str = ""
    path: str = ""
    kind: str | None = None
    count: int = 1
    children: list[Item] = dataclasses.field(default_factory=list)
    references: list[Reference] = dataclasses.field(default_factory=list)
    order: int | None = None
    inputs: str | None = None
    outputs: str | None = None

    @property
    def label(self) -> str:
        """Name and title on one line."""
        return f"{self.name}: {self.title}" if self.name and self.title else self.name or self.title

    @property
    def called(self) -> list[Item]:
        """The children that are called, or contain one that is, in the order of the calls."""
        return [child for child in self.children if child.order is not None]

    def walk(self) -> tp.Iterator[Item]:
        """The item and all below it."""
        pending: list[Item] = [self]
        while pending:
            item = pending.pop()
            yield item
            pending.extend(reversed(item.children))


@dataclasses.dataclass(eq=False)
class Reference(Box):
    """An attribute that refers to a box elsewhere, which is None if it is not in the picture."""

    key: str
    name: str
    path: str
    target: Item | None = None

    @property
    def label(self) -> str:
        """The name of the attribute; without an arrow, also the path of what it refers to."""
        return self.name if self.target is not None else f"{self.name}: {self.path}"


@dataclasses.dataclass
class Picture:
    """All boxes of a model, and totals for each kind of Variable as text."""

    root: Item
    kinds: dict[str, str]

    @property
    def call_edges(self) -> list[tuple[Item, Item, str]]:
        """Pairs of boxes that are called one after the other, with the inputs of the second."""
        return [
            (first, second, inputs_of(second))
            for item in self.root.walk()
            for first, second in itertools.pairwise(item.called)
        ]

    @property
    def references(self) -> list[tuple[Item, Reference]]:
        """Every reference with the box it belongs to."""
        return [(item, reference) for item in self.root.walk() for reference in item.references]


def inputs_of(item: Item) -> str:
    """The inputs of an item's first call; of a container, those of the first call in it."""
    while item.inputs is None and item.called:
        item = item.called[0]
    return item.inputs or ""


def picture_of(obj: tp.Any, rows: tp.Sequence[CallInfo] = ()) -> Picture:
    """The boxes of an object; with calls, boxes that are called are in their order."""
    with expanded(obj) as order:
        maker = _Maker()
        top = [part_of(order)]
        root = maker.item(top, top, 0)
        maker.connect()
        totals = dict(reversed(order[0].totals.items()))
    for row in sorted(rows, key=lambda row: row.call_order):
        item = maker.by_object.get(row.object_id)
        if item is not None and item.order is None:
            item.order = row.call_order
            item.inputs = _on_one_line(row.inputs_repr)
            item.outputs = "" if row.outputs is None else _on_one_line(layout(row.outputs))
    for item in reversed([*root.walk()]):
        orders = [child.order for child in item.children if child.order is not None]
        if orders and item.order is None:
            item.order = min(orders)
        item.children.sort(key=lambda child: -1 if child.order is None else child.order)
    kinds = {kind: totals_text({kind: total}) for kind, total in totals.items()}
    if any(item.kind == ARRAY for item in root.walk()):
        kinds[ARRAY] = ARRAY
    return Picture(root, kinds)


def _on_one_line(text: str) -> str:
    parts = [line.strip().removeprefix("- ") for line in text.splitlines()]
    return clip(", ".join(part for part in parts if part and not part.endswith(": None")), 48)


class _Maker:
    """Makes items of the parts of an outline."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.count = 0
        self.by_object: dict[int, Item] = {}
        self.by_node: dict[int, Item] = {}
        self.waiting: list[tuple[Reference, tp.Any]] = []

    def item(self, group: list[Part], members: list[Part], level: int) -> Item:
        """The box for some equal parts of one object.

        Args:
            group: the parts.
            members: these, and those in the objects that are not drawn since they equal that one.
            level: the number of boxes around it.
        """
        self.count += 1
        part = group[0]
        node, text = part.node, part.node.text
        item = Item(
            key=f"n{next(self.numbers)}",
            name="" if node.parent is None else group_name(group),
            title=f"{count_text(group)}{part.head}",
            settings=part.settings,
            path=node.path(),
            count=len(group),
        )
        for same in members:
            self.by_node[id(same.node)] = self.by_object[id(same.node.value)] = item
        if text is None or text.inline or not part.is_data:
            item.kind = _kind(text) if part.is_data else ""
            item.title = count_text(group) + part.lines[0].text
            return item
        groups = part.groups if level < MAX_LEVELS else []
        for number, below in enumerate(groups):
            if number >= MAX_CHILDREN or self.count >= MAX_ITEMS:
                more = sum(map(len, groups[number:]))
                item.children.append(
                    Item(f"n{next(self.numbers)}", title=f"... {more:,} more", kind="")
                )
                break
            self.add(item, below, [p for same in members for p in same.groups[number]], level)
        return item

    def add(self, item: Item, below: list[Part], members: list[Part], level: int) -> None:
        """Put some equal parts into an item, as a box or as a reference."""
        first = below[0].node.first
        if first is None:
            item.children.append(self.item(below, members, level + 1))
            return
        name = f"{count_text(below)}{group_name(below)}"
        reference = Reference(f"n{next(self.numbers)}", name, first.path())
        item.references.append(reference)
        self.waiting.append((reference, first))

    def connect(self) -> None:
        """Let the references refer to boxes, now that all are there."""
        for reference, first in self.waiting:
            reference.target = self.by_node.get(id(first))


def _kind(text: Text | None) -> str:
    if text is None:
        return ARRAY
    return text.tally[0] if text.tally is not None else text.name
