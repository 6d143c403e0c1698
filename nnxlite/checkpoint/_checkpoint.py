"""`save`, `restore`, `info`: one checkpoint in one folder.

A checkpoint is written beside its path and takes the path when it is complete.  If the process ends in
between, `restore` and the next `save` find it there.
"""

from __future__ import annotations

import dataclasses
import typing as tp
from collections.abc import Iterator, Mapping
from urllib.parse import unquote

import jax
import numpy as np

from nnxlite._base.errors import short_type
from nnxlite._base.text import human_bytes
from nnxlite.checkpoint import _orbax
from nnxlite.checkpoint._contents import KINDS, Contents, below, name_of, other_names
from nnxlite.checkpoint._loading import Renaming, load
from nnxlite.checkpoint._report import CheckpointError, Report, printable, together
from nnxlite.filters import Filter
from nnxlite.graph._kinds import is_graph_node

__all__ = ["Info", "info", "restore", "save", "values"]

if tp.TYPE_CHECKING:
    from etils import epath


def save(path: tp.Any, /, *, only: Filter = ..., overwrite: bool = False, **items: tp.Any) -> None:
    """Write objects, arrays and numbers into a new checkpoint, a folder.

    What several items share is written once. Nothing of the objects' code is stored: to restore them,
    build them first.

    Args:
        path: of the folder, which must not exist.
        only: a filter for the leaves, with paths within the items; by default all are saved.
        overwrite: replace a checkpoint that is there, once the new one is complete.
        items: what is saved: modules, optimizers, metrics, `Rngs`, States or other pytrees, arrays,
            numbers, text, bytes, None, and dictionaries, lists and tuples of these, each under a name of
            its own. An item cannot be called `only` or `overwrite`.

    Raises:
        FileExistsError: if the path exists, and `overwrite` is false or it is not a checkpoint.
        nnxlite.checkpoint.CheckpointError: for a leaf that cannot be saved: traced, deleted, abstract,
            or of another type, such as a function or a set outside of an object; without items; and if
            it cannot be written, as on a full disk.
        ImportError: without Orbax (`pip install "nnxlite[checkpoint]"`).

    >>> import nnxlite as nnx, optax, tempfile
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    >>> folder = tempfile.mkdtemp() + "/latest"
    >>> nnx.checkpoint.save(folder, model=model, optimizer=optimizer, step=100)

    >>> model.kernel[...] = 0
    >>> report = nnx.checkpoint.restore(folder, model=model, optimizer=optimizer)
    >>> report.values["step"], bool((model.kernel != 0).any())
    (100, True)
    """
    check_options("nnx.checkpoint.save", only=only, overwrite=overwrite)
    target = _orbax.folder(path)
    first = jax.process_index() == 0
    with together(f"nnx.checkpoint.save: {target}"):
        contents = contents_of(items, only)
        if first:
            _make_room(target, overwrite)
    _orbax.write(_beside(target), _orbax.content_of(contents))
    with together(f"nnx.checkpoint.save: {target}"):
        if first:
            _settle(target)


def check_options(call: str, **options: tp.Any) -> None:
    """Refuse an option whose value is meant as an item: `overwrite=model`, `metrics=MultiMetric()`."""
    for name, value in options.items():
        good = value is None or isinstance(value, (bool, np.bool_))
        if name == "only":
            parts = value if isinstance(value, (list, tuple)) else [value]
            good = not any(isinstance(x, Mapping) or is_graph_node(x) for x in parts)
        elif isinstance(value, Mapping) and not is_graph_node(value):
            texts = all(isinstance(new, str) for new in value.values())
            numbers = all(np.size(number) == 1 for number in value.values())
            good = (name == "rename" and texts) or (name == "metrics" and numbers)
        if not good:
            way = (
                f'Restore such an item under another name: rename={{"{name}.**": "other.**"}}, other=...'
                if "restore" in call
                else f"Save an item under another name, such as `other_{name}=`."
            )
            raise CheckpointError(
                f"{call}: `{name}` is an option, and got {short_type(value)}. {way}"
            )


def _make_room(target: epath.Path, overwrite: bool) -> None:
    """Refuse a path that is taken."""
    _settle(target)
    if target.exists() and not overwrite:
        raise FileExistsError(
            f"{target} exists. Save elsewhere, or pass overwrite=True to replace it when the new "
            "checkpoint is complete."
        )
    if target.exists() and not is_checkpoint(target):
        raise FileExistsError(f"{target} is not a checkpoint, and is not overwritten.")


def _beside(target: epath.Path) -> epath.Path:
    """Where a checkpoint is written; there is one only if it is complete."""
    return target.parent / f".{target.name}.new"


def _settle(target: epath.Path) -> None:
    """Bring a complete checkpoint to its path, in the place of the one that is there."""
    if (new := _beside(target)).exists():
        if target.exists():
            target.rmtree()
        new.rename(target)


def locate(target: epath.Path) -> epath.Path:
    """The folder of a checkpoint: beside its path, if a process ended before it took the path."""
    new = _beside(target)
    return new if is_checkpoint(new) else target


