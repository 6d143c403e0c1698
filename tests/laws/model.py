"""The engine's operations once more, as slow and obvious as they can be.

Plain recursion, no caches, no versions, no interning: what an object graph is, spelled out.  The laws
compare the engine with this.  Nothing here is clever, so that it can be believed.

The vocabulary: a *reference* is something known by identity (an object, a Variable); a *leaf* is a
Variable, an array, or any other value in a data position; everything else is structure.
"""

import functools
import types
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

import nnxlite as nnx

Path = tuple[tp.Any, ...]


# What a value is ----------------------------------------------------------------------------------


def is_object(value: tp.Any) -> bool:
    return isinstance(value, nnx.Pytree)


def is_variable(value: tp.Any) -> bool:
    return isinstance(value, nnx.Variable)


def is_reference(value: tp.Any) -> bool:
    return is_object(value) or is_variable(value)


def is_array(value: tp.Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray))


def is_foreign(value: tp.Any) -> bool:
    """A pytree node that somebody registered with JAX (plain containers aside)."""
    plain = (list, tuple, dict, nnx.State, type(None))
    return not (isinstance(value, plain) or is_reference(value)) and not jax.tree_util.all_leaves(
        [value]
    )


def is_branch(value: tp.Any) -> bool:
    """Whether a value has children."""
    if is_object(value):
        return True
    return (
        not is_variable(value)
        and not is_array(value)
        and value is not None
        and (isinstance(value, (list, tuple, dict, nnx.State)) or is_foreign(value))
    )


def in_order(keys: tp.Iterable[tp.Any]) -> list[tp.Any]:
    """Numbers first, then text."""
    return sorted(keys, key=lambda k: (isinstance(k, str), k))


def children(value: tp.Any) -> list[tuple[tp.Any, tp.Any, bool]]:
    """(key, child, is it data) of each child, in the order of the library."""
    if is_object(value):
        held = value._nnx_dict if isinstance(value, nnx.List) else vars(value)
        return [(k, held[k], value._nnx_status[k]) for k in in_order(held)]
    if isinstance(value, nnx.State):
        return [(k, value[k], value[k] is not None) for k in in_order(value)]
    if isinstance(value, dict):
        return [(k, value[k], in_container(value[k])) for k in in_order(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(k, v, in_container(v)) for k, v in zip(value._fields, value, strict=True)]
    if isinstance(value, (list, tuple)):
        return [(k, v, in_container(v)) for k, v in enumerate(value)]
    pairs = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)[0]
    return [(path[0].name, child, child is not None) for path, child in pairs]


def in_container(value: tp.Any) -> bool:
    """Whether an element of a plain container is data: anything that is or has children, or an array."""
    return is_reference(value) or is_array(value) or is_branch(value)


def aux(value: tp.Any) -> tp.Any:
    """What a foreign pytree node holds beside its children."""
    return jax.tree_util.tree_flatten(value, is_leaf=lambda x: x is not value)[1]


# Static values ------------------------------------------------------------------------------------


def spelled(value: tp.Any) -> tp.Any:
    """A static value as something whose `==` means: the same type and the same content."""
    if isinstance(value, (float, np.floating)):
        return type(value), float(value).hex()
    if isinstance(value, complex):
        return complex, value.real.hex(), value.imag.hex()
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(spelled(v) for v in value)
    if isinstance(value, (list, tuple)):
        return type(value), tuple(spelled(v) for v in value)
    if isinstance(value, dict):
        return dict, tuple((spelled(k), spelled(v)) for k, v in value.items())
    if isinstance(value, functools.partial):
        keywords = tuple(sorted((k, spelled(v)) for k, v in value.keywords.items()))
        return "partial", spelled(value.func), spelled(value.args), keywords
    if isinstance(value, types.FunctionType):
        captured = tuple(spelled(cell.cell_contents) for cell in value.__closure__ or ())
        return "function", id(value.__code__), captured, spelled(value.__defaults__ or ())
    return type(value), value


