"""Functions that walk trees level by level, and copy them with their sharing: `combine`, `tree_at`, ...

`tree_at` copies the tree with a mark in place of every leaf.  `where` is called with this copy, and the
parts that it returns are recognised by identity.  A second copy has the leaves again in place of the
marks, and the replacements.

Every None is the same object, so it cannot be recognised; and it cannot have a mark, because `where`
may check whether something is None.  If `where` returns a None, it is called a second time, with a mark
in place of every None.
"""

from __future__ import annotations

import collections.abc as cabc
import functools
import typing as tp

import jax
from jax.core import Tracer

from nnxlite._base.errors import path_text, short_type
from nnxlite._base.interning import Writes
from nnxlite._base.jax import flatten_one_level, is_pytree_leaf
from nnxlite.filtered._specs import IsLeaf, SpecKind, T, answers, is_array, leaves_of
from nnxlite.graph._defs import define_container, own_status
from nnxlite.graph._kinds import CONTAINERS, DATA_TYPES, Kind, Leaves, is_static_part, kind_of
from nnxlite.graph._rebuild import Path
from nnxlite.objects._pytree import Pytree
from nnxlite.variables._definition import MISSING
from nnxlite.variables._variable import Variable, make

__all__ = ["apply_updates", "combine", "filter_shard", "tree_at", "tree_check"]
__all__ += ["tree_flatten_one_level"]


def children(value: tp.Any, also: tuple[type, ...] = ()) -> list[tuple[Path, tp.Any]]:
    """The parts one level down, with their paths from there.

    Those of an object are its data attributes, and static ones of the types in `also`; the value of a
    Variable has the Variable's own path.
    """
    kind = kind_of(value)
    if kind == Kind.VARIABLE:
        return [((), value.get_raw_value())]
    if kind == Kind.OBJECT:
        status, attributes = value._nnx_status, value._nnx_dict.items()
        return [((n,), v) for n, v in attributes if status.get(n) or isinstance(v, also)]
    form, parts = _level(value)
    return [((name,), part) for name, part in zip(form.keys, parts)] if form else []


def _walked(
    tree: tp.Any, below: tp.Callable[[tp.Any], list[tuple[Path, tp.Any]]]
) -> tp.Iterator[tuple[Path, Path, tp.Any]]:
    """Every part of a tree, parents first: its path, the first path that it has, and the part."""
    first: dict[int, tuple[Path, tp.Any]] = {}  # which keeps the parts, so that no two have one id
    pending: list[tuple[Path, tp.Any]] = [((), tree)]
    while pending:
        path, value = pending.pop()
        known, _ = first.setdefault(id(value), (path, value))
        yield path, known, value
        if known is path:
            pending += [((*path, *step), child) for step, child in reversed(below(value))]


def _level(value: tp.Any) -> tuple[tp.Any, tp.Sequence[tp.Any]]:
    """The definition of a container and its children; None and nothing for all else."""
    kind = kind_of(value)
    return define_container(value, kind, Leaves.EVERY) if kind in CONTAINERS else (None, ())


