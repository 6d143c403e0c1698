"""What JAX sees of an object: its data attributes are the children, its definition is the treedef's.

A function, text or other object in a container is static there, as it is in an attribute: JAX gets a
`Held` in its place, a node without leaves.  Numbers are leaves.  What a container has in the place of a
leaf once JAX has built the object is a leaf all the same, whatever it is: a tree of labels, shardings or
specs has the structure of its model.  Such an object notes the paths of these leaves.

JAX walks a pytree without end where an object is in a circle, and can crash; on some versions of Python
an exception at depth n takes n levels of recursion from the process.  So an object is searched for
circles before its first level is given away.

Laws: `unflatten(flatten(x))` has the structure and the values of x; the leaves are those that `filtered`
sees, but for shared ones, which are leaves at each path.
"""

from __future__ import annotations

import typing as tp

import jax

from nnxlite._base.errors import path_text
from nnxlite._base.interning import ByShared
from nnxlite._base.jax import trace_state
from nnxlite._base.statics import facts
from nnxlite._base.versions import observe
from nnxlite.graph._defs import ContainerDef, ObjectDef, definition
from nnxlite.graph._kinds import (
    CONTAINERS,
    DATA_KINDS,
    OBJECT,
    STATE,
    VARIABLE,
    GraphNode,
    build_container,
    flatten_container,
    is_static_part,
    items_of,
    kind_by_type,
    kind_of,
)
from nnxlite.graph._rebuild import Path, new_shell

_OPENED = CONTAINERS - {STATE}
_TO_BE_SEEN = _OPENED | {None}  # with the classes of unknown kind
_WHOLE = DATA_KINDS | {STATE}


class Held:
    """A static value in a container, as JAX sees it: a node without leaves.

    Attributes:
        value: the value.
    """

    __slots__ = ("value",)

    def __init__(self, value: tp.Any) -> None:
        self.value = value

    def __eq__(self, other: tp.Any) -> bool:
        if type(other) is not Held:
            return False
        return self.value is other.value or [facts(self.value).key] == [facts(other.value).key]

    def __hash__(self) -> int:
        return hash(facts(self.value).key)

    def __repr__(self) -> str:
        return f"Held({self.value!r})"


jax.tree_util.register_pytree_node(Held, lambda held: ((), held), lambda held, _: held)


KeyedChildren: tp.TypeAlias = list[tuple[tp.Any, tp.Any]]


def register(cls: type[tp.Any]) -> None:
    """Make a class of objects a JAX pytree, whose children are the data attributes."""

    kinds = kind_by_type

    def flatten(node: tp.Any) -> tuple[tuple[tp.Any, ...], ObjectDef | ByShared]:
        found = node._nnx_def
        if found is None or node._nnx_searched != node._nnx_version:
            refuse_circles(node)
        if found is None or found.mutable:
            found = definition(node)
        return _children(node, found), found if found.public is None else ByShared(found)

    def flatten_with_keys(node: tp.Any) -> tuple[KeyedChildren, ObjectDef | ByShared]:
        children, found = flatten(node)
        names = definition(node).layout.data
        return [(cls._nnx_key(name), child) for name, child in zip(names, children)], found

    def unflatten(found: tp.Any, children: tp.Iterable[tp.Any]) -> tp.Any:
        if type(found) is ByShared:
            found = tp.cast(ObjectDef, found.item)
        new = new_shell(cls, found, trace_state.value, 0)
        children = tuple(children)
        attributes = found.fresh_template()
        attributes.update(zip(found.layout.data, children))
        _set_dict(new, attributes)
        if not _OPENED.isdisjoint(map(kinds.get, map(type, children))):
            _release(new)
        return new

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


_set_dict = GraphNode.__dict__["__dict__"].__set__
_set_leaves = GraphNode.__dict__["_nnx_leaves"].__set__
_set_searched = GraphNode.__dict__["_nnx_searched"].__set__


def keyed_children(
    node: tp.Any, also: tp.Callable[[tp.Any], bool] = lambda value: False
) -> KeyedChildren:
    """The children of an object with JAX's keys for them; the object may be in a circle.

    Args:
        node: the object.
        also: which static fields of a frozen module are among them.
    """
    found, key = definition(node), type(node)._nnx_key
    pairs = [(key(n), v) for n, v in zip(found.layout.data, _children(node, found))]
    fields = found.layout.static if node._nnx_frozen else ()
    return pairs + [(key(n), v) for n in fields if also(v := node._nnx_dict[n])]


