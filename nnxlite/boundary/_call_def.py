"""The static side of the arguments of a transform, the arguments rebuilt from it, and what JAX is given.

A `CallDef` is interned: equal calls have the same one, which is their key in JAX's caches. `enter` makes
new objects from it and the leaves that crossed.

`Operands` is one pytree: its leaves are those of a call, its structure is the `CallDef`, by which JAX
caches what it compiles.  JAX's messages, jaxprs and HLO take the names of arguments from the signature
of the function that is traced.  `describe` gives that function a signature that names each leaf as the
user would write it (`model.l1.kernel`, `batch['x']`), and the source of the user's function.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing as tp
import weakref

import jax

from nnxlite._base.errors import path_text
from nnxlite._base.interning import Bounded, Table
from nnxlite._base.jax import PyTreeDef, key_name
from nnxlite._base.statics import ById, atoms, facts
from nnxlite.graph._graphdef import GraphDef
from nnxlite.graph._kinds import Kind, kind_by_type, note_hidden, take_back
from nnxlite.graph._rebuild import Path, build_nodes, note_entered, resolve

T = tp.TypeVar("T")


def template_of(treedef: PyTreeDef) -> tp.Any:
    """The tree with the positions of its leaves in their places."""
    return jax.tree_util.tree_unflatten(treedef, range(treedef.num_leaves))


def paths_of(treedef: PyTreeDef) -> list[Path]:
    """The path of each leaf of a tree."""
    pairs = jax.tree_util.tree_leaves_with_path(template_of(treedef))
    return [tuple(map(key_name, path)) for path, _ in pairs]


class TreeForm:
    """A pytree with roots (objects, Variables and States) as leaves.

    Attributes:
        treedef: of it.
        where: positions of the roots among the leaves; the others are array leaves.
    """

    treedef: PyTreeDef
    where: tuple[int, ...]

    @functools.cached_property
    def num_arrays(self) -> int:
        """How many leaves are not part of the graph: array leaves."""
        return self.treedef.num_leaves - len(self.where)

    def array_positions(self) -> list[int]:
        """The positions of the array leaves in the treedef."""
        roots = set(self.where)
        return [i for i in range(self.treedef.num_leaves) if i not in roots]

    def template(self) -> tp.Any:
        """The tree with the positions of its leaves and roots in their places."""
        return template_of(self.treedef)

    def tree(self, arrays: tp.Iterable[tp.Any], roots: tp.Iterable[tp.Any]) -> tp.Any:
        """The tree with these array leaves and these roots."""
        leaves = [*arrays]
        for position, root in zip(self.where, roots):
            leaves.insert(position, root)
        return jax.tree_util.tree_unflatten(self.treedef, leaves)


Names: tp.TypeAlias = tuple[str, ...] | None
"""The names of the parameters that may be given by position."""


def _named(names: tuple[str, ...], by_name: int, argument: tp.Any, *inside: tp.Any) -> Path:
    """The path of something in arguments `(args, kwargs)`, from the name of its parameter."""
    if not by_name:
        argument = names[argument] if argument < len(names) else f"args[{argument}]"
    return (str(argument), *inside)


class ArgumentLeaf(tp.NamedTuple):
    """One leaf of some arguments, without its value.

    Attributes:
        position: of the leaf, or of the root above it, among the leaves of the arguments' treedef.
        root: number of that root; None for an array leaf, which is below none.
        below: its path from the root.
        path: its path from the whole arguments; see `CallDef.paths`.
        graph_leaf: number of the graph leaf that it is, or that contains it; None for an array leaf.
        inside: its path in the value of that graph leaf.
    """

    position: int
    root: int | None
    below: Path
    path: Path
    graph_leaf: int | None = None
    inside: Path = ()

    def text(self) -> str:
        """Its path for messages."""
        return path_text(self.path)


FLAT: tuple[()] = ()
Structure: tp.TypeAlias = PyTreeDef | tuple[()]
"""Of the values of a graph's leaves; `FLAT` if each is one leaf (treedefs do not compare with None)."""


@dataclasses.dataclass(frozen=True, slots=True)
class StaticArgument:
    """A static argument as part of a cache key; equal as `facts` says.

    Attributes:
        value: the argument.
        key: of it.
        exact: whether equal ones are interchangeable; else the call that has this one is an `OwnCall`.
    """

    value: tp.Any = dataclasses.field(compare=False)
    key: tp.Any
    exact: bool = dataclasses.field(compare=False)


