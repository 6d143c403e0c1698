"""The outline of an object: what `print` shows of a model, a state or a graph definition.

    MLP
      embed: Embed(num_embeddings=100, features=8)
        embedding: Param float32[100,8]
      layers: List
        0-11: 12 x Linear(in_features=8, out_features=8)
          kernel: Param float32[8,8]
          bias: Param float32[8]
      head: shared with `embed`
    Param: 1,664 (6.7 KB)

One line for each object, Variable and array; arrays by dtype and shape, those of one element by
value too.  Settings are in the line of their object, without those that have the default of
`__init__`.  Equal neighbours are shown once, with their number: objects always, others in a sequence.
It is made of the same nodes as the unabridged text, from the last to the first, so that the lines of
the children are known when those of their parent are written; nothing recurses.  `Shown` is the base
of the classes that have both texts.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import typing as tp

import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import TEXT_DEPTH
from nnxlite._base.text import (
    WIDTH,
    Atom,
    Node,
    Text,
    can_be_read,
    clip,
    drawn,
    expanded,
    is_array,
    key_text,
    safely,
    short,
    summary,
    text_of,
)

MAX_CHILDREN = 50  # further lines of one level are counted, not shown
MAX_LINES = 400  # further lines are counted, not shown


class _Line(tp.NamedTuple):
    """A line; the value of a scalar is apart, since equal neighbours may differ in it."""

    depth: int
    text: str
    value: str = ""


@dataclasses.dataclass(slots=True)
class Part:
    """What an outline, or a picture, says of one node.

    Attributes:
        node: the node.
        flat: all of it on one line.
        value: the value of a scalar, printed after it.
        is_data: whether there is an object, a Variable or an array in it; otherwise it is a setting.
        head: the class of an object or container, nothing for a level of a state.
        settings: its settings, as text.
        groups: what is below it: equal neighbours together.
        lines: the node and what is below it; without its name.
    """

    node: Node
    flat: str
    value: str = ""
    is_data: bool = True
    head: str = ""
    settings: str = ""
    groups: list[list[Part]] = dataclasses.field(default_factory=list)
    lines: list[_Line] = dataclasses.field(default_factory=list)


def outline_of(obj: tp.Any) -> str:
    """The outline of an object, as its `__str__` gives it.

    >>> import nnxlite as nnx
    >>> print(nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(12)]))
    List
      0-11: 12 x Linear(in_features=2, out_features=2)
        kernel: Param float32[2,2]
        bias: Param float32[2]
    Param: 72 (288 B)
    """
    with expanded(obj) as order:
        root = part_of(order)
        lines = ["  " * depth + text + value for depth, text, value in root.lines]
        if len(lines) > MAX_LINES:
            lines[MAX_LINES:] = [f"... {len(lines) - MAX_LINES:,} more lines"]
        comment = summary(order[0])
        return "\n".join([*lines, comment] if comment else lines)


def part_of(order: list[Node]) -> Part:
    """The root of some nodes, in the order of their text, with all that is below it."""
    depths: dict[int, int] = {}
    for node in order:
        depths[id(node)] = 0 if node.parent is None else depths[id(node.parent)] + 1
    defaults = functools.cache(_defaults_of)  # for this outline: it keeps classes alive
    parts: dict[int, Part] = {}
    for node in reversed(order):
        children = [parts.pop(id(child)) for child in node.children]
        part = parts[id(node)] = _part(node, children)
        if not part.lines:
            _open(part, children, defaults)
            part.lines = _lines(part, depths[id(node)] < TEXT_DEPTH.get())
    return parts[id(order[0])]


def array_text(array: tp.Any) -> str:
    """An array by dtype and shape.

    >>> import jax.numpy as jnp
    >>> from nnxlite._base.outline import array_text
    >>> array_text(jnp.zeros((2, 3)))
    'float32[2,3]'
    """
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def type_text(array: tp.Any) -> str:
    """The type of an array; that of floats may be weak, which makes a training step compile again."""
    weak = getattr(array, "weak_type", False) is True and jnp.issubdtype(array.dtype, jnp.inexact)
    return f"weakly typed {array_text(array)}" if weak else array_text(array)


def _part(node: Node, children: list[Part]) -> Part:
    """A node without what is below it; one that takes a single line is complete."""
    text = node.text
    if node.first is not None:
        return _leaf(node, f"shared with `{node.first.path()}`")
    if text is None:
        value = node.value
        if node.line is not None or isinstance(value, Atom):
            return _leaf(node, node.line or value)
        if safely(is_array, value) is True:
            return _leaf(node, safely(type_text, value), safely(_scalar_text, value))
        return Part(node, clip(_setting_text(value), WIDTH), is_data=False)
    if text.inline:
        return _variable(node, text.name, children)
    is_data = text.identity or any(child.is_data for child in children)
    inside = ", ".join(f"{child.node.label}{child.flat}{child.value}" for child in children)
    return Part(node, clip(f"{text.name}{text.opening}{inside}{text.closing}", WIDTH), "", is_data)


def _leaf(node: Node, flat: str, value: str = "") -> Part:
    return Part(node, flat, value, lines=[_Line(0, flat, value)])


def _scalar_text(array: tp.Any) -> str:
    if not can_be_read(array) or math.prod(array.shape) != 1:
        return ""
    return f" = {np.asarray(array).item()}"


def _setting_text(value: tp.Any) -> str:
    text = str(safely(short, value))
    is_function = text.startswith("<function ") and text.endswith(">")
    return text[len("<function ") : -1] if is_function else text


def _variable(node: Node, kind: str, children: list[Part]) -> Part:
    named = {child.node.key: child for child in children}
    value = named.pop("value", None)
    metadata = ", ".join(f"{key}={part.flat}{part.value}" for key, part in named.items())
    kind += f"({metadata})" if metadata else ""
    return _leaf(node, kind) if value is None else _leaf(node, f"{kind} {value.flat}", value.value)


def _open(part: Part, children: list[Part], defaults: tp.Callable[..., tp.Any]) -> None:
    """Divide what is below an object, or a container with data, into settings and the rest."""
    node, text = part.node, part.node.text
    if text is None or not part.is_data:
        part.head = part.flat
        return
    missing = None if text.owner else object()  # an object's setting without a parameter
    settings, below = [], []
    for child in children:
        if child.is_data or not child.node.label.endswith("="):
            below.append(child)
        elif not _is_default(defaults(text.owner).get(child.node.key, missing), child.node.value):
            settings.append(f"{child.node.key}={child.flat}")
    is_level = node.bare and text.owner is None  # of a state
    builtin = {"[": "list", "(": "tuple", "{": "dict"}  # these have no name
    part.head = "" if is_level else text.name or builtin[text.opening]
    part.settings = ", ".join(settings)
    part.groups = [list(group) for _, group in itertools.groupby(below, _form)]


def _lines(part: Part, is_open: bool) -> list[_Line]:
    head = f"{part.head}({part.settings})" if part.settings else part.head
    if not is_open:
        return [_Line(0, f"{head} ..." if part.groups else head)]
    lines = [_Line(0, head)]
    for group in part.groups[:MAX_CHILDREN]:
        first, *rest = [_common(same) for same in zip(*(p.lines for p in group), strict=True)]
        line = f"{group_name(group)}: {count_text(group)}{first.text}".rstrip(" ")
        lines.append(_Line(1, line, first.value))
        lines += [_Line(line.depth + 1, line.text, line.value) for line in rest]
    hidden = part.groups[MAX_CHILDREN:]
    if hidden:
        lines.append(_Line(1, f"... {sum(map(len, hidden)):,} more"))
    return lines


def _form(part: Part) -> tp.Any:
    """What makes neighbours equal: for a named Variable or array, nothing."""
    key = part.node.key
    if isinstance(key, int) or (len(part.lines) > 1 and isinstance(key, str)):
        return type(key), [(line.depth, line.text) for line in part.lines]
    return id(part)


def _common(lines: tuple[_Line, ...]) -> _Line:
    first = lines[0]
    return first if len({line.value for line in lines}) == 1 else first._replace(value="")


def group_name(group: list[Part]) -> str:
    """The name of an attribute, or the names or indices of several."""
    keys = [key_text(part.node.key) for part in group]
    if len(keys) == 1:
        return keys[0]
    if isinstance(group[0].node.key, int):
        return f"{keys[0]}-{keys[-1]}"
    return ", ".join(keys) if len(keys) <= 4 else f"{keys[0]} ... {keys[-1]}"


def count_text(group: list[Part]) -> str:
    """How many there are, before the class, if there are several."""
    return f"{len(group):,} x " if len(group) > 1 else ""


def _is_default(default: tp.Any, value: tp.Any) -> bool:
    """Whether a setting has its default; that of one without a parameter is None."""
    return value is default or _equal(value, default) or _equal(value, (default,))


def _equal(value: tp.Any, default: tp.Any) -> bool:
    """Whether they are equal, and not a number and a bool."""
    try:
        return bool(value == default) and (type(value) is bool) == (type(default) is bool)
    except Exception:  # arrays, and classes with an `__eq__` of their own
        return False


def _defaults_of(owner: type | None) -> dict[str, tp.Any]:
    """The defaults of the parameters of `__init__`."""
    defaults: dict[str, tp.Any] = {}
    for base in reversed(() if owner is None else owner.__mro__[:-1]):
        if "__init__" in base.__dict__:
            try:
                parameters = inspect.signature(base.__dict__["__init__"]).parameters
            except (TypeError, ValueError):
                continue
            defaults |= {
                name: p.default for name, p in parameters.items() if p.default is not p.empty
            }
    return defaults


class Shown:
    """Base of objects with a text form: unabridged as `repr`, an outline as `str`.

    A class that defines its own `__repr__` (or `__nnx_repr__`) has that as its `str`.
    """

    __slots__ = ()

    def __nnx_text__(self) -> Text:
        """One level of the text form."""
        raise NotImplementedError  # pragma: no cover - abstract

    def __repr__(self) -> str:
        return text_of(self)

    def __str__(self) -> str:
        shown = type(self).__repr__
        generated = hasattr(shown, "__wrapped__") and dataclasses.is_dataclass(self)
        is_own = shown is not Shown.__repr__ and not generated
        if is_own or hasattr(type(self), "__nnx_repr__"):
            return repr(self)
        return outline_of(self)

    __treescope_repr__ = drawn