# Structure ----------------------------------------------------------------------------------------


def canonical(root: tp.Any, leaf: tp.Callable[[tp.Any], tp.Any] = id) -> tp.Any:
    """A graph as nested tuples: equal ones are isomorphic.

    References carry the number of their first visit, so sharing and cycles are part of the form;
    `leaf` says how values are compared.
    """
    numbers: dict[int, int] = {}

    def visit(value: tp.Any, data: bool) -> tp.Any:
        if is_reference(value):
            if id(value) in numbers:
                return "again", numbers[id(value)]
            numbers[id(value)] = len(numbers)
        if is_variable(value):
            metadata = {k: spelled(v) for k, v in value.get_metadata().items()}
            return type(value), tuple(sorted(metadata.items())), leaf(value.get_raw_value())
        if data and is_branch(value):
            inside = tuple((k, visit(v, d)) for k, v, d in children(value))
            return type(value), aux(value) if is_foreign(value) else None, inside
        return ("leaf", leaf(value)) if data else ("static", spelled(value))

    return visit(root, True)


def copied(root: tp.Any, order: tp.Callable[[list[tp.Any]], list[tp.Any]] = list) -> tp.Any:
    """A graph of the same form, built anew by hand: other objects and Variables, the same values.

    `order` decides in which order the attributes of objects and the items of dicts are put in.
    """
    made: dict[int, tp.Any] = {}

    def visit(value: tp.Any, data: bool) -> tp.Any:
        if not data:
            return value
        if id(value) in made and is_reference(value):
            return made[id(value)]
        if is_variable(value):
            metadata = {k: v for k, v in value.get_metadata().items() if k != "eager_sharding"}
            made[id(value)] = type(value)(value.get_raw_value(), **metadata)
            return made[id(value)]
        if not is_branch(value):
            return value
        if is_object(value):
            new = made[id(value)] = type(value).__new__(type(value))
            inside = children(value)
            for key, child, is_data in inside if isinstance(value, nnx.List) else order(inside):
                content = visit(child, is_data)
                new._nnx_assign(key, nnx.data(content) if is_data else nnx.static(content))
            return new
        parts = {k: visit(v, d) for k, v, d in children(value)}
        if isinstance(value, nnx.State):
            return nnx.State({k: parts[k] for k in order(list(parts))})
        if isinstance(value, dict):
            return {k: parts[k] for k in order(list(parts))}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(**parts)
        if isinstance(value, (list, tuple)):
            return type(value)(parts.values())
        return jax.tree_util.tree_unflatten(aux(value), list(parts.values()))

    return visit(root, True)


# The operations -----------------------------------------------------------------------------------


def visits(root: tp.Any, statics: bool = False) -> tp.Iterator[tuple[Path, tp.Any]]:
    """(path, value) of everything, parents first; what a reference has inside only the first time."""
    seen: set[int] = set()

    def visit(path: Path, value: tp.Any) -> tp.Iterator[tuple[Path, tp.Any]]:
        yield path, value
        if is_reference(value):
            if id(value) in seen:
                return
            seen.add(id(value))
        if is_branch(value):
            for key, child, data in children(value):
                if data or statics:
                    yield from visit((*path, key), child)

    return visit((), root)


def leaves(root: tp.Any) -> list[tuple[Path, tp.Any]]:
    """(path, leaf) in leaf order; each Variable once, at its first path."""
    found: dict[tp.Any, tuple[Path, tp.Any]] = {}
    for path, value in visits(root):
        if value is not None and not is_branch(value):
            found.setdefault(id(value) if is_variable(value) else path, (path, value))
    return list(found.values())


def references(root: tp.Any) -> list[tp.Any]:
    """Every object and Variable, in the order of a traversal."""
    return list({id(x): x for _, x in visits(root) if is_reference(x)}.values())


def owners(root: tp.Any) -> list[tp.Any]:
    """Every object and container of a graph, each once."""
    return list({id(x): x for _, x in visits(root) if is_branch(x)}.values())


