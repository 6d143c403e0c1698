"""How two graphs differ: both are walked together from their roots, name by name.

Two nodes that one path leads to are partners, and a node has one partner.  Where a path leads to a
node that has another one, the graphs share differently.  Partners are compared once, at the first
path, so the walk is linear and ends in cycles; what is below something that was added, removed or
retyped is not compared.
"""

from __future__ import annotations

import dataclasses
import typing as tp

import jax

from nnxlite._errors import listed, path_text
from nnxlite._jax import Ref
from nnxlite._statics import content_key
from nnxlite._text import safely, short
from nnxlite.graph._defs import REF_LEAF, ObjectDef, StaticDef
from nnxlite.graph._graphdef import GraphDef, Path
from nnxlite.graph._rebuild import ArrayCode, Code, ContainerCode, NodeCode
from nnxlite.variables import VariableDef

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

        >>> from nnxlite.graph import Difference
        >>> Difference(("rate",), "setting", 0.1, 0.2).words
        '0.1 became 0.2'
        """
        if self.kind == "added":
            return f"nothing became {_worded(self.after)}"
        if self.kind == "removed":
            return f"{_worded(self.before)} became nothing"
        if self.kind == "value" and self.largest is not None:
            where = f"at {list(self.index)}: " if self.index else ""
            sides = f"{_number(self.before)} became {_number(self.after)}"
            return f"values differ by up to {_number(self.largest)} ({where}{sides})"
        words = _WORDS.get(self.kind, _worded)
        return f"{words(self.before)} became {words(self.after)}"

    def __str__(self) -> str:
        return f"{path_text(self.path)}: {self.words}"


def _worded(value: tp.Any) -> str:
    return "an array" if value is jax.Array else safely(short, value)


def _number(value: tp.Any) -> str:
    return f"{value:.6g}" if isinstance(value, (float, complex)) else str(value)


def _metadata_words(entries: dict[str, tp.Any]) -> str:
    return (
        ", ".join(f"{name}={safely(short, value)}" for name, value in entries.items()) or "nothing"
    )


def _sharing_words(path: Path | None) -> str:
    return "an object of its own" if path is None else f"what is at '{path_text(path)}'"


_WORDS: dict[str, tp.Callable[[tp.Any], str]] = {
    "shape": str,
    "dtype": str,
    "unreadable": str,
    "shared": _sharing_words,
    "metadata": _metadata_words,
}


class AtLeaf(tp.Protocol):
    """Compares a leaf that both graphs have, by its number in each."""

    def __call__(self, path: Path, before: int, after: int, /) -> tp.Iterable[Difference]:
        """The differences of the two leaves."""
        ...


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
    >>> from nnxlite.graph import compare
    >>> a, b = nnx.Dict(rate=0.1, w=nnx.Param(1.0)), nnx.Dict(rate=0.2, w=nnx.BatchStat(1.0))
    >>> print(*compare(nnx.graphdef(a), nnx.graphdef(b)), sep="\\n")
    rate: 0.1 became 0.2
    w: Param became BatchStat
    """
    if before is after and at_leaf is None:
        return []
    walk = _Walk(before, after, at_leaf)
    names: list[Path] = [(i,) for i in range(max(before.num_roots, after.num_roots))]
    if len(names) == 1:
        names = [()]
    names[: len(roots)] = roots
    sides = (dict(zip(names, side.roots)) for side in (walk.before, walk.after))
    walk.push_all((), *sides, joined=False)
    walk.run()
    return walk.found


def differences_text(differences: tp.Sequence[Difference]) -> str:
    """The first few differences for a message.

    >>> from nnxlite.graph import Difference, differences_text
    >>> differences_text([Difference(("mode",), "setting", "a", "b")])
    "'mode': 'a' became 'b'"
    """
    text = lambda one: f"'{path_text(one.path)}': {one.words}"
    return listed(differences, SHOWN, text, between="; ")


class _Attribute(StaticDef):
    """A static attribute, as its own class, since data may be static values too."""

    __slots__ = ()

    def __init__(self, value: tp.Any) -> None:
        super().__init__(value, None)


class _Side:
    """One of the two graphs, and which of its nodes have a partner."""

    def __init__(self, graphdef: GraphDef[tp.Any]) -> None:
        decoded = graphdef.decoded
        self.roots = decoded.roots
        self.definitions = decoded.node_defs
        self.leaves = decoded.node_leaves
        self.codes = dict(decoded.children)
        self.partners: dict[int, int] = {}
        self.paths: dict[int, Path] = {}

    def children(self, code: Code) -> dict[tp.Any, Code]:
        """What is below an object or a container, by name."""
        if isinstance(code, ContainerCode):
            return dict(zip(code.definition.keys, code.codes))
        assert isinstance(code, NodeCode)
        definition: ObjectDef = self.definitions[code.number]
        found: dict[tp.Any, Code] = {n: _Attribute(v) for n, v in definition.template.items()}
        found.update(zip(definition.layout.data, self.codes[code.number]))
        return {name: found[name] for name in definition.layout.status}

    def shown(self, code: Code) -> tp.Any:
        """A class, or the value of what is static."""
        if isinstance(code, StaticDef):
            return code.value
        if isinstance(code, ContainerCode):
            return code.definition.type
        if isinstance(code, ArrayCode):
            return jax.Array
        definition = self.definitions[code.number]
        return Ref if definition is REF_LEAF else definition.type


