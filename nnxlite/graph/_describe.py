"""The text form of a graph definition: its objects, with kinds instead of values.

    GraphDef[MLP]( # 3 objects, 4 leaves
      first=Linear(
        bias=Param,
        kernel=Param(tag='wide'),
        in_features=2,
        ...
      ),
      second=<shared: first>
    )

Each node is shown through one `_Place`, so that the printer finds sharing and cycles as among the
objects themselves.
"""

from __future__ import annotations

import typing as tp

from nnxlite._outline import Shown
from nnxlite._text import Atom, Entry, Text, open_up
from nnxlite.graph._defs import ContainerDef, ObjectDef, StaticDef
from nnxlite.graph._kinds import DICT, LIST, TUPLE
from nnxlite.graph._rebuild import ArrayCode, Code, ContainerCode, Decoded, NodeCode
from nnxlite.variables import VariableDef

_EVERY_VARIABLE_HAS = ("hijax", "ref", "eager_sharding")


def graphdef_node(decoded: Decoded) -> Text:
    """One level of a graph definition; a single root is shown as the definition itself."""
    objects, leaves = len(decoded.children), decoded.num_leaves
    comment = (
        f"{objects} object{'s' * (objects != 1)}, {leaves} {'leaf' if leaves == 1 else 'leaves'}"
    )
    places = _Places(decoded)
    roots = [places.at(code) for code in decoded.roots]
    if len(roots) == 1 and isinstance(roots[0], _Place):
        places.hide(decoded.roots[0])
        name = f"GraphDef[{roots[0].definition.type.__name__}]"
        top = roots[0].__nnx_text__()
        return Text(name, entries=top.entries, comment=comment, owner=top.owner)
    entries = tuple(Entry(index, "", root) for index, root in enumerate(roots))
    return Text("GraphDef", entries=entries, comment=comment)


class _Places:
    """The places of one definition, each made once."""

    def __init__(self, decoded: Decoded) -> None:
        self.definitions = decoded.node_defs
        self.children = dict(decoded.children)
        self.known: dict[int, tp.Any] = {}

    def at(self, code: Code) -> tp.Any:
        """How a code is shown: a place, a static value, or a word."""
        if isinstance(code, StaticDef):
            return code.value
        if isinstance(code, ContainerCode):
            return _Place(self, code.definition, code.codes)
        if isinstance(code, ArrayCode):
            return Atom("Array")
        number = code.number
        if number not in self.known:
            definition = self.definitions[number]
            known = isinstance(definition, (ObjectDef, VariableDef))
            place = _Place(self, definition, self.children.get(number, ()))
            self.known[number] = place if known else Atom("ArrayRef")
        return self.known[number]

    def hide(self, code: Code) -> None:
        """Show further occurrences of the root as a reference."""
        if isinstance(code, NodeCode):
            self.known[code.number] = Atom("<shared: self>")


class _Place(Shown):
    """One object, container or Variable of a definition."""

    __slots__ = ("codes", "definition", "places")

    def __init__(
        self,
        places: _Places,
        definition: ObjectDef | ContainerDef | VariableDef,
        codes: tp.Sequence[Code],
    ) -> None:
        self.places = places
        self.definition = definition
        self.codes = codes

    def __nnx_text__(self) -> Text:
        definition = self.definition
        if isinstance(definition, VariableDef):
            return _variable(definition)
        children = [self.places.at(code) for code in self.codes]
        if isinstance(definition, ObjectDef):
            data = dict(zip(definition.layout.data, children, strict=True))
            shown = {n: v for n, v in {**data, **definition.template}.items() if _public(n)}
            return Text(definition.type.__name__, entries=_labelled(shown), owner=definition.type)
        return _container(definition, children)


def _public(name: tp.Any) -> bool:
    return not str(name).startswith("_")


def _labelled(attributes: tp.Mapping[tp.Any, tp.Any]) -> tuple[Entry, ...]:
    return tuple(Entry(name, f"{name}=", value) for name, value in attributes.items())


def _variable(definition: VariableDef) -> Text:
    shown = {k: v for k, v in definition.metadata.items() if k not in _EVERY_VARIABLE_HAS}
    opening, closing = ("(", ")") if shown else ("", "")
    entries = _labelled(shown)
    return Text(definition.type.__name__, opening, closing, entries, breaks=False, inline=True)


def _container(definition: ContainerDef, children: list[tp.Any]) -> Text:
    if definition.kind in (LIST, TUPLE, DICT):
        return tp.cast(Text, open_up(definition.build(children)))
    entries = _labelled(dict(zip(definition.keys, children)))
    return Text(definition.type.__name__, entries=entries, identity=False, breaks=False)