def changeable(root: tp.Any) -> list[tp.Any]:
    """The objects, lists and dicts that take new content."""
    return [x for x in owners(root) if is_object(x) or type(x) in (list, dict)]


def duplicates(root: tp.Any) -> list[list[Path]]:
    """All paths of each reference or array that has more than one, by first path."""
    paths: dict[int, list[Path]] = {}
    for path, value in visits(root, statics=True):
        if is_reference(value) or is_array(value):
            paths.setdefault(id(value), []).append(path)
    return [found for found in paths.values() if len(found) > 1]


def walk(root: tp.Any) -> list[tuple[Path, tp.Any]]:
    """(path, value) of everything, static attributes included; references once, children first.

    None counts as one node, like a reference.
    """
    seen: set[int] = set()
    out: list[tuple[Path, tp.Any]] = []

    def visit(path: Path, value: tp.Any) -> None:
        if is_reference(value) or value is None:
            if id(value) in seen:
                return
            seen.add(id(value))
        if is_branch(value):
            for key, child, _ in children(value):
                visit((*path, key), child)
        out.append((path, value))

    visit((), root)
    return out


def remove(owner: tp.Any, key: tp.Any) -> None:
    """Delete an attribute or item."""
    if hasattr(type(owner), "__delitem__"):
        del owner[key]
    else:
        delattr(owner, key)


def without(root: tp.Any, kind: type) -> None:
    """Remove the Variables of a kind from every object, list and dict, wherever they are found."""
    for owner in owners(root):
        gone = [k for k, child, data in children(owner) if data and isinstance(child, kind)]
        for key in reversed(gone):
            remove(owner, key)


def content(leaf: tp.Any) -> tp.Any:
    """A leaf as something whose `==` compares values; `sow` makes tuples of arrays in Variables."""
    if type(leaf) in (list, tuple):
        return type(leaf), [content(part) for part in leaf]
    if not is_array(leaf):
        return type(leaf), leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return "key", jax.random.key_data(leaf).tolist()
    kind = jax.dtypes.canonicalize_dtype(leaf.dtype)
    return kind, leaf.shape, np.asarray(leaf).tolist()


# The engine beside the model ----------------------------------------------------------------------


def same_pairs(found: tp.Iterable[tp.Any], expected: tp.Iterable[tp.Any]) -> bool:
    """Whether two lists of (path, leaf) have the same paths and the very same leaves."""
    found, expected = list(found), list(expected)
    return [p for p, _ in found] == [p for p, _ in expected] and all(
        x is y for (_, x), (_, y) in zip(found, expected, strict=True)
    )


def check_plan(root: tp.Any) -> None:
    """The engine's view of a graph, whose plan may be warm, is that of a copy that nobody has seen."""
    graphdef, state = nnx.split(root)
    assert graphdef == nnx.graphdef(copied(root))
    assert same_pairs(nnx.to_flat_state(state), leaves(root))


def check(root: tp.Any) -> None:
    """Every function sees a graph as it is now, whatever it was when a plan was made."""
    check_plan(root)
    expected, form = leaves(root), canonical(root)
    graphdef, state = nnx.split(root)
    assert nnx.graphdef(root) == graphdef
    assert same_pairs(nnx.to_flat_state(nnx.state(root)), expected)
    params = [(p, x) for p, x in expected if isinstance(x, nnx.Param)]
    assert same_pairs(nnx.to_flat_state(nnx.state(root, nnx.Param)), params)
    assert same_pairs(nnx.flatten(root)[1], expected)
    assert canonical(nnx.merge(graphdef, state)) == form
    assert canonical(nnx.clone(root)) == form
    nnx.update(root, nnx.state(root))
    assert canonical(root) == form
    for (path, x), (same_path, y) in zip(nnx.iter_graph(root), walk(root), strict=True):
        assert path == same_path and (x is y or spelled(x) == spelled(y))
    assert nnx.find_duplicates(root) == duplicates(root)