def copied(
    what: str,
    trees: tuple[tp.Any, ...],
    leaf: tp.Callable[..., tp.Any],
    stops: tp.Callable[[tp.Any], bool] = lambda part: False,
    finish: tp.Callable[[tp.Any, tp.Any], None] = lambda lead, copy: None,
) -> tp.Any:
    """A copy of a tree with its sharing, in which leaves are replaced.

    Several trees may be walked together: of their parts at one path, None where a tree has none, the
    first that is not None (the lead) gives the form, and the static parts of objects. An object is
    filled after the containers around it, so a chain of objects may be of any length.

    Args:
        what: the function that copies, for messages.
        trees: the trees.
        leaf: gives the copy of a leaf, from whether it is in a container that an attribute of an object
            has, and what each tree has there.
        stops: whether a part is a leaf, and not walked into.
        finish: is called with each object and its copy, once that has its data.

    Raises ValueError naming the path where two trees differ in structure.
    """
    # By id: the lead, which so stays alive, and its copy.
    copies: dict[int, tuple[tp.Any, tp.Any]] = {}
    pending: list[tuple[Path, tuple[tp.Any, ...], tp.Any]] = []

    def copy_of(path: Path, lead: tp.Any, values: tuple[tp.Any, ...]) -> tp.Any:
        for value in values:
            if value is not None and type(value) is not type(lead):
                differ(what, path, lead, value)
        if isinstance(lead, Variable):
            raw = tuple(None if v is None else v.get_raw_value() for v in values)
            return make(lead._box.definition, part(path, raw, False))
        copy = lead.__copy__()
        pending.append((path, values, copy))
        return copy

    def part(path: Path, values: tuple[tp.Any, ...], in_container: bool) -> tp.Any:
        lead = first_given(*values)
        if lead is None or stops(lead):
            return leaf(in_container, *values)
        if kind_of(lead) in (Kind.OBJECT, Kind.VARIABLE):
            if id(lead) not in copies:
                copies[id(lead)] = lead, copy_of(path, lead, values)
            return copies[id(lead)][1]
        form, _ = _level(lead)
        levels = [(None, ()) if value is None else _level(value) for value in values]
        for value, (other, _) in zip(values, levels):
            if value is not None and getattr(other, "head", None) != getattr(form, "head", None):
                differ(what, path, lead, value)
        if form is None:
            return leaf(in_container, *values)
        below = zip(*[parts or [None] * len(form.keys) for _, parts in levels])
        new = [part((*path, name), parts, in_container) for name, parts in zip(form.keys, below)]
        return form.build(new)

    out = part((), trees, False)
    while pending:
        path, values, copy = pending.pop()
        lead = first_given(*values)
        for name, child in list(lead._nnx_dict.items()):
            if lead._nnx_status.get(name):
                parts = tuple(None if v is None else v._nnx_dict.get(name) for v in values)
                copy._nnx_dict[name] = part((*path, name), parts, kind_of(child) in CONTAINERS)
        finish(lead, copy)
    return out


def first_given(*values: tp.Any) -> tp.Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


def differ(what: str, path: Path, one: tp.Any, other: tp.Any) -> tp.NoReturn:
    """Raise ValueError for two parts of different structure."""

    def shown(value: tp.Any) -> str:
        form, parts = _level(value)
        inside = f" with {len(parts)} children {[*form.keys]}" if form else ""
        return f"{short_type(value)}{inside}"

    raise ValueError(
        f"{what}: the trees differ in structure at '{path_text(path)}': one has {shown(one)}, another "
        f"{shown(other)}."
    )


def combined(
    fun: tp.Callable[..., tp.Any],
    trees: tp.Sequence[tp.Any],
    what: str,
    stops: tp.Callable[[tp.Any], bool] = lambda part: False,
) -> tp.Any:
    """Trees joined leaf by leaf: `fun(*leaves)`, with None where a tree has no leaf.

    The first tree that is not None gives the form at each path, and the static parts of objects: their
    static attributes, and functions, text and other objects in their containers. `fun` decides about
    every leaf, also where all trees, or below a container all but one, are None.

    Raises ValueError naming the path where two trees differ in structure.
    """

    def leaf(in_container: bool, *values: tp.Any) -> tp.Any:
        lead = first_given(*values)
        is_fixed = in_container and lead is not None and is_static_part(lead)
        return lead if is_fixed and not stops(lead) else fun(*values)

    return copied(what, tuple(trees), leaf, stops)


