"""Walking, mapping, converting and freezing object graphs: every node once, children before parents.

`to_refs`, `to_arrays` and `with_vars` give a copy of a graph in which some leaves are stored in
another way: arrays in references, references as arrays, Variables with `ref=True` or without. What
is not converted is shared with the original. A leaf with two paths would become two, so it is
refused.

`freeze` marks Variables by an entry in their metadata: `grad` and `value_and_grad` do not differentiate
them, and no `Optimizer` changes them, whatever their filters select. Metadata is part of the structure:
after a change a step is compiled again, and unfreezing brings the former program back.
"""

from __future__ import annotations

import difflib
import operator
import typing as tp

from nnxlite import filters
from nnxlite._base.errors import GRAPH_MODE, filter_text, listed, path_text
from nnxlite._base.jax import is_ref, trace_state
from nnxlite._base.statics import facts
from nnxlite.filters import Filter, OfType, PathContains, Predicate, WithTag, to_predicate
from nnxlite.graph._defs import (
    ObjectDef,
    children_of,
    contains_itself,
    define_container,
    define_custom,
    definition,
)
from nnxlite.graph._functional import build
from nnxlite.graph._kinds import (
    CONTAINERS,
    CUSTOM_NODES,
    NODES,
    Kind,
    is_graph_node,
    is_node,
    is_node_leaf,
    kind_of,
)
from nnxlite.graph._plan import checked_view, view
from nnxlite.graph._rebuild import ArrayCode, NodeCode, Path, fill, new_node
from nnxlite.variables._definition import FROZEN, refuse_hijax
from nnxlite.variables._kinds import array_ref
from nnxlite.variables._variable import Variable, is_variable

__all__ = ["find_duplicates", "freeze", "iter_children", "iter_graph", "map", "recursive_map"]
__all__ += ["to_arrays", "to_refs", "unfreeze", "vars_as", "with_vars"]

N = tp.TypeVar("N")
Pairs = list[tuple[Path, tp.Any]]

_REFERENCES = frozenset({Kind.OBJECT, Kind.CUSTOM, Kind.VARIABLE, Kind.REF})


def iter_graph(node: tp.Any, /, *, graph: bool | None = None) -> tp.Iterator[tuple[Path, tp.Any]]:
    """Every (path, value) of a graph; each node once, children before their parent.

    Static attributes are among the values, but not with `graph=False`. None counts as one node of
    the graph, so it comes once; with `graph=False` it comes wherever it is found.

    Args:
        node: an object, or a pytree of objects.
        graph: False refuses shared references.

    Returns:
        An iterator of pairs; a path is a tuple of names, keys and indices.

    >>> import nnxlite as nnx
    >>> model = nnx.Dict(w=nnx.Param(1.0), size=3)
    >>> [(path, type(value).__name__) for path, value in nnx.iter_graph([model, model])]
    [((0, 'size'), 'int'), ((0, 'w'), 'Param'), ((0,), 'Dict'), ((), 'list')]
    """
    graph = GRAPH_MODE.given(graph)
    if not graph:
        checked_view(node, graph, "iter_graph")
    return _iter(node, graph)


def _iter(node: tp.Any, graph: bool) -> tp.Iterator[tuple[Path, tp.Any]]:
    none_seen = False
    for step, names, value in _steps(node, static=graph):
        if step == LEAVE and (value is not None or not none_seen):
            yield tuple(names[1:]), value
            none_seen = none_seen or (graph and value is None)


ENTER, LEAVE, AGAIN = range(3)
"""Steps of a walk: into a value, out of it, and past a reference that was entered before."""


