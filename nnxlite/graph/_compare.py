"""The text form of a graph definition, and how two of them differ.

The text is that of its objects, with kinds instead of values.  Each node is shown through one `_Place`,
so that the printer finds sharing and cycles as among the objects themselves.

    GraphDef[MLP]( # 3 objects, 4 leaves
      first=Linear(
        bias=Param,
        kernel=Param(tag='wide'),
        in_features=2,
        ...
      ),
      second=<shared: first>
    )

To find differences both are walked together from their roots, name by name.  Two nodes that one path
leads to are partners, and a node has one partner.  Where a path leads to a node that has another one,
the graphs share differently.  Partners are compared once, at the first path, so the walk is linear and
ends in cycles; what is below something that was added, removed or retyped is not compared.
"""

from __future__ import annotations

import dataclasses
import itertools
import typing as tp

import jax

from nnxlite._base.errors import listed, path_text
from nnxlite._base.jax import Ref
from nnxlite._base.outline import Shown
from nnxlite._base.statics import facts
from nnxlite._base.text import Atom, Text, elements, labelled, object_node, open_up, safely, short
from nnxlite.graph._defs import REF_LEAF, ObjectDef, StaticDef
from nnxlite.graph._kinds import Kind
from nnxlite.graph._rebuild import ArrayCode, Code, ContainerCode, Decoded, NodeCode, Path
from nnxlite.variables._definition import MISSING, VariableDef
from nnxlite.variables._variable import Variable

if tp.TYPE_CHECKING:
    from nnxlite.graph._graphdef import GraphDef

__all__ = ["Difference"]


def graphdef_node(decoded: Decoded) -> Text:
    """One level of a graph definition; a single root is shown as the definition itself."""
    objects, leaves = len(decoded.children), decoded.num_leaves
    comment = f"{objects} {'object' if objects == 1 else 'objects'}, "
    comment += f"{leaves} {'leaf' if leaves == 1 else 'leaves'}"
    known: dict[Code, tp.Any] = {}
    roots = [_shown(decoded, code, known) for code in decoded.roots]
    if len(roots) == 1 and isinstance(roots[0], _Place):
        known[roots[0].code] = Atom("<shared: self>")
        top = roots[0].__nnx_text__()
        name = f"GraphDef[{roots[0].definition.type.__name__}]"
        return Text(name, entries=top.entries, comment=comment, owner=top.owner)
    return Text("GraphDef", entries=elements(roots), comment=comment)


def _shown(decoded: Decoded, code: Code, known: dict[Code, tp.Any]) -> tp.Any:
    """How a code is shown: a place, each made once, a static value, or a word."""
    if isinstance(code, StaticDef):
        return code.value
    if isinstance(code, ArrayCode):
        return Atom("Array")
    if code not in known:
        place = _Place(decoded, code, known)
        known[code] = Atom("ArrayRef") if place.definition is REF_LEAF else place
    return known[code]


class _Place(Shown):
    """One object, container or Variable of a definition."""

    __slots__ = ("code", "decoded", "definition", "known")

    def __init__(
        self, decoded: Decoded, code: NodeCode | ContainerCode, known: dict[Code, tp.Any]
    ) -> None:
        self.decoded, self.code, self.known = decoded, code, known
        is_node = isinstance(code, NodeCode)
        self.definition: tp.Any = decoded.node_defs[code.number] if is_node else code.definition

    def __nnx_text__(self) -> Text:
        definition = self.definition
        if isinstance(definition, VariableDef):
            return _variable(definition)
        below = self.decoded.below(self.code)
        data = {name: _shown(self.decoded, code, self.known) for name, code in below}
        if isinstance(definition, ObjectDef):
            return object_node(definition.type, {**data, **definition.template}, totals=False)
        if definition.kind in (Kind.LIST, Kind.TUPLE, Kind.DICT):
            return tp.cast(Text, open_up(definition.build([*data.values()])))
        entries = labelled(data)
        return Text(definition.type.__name__, entries=entries, identity=False, breaks=False)


def _variable(definition: VariableDef) -> Text:
    shown = {k: v for k, v in definition.metadata.items() if k not in Variable.required_metadata}
    opening, closing = ("(", ")") if shown else ("", "")
    entries = labelled(shown)
    return Text(definition.type.__name__, opening, closing, entries, breaks=False, inline=True)


# How two graphs differ --------------------------------------------------------------------------

