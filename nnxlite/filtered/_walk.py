"""Walking trees level by level, and copying them with their sharing.

Recursion is written as generators and run by a loop, so that depth is not limited.
"""

from __future__ import annotations

import typing as tp

from nnxlite._errors import path_text, short_type
from nnxlite._jax import flatten_one_level, is_pytree_leaf, key_name
from nnxlite._state import sorted_keys
from nnxlite.graph import OBJECT, VARIABLE, Path, is_static_part, kind_of
from nnxlite.variables import make

Steps = tp.Generator["Steps", tp.Any, tp.Any]


def run_deep(steps: Steps) -> tp.Any:
    """Run a generator that yields generators for the calls it wants made; returns its result."""
    stack = [steps]
    value: tp.Any = None
    while stack:
        try:
            stack.append(stack[-1].send(value))
            value = None
        except StopIteration as stop:
            stack.pop()
            value = stop.value
    return value


def level(value: tp.Any) -> tuple[list[tuple[tp.Any, tp.Any]], tp.Any] | None:
    """The (name, child) pairs of an ordinary container and its treedef; None for a leaf."""
    if value is None or is_pytree_leaf(value):
        return None
    pairs, treedef = flatten_one_level(value)
    return [(key_name(key), child) for key, child in pairs], treedef


def children(value: tp.Any, also: tuple[type, ...] = ()) -> list[tuple[Path, tp.Any]]:
    """The parts one level down, with their paths from there.

    Those of an object are its data attributes, and static ones of the types in `also`; the value of a
    Variable has the Variable's own path.
    """
    kind = kind_of(value)
    if kind == VARIABLE:
        return [((), value.get_raw_value())]
    if kind == OBJECT:
        status, attributes = value._nnx_status, value._nnx_dict.items()
        return [((n,), v) for n, v in attributes if status.get(n) or isinstance(v, also)]
    found = level(value)
    return [((name,), child) for name, child in found[0]] if found else []


class _Keys(tp.NamedTuple):
    """The form of a dict, whose keys may be of several types, unlike for JAX."""

    keys: tuple[tp.Any, ...]

    def unflatten(self, children: tp.Iterable[tp.Any]) -> dict[tp.Any, tp.Any]:
        """The dict of its values."""
        return dict(zip(self.keys, children))


def _level(value: tp.Any) -> tuple[list[tuple[tp.Any, tp.Any]], tp.Any] | None:
    if type(value) is not dict:
        return level(value)
    keys = tuple(sorted_keys(value))
    return [(key, value[key]) for key in keys], _Keys(keys)


Values = tuple[tp.Any, ...]


def lead_of(values: Values) -> tp.Any:
    """The first value that is not None."""
    return next((v for v in values if v is not None), None)