def boxed(value: tp.Any) -> StaticArgument:
    """A static argument of any type; an unhashable one is compared by identity."""
    about = facts(value)
    if about.hashable:
        return StaticArgument(value, about.key, about.exact)
    return StaticArgument(value, ById(value), True)


# A leaf: what the arguments look like is known from their types.
kind_by_type[StaticArgument] = Kind.OTHER


@dataclasses.dataclass(frozen=True)
class StaticLeaves:
    """Leaves of some arguments that are part of the key of the call; equal where their keys are.

    Attributes:
        numbers: of these leaves among all of the arguments, in order.
        values: of these leaves.
        keys: the static key of each value.
        exact: whether equal ones are interchangeable; else the call that has these is an `OwnCall`.
    """

    numbers: tuple[int, ...]
    values: tp.Sequence[tp.Any] = dataclasses.field(compare=False)
    keys: tuple[tp.Any, ...]
    exact: bool = dataclasses.field(compare=False)

    def split(self, leaves: tp.Sequence[T]) -> list[T]:
        """Something for each of the other leaves, from a list for all."""
        static = set(self.numbers)
        return [leaf for number, leaf in enumerate(leaves) if number not in static]

    def join(self, leaves: tp.Iterable[tp.Any], blank: bool = False) -> list[tp.Any]:
        """All leaves, from the others; with `blank` these are None."""
        out = [*leaves]
        for number, value in zip(self.numbers, self.values):
            out.insert(number, None if blank else value)
        return out


def static_leaves(
    leaves: tp.Sequence[tp.Any],
    chosen: tp.Iterable[tp.Any],
    refuse: tp.Callable[[int], Exception] | None = None,
) -> StaticLeaves | None:
    """The leaves for which `chosen` is true; None if there are none.

    Args:
        leaves, chosen: something for each leaf.
        refuse: gives the error for a leaf that is unhashable; without it, that counts by identity.
    """
    numbers = tuple([number for number, static in enumerate(chosen) if static])
    if not numbers:
        return None
    keys, exact = list[tp.Any](), True
    for number in numbers:
        value = leaves[number]
        about = facts(value)
        if about.hashable:
            keys.append(about.key)
            exact = exact and about.exact
        elif refuse is not None:
            raise refuse(number)
        else:
            keys.append(ById(value))
    return StaticLeaves(numbers, [leaves[number] for number in numbers], tuple(keys), exact)


def own_values(graphdef: GraphDef[tp.Any], static: StaticLeaves | None) -> list[tp.Any]:
    """The static values that an equal call may have as other objects, in order."""
    values = () if static is None else static.values
    return [*graphdef.atoms(), *[atom for value in values for atom in atoms(value)]]


