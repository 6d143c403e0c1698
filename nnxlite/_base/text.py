"""The text form of objects: what `repr` shows of modules, Variables, states and graph definitions.

An object describes one level of its text form in `__nnx_text__`: a `Text`, with a name, brackets and
labelled children.  The children are the objects themselves: `text_of` expands them in turn, so that
sharing, depth and width are handled in one place.

    Linear( # Param: 9 (36 B)
      kernel=Param( # 6 (24 B)
        value=Array(shape=(2, 3), dtype=float32)
      ),
      ...
      dot_general=<function dot_general>
    )

A second occurrence of an object is shown as the path of the first (`<shared: layers.0>`; the root is
`self`), which also ends cycles.  Arrays are shown by shape and dtype, the smallest by value;
functions and types by name; addresses never.  Both passes, expanding and laying out, are loops, so
that nesting is not limited by recursion; levels that are too deep or too long to read are collapsed
(`Block(...)`) but still counted.  The text has no colour; see `nnxlite.inspect` for that.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import functools
import math
import re
import types
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import TEXT_DEPTH
from nnxlite._base.jax import is_concrete

WIDTH = 80  # a builtin container of at most this many characters is on one line
MAX_ENTRIES = 200  # further entries of one level are counted, not shown
MAX_LINES = 5000  # after this many lines every level is collapsed
FEW = 6  # arrays of at most this many elements are shown by value


class Entry(tp.NamedTuple):
    """One child: its key in a path, the label printed before it, and the object itself."""

    key: tp.Any
    label: str
    child: tp.Any


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """One level of an object's text form.

    Attributes:
        name: the text before the opening bracket.
        opening, closing: the brackets.
        entries: the children in order.
        comment: printed after the opening bracket, after a `#`.
        tally: for a leaf that is counted: name of its kind, number of elements, bytes.
        totals: whether the comment is the sum of the tallies below.
        few: if it is the root, arrays of at most this many elements are shown by value.
        identity: whether a second occurrence is shown as a reference to the first.
        breaks: whether it takes several lines even if one is enough.
        inline: whether an outline shows it on one line, as it does Variables.
        owner: the class whose defaults an outline leaves out.
    """

    name: str
    opening: str = "("
    closing: str = ")"
    entries: tuple[Entry, ...] = ()
    comment: str = ""
    tally: tuple[str, int, int] | None = None
    totals: bool = False
    few: int = FEW
    identity: bool = True
    breaks: bool = True
    inline: bool = False
    owner: type | None = None


class Atom(str):
    """A child that is text already."""

    __slots__ = ()


# Forms of the library's own objects ----------------------------------------------------------


def labelled(attributes: tp.Mapping[tp.Any, tp.Any]) -> tuple[Entry, ...]:
    """Children with their names: `name=value`."""
    return tuple(Entry(name, f"{name}=", value) for name, value in attributes.items())


def keyed(mapping: tp.Mapping[tp.Any, tp.Any]) -> tuple[Entry, ...]:
    """Children with their keys: `key: value`."""
    return tuple(Entry(key, f"{key!r}: ", value) for key, value in mapping.items())


def elements(items: tp.Iterable[tp.Any]) -> tuple[Entry, ...]:
    """Children by their position."""
    return tuple(Entry(index, "", item) for index, item in enumerate(items))


def object_node(kind: type, attributes: tp.Mapping[tp.Any, tp.Any], *, totals: bool = True) -> Text:
    """A module or other object by its public attributes, with totals for each kind of Variable."""
    entries = labelled({n: v for n, v in attributes.items() if not str(n).startswith("_")})
    return Text(kind.__name__, entries=entries, totals=totals, few=1, owner=kind)


def variable_node(type_: type, value: tp.Any, metadata: tp.Mapping[str, tp.Any]) -> Text:
    """A Variable by its value and metadata, with the number of elements and bytes."""
    count, size = count_and_bytes(value)
    entries = (Entry("value", "value=", value), *labelled(metadata))
    comment = f"{count:,} ({human_bytes(size)})" if count else ""
    tally = (counted_as(type_), count, size) if count else None
    return Text(type_.__name__, entries=entries, comment=comment, tally=tally, inline=True)


def mapping_node(owner: tp.Any, mapping: tp.Mapping[tp.Any, tp.Any]) -> Text:
    """A mapping type by its items; one inside another of the same type has bare braces."""
    return Text(type(owner).__name__, "({", "})", keyed(mapping), totals=True)


def sequence_node(owner: tp.Any, items: tp.Iterable[tp.Any]) -> Text:
    """A sequence type by its items."""
    return Text(type(owner).__name__, "([", "])", elements(items), totals=True)


def counted_as(type_: type) -> str:
    """The name under which totals count a class of Variables."""
    return getattr(type_, "_nnx_counted_as", type_.__name__)


def count_and_bytes(value: tp.Any) -> tuple[int, int]:
    """How many array elements a value (an array or any pytree) has, and their size in bytes.

    >>> import jax.numpy as jnp
    >>> from nnxlite._base.text import count_and_bytes
    >>> count_and_bytes({"a": jnp.zeros((2, 3)), "b": 1})
    (6, 24)
    """
    leaves = (value,) if is_array(value) else jax.tree_util.tree_leaves(value)
    arrays = [(math.prod(x.shape), getattr(x.dtype, "itemsize", 0)) for x in leaves if is_array(x)]
    return sum(n for n, _ in arrays), sum(n * itemsize for n, itemsize in arrays)


def mesh_text(mesh: tp.Any) -> str:
    """The axes of a mesh with their sizes: `data=4, model=2`."""
    return ", ".join(f"{name}={size}" for name, size in mesh.shape.items())


def human_bytes(size: int) -> str:
    """A number of bytes in readable units.

    >>> from nnxlite._base.text import human_bytes
    >>> human_bytes(36), human_bytes(4_000_000)
    ('36 B', '4.0 MB')
    """
    if size < 1000:
        return f"{size} B"
    scaled, units = size / 1000, ["KB", "MB", "GB", "TB"]
    while scaled >= 999.95 and len(units) > 1:
        scaled /= 1000
        units.pop(0)
    return f"{scaled:,.1f} {units[0]}"


def totals_text(totals: tp.Mapping[str, tuple[int, int]]) -> str:
    """Counts and bytes for each kind, and their sum if there are several kinds.

    >>> from nnxlite._base.text import totals_text
    >>> totals_text({"Param": (9, 36), "BatchStat": (6, 24)})
    'Param: 9 (36 B), BatchStat: 6 (24 B), Total: 15 (60 B)'
    """
    rows = dict(totals)
    if len(rows) > 1:
        rows["Total"] = (sum(n for n, _ in rows.values()), sum(b for _, b in rows.values()))
    return ", ".join(f"{kind}: {n:,} ({human_bytes(b)})" for kind, (n, b) in rows.items())


# Single values -------------------------------------------------------------------------------


def short(value: tp.Any, few: int = FEW) -> str:
    """A value that is not expanded, on one line.

    Arrays of more than `few` elements by shape and dtype, functions and types by name.

    >>> import jax, jax.numpy as jnp
    >>> from nnxlite._base.text import short
    >>> print(short(jnp.zeros((20, 20))), short(jnp.float32), short(jax.nn.relu))
    Array(shape=(20, 20), dtype=float32) float32 <function relu>
    """
    if isinstance(value, Atom):
        return value
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, np.dtype):
        return str(value)
    if is_array(value):
        return _array_text(value, few)
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, types.MethodType):
        return f"<method {value.__qualname__}>"
    if callable(value) and isinstance(getattr(value, "__name__", None), str):
        return f"<function {value.__name__}>"
    return clip(re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value)), 4 * WIDTH)  # no addresses


def clip(text: str, width: int) -> str:
    """The text on one line, cut to `width` characters.

    >>> from nnxlite._base.text import clip
    >>> clip("one two  three", 10)
    'one two...'
    """
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= width else text[: width - 3].rstrip() + "..."


def is_array(value: tp.Any) -> bool:
    if isinstance(value, (type, np.generic)):
        return False
    return isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype")


def _array_text(array: tp.Any, few: int) -> str:
    name = type(array).__name__
    name = "Array" if name in ("ArrayImpl", "PRNGKeyArray") else name
    dtype = str(array.dtype)
    dtype += ", weak_type=True" if getattr(array, "weak_type", False) is True else ""
    shape = tuple(array.shape)
    if not can_be_read(array) or not 0 < math.prod(shape) <= few:
        return f"{name}(shape={shape}, dtype={dtype})"
    numbers = np.array2string(np.asarray(array), separator=", ", max_line_width=10**6)
    numbers = re.sub(r"\s+", " ", numbers).replace("[ ", "[").replace(" ]", "]")
    return f"{name}({numbers.replace(' ,', ',')}, dtype={dtype})"


def can_be_read(array: tp.Any) -> bool:
    """Whether the elements can be read: not traced, deleted, or on other hosts."""
    if isinstance(array, np.ndarray):
        return array.dtype != object
    return (
        is_concrete(array)
        and not jnp.issubdtype(array.dtype, jax.dtypes.extended)
        and type(array).__name__ == "ArrayImpl"
        and not array.is_deleted()
        and array.is_fully_addressable
    )


# Expanding -----------------------------------------------------------------------------------

_SIMPLE = (int, float, complex, bool, str, bytes, type(None))


def open_up(value: tp.Any) -> Text | None:
    """One level of any value, or None for one that is shown by `short`."""
    if isinstance(value, (*_SIMPLE, type)):
        return None
    if hasattr(type(value), "__nnx_text__"):
        return value.__nnx_text__()
    name = type(value).__name__
    if isinstance(value, functools.partial):
        name, entries = "partial", elements((value.func, *value.args)) + labelled(value.keywords)
    elif isinstance(value, tuple) and isinstance(getattr(value, "_fields", None), tuple):
        entries = labelled(dict(zip(value._fields, value, strict=True)))  # type: ignore[attr-defined]
    elif type(value) in (list, tuple):
        return _builtin_sequence(value)
    elif type(value) is dict or type(value) is types.MappingProxyType:
        return Text("", "{", "}", keyed(value), identity=False, breaks=False)
    elif dataclasses.is_dataclass(value) and hasattr(type(value).__repr__, "__wrapped__"):
        shown = [f.name for f in dataclasses.fields(value) if f.repr and hasattr(value, f.name)]
        entries = labelled({name: getattr(value, name) for name in shown})
    else:
        return None
    return Text(name, entries=entries, identity=False, breaks=False)


def _builtin_sequence(items: tp.Sequence[tp.Any]) -> Text:
    opening, closing = ("[", "]") if isinstance(items, list) else ("(", ")")
    if len(items) == 1 and isinstance(items, tuple):
        closing = ",)"
    shown: tp.Sequence[tp.Any] = items
    if len(items) > FEW * 4 and all(type(item) in _SIMPLE for item in items):
        shown = [*items[:FEW], Atom(f"... {len(items) - FEW:,} more")]
    return Text("", opening, closing, elements(shown), identity=False, breaks=False)


def key_text(key: tp.Any) -> str:
    """A name or key as one line of text.

    >>> from nnxlite._base.text import key_text
    >>> print(key_text(0), key_text("größe"), key_text("two\\nlines"))
    0 größe two\\nlines
    """
    text = str(safely(str, key))
    return text if text.isprintable() else repr(text)[1:-1]


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """A node of the tree that is printed: one occurrence of an object, expanded or on one line.

    Attributes:
        key, label, value: as in its `Entry`.
        parent: the node above.
        text: None for a value that is not expanded.
        line: all of its text, if it is known to take one line.
        first: the first occurrence of the object, if this is another.
        children: the nodes below.
        totals: elements and bytes below, for each kind of Variable.
        bare: whether it has the braces of an inner mapping.
    """

    key: tp.Any
    label: str
    value: tp.Any
    parent: Node | None
    text: Text | None = None
    line: str | None = None
    first: Node | None = None
    children: list[Node] = dataclasses.field(default_factory=list)
    totals: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    bare: bool = False

    def path(self) -> str:
        keys = []
        node = self
        while node.parent is not None:
            keys.append(key_text(node.key))
            node = node.parent
        return ".".join(reversed(keys)) or "self"

    def one_line(self, style: Style) -> str | None:
        """All of its text if that takes one line; computed only when it is shown."""
        if self.line is None and self.text is None:
            self.line = style.leaf(self.value)
        return self.line

    def is_inside(self, value: tp.Any) -> bool:
        """Whether a node above stands for this value."""
        node = self.parent
        while node is not None and node.value is not value:
            node = node.parent
        return node is not None


_being_printed: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar(
    "being_printed", default=frozenset()
)
"""The roots whose text is being made, since a `__repr__` on the way may refer to them again."""


def safely(make: tp.Callable[..., tp.Any], value: tp.Any, *args: tp.Any) -> tp.Any:
    """`make(value, *args)`, or, where a half-built object makes it fail, a text that says so.

    >>> from nnxlite._base.text import safely
    >>> safely(len, 3)
    '<int: TypeError while it was shown>'
    """
    try:
        return make(value, *args)
    except Exception as error:
        return Atom(f"<{type(value).__name__}: {type(error).__name__} while it was shown>")


@dataclasses.dataclass(frozen=True, slots=True)
class Style:
    """How a tree is laid out.

    Attributes:
        leaf: the text of a value that is not expanded.
        open: one level of a value, or None; a text for one that could not be opened.
        width: objects, too, are on one line where they fit into a line of so many characters, and are
            written out wherever they occur; with None, objects take several lines, and only their
            first occurrence is written out.
        indent: of each level, in characters.
    """

    leaf: tp.Callable[[tp.Any], str]
    open: tp.Callable[[tp.Any], tp.Any] = functools.partial(safely, open_up)
    width: float | None = None
    indent: int = 2


_PLAIN = Style(functools.partial(safely, short))


@contextlib.contextmanager
def expanded(obj: tp.Any, style: Style = _PLAIN) -> tp.Iterator[list[Node]]:
    """An object and all nodes below it, in the order in which they are printed."""
    outer = _being_printed.get()
    token = _being_printed.set(outer | {id(obj)})
    try:
        order = _expand_all(obj, outer, style)
        _sum_up(order)
        yield order
    finally:
        _being_printed.reset(token)


def _expand_all(root: tp.Any, outer: frozenset[int], style: Style) -> list[Node]:
    first: dict[int, Node] = {}
    order: list[Node] = []
    todo = [Node("", "", root, None)]
    while todo:
        node = todo.pop()
        value = node.value
        order.append(node)
        if id(value) in outer:
            node.line = f"{type(value).__name__}(...)"
            continue
        text = style.open(value)
        if not isinstance(text, Text):
            node.line = text  # None, unless it could not be opened
            continue
        earlier = first.setdefault(id(value), node)
        once = text.identity and style.width is None
        if earlier is not node and (once or node.is_inside(value)):
            node.line = f"<shared: {earlier.path()}>"
            node.first = earlier
            continue
        node.text = text
        above = node.parent.text if node.parent is not None else None
        same = above is not None and (above.name, above.opening) == (text.name, text.opening)
        node.bare = same and text.opening == "({"
        if text.tally is not None:
            node.totals[text.tally[0]] = text.tally[1:]
        node.children = [Node(*entry, node) for entry in text.entries]
        todo.extend(reversed(node.children))
    return order


def _sum_up(order: list[Node]) -> None:
    """Add up the tallies, from the end, which reverses the order of the kinds."""
    for node in reversed(order):
        if node.parent is not None:
            into = node.parent.totals
            for kind, (count, size) in node.totals.items():
                n, b = into.pop(kind, (0, 0))
                into[kind] = (n + count, b + size)


# Laying out ----------------------------------------------------------------------------------


def _fold(order: list[Node], style: Style) -> None:
    """Lay out on one line what may be, and is short enough."""
    most = WIDTH if style.width is None else style.width
    for node in reversed(order):
        text = node.text
        if text is None or (node.children and text.breaks and style.width is None):
            continue
        opening, closing = _brackets(node)
        inside: list[str] = []
        width = 0
        for child in node.children:
            line = child.one_line(style)
            if line is None or ("\n" in line and most < math.inf):
                break
            inside.append(child.label + line)
            width += len(inside[-1]) + 2
            if width > most:
                break
        else:
            node.line = opening + ", ".join(inside) + closing


def _brackets(node: Node) -> tuple[str, str]:
    assert node.text is not None
    if node.bare:
        return "{", "}"
    return node.text.name + node.text.opening, node.text.closing


def summary(node: Node) -> str:
    """What is counted below a node, or the comment of its text."""
    if node.text is not None and node.text.totals:
        return totals_text(dict(reversed(node.totals.items())))
    return "" if node.text is None else node.text.comment


def comment_of(node: Node) -> str:
    """The comment in the first line of a node: ` # Param: 9 (36 B)`, or nothing."""
    comment = "" if node.bare else summary(node)
    return f" # {comment}" if comment else ""


def laid_out(order: list[Node], style: Style) -> str:
    """The text of expanded nodes."""
    _fold(order, style)
    lines: list[str] = []
    todo: list[tuple[Node | str, int, str]] = [(order[0], 0, "")]
    repeats = style.width is not None
    most = math.inf if style.width is None else style.width
    while todo:
        node, depth, comma = todo.pop()
        pad = " " * (style.indent * depth)
        if isinstance(node, str):
            lines.append(f"{pad}{node}{comma}")
            continue
        whole = node.one_line(style)
        line = f"{pad}{node.label}{whole}{comma}"
        if whole is not None and (not node.children or len(line) <= most):
            lines.append(line.replace("\n", "\n" + pad))
            continue
        opening, closing = _brackets(node)
        last = closing[:1] if closing.startswith(",") else ""  # of a tuple with one item
        closing = closing.removeprefix(",")
        comment = "" if repeats else comment_of(node)
        if not repeats and (depth >= TEXT_DEPTH.get() or len(lines) >= MAX_LINES):
            lines.append(f"{pad}{node.label}{opening}...{closing}{comma}{comment}")
            continue
        lines.append(f"{pad}{node.label}{opening}{comment}")
        todo.append((closing, depth, comma))
        shown: list[Node | str] = [*node.children]
        if len(shown) > MAX_ENTRIES and not repeats:
            shown[MAX_ENTRIES:] = [f"... {len(shown) - MAX_ENTRIES:,} more"]
        commas = [","] * (len(shown) - 1) + [last]
        todo.extend(reversed([(s, depth + 1, c) for s, c in zip(shown, commas, strict=True)]))
    return "\n".join(lines)


def text_of(obj: tp.Any) -> str:
    """The text form of an object, as its `__repr__` gives it.

    >>> from nnxlite._base.text import text_of
    >>> print(text_of({"sizes": [1, 2], "act": max}))
    {'sizes': [1, 2], 'act': <function max>}
    """
    with expanded(obj) as order:
        top = order[0].text
        few = FEW if top is None else top.few
        return laid_out(order, Style(lambda value: safely(short, value, few)))


def drawn(obj: tp.Any, path: str | None, subtree_renderer: tp.Any) -> tp.Any:
    """The drawing of an object, as its `__treescope_repr__` gives it."""
    from nnxlite.inspect._treescope import render

    return render(obj, path, subtree_renderer)