def _steps(root: tp.Any, static: bool = True) -> tp.Iterator[tuple[int, list[tp.Any], tp.Any]]:
    """Walk a graph: (step, names down to the value, value), each reference entered once.

    The first name is that of the root, which has none: ().

    Args:
        static: whether static attributes are visited as well.

    Raises ValueError for a plain container that contains itself.
    """
    entered: dict[int, tp.Any] = {}  # references entered: they live as long as the walk
    open_containers: set[int] = set()
    names: list[tp.Any] = []  # one list for all steps
    stack: list[tuple[tp.Any, tp.Iterator[tuple[tp.Any, tp.Any]]]] = [(None, iter([((), root)]))]
    while True:
        above, rest = stack[-1]
        pair = next(rest, None)
        if pair is None:
            stack.pop()
            if not stack:
                return
            open_containers.discard(id(above))
            yield LEAVE, names, above
            names.pop()
            continue
        name, value = pair
        names.append(name)
        kind = kind_of(value)
        if kind in _REFERENCES and id(value) in entered:
            yield AGAIN, names, value
        else:
            yield ENTER, names, value
            if kind in _REFERENCES:
                entered[id(value)] = value
            elif kind in CONTAINERS:
                if id(value) in open_containers:
                    raise contains_itself(value, names[1:])
                open_containers.add(id(value))
            if kind in NODES:
                stack.append((value, iter(children_of(value, static))))
                continue
            yield LEAVE, names, value
        names.pop()


def iter_children(
    node: tp.Any, /, *, graph: bool | None = None
) -> tp.Iterator[tuple[tp.Any, tp.Any]]:
    """The (name, child) pairs of the direct children that are objects or Variables.

    Args:
        node: an object, or a plain container of some.
        graph: accepted for compatibility; direct children cannot form a cycle.

    Returns:
        An iterator of pairs.

    Raises:
        ValueError: where `node` has no children, as a Variable or an array.

    >>> import nnxlite as nnx
    >>> [name for name, child in nnx.iter_children(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))]
    ['bias', 'kernel']
    """
    return iter([pair for pair in children_of_node(node) if is_graph_node(pair[1])])


def children_of_node(node: tp.Any) -> list[tuple[tp.Any, tp.Any]]:
    """The (name, child) pairs of a node; a leaf or static value raises."""
    if not is_node(node):
        raise ValueError(f"Expected an object or a container of some, got {type(node).__name__}.")
    return children_of(node)


def find_duplicates(node: tp.Any, /, *, only: Filter = ...) -> list[list[Path]]:
    """The paths of every object, Variable or array that has more than one path.

    Paths after the first count where `only` matches.

    Args:
        node: an object, or a pytree of objects.
        only: a filter for the paths after the first; by default all count.

    Returns:
        A list with the paths of each, in order of their first paths.

    >>> import nnxlite as nnx
    >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.find_duplicates(nnx.Dict(a=layer, b=layer))
    [[('a',), ('b',)]]
    """
    predicate = to_predicate(only)
    found = [
        [first, *[path for path in more if predicate(path, value)]]
        for value, (first, *more) in _duplicates(node)
    ]
    return [paths for paths in found if len(paths) > 1]


def _duplicates(node: tp.Any) -> list[tuple[tp.Any, list[Path]]]:
    """Every object, Variable, reference and array with several paths, in order of the first of them."""
    seen = view(node)
    nodes, decoded = seen.nodes(), seen.graphdef.decoded
    found: dict[int, tuple[tp.Any, list[Path]]] = {}
    for path, code in decoded.visit(decoded.roots[0]):
        if isinstance(code, NodeCode):
            value = nodes[code.number]
        elif isinstance(code, ArrayCode) and kind_of(seen.leaves[code.leaf]) == Kind.ARRAY:
            value = seen.leaves[code.leaf]
        else:
            continue
        found.setdefault(id(value), (value, []))[1].append(path)
    return [pair for pair in found.values() if len(pair[1]) > 1]


def map(
    f: tp.Callable[[Path, tp.Any], tp.Any],
    node: N,
    /,
    *,
    graph: bool | None = None,
    recreate_variables: bool = True,
) -> N:
    """A graph of the same structure whose leaves are `f(path, leaf)`.

    A leaf is a Variable or an array; a Variable for which `f` returns another kind of value becomes
    a Variable that holds it. With `recreate_variables=False` that value takes the Variable's place
    (but not with `graph=False`).

    Args:
        f: a function of a path, a tuple, and a leaf.
        node: an object, or a pytree of objects.
        graph: False refuses shared references.
        recreate_variables: whether values are put into Variables, as above.

    Returns:
        A new graph.

    >>> import nnxlite as nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> zeros = nnx.map(lambda path, v: v.replace(0 * v.value), model)
    >>> float(zeros.kernel.sum())
    0.0
    """
    seen = checked_view(node, graph, "map")
    leaves = [f(path, leaf) for path, leaf in zip(seen.graphdef.each_path(), seen.leaves)]
    return build(seen.graphdef, leaves, recreate_variables or not GRAPH_MODE.given(graph))


