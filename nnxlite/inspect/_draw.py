"""`draw`: a model as a flowchart of Mermaid.

It is made of the outline that `print` shows: each object is a box with its attributes, equal neighbours
are one box.  An attribute that refers to a box elsewhere is a dashed arrow.  With inputs, arrows lead
from each box that is called to the next, with the shapes of its inputs.
"""

from __future__ import annotations

import dataclasses
import itertools
import typing as tp

from nnxlite._base.outline import MAX_CHILDREN, Part, count_text, group_name, part_of
from nnxlite._base.text import Node, Text, clip, expanded
from nnxlite.inspect._calls import CallInfo, trace_calls
from nnxlite.inspect._tabulate import filter_rng_streams

__all__ = ["Drawing", "draw"]

MAX_BOXES = 400  # further ones are counted; Mermaid refuses texts of more than 50,000 characters
MAX_LEVELS = 16  # deeper levels are not shown
COLOURS = ("#cfe2ff", "#d1f0d6", "#ffe5b4", "#e6dcf7", "#fde2e4", "#fff3b0", "#d8e2dc", "#e9ecef")


@dataclasses.dataclass(frozen=True, repr=False)
class Drawing:
    """A picture of a model, as `draw` returns it; a notebook shows it.

    Attributes:
        text: a flowchart of Mermaid, which code hosts draw from a `mermaid` block of Markdown.

    >>> import nnxlite as nnx
    >>> drawing = nnx.draw(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> drawing.text == str(drawing), drawing.text.split()[0]
    (True, 'flowchart')
    """

    text: str

    def _repr_mimebundle_(self, include: tp.Any = None, exclude: tp.Any = None) -> dict[str, str]:
        markdown = f"```mermaid\n{self.text}```\n"
        return {"text/vnd.mermaid": self.text, "text/markdown": markdown, "text/plain": self.text}

    def __repr__(self) -> str:
        return self.text