def combine(*pytrees: T, is_leaf: IsLeaf | None = None) -> T:
    """One tree of several: at each leaf the first value that is not None.

    Args:
        pytrees: trees of one structure, up to None.
        is_leaf: parts for which it is true are leaves.

    Returns:
        A tree of the structure of the trees; graph objects in it are new.

    Raises:
        ValueError: for trees of different structure, naming the path; or for no trees.

    >>> import nnxlite as nnx
    >>> nnx.combine([None, 2, 3], [1, None, 4])
    [1, 2, 3]
    """
    if not pytrees:
        raise ValueError("combine needs at least one pytree.")
    return combined(first_given, pytrees, "combine", is_leaf or (lambda part: False))


def apply_updates(model: T, updates: tp.Any) -> T:
    """A tree with updates added; where an update is None the leaf is unchanged.

    Args:
        model: any pytree, or a graph object. It is not changed; the result has its sharing.
        updates: a tree of the same structure, up to None, as `filter_grad` and optax give them.

    Returns:
        A tree of the structure of `model`; graph objects in it are new.

    Raises:
        ValueError: for updates of another structure, naming the path, or an update of a None.

    >>> import nnxlite as nnx
    >>> nnx.apply_updates([1.0, "name"], [0.5, None])
    [1.5, 'name']
    """
    return combined(_add, (model, updates), "apply_updates")


def _add(value: tp.Any, update: tp.Any) -> tp.Any:
    if update is None:
        return value
    if value is None:
        raise ValueError(
            f"apply_updates: the update {short_type(update)} belongs to a None of the model, and would "
            "be dropped. Give None there."
        )
    return value + update


def tree_check(pytree: tp.Any) -> None:
    """Check that no container or pytree node appears twice in a tree.

    JAX would make two of it. Graph objects may be shared: the transforms of this library keep their
    sharing.

    Args:
        pytree: any pytree.

    Raises:
        ValueError: naming both paths of a node that appears twice, or that of one inside itself.

    >>> import nnxlite as nnx
    >>> nnx.tree_check({"a": [1], "b": [1]})
    """
    below = lambda value: [] if isinstance(value, Variable) else children(value)
    for path, first, value in _walked(pytree, below):
        # A leaf may be there twice, what is empty has no effect, and an object may be shared.
        if first is not path and kind_of(value) in CONTAINERS and children(value):
            raise ValueError(
                f"The {type(value).__name__} at '{path_text(first)}' appears again at "
                f"'{path_text(path)}'. Crossing a JAX transform makes two of it. Put a copy in one "
                "of the places, or use a graph object (nnx.List, nnx.Dict, a Module), which may be "
                "shared."
            )


def tree_flatten_one_level(pytree: tp.Any) -> tuple[list[tp.Any], tp.Any]:
    """The direct children of a pytree node, and how to put them together.

    A leaf is its own only child.

    Args:
        pytree: any pytree.

    Returns:
        `(children, treedef)`; `jax.tree.unflatten(treedef, children)` gives the node again.

    Raises:
        ValueError: for a node that is its own child.

    >>> import nnxlite as nnx
    >>> nnx.tree_flatten_one_level([1, [2, 3]])[0]
    [1, [2, 3]]
    """
    if pytree is None or is_pytree_leaf(pytree):
        return jax.tree_util.tree_flatten(pytree)
    pairs, treedef = flatten_one_level(pytree)
    if any(child is pytree for _, child in pairs):
        raise ValueError(f"The {type(pytree).__name__} contains itself: it is not a tree.")
    return [child for _, child in pairs], treedef


_SHARDINGS = (type(None), jax.Device, jax.sharding.Sharding, jax.sharding.PartitionSpec)
SHARDING = SpecKind(
    "device_or_shardings",
    lambda x: isinstance(x, _SHARDINGS),
    "shardings and devices, callables",
)