def recursive_map(
    f: tp.Callable[[Path, tp.Any], tp.Any], node: N, /, *, graph: bool | None = None
) -> N:
    """Replace every node, leaf and static value by `f(path, value)`, children before parents.

    Nodes are copied first, so `f` may edit what it is given; each shared node is visited once.
    With `graph=False` static values are left alone.

    Args:
        f: a function of a path, a tuple, and a value.
        node: an object, or a pytree of objects; it stays as it is.
        graph: False refuses shared references.

    Returns:
        What `f` returns for the root.

    >>> import nnxlite as nnx
    >>> model = nnx.Dict(a=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> f = lambda path, x: nnx.List([x]) if isinstance(x, nnx.Linear) else x
    >>> type(nnx.recursive_map(f, model).a).__name__
    'List'
    """
    graph = GRAPH_MODE.given(graph)
    if not graph:
        checked_view(node, graph, "recursive_map")
    trace = trace_state.value
    copies: dict[int, tp.Any] = {}  # of references: empty while they are entered, then f's result
    given: list[tp.Any] = []  # to f: alive to the end, so that no two have one id
    results: list[list[tuple[tp.Any, tp.Any]]] = [[]]  # of the children of each open value
    for step, names, value in _steps(node, static=graph):
        kind = kind_of(value)
        if step == ENTER:
            results.append([])
            if kind in (Kind.OBJECT, Kind.CUSTOM):
                form = definition(value) if kind == Kind.OBJECT else define_custom(value)[0]
                copies[id(value)] = new_node(form, trace)
            continue
        if step == LEAVE:
            given.append(_with_children(value, copies.get(id(value)), results.pop()))
            new = f(tuple(names[1:]), given[-1])
            if kind in _REFERENCES:
                copies[id(value)] = new
        else:
            new = copies[id(value)]
        results[-1].append((names[-1], new))
    return results[0][0][1]


def _with_children(value: tp.Any, copy: tp.Any, children: list[tuple[tp.Any, tp.Any]]) -> tp.Any:
    """A node like `value` with other children, put into the empty `copy` of an object."""
    kind = kind_of(value)
    if kind == Kind.OBJECT:
        form: ObjectDef = definition(value)
        attributes = dict(children)
        fill(copy, form, [attributes[name] for name in form.names.data])
        for name, old in form.template.items():
            new = attributes.get(name, old)
            if new is not old and facts(new).key != facts(old).key:
                copy._nnx_assign(name, new)
        return copy
    if kind == Kind.CUSTOM:
        CUSTOM_NODES[type(value)].init(copy, tuple(children))
        return copy
    if kind == Kind.DICT:
        children_by_key = dict(children)
        return {key: children_by_key[key] for key in value}  # in its own order
    if kind in CONTAINERS:
        return define_container(value, kind)[0].build([child for _, child in children])
    return value


# Arrays and references --------------------------------------------------------------------------


def _arrays(path: Path, leaf: tp.Any) -> bool:
    """Arrays, and Variables that hold one."""
    return kind_of(_raw(leaf)) == Kind.ARRAY


def _refs(path: Path, leaf: tp.Any) -> bool:
    """Array references, and Variables that hold one."""
    return is_ref(_raw(leaf))


def _raw(leaf: tp.Any) -> tp.Any:
    return leaf.get_raw_value() if isinstance(leaf, Variable) else leaf


def to_refs(node: N, /, only: Filter = _arrays) -> N:
    """A copy of a graph whose arrays are array references.

    A Variable that contains an array becomes one with `ref=True`.

    Args:
        node: a graph object, or any structure of arrays.
        only: which leaves are converted; all arrays by default.

    Returns:
        A new graph of the same structure.

    Raises:
        ValueError: when an array or Variable that is converted has several paths.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> model = nnx.to_refs(nnx.Dict(w=jnp.zeros(2), b=nnx.Param(jnp.zeros(2))))
    >>> nnx.is_array_ref(model.w), model.b.ref
    (True, True)
    """
    return _convert(node, filters.All(only, _arrays), {"ref": True}, array_ref)