class CallDef(TreeForm):
    """The static side of some arguments; one object for equal content, unless it is an `OwnCall`.

    The leaves that cross have one numbering: the array leaves first, then those of the graph.

    Attributes:
        graphdef: the graph below the roots.
        extra: what else the transform adds to the key.
        trees: whether numbers in the containers of objects are leaves, as with `graph=False`.
        names: for arguments `(args, kwargs)` the names of the parameters; None for another tree.
        structure: of the list of the values of the graph's leaves, where the leaves in them count, and
            some value is not one leaf; else `FLAT`.
        static: the leaves that are part of the key and do not cross; None if all cross.
        cache: what follows from this call and a key. It is bounded: a key may contain a filter that is
            a new function in each training step, and the call lives as long as the model.
    """

    graphdef: GraphDef[tp.Any]
    extra: tp.Any
    trees: bool
    names: Names
    structure: Structure
    static: StaticLeaves | None

    def __init__(self, *key: tp.Any) -> None:
        self.key = key
        (self.treedef, self.where, self.graphdef, self.extra) = key[:4]
        (self.trees, self.names, self.structure, self.static) = key[4:8]
        self.cache: Bounded[tp.Any, tp.Any] = Bounded(_ENTRIES_PER_CALL)

    @functools.cached_property
    def own_tree(self) -> bool:
        """Whether the treedef has static data that an equal one does not have: see `Definition`."""
        pending = [self.treedef]
        while pending:
            part = pending.pop()
            kind, data = part.node_data() or (None, None)
            if kind not in _PLAIN_NODES and not hasattr(kind, "_fields") and not facts(data).exact:
                return True
            pending += part.children()
        return False

    @property
    def shared(self) -> CallDef:
        """What it shares with equal ones: the interned one."""
        return self

    @property
    def exactly(self) -> tp.Any:
        """A key that no other call has whose static values differ in anything."""
        return self if self.shared is self else ById(self)

    def by_side(self, leaves: tp.Sequence[T]) -> tuple[list[T], list[T]]:
        """Something for each leaf, as two lists: for the array leaves, and for the graph leaves."""
        count = self.num_arrays - len(self.static_positions())
        return [*leaves[:count]], [*leaves[count:]]

    def whole(
        self, leaves: tp.Sequence[tp.Any], blank: bool = False
    ) -> tuple[list[tp.Any], list[tp.Any]]:
        """All array leaves, and the values of the graph's leaves, from the leaves that cross.

        With `blank` the static leaves are None.
        """
        if self.static is not None:
            leaves = self.static.join(leaves, blank)
        arrays, values = [*leaves[: self.num_arrays]], [*leaves[self.num_arrays :]]
        if self.structure is not FLAT:
            values = jax.tree_util.tree_unflatten(self.structure, values)
        return arrays, values

    def static_positions(self) -> list[int]:
        """The positions of the static array leaves in the treedef, in order."""
        numbers = () if self.static is None else self.static.numbers
        positions = self.array_positions() if numbers else []
        return [positions[number] for number in numbers if number < len(positions)]

    def paths(self) -> list[Path]:
        """The path of each position of the treedef, as a user would write it.

        Those of arguments begin with the name of the parameter: `model`, `args[2]`.
        """
        paths = paths_of(self.treedef)
        return paths if self.names is None else [_named(self.names, *path) for path in paths]

    def root_paths(self) -> list[Path]:
        """The path of each root."""
        paths = self.paths()
        return [paths[position] for position in self.where]

    def leaves(self) -> list[ArgumentLeaf]:
        """The leaves that cross, in their order; a leaf with several paths has its first."""
        leaves = self.all_leaves
        return [*leaves] if self.static is None else self.static.split(leaves)

    @functools.cached_property
    def all_leaves(self) -> list[ArgumentLeaf]:
        """The same with the static leaves."""
        paths, graph_leaves = self.paths(), self.graph_leaves()
        out = [ArgumentLeaf(i, None, (), paths[i]) for i in self.array_positions()]
        return out + [
            graph_leaves[number]._replace(path=(*graph_leaves[number].path, *path), inside=path)
            for number, path in self.value_leaves()
        ]

    def value_leaves(self) -> list[tuple[int, Path]]:
        """The leaves of the graph's values: which graph leaf has the value, and the path in it."""
        if self.structure is FLAT:
            return [(number, ()) for number in range(self.graphdef.num_leaves)]
        return [(number, tuple(path)) for number, *path in paths_of(self.structure)]

    def graph_leaves(self) -> list[ArgumentLeaf]:
        """The leaves of the graph, by leaf number."""
        paths, out = self.root_paths(), list[ArgumentLeaf]()
        for number, (root, *below) in enumerate(self.graphdef.decoded.leaf_paths()):
            path = (*paths[root], *below)
            out.append(ArgumentLeaf(self.where[root], root, tuple(below), path, number))
        return out

    def build(self, leaves: tp.Sequence[tp.Any], blank: bool = False) -> tp.Any:
        """The tree with these leaves; its objects are new. With `blank` the static leaves are None."""
        return enter(self, leaves, blank)[0]

    def renamed(self, names: Names) -> CallDef:
        """The same with other names of the arguments, for messages."""
        return CallDef(*self.key[:5], names, *self.key[6:])

    def __reduce__(self) -> tp.Any:
        return call_def, self.key


class OwnCall(CallDef):
    """A CallDef with static values of this very call, which an equal one does not have.

    It is equal where what it shares is the same, so that programs are shared; the trace of a program
    sees the values of the call that caused it. One that shares nothing, because its tree has static
    data without a hash, is compared by content.
    """

    def __init__(self, shared: CallDef | None, *key: tp.Any) -> None:
        super().__init__(*key)
        self._shared = shared

    @property
    def shared(self) -> CallDef:
        """What it shares with equal ones: the interned one."""
        return self._shared or self

    def __eq__(self, other: tp.Any) -> bool:
        if type(other) is not OwnCall or self._shared is not other._shared:
            return False
        return self._shared is not None or self.key == other.key

    def __hash__(self) -> int:
        return hash(self._shared)


_ENTRIES_PER_CALL = 64
_interned: Table[CallDef] = Table("key")