SHOWN = 5
"""How many differences a message lists."""


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """One difference of two graphs.

    Attributes:
        path: where it is.
        kind: one of

            * "added", "removed": only one side has an attribute of this name;
            * "retyped": classes of objects, Variables or containers, or an object in place of a
              setting;
            * "shared": what is there is also at another path, or at a different one;
            * "setting": the value of a static attribute, or the static part of a pytree node;
            * "metadata": of a Variable;
            * "shape", "dtype", "value": of an array;
            * "unreadable": a side that cannot be traversed.
        before, after: what each side has there.  A class for "added", "removed" and "retyped" (or a
            static value), the path of the first occurrence (or None) for "shared", a dict of what
            differs for "metadata", text such as `float32[2,3]` for "shape" and "dtype", and, for
            "value", the elements that differ most.
        largest: for "value", the largest absolute difference of two elements; NaN where one side
            alone is NaN, None for what is not a number.
        index: for "value", the index of these elements.

    >>> import nnxlite as nnx
    >>> one, two = nnx.Dict(a=nnx.Param(1.0)), nnx.Dict(a=nnx.BatchStat(1.0))
    >>> difference = nnx.diff(one, two).entries[0]
    >>> difference.path, difference.kind, difference.after.__name__
    (('a',), 'retyped', 'BatchStat')
    """

    path: Path
    kind: str
    before: tp.Any = None
    after: tp.Any = None
    largest: float | None = None
    index: tuple[int, ...] = ()

    @property
    def words(self) -> str:
        """The difference without its path.

        >>> from nnxlite.graph._compare import Difference
        >>> Difference(("rate",), "setting", 0.1, 0.2).words
        '0.1 became 0.2'
        """
        if self.kind == "added":
            return f"nothing became {worded(self.after)}"
        if self.kind == "removed":
            return f"{worded(self.before)} became nothing"
        if self.kind == "value" and self.largest is not None:
            where = f"at {list(self.index)}: " if self.index else ""
            sides = f"{_number(self.before)} became {_number(self.after)}"
            return f"values differ by up to {_number(self.largest)} ({where}{sides})"
        words = _WORDS.get(self.kind, worded)
        return f"{words(self.before)} became {words(self.after)}"

    def __str__(self) -> str:
        return f"{path_text(self.path)}: {self.words}"


def worded(value: tp.Any) -> str:
    return "an array" if value is jax.Array else safely(short, value)


def _number(value: tp.Any) -> str:
    return f"{value:.6g}" if isinstance(value, (float, complex)) else str(value)


def _metadata_words(entries: dict[str, tp.Any]) -> str:
    words = [f"{name}={safely(short, value)}" for name, value in entries.items()]
    return ", ".join(words) or "nothing"


def _sharing_words(path: Path | None) -> str:
    return "an object of its own" if path is None else f"what is at '{path_text(path)}'"


_WORDS: dict[str, tp.Callable[[tp.Any], str]] = {
    "shape": str,
    "dtype": str,
    "unreadable": str,
    "shared": _sharing_words,
    "metadata": _metadata_words,
}


AtLeaf: tp.TypeAlias = tp.Callable[[Path, int, int], tp.Iterable[Difference]]
"""Gives the differences of a leaf that both graphs have, from its path and its number in each."""


def compare(
    before: GraphDef[tp.Any],
    after: GraphDef[tp.Any],
    roots: tp.Sequence[Path] = (),
    at_leaf: AtLeaf | None = None,
) -> list[Difference]:
    """Every difference of two graph definitions, in the order of their walk.

    Args:
        before, after: the definitions.
        roots: the paths of the roots; by number, if not given.
        at_leaf: called for each leaf that both have, to compare what a definition does not contain.

    >>> import nnxlite as nnx
    >>> from nnxlite.graph._compare import compare
    >>> a, b = nnx.Dict(rate=0.1, w=nnx.Param(1.0)), nnx.Dict(rate=0.2, w=nnx.BatchStat(1.0))
    >>> print(*compare(nnx.graphdef(a), nnx.graphdef(b)), sep="\\n")
    rate: 0.1 became 0.2
    w: Param became BatchStat
    """
    if before is after and at_leaf is None:
        return []
    names: list[Path] = [(i,) for i in range(max(before.num_roots, after.num_roots))]
    if len(names) == 1:
        names = [()]
    names[: len(roots)] = roots
    return list(_walk(before.decoded, after.decoded, names, at_leaf or (lambda path, a, b: ())))


def differences_text(differences: tp.Sequence[Difference]) -> str:
    """The first few differences for a message.

    >>> from nnxlite.graph._compare import Difference, differences_text
    >>> differences_text([Difference(("mode",), "setting", "a", "b")])
    "'mode': 'a' became 'b'"
    """
    text = lambda one: f"'{path_text(one.path)}': {one.words}"
    return listed(differences, SHOWN, text, between="; ")