class Copier:
    """Copies a tree, with its sharing; subclasses define the copies of its parts.

    Several trees may be walked together: `values` are their parts at one path, None where a tree has
    none.  The first that is not None, the lead, gives the form, and the static parts of objects.

    Args:
        what: the function that copies, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._copies: dict[int, tuple[tp.Any, tp.Any]] = {}
        """Of objects and Variables: by id, the lead (which so stays alive) and its copy."""

    def __call__(self, *trees: tp.Any) -> tp.Any:
        """The copy.

        Raises ValueError naming the path where two trees differ in structure.
        """
        return run_deep(self.part((), trees, False))

    def stops(self, lead: tp.Any) -> bool:
        """Whether a part is a leaf, and not walked into."""
        return False

    def leaf(self, path: Path, values: Values, in_container: bool) -> tp.Any:
        """The copy of a leaf.

        Args:
            path, values: of the leaf.
            in_container: whether it is in a container that an attribute of an object has.
        """
        raise NotImplementedError  # pragma: no cover - abstract

    def static(self, copy: tp.Any, name: str, value: tp.Any) -> None:
        """Called for each static attribute of a copied object."""

    def part(self, path: Path, values: Values, in_container: bool) -> Steps:
        """The copy of a part."""
        lead = lead_of(values)
        if lead is None or self.stops(lead):
            return self.leaf(path, values, in_container)
        kind = kind_of(lead)
        if kind in (OBJECT, VARIABLE):
            if id(lead) not in self._copies:
                for value in values:
                    if value is not None and type(value) is not type(lead):
                        self.differ(path, lead, value)
                yield (self._object if kind == OBJECT else self._variable)(path, lead, values)
            return self._copies[id(lead)][1]
        found = _level(lead)
        if found is None:
            return self.leaf(path, values, in_container)
        pairs, treedef = found
        others = [None if value is None else _level(value) for value in values]
        for value, other in zip(values, others):
            if value is not None and (other is None or other[1] != treedef):
                self.differ(path, lead, value)
        new = []
        for number, (name, _) in enumerate(pairs):
            below = tuple(None if other is None else other[0][number][1] for other in others)
            new.append((yield self.part((*path, name), below, in_container)))
        return treedef.unflatten(new)

    def _variable(self, path: Path, lead: tp.Any, values: Values) -> Steps:
        raw = tuple(None if v is None else v.get_raw_value() for v in values)
        copy = make(lead._box.definition, (yield self.part(path, raw, False)))
        self._copies[id(lead)] = lead, copy

    def _object(self, path: Path, lead: tp.Any, values: Values) -> Steps:
        copy = lead.__copy__()
        self._copies[id(lead)] = lead, copy
        for name, child in list(copy._nnx_dict.items()):
            if lead._nnx_status.get(name):
                parts = tuple(None if v is None else v._nnx_dict.get(name) for v in values)
                is_container = (
                    kind_of(child) not in (OBJECT, VARIABLE) and _level(child) is not None
                )
                new = yield self.part((*path, name), parts, is_container)
                copy._nnx_dict[name] = new
            else:
                self.static(copy, name, child)

    def differ(self, path: Path, one: tp.Any, other: tp.Any) -> tp.NoReturn:
        """Raise ValueError for two parts of different structure."""

        def shown(value: tp.Any) -> str:
            found = None if kind_of(value) in (OBJECT, VARIABLE) else _level(value)
            names = [] if found is None else [name for name, _ in found[0]]
            return short_type(value) + (f" with {len(names)} children {names}" if found else "")

        raise ValueError(
            f"{self._what}: the trees differ in structure at '{path_text(path)}': one has "
            f"{shown(one)}, another {shown(other)}."
        )


class _Combiner(Copier):
    """Joins trees leaf by leaf."""

    def __init__(
        self,
        fun: tp.Callable[..., tp.Any],
        what: str,
        is_leaf: tp.Callable[[tp.Any], bool] | None = None,
    ) -> None:
        super().__init__(what)
        self._fun, self._is_leaf = fun, is_leaf

    def stops(self, lead: tp.Any) -> bool:
        return self._is_leaf is not None and self._is_leaf(lead)

    def leaf(self, path: Path, values: Values, in_container: bool) -> tp.Any:
        lead = lead_of(values)
        if lead is None or self.stops(lead):
            return self._fun(*values)
        if in_container and is_static_part(lead):
            return lead
        for value in values:
            if kind_of(value) in (OBJECT, VARIABLE) or _level(value) is not None:
                self.differ(path, lead, value)
        return self._fun(*values)


def combined(
    fun: tp.Callable[..., tp.Any],
    trees: tp.Sequence[tp.Any],
    what: str,
    is_leaf: tp.Callable[[tp.Any], bool] | None = None,
) -> tp.Any:
    """Trees joined leaf by leaf: `fun(*leaves)`, with None where a tree has no leaf.

    The first tree that is not None gives the form at each path, and the static parts of objects: their
    static attributes, and functions, text and other objects in their containers. `fun` decides about
    every leaf, also where all trees, or below a container all but one, are None.

    Raises ValueError naming the path where two trees differ in structure.
    """
    return _Combiner(fun, what, is_leaf)(*trees)