class _Walk:
    def __init__(
        self, before: GraphDef[tp.Any], after: GraphDef[tp.Any], at_leaf: AtLeaf | None
    ) -> None:
        self.before, self.after = _Side(before), _Side(after)
        self.at_leaf = at_leaf
        self.found: list[Difference] = []
        self.pending: list[tuple[Path, Code | None, Code | None]] = []

    def add(self, path: Path, kind: str, before: tp.Any = None, after: tp.Any = None) -> None:
        self.found.append(Difference(path, kind, before, after))

    def push_all(
        self,
        path: Path,
        before: dict[tp.Any, Code],
        after: dict[tp.Any, Code],
        joined: bool = True,
    ) -> None:
        """Visit the children next, in order; `joined` says that their names go after the path."""
        names = [*before, *(name for name in after if name not in before)]
        for name in reversed(names):
            below = (*path, name) if joined else name
            self.pending.append((below, before.get(name), after.get(name)))

    def run(self) -> None:
        while self.pending:
            path, a, b = self.pending.pop()
            if a is None or b is None:
                if b is not None:
                    self.add(path, "added", after=self.after.shown(b))
                elif a is not None:
                    self.add(path, "removed", before=self.before.shown(a))
            elif type(a) is not type(b):
                self.retyped(path, a, b)
            elif isinstance(a, NodeCode) and isinstance(b, NodeCode):
                self.nodes(path, a, b)
            elif isinstance(a, ContainerCode) and isinstance(b, ContainerCode):
                self.containers(path, a, b)
            elif isinstance(a, ArrayCode) and isinstance(b, ArrayCode):
                self.leaves(path, a.leaf, b.leaf)
            elif isinstance(a, StaticDef) and isinstance(b, StaticDef):
                if _differ(a.value, b.value):
                    self.add(path, "setting", a.value, b.value)

    def leaves(self, path: Path, a: int, b: int) -> None:
        if self.at_leaf is not None:
            self.found.extend(self.at_leaf(path, a, b))

    def retyped(self, path: Path, a: Code, b: Code) -> None:
        before, after = self.before.shown(a), self.after.shown(b)
        if isinstance(a, StaticDef) and isinstance(b, StaticDef):  # equal or not, a new status
            before, after = (Status(type(x) is StaticDef, x.value) for x in (a, b))
        self.add(path, "retyped", before, after)

    def nodes(self, path: Path, a: NodeCode, b: NodeCode) -> None:
        before, after = self.before, self.after
        partner = before.partners.get(a.number)
        if partner == b.number:
            return
        if partner is not None or b.number in after.partners:
            self.add(path, "shared", before.paths.get(a.number), after.paths.get(b.number))
            return
        before.partners[a.number], after.partners[b.number] = b.number, a.number
        before.paths[a.number] = after.paths[b.number] = path
        old, new = before.definitions[a.number], after.definitions[b.number]
        if before.shown(a) is not after.shown(b):
            self.add(path, "retyped", before.shown(a), after.shown(b))
        elif isinstance(old, ObjectDef):
            if _differ(old.metadata, new.metadata):  # of a registered class
                self.add(path, "setting", old.metadata, new.metadata)
            self.push_all(path, before.children(a), after.children(b))
        else:
            if isinstance(old, VariableDef) and old is not new:
                self.metadata(path, old.metadata, new.metadata)
            self.leaves(path, before.leaves[a.number], after.leaves[b.number])

    def metadata(self, path: Path, old: dict[str, tp.Any], new: dict[str, tp.Any]) -> None:
        names = [n for n in {**old, **new} if _differ(old.get(n, _END), new.get(n, _END))]
        if names:
            sides = ({n: side[n] for n in names if n in side} for side in (old, new))
            self.add(path, "metadata", *sides)

    def containers(self, path: Path, a: ContainerCode, b: ContainerCode) -> None:
        old, new = a.definition, b.definition
        if old.type is not new.type:
            self.add(path, "retyped", old.type, new.type)
            return
        if old.keys == new.keys and old is not new and _differ(old.treedef, new.treedef):
            self.add(path, "setting", old.treedef, new.treedef)
        self.push_all(path, self.before.children(a), self.after.children(b))


def _differ(a: tp.Any, b: tp.Any) -> bool:
    """Whether two static values differ; those that cannot be compared, by identity."""
    try:
        return bool(content_key(a) != content_key(b))
    except Exception:  # an `__eq__` of the user's own
        return a is not b


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """A static value as an attribute of one status or the other."""

    is_data: bool
    value: tp.Any

    def __repr__(self) -> str:
        return f"{'data' if self.is_data else 'static'} {safely(short, self.value)}"


_END = object()