def is_checkpoint(path: epath.Path) -> bool:
    """Whether there is a complete checkpoint at a path."""
    return (path / _orbax.ABOUT / "metadata").exists()


def contents_of(items: dict[str, tp.Any], only: Filter = ...) -> Contents:
    """The contents of named items; CheckpointError without any, and for what cannot be stored."""
    if not items:
        raise CheckpointError("Pass what is to be saved or restored by name: model=model, step=3.")
    return Contents(items, only, items=True)


def restore(
    path: tp.Any,
    /,
    *,
    only: Filter = ...,
    rename: Renaming | None = None,
    strict: bool = True,
    cast: bool | None = False,
    **items: tp.Any,
) -> Report:
    """Read a checkpoint into objects that exist, in place.

    Each array comes to the devices, and in the sharding, of the array that it replaces, whatever it was
    saved from; for an abstract model (`nnx.eval_shape(lambda: Model(...))`) as its shardings say. All is
    read before the first object is changed.

    Args:
        path: of the folder; also of a pytree that Orbax wrote without nnxlite, such as a State of Flax
            NNX, for a single item.
        only: a filter for the leaves of the items, with paths within the items; others are left alone.
        rename: patterns of stored names and what each becomes, `{"model.encoder.**": "model.body.**"}`:
            `*` is any text within one name, `**` any number of names, `{i}` one name.
        strict: whether leaves that are not stored, stored ones of the items that are not used, and
            leaves of other shapes are refused. If not, what matches is restored.
        cast: whether values may lose precision or range by a cast to the dtype that the object has.
            None: nothing is cast, and the object takes the dtypes that were saved. Without x64 JAX has
            no arrays of 64 bits: those are cast to 32 bits then, and listed under `cast` in the report,
            unless their values are outside of that range, which is an error.
        items: the objects, by the names they were saved by; a number, as in `step=0`, or another item
            that cannot be changed in place is in the `values` of the report, as are all items that are
            not passed. Plain data (None, text, bytes, dictionaries, lists and tuples of these and of
            numbers) comes back as it was saved, whatever is passed; dictionaries and lists in place.

    Returns:
        A `Report`: what was restored, renamed, cast, and, without `strict`, what was not restored.

    Raises:
        nnxlite.checkpoint.MismatchError: if the objects need something else than is stored; its `report`
            has every name.
        nnxlite.checkpoint.NotFoundError: if the folder has no checkpoint, with what it has instead.
        nnxlite.checkpoint.DamagedError: if files are missing or cut short.
        nnxlite.checkpoint.CheckpointError: for a renaming that matches nothing or one name twice.
        ImportError: without Orbax (`pip install "nnxlite[checkpoint]"`).

    The objects are unchanged after an error.

    >>> import nnxlite as nnx, tempfile
    >>> folder = tempfile.mkdtemp() + "/weights"
    >>> nnx.checkpoint.save(folder, model=nnx.Dict(old=nnx.Linear(2, 3, rngs=nnx.Rngs(0))))
    >>> model = nnx.Dict(new=nnx.Linear(2, 3, rngs=nnx.Rngs(1)))
    >>> report = nnx.checkpoint.restore(
    ...     folder, model=model, rename={"model.old.**": "model.new.**"}
    ... )
    >>> report.restored
    ('model.new.bias', 'model.new.kernel')
    """
    check_options("nnx.checkpoint.restore", only=only, rename=rename, strict=strict, cast=cast)
    place = locate(_orbax.folder(path))
    with together(f"nnx.checkpoint.restore: {place}"):
        contents = contents_of(dict(items), only)
        source = _orbax.Folder(place, items).with_keys(contents)
        new, report = load(source, contents, rename=rename, strict=strict, cast=cast, within=items)
    contents.write(new)
    return dataclasses.replace(report, values=Values(source, contents.root))


@dataclasses.dataclass(frozen=True, repr=False)
class Info:
    """The contents of a checkpoint, without its arrays.

    Attributes:
        path: of the folder.
        leaves: shape and dtype of each leaf, as text, by name.
        values: the numbers, texts and plain data, by name.
        aliases: further names of what is shared, with the names it is stored by.
        classes: the classes of objects and Variables, by name.
        nbytes: the size of the arrays.

    >>> from nnxlite.checkpoint import Info
    >>> Info("/runs/1", {"step": "Python int"}, {"step": 3}, {}, {}, 0)
    /runs/1: 1 leaves, 0 B
    step: 3
    """

    path: str
    leaves: dict[str, str]
    values: dict[str, tp.Any]
    aliases: dict[str, str]
    classes: dict[str, str]
    nbytes: int

    def __repr__(self) -> str:
        lines = [f"{self.path}: {len(self.leaves):,} leaves, {human_bytes(self.nbytes)}"]
        for item in _orbax.items_of(self.leaves):
            names = [name for name in self.leaves if name.partition(".")[0] == item]
            if names == [item]:
                lines.append(f"{item}: {self.values.get(item, self.leaves[item])!r}")
            else:
                kind = self.classes.get(item, "pytree")
                count = "1 leaf" if len(names) == 1 else f"{len(names):,} leaves"
                lines.append(f"{item}: {kind} with {count}")
        return "\n".join(map(printable, lines))


