"""What a checkpoint contains, read without the objects that were saved."""

from __future__ import annotations

import typing as tp
from collections.abc import Iterator, Mapping

from nnxlite.checkpoint import _orbax
from nnxlite.checkpoint._contents import below, name_of, other_names
from nnxlite.checkpoint._plain import rebuilt


class Values(Mapping[str, tp.Any]):
    """The items of a checkpoint, by name; the arrays of one are read when it is first asked for.

    Args:
        place: the folder.
        stored: its description.
        ready: items whose values are known.
    """

    def __init__(
        self, place: tp.Any, stored: _orbax.Stored, ready: tp.Mapping[str, tp.Any] = {}
    ) -> None:
        self._place = place
        self._stored = stored
        self._ready = dict(ready)
        self._names: dict[str, list[str]] = {}
        for name in [*(stored.table or ()), *stored.specs]:
            self._names.setdefault(_item(name), []).append(name)

    def __getitem__(self, name: str) -> tp.Any:
        if name not in self._ready:
            self._ready[name] = self._read(name, self._names[name])
        return self._ready[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._names, **self._ready})

    def __len__(self) -> int:
        return len({**self._names, **self._ready})

    def __repr__(self) -> str:
        shown = (f"{n!r}: {self._ready[n]!r}" if n in self._ready else f"{n!r}: ..." for n in self)
        return f"{{{', '.join(shown)}}}"

    def _read(self, item: str, names: list[str]) -> tp.Any:
        stored = self._stored
        shared = [first for alias, first in stored.aliases.items() if _item(alias) == item]
        names = [*names, *(name for name in stored.specs for first in shared if below(name, first))]
        wanted = dict.fromkeys(name for name in names if name in stored.specs)
        leaves = _orbax.read_arrays(self._place, stored, wanted)
        for name in wanted:
            for other in other_names(name, stored.aliases):
                if _item(other) == item:
                    leaves.setdefault(other, leaves[name])
        return rebuilt(name_of((item,)), stored.table or {}, lambda name: _tree(name, leaves))


def _item(name: str) -> str:
    """The item that a leaf belongs to; where keys of two types are alike, its name is quoted."""
    return _key(name.partition(".")[0].strip("'"))


def _tree(name: str, leaves: tp.Mapping[str, tp.Any]) -> tp.Any:
    """A leaf, or the leaves of an object in dictionaries by attribute."""
    if name in leaves:
        return leaves[name]
    tree: dict[str, tp.Any] = {}
    for full, leaf in leaves.items():
        if below(full, name):
            *path, last = (_key(part) for part in full[len(name) + 1 :].split("."))
            node = tree
            for key in path:
                node = node.setdefault(key, {})
            node[last] = leaf
    return tree


def _key(part: str) -> str:
    """A part of a name as the key that it was made of, see `name_of`."""
    for char in "/.%":
        part = part.replace(f"%{ord(char):02X}", char)
    return part