def filter_shard(x: T, device_or_shardings: tp.Any) -> T:
    """A tree with its arrays on a device, or sharded; other leaves are unchanged.

    Under `jit` it constrains the shardings. Graph objects in the result are new.

    Args:
        x: any pytree, or a graph object.
        device_or_shardings: a device or sharding, or a prefix of the tree with them; None leaves
            arrays where they are.

    Returns:
        A tree of the same structure and values.

    >>> import nnxlite as nnx, jax, jax.numpy as jnp
    >>> nnx.filter_shard((jnp.ones(2), "name"), jax.devices()[0])[1]
    'name'
    """
    tree = leaves_of(x)
    shardings = answers(tree, device_or_shardings, SHARDING)
    return tree.definition.build(list(map(_placed, tree.leaves, shardings)))


def _placed(leaf: tp.Any, sharding: tp.Any) -> tp.Any:
    if sharding is None or not is_array(leaf):
        return leaf
    if not isinstance(leaf, Tracer):
        return jax.device_put(leaf, sharding)
    if isinstance(sharding, jax.Device):
        sharding = jax.sharding.SingleDeviceSharding(sharding)
    return jax.lax.with_sharding_constraint(leaf, sharding)


# tree_at ------------------------------------------------------------------------------------------


class _Mark:
    """Stands for one leaf while `where` selects parts."""

    __slots__ = ("value",)

    def __init__(self, value: tp.Any) -> None:
        self.value = value

    def __getitem__(self, key: tp.Any) -> tp.Any:
        if key is ...:  # `variable[...]`
            return self
        raise TypeError(
            "tree_at: `where` must return parts of the tree; it looked inside a leaf "
            f"{short_type(self.value)} with [{key!r}]."
        )

    def __repr__(self) -> str:
        return f"<leaf {short_type(self.value)}>"


class _StaticMark(_Mark):
    """Stands for a function or text in a container, which is not a leaf."""

    __slots__ = ()


DATA_TYPES.add(_Mark)  # a leaf in containers as well, so that `where` may call jax.tree.leaves


class _Empty(tuple):
    """An empty tuple with an identity of its own."""

    __slots__ = ()


def _marked(tree: tp.Any, is_leaf: IsLeaf) -> tp.Any:
    """A copy of a tree with marks in place of its leaves."""

    def mark(in_container: bool, value: tp.Any) -> tp.Any:
        if is_leaf(value):
            return _Mark(value)
        if type(value) is tuple:
            return _Empty()
        if value is None:
            return None
        return _StaticMark(value) if in_container and is_static_part(value) else _Mark(value)

    def mark_static(lead: tp.Any, copy: tp.Any) -> None:
        for name, value in _static_attributes(lead):
            selectable = copy._nnx_frozen and name not in copy._nnx_declares()  # a function or text
            if selectable or (value is None and is_leaf(None)):
                copy._nnx_dict[name] = _Mark(value)

    stops = lambda lead: is_leaf(lead) or (type(lead) is tuple and not lead)
    return copied("tree_at", (tree,), mark, stops, mark_static)


def _static_attributes(lead: tp.Any) -> list[tuple[str, tp.Any]]:
    return [pair for pair in lead._nnx_dict.items() if not lead._nnx_status.get(pair[0])]


def _filled(marked: tp.Any, new: dict[int, tp.Callable[[tp.Any], tp.Any]]) -> tp.Any:
    """A copy of a marked tree with leaves again in place of its marks, and with some parts replaced.

    Args:
        marked: the tree.
        new: for each part to be replaced, by id, the function from the old part to the new.
    """
    replaced: dict[int, tp.Any] = {}

    def fill(in_container: bool, value: tp.Any) -> tp.Any:
        if id(value) in new:
            if id(value) not in replaced:
                replaced[id(value)] = new[id(value)](_filled(value, {}))
            return replaced[id(value)]
        if isinstance(value, _Mark):
            return value.value
        return () if type(value) is _Empty else value

    def fill_static(lead: tp.Any, copy: tp.Any) -> None:
        for name, old in lead._nnx_dict.items() if copy._nnx_frozen else ():
            was_leaf = isinstance(old, _Mark) and is_static_part(old.value)  # in a tree of labels
            if id(old) in new and lead._nnx_status.get(name) and not was_leaf:
                own_status(copy)[name] = copy._nnx_decided(name, copy._nnx_dict[name])[1]
        for name, mark in _static_attributes(lead):
            if not isinstance(mark, _Mark):
                continue
            value = copy._nnx_dict[name] = mark.value
            if id(mark) in new and (other := new[id(mark)](value)) is not value:
                writes = Writes()  # whether it is data or static is decided again
                Pytree._nnx_edit(copy, writes, {}, (name,))  # frozen or not: the copy is ours
                writes.make()
                Pytree._nnx_assign(copy, name, other)

    return copied("tree_at", (marked,), fill, lambda lead: id(lead) in new, fill_static)


