"""`diff`: how objects differ from what a checkpoint has of them."""

from __future__ import annotations

import typing as tp

from nnxlite._text import Atom
from nnxlite.checkpoint import _orbax
from nnxlite.checkpoint._checkpoint import contents_of, items_of, locate
from nnxlite.checkpoint._contents import Contents, Leaf, Spec
from nnxlite.graph import Difference, Path
from nnxlite.inspect import Diff, array_difference


def diff(path: tp.Any, /, **items: tp.Any) -> Diff:
    """How objects differ from what was saved of them: classes, settings, sharing, shapes, values.

    Settings are compared as text, since nothing but text is stored of them.

    Args:
        path: of a checkpoint.
        items: the objects, by the names they were saved by.

    Returns:
        A `Diff`, from the checkpoint to the objects, as `nnx.diff` gives.

    Raises:
        nnxlite.checkpoint.NotFoundError: if there is no checkpoint.
        nnxlite.checkpoint.DamagedError: if it cannot be read.

    >>> import nnxlite as nnx, tempfile
    >>> folder = tempfile.mkdtemp() + "/weights"
    >>> layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    >>> nnx.checkpoint.save(folder, layer=layer)
    >>> layer.rate = 0.1
    >>> nnx.checkpoint.diff(folder, layer=layer)
    layer.rate: 0.5 became 0.1
    """
    place = locate(_orbax.folder(path))
    stored = _orbax.read_stored(place)
    now = contents_of(dict(items))
    of_items = {n: s for n, s in stored.specs.items() if items_of([n])[0] in items}
    both = {name for name in of_items if name in now.leaves}
    arrays = _orbax.read_arrays(place, stored, dict.fromkeys(both), verify=False)
    classes, settings, aliases = (
        {name: text for name, text in table.items() if items_of([name])[0] in items}
        for table in (stored.classes, stored.settings, stored.aliases)
    )
    found: list[Difference] = []
    for differences in (
        _texts("shared", aliases, now.aliases),
        _one_sided(
            {**of_items, **classes, **aliases}, {**now.leaves, **now.classes(), **now.aliases}
        ),
        _texts("retyped", classes, now.classes()),
        _texts("setting", settings, now.settings()),
        (d for name in both for d in _values(name, arrays[name], now)),
    ):  # nothing is said of what is below a difference
        above = {".".join(map(str, difference.path)) for difference in found}
        found += [d for d in differences if not _starts(d.path, above)]
    return Diff(tuple(sorted(found, key=lambda difference: difference.path)))


def _starts(path: Path, names: set[str]) -> bool:
    """Whether a path, or one above it, is among some names."""
    return any(".".join(map(str, path[:i])) in names for i in range(1, len(path) + 1))


def _path(name: str) -> tuple[str, ...]:
    return tuple(name.split("."))


def _one_sided(
    before: tp.Mapping[str, tp.Any], after: tp.Mapping[str, tp.Any]
) -> tp.Iterator[Difference]:
    """What only one side has, without what is below it."""
    removed, added = before.keys() - after.keys(), after.keys() - before.keys()
    for name in removed:
        if not _starts(_path(name)[:-1], removed):
            yield Difference(_path(name), "removed", Atom(_what(before[name])))
    for name in added:
        if not _starts(_path(name)[:-1], added):
            yield Difference(_path(name), "added", None, Atom(_what(after[name])))


def _what(entry: Leaf | Spec | str) -> str:
    return str(entry.spec if isinstance(entry, Leaf) else entry)


def _texts(
    kind: str, before: tp.Mapping[str, str], after: tp.Mapping[str, str]
) -> tp.Iterator[Difference]:
    """What is another text on the other side; of classes, what both sides have."""
    form: tp.Callable[[str], tp.Any] = _path if kind == "shared" else Atom
    for name in before.keys() | after.keys():
        old, new = before.get(name), after.get(name)
        if old != new and (kind != "retyped" or (old and new)):
            yield Difference(_path(name), kind, old and form(old), new and form(new))


def _values(name: str, old: tp.Any, now: Contents) -> tp.Iterator[Difference]:
    leaf = now.leaves[name]
    if leaf.spec.is_python or not hasattr(old, "dtype"):
        if type(old) is not type(leaf.value) or old != leaf.value:
            yield Difference(_path(name), "value", old, leaf.value)
    else:
        yield from array_difference(_path(name), old, leaf.value)
