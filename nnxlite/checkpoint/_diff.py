"""`diff`: how objects, or another checkpoint, differ from what a checkpoint has."""

from __future__ import annotations

import dataclasses
import typing as tp

from nnxlite._base.text import Atom
from nnxlite.checkpoint import _orbax
from nnxlite.checkpoint._checkpoint import contents_of, items_of, locate
from nnxlite.checkpoint._contents import Spec
from nnxlite.checkpoint._errors import CheckpointError
from nnxlite.graph._compare import Difference
from nnxlite.graph._rebuild import Path
from nnxlite.inspect import Diff, array_difference

T = tp.TypeVar("T")
Table: tp.TypeAlias = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Side:
    """What is compared: leaves, classes, settings and aliases by name, and how values are read."""

    specs: dict[str, Spec]
    classes: Table
    settings: Table
    aliases: Table
    read: tp.Callable[[tp.Iterable[str]], tp.Mapping[str, tp.Any]]


def diff(path: tp.Any, other: tp.Any = None, /, **items: tp.Any) -> Diff:
    """How objects, or another checkpoint, differ from a checkpoint: settings, sharing, shapes, values.

    Settings are compared as text, since nothing but text is stored of them.

    Args:
        path: of a checkpoint.
        other: of another checkpoint, in place of objects.
        items: the objects, by the names they were saved by.

    Returns:
        A `Diff`, from the checkpoint to the objects, or to the other one, as `nnx.diff` gives.

    Raises:
        nnxlite.checkpoint.NotFoundError: if there is no checkpoint.
        nnxlite.checkpoint.DamagedError: if it cannot be read.
        nnxlite.checkpoint.CheckpointError: if both another path and objects are given, or none.

    >>> import nnxlite as nnx, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    >>> nnx.checkpoint.save(folder + "/before", layer=layer)
    >>> layer.rate = 0.1
    >>> nnx.checkpoint.diff(folder + "/before", layer=layer)
    layer.rate: 0.5 became 0.1
    >>> nnx.checkpoint.save(folder + "/after", layer=layer)
    >>> nnx.checkpoint.diff(folder + "/before", folder + "/after")
    layer.rate: 0.5 became 0.1
    """
    if other is not None and items:
        raise CheckpointError("diff: pass the path of another checkpoint, or objects, not both.")
    before = _of_path(path, items)
    after = _of_objects(items) if other is None else _of_path(other, {})
    both = [name for name in before.specs if name in after.specs]
    old, new = before.read(both), after.read(both)
    found: list[Difference] = []
    for differences in (
        _texts("shared", before.aliases, after.aliases),
        _one_sided(_everything(before), _everything(after)),
        _texts("retyped", before.classes, after.classes),
        _texts("setting", before.settings, after.settings),
        (d for name in both for d in _values(name, old[name], new[name])),
    ):  # what is below a difference is not reported
        above = {".".join(map(str, difference.path)) for difference in found}
        found += [d for d in differences if not _starts(d.path, above)]
    return Diff(tuple(sorted(found, key=lambda difference: difference.path)))


def _of_path(path: tp.Any, items: tp.Container[str]) -> Side:
    """A checkpoint; without items, all of it."""
    place = locate(_orbax.folder(path))
    stored = _orbax.read_stored(place)

    def within(table: dict[str, T]) -> dict[str, T]:
        return {n: entry for n, entry in table.items() if not items or items_of([n])[0] in items}

    return Side(
        within(stored.specs),
        within(stored.classes),
        within(stored.settings),
        within(stored.aliases),
        lambda names: _orbax.read_arrays(place, stored, dict.fromkeys(names), verify=False),
    )


def _of_objects(items: dict[str, tp.Any]) -> Side:
    now = contents_of(items)
    specs = {name: leaf.spec for name, leaf in now.leaves.items()}
    read = lambda names: {name: now.leaves[name].value for name in names}
    return Side(specs, now.classes(), now.settings(), now.aliases, read)


def _everything(side: Side) -> Table:
    """What each name is: a class, or for an array outside a Variable its shape and dtype."""
    return {**{n: str(spec) for n, spec in side.specs.items()}, **side.classes, **side.aliases}


def _path(name: str) -> tuple[str, ...]:
    return tuple(name.split("."))


def _starts(path: Path, names: tp.Container[str]) -> bool:
    """Whether a path, or one above it, is among some names."""
    return any(".".join(map(str, path[:i])) in names for i in range(1, len(path) + 1))


def _one_sided(before: Table, after: Table) -> tp.Iterator[Difference]:
    """What only one side has, without what is below it."""
    removed, added = before.keys() - after.keys(), after.keys() - before.keys()
    for name in removed:
        if not _starts(_path(name)[:-1], removed):
            yield Difference(_path(name), "removed", Atom(before[name]))
    for name in added:
        if not _starts(_path(name)[:-1], added):
            yield Difference(_path(name), "added", None, Atom(after[name]))


def _texts(kind: str, before: Table, after: Table) -> tp.Iterator[Difference]:
    """What is another text on the other side; of classes, what both sides have."""
    form: tp.Callable[[str], tp.Any] = _path if kind == "shared" else Atom
    for name in before.keys() | after.keys():
        old, new = before.get(name), after.get(name)
        if {old, new} == {None, "None"}:
            continue  # an earlier version says nothing of attributes that are None
        if old != new and (kind != "retyped" or (old and new)):
            yield Difference(_path(name), kind, old and form(old), new and form(new))


def _values(name: str, old: tp.Any, new: tp.Any) -> tp.Iterator[Difference]:
    if hasattr(old, "dtype") and hasattr(new, "dtype"):
        yield from array_difference(_path(name), old, new)
    elif type(old) is not type(new) or old != new:
        yield Difference(_path(name), "value", old, new)
