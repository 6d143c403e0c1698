"""`GraphDef`: the static half of an object graph, hashable, with everything derived cached.

Two graph definitions with equal content have one interned *structure*: comparing is an identity check,
and whatever is worked out of one (paths, the shape of its `State`) is worked out once.  A graph with
static values that stay with their objects (see `_base.interning`) has a `GraphDef` of its own, which
contains these values; any other is its structure.
"""

from __future__ import annotations

import copy as copy_lib
import dataclasses
import functools
import typing as tp

import jax

from nnxlite import filters
from nnxlite._base.interning import Bounded, Definition, Table
from nnxlite._base.jax import ApplyCaller
from nnxlite._base.outline import Shown
from nnxlite._base.text import Text
from nnxlite._state._definition import State
from nnxlite.filters import Filter, Predicate, filters_to_predicates, match_index
from nnxlite.graph._compare import graphdef_node
from nnxlite.graph._defs import LEAF, REF_LEAF, ContainerDef, ObjectDef, StaticDef, Token
from nnxlite.graph._rebuild import ArrayCode, Decoded, NodeCode, Path
from nnxlite.variables._definition import MISSING, VariableDef
from nnxlite.variables._variable import Variable

__all__ = ["GraphDef"]

N = tp.TypeVar("N")


# The records of the reference, for its pickles and for `isinstance`: a GraphDef here has tokens ------


@dataclasses.dataclass(frozen=True, slots=True)
class NodeDef:
    """One object or container, in a `GraphDef` of the reference."""

    type: type
    index: int | None
    outer_index: int | None
    num_attributes: int
    metadata: tp.Any