def _at_path(tree: tp.Any, where: str | Path) -> tp.Any:
    """The part of a marked tree at a path; static attributes become marks."""
    value, path = tree, tp.cast(tp.Any, where)
    if isinstance(where, str):
        path = tuple([int(n) if n.lstrip("-").isdigit() else n for n in where.split(".")])
    for step, name in enumerate(path):
        parent: tp.Any = value
        if kind_of(parent) == Kind.OBJECT and name in parent._nnx_dict:
            value = parent._nnx_dict[name]
            if not parent._nnx_status.get(name) and not isinstance(value, _Mark):
                value = parent._nnx_dict[name] = _Mark(value)
            continue
        if isinstance(parent, Variable):
            parent = parent.get_raw_value()
        try:
            is_container = isinstance(parent, (list, tuple, dict))
            value = parent[name] if is_container else getattr(parent, tp.cast(str, name))
        except (AttributeError, KeyError, IndexError, TypeError):
            raise ValueError(
                f"tree_at: there is nothing at '{path_text(path)}': {type(parent).__name__} at "
                f"'{path_text(path[:step])}' has no {name!r}."
            ) from None
    return value


def _ids(tree: tp.Any) -> dict[int, Path]:
    """The path of every node and leaf of a marked tree, by identity."""
    below = functools.partial(children, also=(_Mark,))
    return {id(value): first for _, first, value in _walked(tree, below)}


def _find(where: tp.Any, marked: tp.Any) -> tuple[list[tp.Any], bool]:
    """The parts that `where` selects, and whether it selects one rather than a sequence."""
    if isinstance(where, (str, tuple)):
        return [_at_path(marked, where)], True
    if isinstance(where, list):
        return [_at_path(marked, path) for path in where], False
    selected = where(marked)
    if isinstance(selected, (list, tuple)) and id(selected) not in _ids(marked):
        return [*selected], False
    return [selected], True


def _parts(where: tp.Any, tree: tp.Any, is_leaf: IsLeaf) -> tuple[tp.Any, list[tp.Any], bool]:
    """The tree with marks, the parts of it that `where` selects, and whether that is one part."""
    marked = _marked(tree, is_leaf)
    parts, single = _find(where, marked)
    if any(part is None for part in parts):
        marked = _marked(tree, lambda x: x is None or is_leaf(x))
        nones, (parts, single) = [part is None for part in parts], _find(where, marked)
        if [isinstance(part, _Mark) and part.value is None for part in parts] != nones:
            raise ValueError(
                "tree_at: `where` returns a None, and it is unclear which one, as it asks whether "
                "parts are None. Pass is_leaf=lambda x: x is None, and give paths or parts without "
                "asking."
            )
    return marked, parts, single