def _walk(
    before: Decoded, after: Decoded, names: tp.Sequence[Path], at_leaf: AtLeaf
) -> tp.Iterator[Difference]:
    partners: dict[int, int] = {}
    paths: tuple[dict[int, Path], dict[int, Path]] = {}, {}  # of the nodes of each side
    roots = itertools.zip_longest(map(_as_static, before.roots), map(_as_static, after.roots))
    pending: list[tuple[Path, tp.Any, tp.Any]]
    pending = [(path, a, b) for path, (a, b) in zip(names, roots)][::-1]
    while pending:
        path, a, b = pending.pop()
        kinds = kind_at(before, a), kind_at(after, b)
        inside: tuple[tp.Any, tp.Any] | None = None  # what else objects or containers consist of
        if a is None or b is None:
            yield Difference(path, "added" if a is None else "removed", *kinds)
        elif isinstance(a, StaticValue) and isinstance(b, StaticValue):
            if a.is_data != b.is_data:  # equal or not
                yield Difference(path, "retyped", a, b)
            elif _differ(a.value, b.value):
                yield Difference(path, "setting", a.value, b.value)
        elif isinstance(a, NodeCode) and isinstance(b, NodeCode):
            if partners.get(a.number) == b.number:
                continue
            if a.number in paths[0] or b.number in paths[1]:
                yield Difference(path, "shared", paths[0].get(a.number), paths[1].get(b.number))
                continue
            partners[a.number] = b.number
            paths[0][a.number] = paths[1][b.number] = path
            old, new = before.node_defs[a.number], after.node_defs[b.number]
            if kinds[0] is not kinds[1]:
                yield Difference(path, "retyped", *kinds)
            elif isinstance(old, ObjectDef):  # with metadata: of a registered class
                inside = old.metadata, new.metadata
            else:
                if isinstance(old, VariableDef) and old is not new:
                    yield from _metadata(path, old.metadata, new.metadata)
                yield from at_leaf(path, before.leaf_of(a), after.leaf_of(b))
        elif type(a) is not type(b) or kinds[0] is not kinds[1]:
            yield Difference(path, "retyped", *kinds)
        elif isinstance(a, ContainerCode) and isinstance(b, ContainerCode):
            inside = a.definition.treedef, b.definition.treedef
        elif isinstance(a, ArrayCode) and isinstance(b, ArrayCode):
            yield from at_leaf(path, a.leaf, b.leaf)
        if inside is not None:
            ours, theirs = _below(before, a), _below(after, b)
            if _differ(*inside) and (isinstance(a, NodeCode) or [*ours] == [*theirs]):
                yield Difference(path, "setting", *inside)
            every = [*ours, *(name for name in theirs if name not in ours)]
            below = [((*path, name), ours.get(name), theirs.get(name)) for name in every]
            pending += reversed(below)


def _as_static(code: Code) -> tp.Any:
    return StaticValue(True, code.value) if isinstance(code, StaticDef) else code


def _below(side: Decoded, code: tp.Any) -> dict[tp.Any, tp.Any]:
    """What is below an object or a container, by name, static attributes among it."""
    below = {name: _as_static(child) for name, child in side.below(code)}
    definition = side.node_defs[code.number] if isinstance(code, NodeCode) else None
    if definition is None:
        return below
    settings = {name: StaticValue(False, value) for name, value in definition.template.items()}
    every = below | settings
    return {name: every[name] for name in definition.names.status}


def _metadata(
    path: Path, old: dict[str, tp.Any], new: dict[str, tp.Any]
) -> tp.Iterator[Difference]:
    names = [n for n in {**old, **new} if _differ(old.get(n, MISSING), new.get(n, MISSING))]
    if names:
        before, after = ({n: side[n] for n in names if n in side} for side in (old, new))
        yield Difference(path, "metadata", before, after)


def kind_at(side: Decoded, code: Code | StaticValue | None) -> tp.Any:
    """A class, or the value of what is static."""
    if code is None:
        return None
    if isinstance(code, (StaticDef, StaticValue)):
        return code.value
    if isinstance(code, ContainerCode):
        return code.definition.type
    if isinstance(code, ArrayCode):
        return jax.Array
    definition = side.node_defs[code.number]
    return Ref if definition is REF_LEAF else definition.type


def _differ(a: tp.Any, b: tp.Any) -> bool:
    """Whether two static values differ; those that cannot be compared, by identity."""
    try:
        return bool(facts(a).key != facts(b).key)
    except Exception:  # an `__eq__` of the user's own
        return a is not b


@dataclasses.dataclass(frozen=True, slots=True)
class StaticValue:
    """A static value: one among the data, or in a static attribute."""

    is_data: bool
    value: tp.Any

    def __repr__(self) -> str:
        return f"{'data' if self.is_data else 'static'} {safely(short, self.value)}"