def info(path: tp.Any, /) -> Info:
    """The contents of a checkpoint: names, shapes and dtypes, numbers and classes.

    Args:
        path: of the folder.

    Returns:
        An `Info`, which prints as a summary.

    Raises:
        nnxlite.checkpoint.NotFoundError: if the folder has no checkpoint.
        nnxlite.checkpoint.DamagedError: if its description cannot be read.

    >>> import nnxlite as nnx, tempfile
    >>> folder = tempfile.mkdtemp() + "/weights"
    >>> nnx.checkpoint.save(folder, model=nnx.Linear(2, 3, rngs=nnx.Rngs(0)), step=7)
    >>> found = nnx.checkpoint.info(folder)
    >>> found.leaves["model.kernel"], found.values["step"], found.classes["model"]
    ('float32[2,3]', 7, 'Linear')
    """
    found = _orbax.Folder(locate(_orbax.folder(path)))
    return Info(
        str(found.path),
        {name: str(spec) for name, spec in found.specs.items()},
        found.values,
        found.aliases,
        found.classes,
        sum(spec.nbytes for spec in found.specs.values()),
    )


def values(path: tp.Any, /) -> tp.Mapping[str, tp.Any]:
    """The contents of a checkpoint, by item, without the objects that were saved.

    Args:
        path: of the folder.

    Returns:
        A mapping of the items. Plain data is as it was saved. Of a container around arrays there are
        lists, tuples and dictionaries, whose keys are text, with arrays of NumPy; of an object its
        arrays, in dictionaries by attribute. The arrays of an item are read when it is first asked for.

    Raises:
        nnxlite.checkpoint.NotFoundError: if the folder has no checkpoint.
        nnxlite.checkpoint.DamagedError: if it cannot be read.

    >>> import nnxlite as nnx, tempfile
    >>> folder = tempfile.mkdtemp() + "/weights"
    >>> settings = {"features": (2, 3), "seed": None}
    >>> nnx.checkpoint.save(folder, model=nnx.Linear(2, 3, rngs=nnx.Rngs(0)), settings=settings)
    >>> found = nnx.checkpoint.values(folder)
    >>> found["settings"], found["model"]["kernel"].shape
    ({'features': (2, 3), 'seed': None}, (2, 3))
    """
    return Values(_orbax.Folder(locate(_orbax.folder(path))))


class Values(Mapping[str, tp.Any]):
    """The items of a checkpoint, by name; the arrays of one are read when it is first asked for.

    Args:
        source: the folder.
        ready: items whose values are known.
    """

    def __init__(self, source: _orbax.Folder, ready: tp.Mapping[str, tp.Any] = {}) -> None:
        self._source = source
        self._ready = dict(ready)
        self._items = dict.fromkeys([*map(_item, source.specs), *ready])

    def __getitem__(self, name: str) -> tp.Any:
        if name not in self._ready and name in self._items:
            self._ready[name] = self._read(name)
        return self._ready[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        shown = (f"{n!r}: {self._ready[n]!r}" if n in self._ready else f"{n!r}: ..." for n in self)
        return f"{{{', '.join(shown)}}}"

    def _read(self, item: str) -> tp.Any:
        source = self._source
        names = ((n, other_names(n, source.aliases)) for n in source.specs)
        mine = {n: name for name, others in names for n in (name, *others) if _item(n) == item}
        read = source.open(dict.fromkeys(mine.values()))
        leaves = {n: read(name) for n, name in mine.items()}
        return _tree(name_of((item,)), leaves, source.classes)


def _item(name: str) -> str:
    """The item that a leaf belongs to; where keys of two types are alike, its name is quoted."""
    return unquote(name.partition(".")[0].strip("'"))


def _tree(name: str, leaves: tp.Mapping[str, tp.Any], classes: tp.Mapping[str, str]) -> tp.Any:
    """A leaf; or a container by key, and an object by attribute, as dictionaries, lists and tuples."""
    if name in leaves:
        return leaves[name]
    tree: dict[str, tp.Any] = {}
    for full, leaf in leaves.items():
        if below(full, name):
            *path, last = full[len(name) + 1 :].split(".")
            node = tree
            for key in path:
                node = node.setdefault(key, {})
            node[last] = leaf
    return _typed(tree, name, classes)


def _typed(tree: tp.Any, name: str, classes: tp.Mapping[str, str]) -> tp.Any:
    if not isinstance(tree, dict):
        return tree
    parts = {unquote(key): _typed(child, f"{name}.{key}", classes) for key, child in tree.items()}
    if (kind := classes.get(name)) in ("list", "tuple"):
        return KINDS[kind]([(i, parts.get(str(i))) for i in range(1 + max(map(int, parts)))])
    return parts