def draw(
    model: tp.Any, *input_args: tp.Any, method: str = "__call__", **input_kwargs: tp.Any
) -> Drawing:
    """A picture of the object graph of a model: objects are boxes in boxes, Variables have a colour.

    Equal neighbours are one box. An object or Variable that is shared is one box, with an arrow from
    each further attribute that refers to it. With inputs, the boxes that are called have arrows from
    one to the next, in the order of their first calls, with the shapes of the inputs on them.

    Args:
        model: a module, or any other object that `print` shows as an outline.
        input_args, input_kwargs: arguments of a call, which is traced for its shapes only.
        method: the method to call.

    Returns:
        A `Drawing`: notebooks show it, and its `text` is a flowchart of Mermaid.

    Raises:
        ValueError: with inputs, if `model` is not a graph object.
        AttributeError: with inputs, if it does not have this method.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> model = nnx.Sequential(*[nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(24)])
    >>> print(nnx.draw(model, jnp.ones((1, 2))))
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
    rows: list[CallInfo] = []
    if input_args or input_kwargs:
        calls = trace_calls(model, method, input_args, input_kwargs)
        rows = [row for row in calls if filter_rng_streams(row)]
    with expanded(model) as order:
        root = part_of(order)
        return Drawing(_Flowchart(rows).of(root))


class _Called(tp.NamedTuple):
    """The first call of a box, or of one in it: its number, the box, and the inputs as text."""

    order: int
    key: str
    inputs: str


class _Flowchart:
    """Writes the text, box by box."""

    def __init__(self, rows: list[CallInfo]) -> None:
        self.calls = {row.object_id: row for row in reversed(rows)}  # the first of each object
        self.lines = ["flowchart TD"]
        self.edges: list[str] = []
        self.classes: dict[str, str] = {}
        self.keys: dict[int, str] = {}  # of the boxes, by node
        self.references: list[tuple[str, Node]] = []  # from an attribute to a box elsewhere
        self.count = 0

    def of(self, root: Part) -> str:
        """The text for an object."""
        self.box([root], [root], ())
        # A box beyond MAX_BOXES has no key.
        known = [(key, self.keys.get(id(first))) for key, first in self.references]
        arrows = [f"  {key} -.-> {target}" for key, target in known if target]
        colours = [
            f"  classDef {name} fill:{COLOURS[n % len(COLOURS)]},stroke:#8d99ae,color:#000"
            for n, name in enumerate(self.classes.values())
        ]
        return "\n".join([*self.lines, *arrows, *self.edges, *colours]) + "\n"

    def key(self) -> str:
        """A new name for a box."""
        self.count += 1
        return f"n{self.count - 1}"

    def box(
        self, group: list[Part], members: list[Part], around: tuple[str, ...]
    ) -> _Called | None:
        """Write a box for some equal parts of one object; returns its first call.

        Args:
            group: the parts.
            members: these, and those in the objects that are not drawn since they equal that one.
            around: the keys of the boxes that it is in.
        """
        part, key, pad = group[0], self.key(), "  " * (len(around) + 1)
        self.keys.update((id(same.node), key) for same in members)
        text = part.node.text
        name = "" if part.node.parent is None else group_name(group)
        if text is None or text.inline or not part.is_data:
            style = f":::{self.colour(text)}" if part.is_data else ""
            title = _quoted(name, count_text(group) + part.lines[0].text)
            self.lines.append(f"{pad}{key}[{title}]{style}")
            return self.call(members, key, [])
        title = _quoted(name, count_text(group) + part.head)
        groups = part.groups if len(around) < MAX_LEVELS else []
        self.lines.append(f"{pad}{'subgraph ' if groups else ''}{key}[{title}]")
        called: list[_Called] = []
        for number, below in enumerate(groups):
            if number >= MAX_CHILDREN or self.count >= MAX_BOXES:
                more = sum(map(len, groups[number:]))
                self.lines.append(f'{pad}  {self.key()}["... {more:,} more"]')
                break
            if below[0].node.first is not None:
                self.refer(below, f"{pad}  ", (*around, key))
                continue
            same_below = [p for same in members for p in same.groups[number]]
            called += filter(None, [self.box(below, same_below, (*around, key))])
        self.lines += [f"{pad}end"] * bool(groups)
        for first, second in itertools.pairwise(sorted(called)):
            label = f"|{_quoted(second.inputs)}|" if second.inputs else ""
            self.edges.append(f"  {first.key} -->{label} {second.key}")
        return self.call(members, key, called)

    def refer(self, group: list[Part], pad: str, around: tuple[str, ...]) -> None:
        """Write a box for attributes that refer to a box elsewhere, which may not be written yet."""
        first, key = group[0].node.first, self.key()
        assert first is not None
        name, target = f"{count_text(group)}{group_name(group)}", self.keys.get(id(first))
        if target not in around:  # Mermaid has no arrows to a surrounding box
            self.references.append((key, first))
        if target is None or target in around:
            name = f"{name}: {first.path()}"
        self.lines.append(f"{pad}{key}([{_quoted(name)}])")

    def call(self, members: list[Part], key: str, inside: list[_Called]) -> _Called | None:
        """The first call of a box; of one that is not called itself, that of a box in it."""
        rows = [self.calls.get(id(same.node.value)) for same in members]
        own = [_Called(row.call_order, key, _one_line(row.inputs_repr)) for row in rows if row]
        return min(own or [first._replace(key=key) for first in inside], default=None)

    def colour(self, text: Text | None) -> str:
        """The style of a kind of Variable, or of arrays without one."""
        kind = "" if text is None else text.tally[0] if text.tally is not None else text.name
        return self.classes.setdefault(kind, f"kind{len(self.classes)}")


def _one_line(text: str) -> str:
    parts = [line.strip().removeprefix("- ") for line in text.splitlines()]
    return clip(", ".join(part for part in parts if part and not part.endswith(": None")), 48)


ENTITIES = str.maketrans(
    {"#": "#35;", "&": "#amp;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "\n": " "}
)


def _quoted(*parts: str) -> str:
    text = ": ".join(filter(None, parts)).translate(ENTITIES)
    return f'"{text}"'.encode("utf-8", "replace").decode()  # what no file can have