def to_arrays(node: N, /, *, only: Filter = _refs, allow_duplicates: bool = False) -> N:
    """A copy of a graph whose array references are arrays.

    A Variable with `ref=True` becomes one without.

    Args:
        node: a graph object, or any structure of array references.
        only: which leaves are converted; all references by default.
        allow_duplicates: convert a reference that has several paths once for each of them.

    Returns:
        A new graph of the same structure.

    Raises:
        ValueError: when a reference that is converted has several paths.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> array, number = nnx.to_arrays([nnx.array_ref(1.0), 2.0])
    >>> float(array), number
    (1.0, 2.0)
    """
    wanted = filters.All(only, _refs)
    return _convert(node, wanted, {"ref": False}, operator.itemgetter(...), allow_duplicates)


def with_vars(
    node: N,
    /,
    *,
    hijax: bool | None = None,
    ref: bool | None = None,
    mutable: bool | None = None,
    only: Filter = ...,
    allow_duplicates: bool = False,
) -> N:
    """A copy of a graph whose Variables hold their values another way.

    Args:
        node: a graph object, or any pytree of them.
        hijax: accepted for compatibility; True raises ValueError (use `ref=True`).
        ref: True moves values into JAX array references, False out of them.
        mutable: sets the metadata entry of this name.
        only: which Variables are meant; all by default.
        allow_duplicates: convert a Variable that has several paths, as one.

    Returns:
        A new graph of the same structure.

    Raises:
        ValueError: when a Variable that is converted is found at several paths, or for hijax=True.
        TypeError: for `ref=True` where a value is not an array.

    >>> import nnxlite as nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> in_refs = nnx.with_vars(model, ref=True)
    >>> in_refs.kernel.ref, model.kernel.ref
    (True, False)
    """
    if hijax:
        refuse_hijax("with_vars")
    given = {"ref": ref, "mutable": mutable}
    wanted = {name: value for name, value in given.items() if value is not None}
    chosen = to_predicate(only)

    def differs(path: Path, leaf: tp.Any) -> bool:
        return (
            isinstance(leaf, Variable)
            and any(leaf.get_metadata(name, None) != value for name, value in wanted.items())
            and chosen(path, leaf)
        )

    return _convert(node, differs, wanted, array_ref, allow_duplicates)


vars_as = with_vars
"""The former name of `with_vars`."""


def _convert(
    node: N,
    wanted: Predicate,
    metadata: dict[str, tp.Any],
    of_bare: tp.Callable[[tp.Any], tp.Any],
    allow_duplicates: bool = False,
) -> N:
    """A copy of a graph with other metadata of its wanted Variables, and its other leaves converted."""
    seen = view(node)
    if not allow_duplicates:
        _refuse_duplicates(node, wanted)
    leaves = list(seen.leaves)
    for number, path in enumerate(seen.graphdef.each_path()):
        leaf = leaves[number]
        if wanted(path, leaf):
            boxed = isinstance(leaf, Variable)
            leaves[number] = leaf.replace(**metadata) if boxed else of_bare(leaf)
    return build(seen.graphdef, leaves)


def _refuse_duplicates(node: tp.Any, wanted: Predicate) -> None:
    """Raise ValueError where a wanted leaf has several paths."""
    for value, paths in _duplicates(node):
        chosen = [path for path in paths if wanted(path, value)] if is_node_leaf(value) else []
        found = chosen if kind_of(value) == Kind.ARRAY else paths  # an array may well have others
        if chosen and len(found) > 1:
            lines = "".join(f"  {path_text(path)}\n" for path in found)
            raise ValueError(f"Found duplicate at paths:\n  ---\n{lines}  ---")


# Freezing ---------------------------------------------------------------------------------------