def _children(node: tp.Any, found: ObjectDef) -> tuple[tp.Any, ...]:
    """The data attributes of an object, with `Held` in the place of static values in containers."""
    values = found.layout.data_values(node._nnx_dict)
    for value in values:
        if kind_by_type.get(type(value)) in _TO_BE_SEEN:
            break
    else:
        return values
    leaves = getattr(node, "_nnx_leaves", ())

    def held(path: Path, child: tp.Any) -> tp.Any:
        return child if path in leaves else Held(child)

    return tuple([_with_statics(held, v, (name,)) for name, v in zip(found.layout.data, values)])


def _with_statics(change: tp.Callable[[Path, tp.Any], tp.Any], value: tp.Any, path: Path) -> tp.Any:
    """A container with other static parts and `Held`, at any depth; the same one without any.

    `change(path, part)` returns what takes the place of one.
    """
    kind = kind_of(value)
    if kind not in _OPENED:
        return value
    keys, children, treedef = flatten_container(value, kind)
    for child in children:
        if kind_by_type.get(type(child)) not in _WHOLE:
            break
    else:
        return value
    new = [
        change((*path, key), child)
        if type(child) is Held or is_static_part(child)
        else _with_statics(change, child, (*path, key))
        for key, child in zip(keys, children)
    ]
    if all(x is y for x, y in zip(new, children)):
        return value
    return build_container(ContainerDef(kind, type(value), keys, treedef), new)


def _release(node: tp.Any) -> None:
    """Put values in the place of `Held` in containers of an object, and note leaves that look static."""
    odd: list[Path] = []

    def released(path: Path, part: tp.Any) -> tp.Any:
        if type(part) is Held:
            return part.value
        odd.append(path)
        return part

    attributes = node._nnx_dict
    for name in node._nnx_def.layout.data:
        attributes[name] = _with_statics(released, attributes[name], (name,))
    if odd:
        _set_leaves(node, frozenset(odd))


# Circles --------------------------------------------------------------------------------------------


def refuse_circles(root: tp.Any) -> None:
    """Raise ValueError where an object leads back to itself, or to another one below it.

    All that it leads to is searched, as one edit below can close a circle through what has not changed;
    and then not again before its structure changes.
    """
    found = root._nnx_def
    if found is not None and root._nnx_searched == root._nnx_version:
        return
    names: list[tp.Any] = []
    opened: dict[int, int] = {id(root): 0}  # with the number of names that lead there
    done: dict[int, tuple[tp.Any, int]] = {}
    stack = [(root, observe(root), iter(_below(root)))]
    while stack:
        value, version, rest = stack[-1]
        for name, child in rest:
            if id(child) in done:
                continue
            if id(child) in opened:
                raise _circle(root, child, [*names, name], opened[id(child)])
            names.append(name)
            opened[id(child)] = len(names)
            number = observe(child) if kind_of(child) == OBJECT else 0
            stack.append((child, number, iter(_below(child))))
            break
        else:
            stack.pop()
            names[len(stack) - 1 :] = []
            del opened[id(value)]
            done[id(value)] = value, version
    for value, version in done.values():
        if version:
            _set_searched(value, version)


def _below(value: tp.Any) -> list[tuple[tp.Any, tp.Any]]:
    """The children of an object, a Variable or a container that can lead to an object, by name."""
    kind = kind_of(value)
    if kind == OBJECT:
        attributes = value._nnx_dict
        pairs = [(name, attributes[name]) for name in definition(value).layout.data]
    elif kind == VARIABLE:
        pairs = [("value", value._box.value)]
    else:
        pairs = items_of(value, kind)
    return [pair for pair in pairs if kind_of(pair[1]) in _LEAD_ON]


_LEAD_ON = _OPENED | {OBJECT, VARIABLE}


def _circle(root: tp.Any, value: tp.Any, names: list[tp.Any], start: int) -> ValueError:
    cls = type(root).__name__
    first = f"at '{path_text(names[:start])}' " if start else ""
    return ValueError(
        f"{cls} is in a circle, so JAX cannot take it as a pytree: '{path_text(names)}' of it is the "
        f"{type(value).__name__} {first}again, and jax.tree, jax.jit and the like would follow it "
        "without end. Use the transforms of nnx (nnx.jit, nnx.grad), which visit an object once, or "
        f"give JAX the state: graphdef, state = nnx.split({cls.lower()})."
    )