def call_def(*key: tp.Any) -> CallDef:
    """The CallDef with these parts; raises TypeError where one is unhashable."""
    treedef, where, graphdef, *more, static = key[:8]
    public = (treedef, where, graphdef.structure, *more, static)
    values = own_values(graphdef, static)
    if len({*map(id, values)}) < len(values):  # `OutDef.of_call` tells them by identity
        ids, first = [id(value) for value in values if not facts(value).exact], dict[int, int]()
        places = tuple([first.setdefault(number, at) for at, number in enumerate(ids)])
        public = (*public, places) if len(first) < len(ids) else public
    shared = _interned.find(public) or _interned.add(public, CallDef(*public))
    own = graphdef.own or shared.own_tree or (static is not None and not static.exact)
    return OwnCall(shared, *key) if own else shared


_PLAIN_NODES = frozenset({None, tuple, list, dict, type(None)})


class Inner:
    """The arguments rebuilt inside a transform.

    Attributes:
        nodes: the new objects, by node number.
        values: the raw values of the arguments, by leaf number.
        plain: the plain objects among the static values, as they were.
    """

    __slots__ = ("call", "nodes", "plain", "values")

    def __init__(self, call: CallDef, values: list[tp.Any]) -> None:
        self.call = call
        self.values = values
        self.nodes = build_nodes(call.graphdef.decoded, values) if values or call.where else []
        plain = call.graphdef.decoded.plain_objects if self.nodes else ()
        self.plain = note_hidden(plain) if plain else []

    def roots(self) -> list[tp.Any]:
        """The rebuilt roots."""
        codes = self.call.graphdef.decoded.roots
        return [resolve(code, self.nodes, self.values) for code in codes]

    def run(self, fun: tp.Callable[..., T], /, *args: tp.Any, **kwargs: tp.Any) -> T:
        """Call the user's function; where it fails, no plain object keeps a tracer."""
        try:
            return fun(*args, **kwargs)
        except BaseException:
            take_back(self.plain)
            raise


def enter(call: CallDef, leaves: tp.Sequence[tp.Any], blank: bool = False) -> tuple[tp.Any, Inner]:
    """The argument tree, rebuilt with new objects at the current trace level; see `CallDef.whole`."""
    arrays, values = call.whole(leaves, blank)
    inner = Inner(call, values)
    roots = inner.roots()
    if roots:
        note_entered(roots)
    return call.tree(arrays, roots), inner


@functools.partial(jax.tree_util.register_dataclass, data_fields=["leaves"], meta_fields=["call"])
@dataclasses.dataclass(slots=True, eq=False)
class Operands:
    """Leaves of a call: all of them, or the first of several groups."""

    call: CallDef
    leaves: list[tp.Any]

    def __iter__(self) -> tp.Iterator[tp.Any]:
        return iter(self.leaves)


def leaf_names(call: CallDef, leaves: tp.Iterable[ArgumentLeaf] | None = None) -> list[str]:
    """The names of the leaves of a call `(args, kwargs)`: `model.layers[0].kernel`, `args[1]`.

    Args:
        call: the arguments.
        leaves: which of their leaves; by default those that cross.
    """
    keys = [path[2:] for path, _ in jax.tree_util.tree_leaves_with_path(call.template())]
    arguments = [path[0] for path in call.paths()]
    starts = [name + jax.tree_util.keystr(inside) for name, inside in zip(arguments, keys)]
    names: list[str] = []
    for leaf in call.leaves() if leaves is None else leaves:
        inside = [f"[{key!r}]" for key in leaf.inside]
        names.append("".join([starts[leaf.position], *map(step_text, leaf.below), *inside]))
    return names


def step_text(name: tp.Any) -> str:
    """A name or key as it is written after the value that has it."""
    return f".{name}" if isinstance(name, str) and name.isidentifier() else f"[{name!r}]"


def parameters_of(fun: tp.Any) -> list[inspect.Parameter] | None:
    """The parameters of a function; None where it has no signature."""
    try:
        return [*inspect.signature(fun).parameters.values()]
    except (TypeError, ValueError):
        return None


def names_by_position(parameters: tp.Iterable[inspect.Parameter]) -> list[str]:
    """The names of the parameters that may be given by position."""
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def parameter_names(fun: tp.Any) -> tuple[str, ...]:
    """The names of the parameters of a function that may be given by position."""
    if type(fun) is types.FunctionType and not fun.__dict__:  # no `__wrapped__`, `__signature__`
        return fun.__code__.co_varnames[: fun.__code__.co_argcount]
    return tuple(names_by_position(parameters_of(fun) or ()))