def _check_parts(parts: list[tp.Any], marked: tp.Any) -> None:
    ids = _ids(marked)
    seen: set[int] = set()
    for part in parts:
        if id(part) not in ids:
            raise ValueError(
                f"tree_at: `where` does not return a part of the tree, but {part!r} of type "
                f"{type(part).__name__}. It must return nodes or leaves of its argument, not "
                "values computed from them. For a static attribute give its path instead, such as "
                "where='layers.0.rate'."
            )
        if id(part) in seen:
            raise ValueError(
                f"tree_at: `where` returns the part at '{path_text(ids[id(part)])}' twice; each "
                "part can be replaced once (a shared Variable or object is one part)."
            )
        seen.add(id(part))
    for part in parts:
        for inner, path in _ids(part).items():
            if inner != id(part) and inner in seen:
                outer = ids[id(part)]
                raise ValueError(
                    f"tree_at: the parts overlap: '{path_text((*outer, *path))}' lies inside "
                    f"'{path_text(outer)}'."
                )


def _replaced(value: tp.Any, replace_fn: tp.Any, old: tp.Any) -> tp.Any:
    """What replaces an old part; a value for a Variable becomes a Variable of the same kind."""
    of_variable = isinstance(old, Variable)
    if replace_fn is not MISSING:
        value = replace_fn(old.get_raw_value() if of_variable else old)
    keeps_kind = of_variable and value is not None and not isinstance(value, Variable)
    return make(old._box.definition, value) if keeps_kind else value


def tree_at(
    where: tp.Callable[[T], tp.Any] | str | tp.Sequence[tp.Any],
    pytree: T,
    replace: tp.Any = MISSING,
    replace_fn: tp.Callable[[tp.Any], tp.Any] = MISSING,
    is_leaf: IsLeaf | None = None,
) -> T:
    """A tree with some of its parts replaced; the tree itself is not changed.

    Graph objects in the result are new, with the types and the sharing of the old; a shared Variable
    is one part. Where a Variable is replaced by a value other than a Variable or None, it keeps its kind
    and metadata.

    Args:
        where: a function from the tree to one of its parts (a leaf or node of its argument) or a
            sequence of parts. Or a path: `"layers.0.kernel"` or `("layers", 0, "kernel")`, or a list
            of paths; paths can also name static attributes.
        pytree: any pytree, or a graph object.
        replace: the new part; a sequence with one for each part, where `where` returns several.
        replace_fn: instead of `replace`, a function from the old part to the new.
        is_leaf: parts for which it is true are leaves.

    Returns:
        A tree of the structure of `pytree`, except for the parts that were replaced.

    Raises:
        ValueError: unless exactly one of `replace` and `replace_fn` is given; where `where` returns
            something that is not a part of the tree, a part twice, or a part in another; where the
            numbers of parts and replacements differ; for a path that does not exist.

    >>> import nnxlite as nnx
    >>> nnx.tree_at(lambda t: t["a"][1], {"a": [1, 2], "b": 3}, replace=0)
    {'a': [1, 0], 'b': 3}
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.tree_at("bias", model, replace_fn=lambda b: b + 1).bias.value.tolist()
    [1.0, 1.0, 1.0]
    """
    if (replace is MISSING) == (replace_fn is MISSING):
        raise ValueError("tree_at needs exactly one of `replace` and `replace_fn`.")
    marked, parts, single = _parts(where, pytree, is_leaf or (lambda x: False))
    _check_parts(parts, marked)
    values: tp.Sequence[tp.Any] = [None] * len(parts)
    if replace_fn is MISSING:
        values = [replace] if single else _several(replace, len(parts))
    new = {id(p): functools.partial(_replaced, v, replace_fn) for p, v in zip(parts, values)}
    return _filled(marked, new)


def _several(replace: tp.Any, count: int) -> tp.Sequence[tp.Any]:
    sequence = isinstance(replace, cabc.Sequence) or (is_array(replace) and replace.ndim > 0)
    if not sequence or len(replace) != count:
        given = f"{len(replace)}" if sequence else short_type(replace)
        raise ValueError(
            f"tree_at: `where` returns a sequence of {count} parts, so `replace` must be a "
            f"sequence of the same length, got {given}."
        )
    return list(replace)