def freeze(model: tp.Any, filter: Filter = ..., /) -> None:
    """Freeze Variables: `nnx.grad` does not differentiate them and no optimizer changes them.

    An optimizer made afterwards has no state for them. One made before keeps their state as it is,
    and goes on with it once they are unfrozen.

    Args:
        model: an object, or a pytree of objects.
        filter: the Variables to freeze; by default all.

    Raises:
        ValueError: if the filter matches no Variable; nothing is changed then.
        TraceContextError: when called from another trace level than the Variables' own.

    >>> import nnxlite as nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.freeze(model, nnx.PathContains("kernel"))
    >>> list(nnx.grad(lambda m: m.kernel.sum() + m.bias.sum())(model))
    ['bias']
    >>> list(nnx.state(model, nnx.Frozen()))
    ['kernel']
    """
    for variable in _chosen(model, filter, "freeze"):
        variable.set_metadata(FROZEN, True)


def unfreeze(model: tp.Any, filter: Filter = ..., /) -> None:
    """The inverse of `freeze`.

    Args:
        model: an object, or a pytree of objects.
        filter: the Variables to unfreeze; by default all.

    Raises:
        ValueError: if the filter matches no Variable; nothing is changed then.
        TraceContextError: when called from another trace level than the Variables' own.

    >>> import nnxlite as nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.freeze(model)
    >>> nnx.unfreeze(model, nnx.PathContains("bias"))
    >>> list(nnx.state(model, nnx.Not(nnx.Frozen())))
    ['bias']
    """
    for variable in _chosen(model, filter, "unfreeze"):
        if variable.has_metadata(FROZEN):
            variable.del_metadata(FROZEN)


def _chosen(model: tp.Any, filter: Filter, caller: str) -> list[Variable[tp.Any]]:
    """The Variables that a filter matches, all of the present trace."""
    chosen = [variable for _, variable in matched(model, filter, is_variable, "Variable", caller)]
    for variable in chosen:
        variable._check_level("metadata")
    return chosen


def matched(
    model: tp.Any,
    filter: Filter,
    wanted: tp.Callable[[tp.Any], bool],
    what: str,
    caller: str,
) -> Pairs:
    """The nodes of a graph that a filter matches, each once, with their paths.

    Args:
        model: an object, or a pytree of objects.
        filter: the filter.
        wanted: whether a node is considered.
        what: the name of the wanted nodes, for messages.
        caller: the user's call, for messages.

    Raises ValueError, which suggests similar names, if none matches.
    """
    predicate = to_predicate(filter)
    nodes = [(path, node) for path, node in iter_graph(model) if wanted(node)]
    chosen = [(path, node) for path, node in nodes if predicate(path, node)]
    if not chosen:
        raise ValueError(
            f"{caller}: the filter {filter_text(filter)} matches no {what} of {type(model).__name__}. "
            f"{_hint(predicate, nodes, what)}{_listed(nodes, what)}"
        )
    return chosen


def _hint(predicate: tp.Any, nodes: Pairs, what: str) -> str:
    """What was probably meant."""
    names = {str(part) for path, _ in nodes for part in path}
    if isinstance(predicate, PathContains):
        return _similar(str(predicate.key), names, "in the paths")
    if isinstance(predicate, WithTag):
        if predicate.tag in names:
            return (
                f"A string is the tag of a Variable; for a name in the path use "
                f"PathContains({predicate.tag!r}). "
            )
        tags = {str(getattr(node, "tag", "")) for _, node in nodes}
        return _similar(predicate.tag, tags | names, "among tags and paths")
    if isinstance(predicate, OfType) and isinstance(predicate.type, type):
        kinds = ", ".join(sorted({type(node).__name__ for _, node in nodes}))
        if what == "Variable" and nodes and not issubclass(predicate.type, Variable):
            part = path_text(("model", *nodes[0][0][:-1]))
            return (
                "Filters match Variables here, not the objects that contain them; give the part "
                f"itself, such as {part}. "
            )
        return f"Its {what}s are of the kinds {kinds}. " if kinds else ""
    return ""


def _similar(word: str, words: tp.Iterable[str], where: str) -> str:
    near = difflib.get_close_matches(word, sorted(words), n=3)
    return f"Similar {where}: {', '.join([repr(name) for name in near])}. " if near else ""


def _listed(nodes: Pairs, what: str) -> str:
    if not nodes:
        return f"It has no {what}s."
    return f"It has {listed(nodes, text=lambda pair: path_text(pair[0]))}."