@dataclasses.dataclass(frozen=True, slots=True)
class NodeRef:
    """A reference to an earlier node, in a `GraphDef` of the reference."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class VariableRecord:
    """One Variable, in a `GraphDef` of the reference."""

    type: type
    index: int
    outer_index: int | None
    metadata: dict[str, tp.Any]
    array_refdef: tp.Any = None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, slots=True)
class Static:
    """A static value; as a pytree it has no leaves."""

    value: tp.Any


# Definitions ---------------------------------------------------------------------------------------


class StateProgram:
    """How to build a nested `State` from chosen leaves, and how to read them from it again.

    Attributes:
        leaves: numbers of the chosen leaves.
        levels: the mappings, from the innermost to the root: under each key a number >= 0 is a
            position among the chosen leaves, a number < 0 the complement of an earlier level.
    """

    __slots__ = ("leaves", "levels")

    def __init__(self, leaves: tuple[int, ...], levels: list[dict[tp.Any, int]]) -> None:
        self.leaves = leaves
        self.levels = levels

    def build(self, values: list[tp.Any]) -> State[tp.Any, tp.Any]:
        """The nested State that contains `values`, one for each chosen leaf."""
        built: list[tp.Any] = []
        wrap = State._nnx_wrap
        for slots in self.levels:
            built.append(wrap({k: values[s] if s >= 0 else built[~s] for k, s in slots.items()}))
        return built[-1] if built else wrap({})

    def read(self, *states: tp.Any) -> list[tp.Any] | None:
        """The values in States (or nested dicts) that together have exactly this shape, or None."""
        values: list[tp.Any] = [MISSING] * len(self.leaves)
        parts: list[list[tp.Any]] = [[] for _ in self.levels]
        if not parts:
            return None
        parts[-1].extend(states)
        for number in range(len(parts) - 1, -1, -1):
            slots = self.levels[number]
            for part in parts[number]:
                mapping = part._mapping if type(part) is State else part
                if type(mapping) is not dict:
                    return None
                for key, value in mapping.items():
                    slot = slots.get(key)
                    if slot is None:
                        return None
                    if slot >= 0:
                        values[slot] = value
                    else:
                        parts[~slot].append(value)
        return None if any(value is MISSING for value in values) else values


class GraphDef(Shown, tp.Generic[N]):
    """Everything static about an object graph.

    It is what `split` returns beside the state: hashable, comparable, a pytree without leaves, and
    enough to rebuild the objects with `merge`.

    Attributes:
        tokens: the preorder sequence of definitions (see `nnxlite.graph._defs`).
        num_roots: how many roots the sequence describes; 1 except inside transforms.
        own: positions of the private definitions among the tokens.
        outer: for `update_context`, the outer number of each node (or None), else None.
        first: number of the first own node; smaller numbers refer to nodes of an earlier definition.

    >>> import nnxlite as nnx
    >>> graphdef, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> model = graphdef.merge(state)
    >>> model.kernel.shape, nnx.graphdef(model) == graphdef
    ((2, 3), True)
    """

    tokens: tuple[Token, ...]
    own: tuple[int, ...]
    num_roots: int
    outer: tuple[int | None, ...] | None
    first: int
    _cache: dict[tp.Hashable, tp.Any]
    _key: tuple[tp.Any, ...]
    _structure: GraphDef[N] | None

    def __new__(
        cls,
        tokens: tp.Sequence[Token],
        num_roots: int = 1,
        outer: tuple[int | None, ...] | None = None,
        first: int = 0,
    ) -> GraphDef[N]:
        """The definition with this content."""
        tokens = tuple(tokens)
        own = [
            i for i, t in enumerate(tokens) if isinstance(t, Definition) and t.public is not None
        ]
        shared = list(tokens)
        for position in own:
            shared[position] = tp.cast(Definition, tokens[position]).public
        key = (tuple(shared), num_roots, outer, first)
        structure = _interned.find(key)
        if structure is None:
            structure = _interned.add(key, cls._made(key[0], key, None, ()))
        return cls._made(tokens, key, structure, tuple(own)) if own else structure

    @classmethod
    def _made(
        cls, tokens: tuple[Token, ...], key: tp.Any, structure: tp.Any, own: tuple[int, ...]
    ) -> GraphDef[N]:
        new = object.__new__(cls)
        new.tokens, new._key, new.own = tokens, key, own
        _, new.num_roots, new.outer, new.first = key
        new._structure = structure
        new._cache = {} if structure is None else structure._cache
        return new

    @property
    def structure(self) -> GraphDef[N]:
        """The interned definition of the same graph without the values that stay with its objects."""
        return self if self._structure is None else self._structure

    def __eq__(self, other: tp.Any) -> bool:
        return self is other or (type(other) is GraphDef and self.structure is other.structure)

    def __hash__(self) -> int:
        return id(self.structure) >> 4

    def __reduce__(self) -> tp.Any:
        return GraphDef, (self.tokens, *self._key[1:])

    def __copy__(self) -> GraphDef[N]:
        return self

    def __deepcopy__(self, memo: tp.Any) -> GraphDef[N]:
        return self.mapped(lambda definition: copy_lib.deepcopy(definition, memo))

    def mapped(self, change: tp.Callable[[tp.Any], tp.Any]) -> GraphDef[N]:
        """The definition with each private definition replaced by an equal one.

        Args:
            change: gives the one to use.
        """
        if not self.own:
            return self
        tokens = list(self.tokens)
        for position in self.own:
            tokens[position] = change(tokens[position])
        return self._made(tuple(tokens), self._key, self._structure, self.own)

    def atoms(self) -> list[tp.Any]:
        """The objects in the static values that stay with the graph, in order."""
        return [a for i in self.own for a in tp.cast(Definition, self.tokens[i]).atoms]

    def __nnx_text__(self) -> Text:
        return graphdef_node(self.decoded)

    # derived facts, each worked out once -------------------------------------------------------

    def _once(self, name: tp.Hashable, make: tp.Callable[[], tp.Any]) -> tp.Any:
        cache = self._cache
        if name not in cache:
            cache[name] = make()
        return cache[name]

    @functools.cached_property
    def decoded(self) -> Decoded:
        """The token sequence made ready for rebuilding."""
        if self.own:
            return self.structure.decoded.with_tokens(self.tokens, self.own)
        return Decoded(self.tokens, self.num_roots, self.first)

    @property
    def nodes(self) -> list[ObjectDef | ContainerDef | VariableDef]:
        """The definitions of objects, containers and Variables, the root first; `type` is the class."""
        return [t for t in self.tokens if isinstance(t, ObjectDef | ContainerDef | VariableDef)]

    @property
    def num_leaves(self) -> int:
        """How many leaves (Variables and arrays) the graph has."""
        return self.decoded.num_leaves

    @property
    def paths(self) -> tuple[Path, ...]:
        """The path of each leaf, in leaf order, from the (single) root."""
        paths = self._cache.get("paths")
        if paths is None:
            paths = tuple(self.each_path())
            if sum(map(len, paths)) <= CACHED_NAMES:
                self._cache["paths"] = paths
        return paths

    def each_path(self) -> tp.Iterator[Path]:
        """The path of each leaf, one at a time."""
        return self.decoded.leaf_paths(1 if self.num_roots == 1 else 0)

    def shared(self, arrays: bool = True) -> int | None:
        """The number of a node with state that the graph refers to more than once, or None.

        An object counts if there is a leaf below it, or it contains itself: another one is the same
        as a copy in each of its places.

        Args:
            arrays: whether arrays outside Variables count as state.
        """
        numbers = (t for t in self.tokens if type(t) is int)
        find = lambda: next((n for n in numbers if self._has_state(NodeCode(n), arrays)), None)
        return self._once(("shared", arrays), find)

    def _has_state(self, node: NodeCode, arrays: bool) -> bool:
        for path, code in self.decoded.visit(node):
            if isinstance(code, NodeCode):
                if code.number not in self.decoded.children or (path and code == node):
                    return True
            elif isinstance(code, ArrayCode) and arrays:
                return True
        return False

    @property
    def has_static_items(self) -> bool:
        """Whether a plain container contains something static besides None."""
        items = (t.value for t in self.tokens if type(t) is StaticDef)
        return self._once("static_items", lambda: any(item is not None for item in items))

    def candidates(self, base: type, name: str, value: tp.Any) -> tuple[int, ...]:
        """The numbers of the objects of a class that have an attribute, or whose class may compute it.

        The last one first; of those that have a flag of this value already, one. Cached for each name
        (and flag) that a loop sets: because of it a change of mode does not ask every module of a model,
        and setting the mode that a model has asks next to none (bench `loops`, training as in
        tutorials: 12 %).

        Args:
            base: the class.
            name: of the attribute.
            value: what it is to be set to.
        """
        flag = value if type(value) is bool else None

        def find() -> tuple[int, ...]:
            computes = lambda cls: hasattr(cls, name) or hasattr(cls, "__getattr__")
            found, have = [], []
            for number, definition in reversed([*enumerate(self.decoded.node_defs)]):
                if not isinstance(definition, ObjectDef) or not issubclass(definition.type, base):
                    continue
                if flag is not None and definition.template.get(name) is flag:
                    have.append(number)
                elif name in definition.names.status or computes(definition.type):
                    found.append(number)
            return (*have[:1], *found)

        return self._once(("candidates", base, name, flag), find)

    @property
    def is_leaf(self) -> bool:
        """Whether the single root is itself a leaf: then its state is that leaf."""
        return self.num_roots == 1 and (
            self.tokens[0] in (LEAF, REF_LEAF) or isinstance(self.tokens[0], VariableDef)
        )

    def program(self, chosen: tuple[int, ...] | None = None) -> StateProgram:
        """How to build the nested State of all leaves, or of the chosen ones.

        Args:
            chosen: numbers of leaves; None for all.
        """
        if chosen is None:
            return self._once("program", lambda: self.program(tuple(range(self.num_leaves))))
        decoded = self.decoded
        root = 1 if self.num_roots == 1 else 0
        members: dict[int, dict[tp.Any, int]] = {}
        for position, leaf in enumerate(chosen):
            frame, name = decoded.leaf_frames[leaf]
            is_new = frame not in members
            members.setdefault(frame, {})[name] = position
            while is_new and frame > root:
                below = frame
                frame, name = decoded.frames[frame]
                is_new = frame not in members
                members.setdefault(frame, {})[name] = ~below
        order = sorted(members, reverse=True)  # children are numbered after their parents
        place = {frame: i for i, frame in enumerate(order)}
        levels = [
            {name: s if s >= 0 else ~place[~s] for name, s in members[frame].items()}
            for frame in order
        ]
        return StateProgram(chosen, levels)

    def groups(
        self, wanted: tuple[Filter, ...], leaves: tp.Sequence[tp.Any]
    ) -> tuple[list[StateProgram], list[int]]:
        """For each filter how to build its State, and the leaves that no filter matches.

        Cached where the filters look only at paths and classes of Variables.  Key: the filters.  Bound:
        CACHED_GROUPS.  Threads: they may work one out twice.  Earned by steps that split by filters:
        `split` of 200 leaves takes 119 us instead of 388.

        Args:
            wanted: the filters.
            leaves: the leaves, in order.
        """
        predicates = filters_to_predicates(wanted)
        if self.decoded.has_arrays or not all(map(_is_of_definition, predicates)):
            return self._group(predicates, leaves)
        groups = self._once("groups", lambda: Bounded(CACHED_GROUPS))
        return groups.get_or_make(predicates, lambda: self._group(predicates, leaves))

    def _group(
        self, predicates: tp.Sequence[Predicate], leaves: tp.Sequence[tp.Any]
    ) -> tuple[list[StateProgram], list[int]]:
        """For each predicate the leaves that it is the first to match, and the other leaves."""
        chosen: list[list[int]] = [[] for _ in predicates]
        rest: list[int] = []
        for number, (path, leaf) in enumerate(zip(self.each_path(), leaves)):
            index = match_index(predicates, path, leaf)
            (rest if index is None else chosen[index]).append(number)
        return [self.program(tuple(c)) for c in chosen], rest

    # use ---------------------------------------------------------------------------------------

    def merge(self, *states: tp.Any) -> N:
        """The same as `nnxlite.merge(graphdef, *states)`.

        Args:
            states: the states that were split with it.
        """
        from nnxlite.graph._functional import merge

        return merge(self, *states)

    def apply(
        self, state: tp.Any, *states: tp.Any, graph: bool | None = None
    ) -> ApplyCaller[tuple[GraphDef[N], State[tp.Any, tp.Any]]]:
        """A proxy that merges, calls (the object or a method of it), and splits again.

        Its calls return `(output, (graphdef, state))`.

        Args:
            state, states: the states that were split with it.
            graph: False refuses shared references.

        >>> import nnxlite as nnx, jax.numpy as jnp
        >>> graphdef, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> y, (graphdef, state) = graphdef.apply(state)(jnp.ones((1, 2)))
        >>> y.shape
        (1, 3)
        """
        from nnxlite.graph._functional import Proxy

        return tp.cast(tp.Any, Proxy((self, state, *states), graph))

    def with_no_outer_index(self) -> GraphDef[N]:
        """The same definition without outer numbers."""
        return GraphDef(self.tokens, self.num_roots, None, self.first)

    def with_same_outer_index(self) -> GraphDef[N]:
        """The same definition where every node's outer number is its own."""
        own = tuple(range(self.first, len(self.decoded.node_defs)))
        return GraphDef(self.tokens, self.num_roots, own, self.first)

    def with_matching_outer_index(self, other: GraphDef[tp.Any]) -> GraphDef[N]:
        """The same definition with the outer numbers of another of the same shape.

        Args:
            other: the definition that has the outer numbers.

        Raises:
            ValueError: when the two have a different number of nodes.
        """
        theirs = other.outer or tuple(range(other.first, len(other.decoded.node_defs)))
        if len(theirs) != len(self.decoded.node_defs) - self.first:
            raise ValueError(
                f"Outer numbers of a graph with {len(theirs)} nodes do not fit a graph with "
                f"{len(self.decoded.node_defs) - self.first} nodes."
            )
        return GraphDef(self.tokens, self.num_roots, theirs, self.first)


_interned: Table[GraphDef[tp.Any]] = Table("_key")

jax.tree_util.register_static(GraphDef)


def _is_of_definition(predicate: tp.Any) -> bool:
    """Whether a predicate looks only at paths and at classes of Variables.

    Not a tag, which may also be an attribute of the value or a property of the class.  Nor a part of a
    key, since `True` and `1` are equal and differ as text.
    """
    if type(predicate) in (filters.Any, filters.All):
        return all(map(_is_of_definition, predicate.predicates))
    if type(predicate) is filters.Not:
        return _is_of_definition(predicate.predicate)
    if type(predicate) is filters.OfType:
        kinds = predicate.type if isinstance(predicate.type, tuple) else (predicate.type,)
        return all(isinstance(kind, type) and issubclass(kind, Variable) for kind in kinds)
    if type(predicate) is filters.PathContains:
        return predicate.exact and isinstance(predicate.key, (str, int))
    return type(predicate) in (filters.PathIn, filters.Everything, filters.Nothing)


CACHED_NAMES = 1_000_000
"""How many names the paths may have that a definition keeps once they are spelled out."""

CACHED_GROUPS = 32
"""For how many different filters a definition caches which leaves they match."""