class _Signature(inspect.Signature):
    """A signature that gives the leaves of arguments names of their own.

    JAX caches the signature of a function under a weak reference to the function. So the signature does
    not refer to the names, which lead to the function: it asks the function for them.
    """

    fun: tp.Callable[[], tp.Any]

    def bind(self, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        return types.SimpleNamespace(arguments=dict(self.fun().names(*args, **kwargs)))


def describe(
    run: tp.Callable[..., tp.Any],
    fun: tp.Any,
    name: str,
    names: tp.Callable[..., tp.Iterable[tuple[str, tp.Any]]] | None = None,
) -> tp.Callable[..., tp.Any]:
    """`run` as a function that JAX's messages call by the name and source of the user's function.

    Args:
        run: the function for JAX to trace; if it refers to `fun` weakly, so does the result.
        fun: the user's function.
        name: of the program, for JAX.
        names: from the arguments of `run` to pairs of a name and a leaf.
    """

    def described(*args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        return run(*args, **kwargs)

    described.__name__ = described.__qualname__ = name
    signature = inspect.signature(run, follow_wrapped=False)
    if names is not None:
        signature = _Signature([*signature.parameters.values()])
        signature.fun = weakref.ref(described)
        described.names = names  # type: ignore[attr-defined]
    described.__signature__ = signature  # type: ignore[attr-defined]
    inner: tp.Any = fun
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = inspect.unwrap(inner)
    if not hasattr(inner, "__code__"):
        inner = vars(type(inner)).get("__call__")
    if hasattr(inner, "__code__"):
        # The source location alone: it does not keep the function alive.
        shown = getattr(inner, "__name__", type(inner).__name__)
        source = types.SimpleNamespace(__name__=shown, __code__=inner.__code__)
        described.__wrapped__ = source  # type: ignore[attr-defined]
    return described


# Partitions -----------------------------------------------------------------------------------------
#
# Partition: the leaves of a call divided into groups, and joined again.
#
# Each transform treats leaves in different ways: differentiated or not, mapped along an axis, carried,
# constant, donated.  It gives every leaf a label, and passes JAX one list for each label.


@dataclasses.dataclass(frozen=True)
class Partition:
    """A division of leaves into groups; static and comparable.

    `join(*split(leaves))` gives the same leaves.

    Attributes:
        labels: the group of each leaf.
        order: the groups, in the order in which `split` gives them.

    >>> from nnxlite.boundary._call_def import Partition
    >>> partition = Partition(("carry", "constant", "carry"), ("constant", "carry"))
    >>> partition.split([1, 2, 3])
    ([2], [1, 3])
    >>> partition.join([2], [1, 3])
    [1, 2, 3]
    """

    labels: tuple[tp.Any, ...]
    order: tuple[tp.Any, ...] = (True, False)

    @functools.cached_property
    def positions(self) -> tuple[list[int], ...]:
        """The positions of the leaves of each group."""
        positions: tuple[list[int], ...] = tuple([] for _ in self.order)
        for position, label in enumerate(self.labels):
            positions[self.order.index(label)].append(position)
        return positions

    @classmethod
    def chosen(cls, flags: tp.Iterable[tp.Any]) -> Partition:
        """Leaves divided into those with a true flag and the rest."""
        return cls(tuple(map(bool, flags)))

    def split(self, leaves: tp.Sequence[tp.Any]) -> tuple[list[tp.Any], ...]:
        """The leaves of each group."""
        return tuple([leaves[i] for i in positions] for positions in self.positions)

    def join(self, *groups: tp.Sequence[tp.Any]) -> list[tp.Any]:
        """The leaves in their own order, from the groups."""
        leaves: list[tp.Any] = [None] * len(self.labels)
        for positions, group in zip(self.positions, groups):
            put(leaves, positions, group)
        return leaves


def put(leaves: list[tp.Any], positions: tp.Iterable[int], values: tp.Iterable[tp.Any]) -> None:
    """Store values at some positions of a list."""
    for position, value in zip(positions, values):
        leaves[position] = value


def replaced(
    leaves: tp.Sequence[tp.Any], positions: tp.Iterable[int], values: tp.Iterable[tp.Any]
) -> list[tp.Any]:
    """A list with other values at some positions."""
    out = [*leaves]
    put(out, positions, values)
    return out
