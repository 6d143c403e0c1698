"""`save`, `restore`, `info`: one checkpoint in one folder.

A checkpoint is written beside its path and takes the path when it is complete.  If the process ends in
between, `restore` and the next `save` find it there.
"""

from __future__ import annotations

import dataclasses
import typing as tp
from collections.abc import Mapping
from urllib.parse import unquote

import jax
import numpy as np

from nnxlite._base.errors import short_type
from nnxlite.checkpoint import _orbax
from nnxlite.checkpoint._contents import Contents
from nnxlite.checkpoint._loading import Renaming, load
from nnxlite.checkpoint._orbax import Info
from nnxlite.checkpoint._report import CheckpointError, Report, together
from nnxlite.filters import Filter
from nnxlite.graph._kinds import is_graph_node

__all__ = ["Info", "info", "restore", "save"]

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
        contents = Contents(items, only)
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
        elif name in ("rename", "metrics") and isinstance(value, Mapping):
            good = all(
                isinstance(x, str) if name == "rename" else np.size(x) == 1 for x in value.values()
            )
        if not good or is_graph_node(value):
            raise CheckpointError(
                f"{call}: `{name}` is an option, and got {short_type(value)}. Save an item under "
                f'another name; restore it under one by rename={{"{name}.**": "other.**"}}.'
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
            None: nothing is cast, and the object takes the dtypes that were saved; arrays of 64 bits,
            which JAX does not have without x64, are refused, as are numbers where an array of another
            kind is.
        items: the objects, by the names they were saved by; one that cannot be changed in place, such as
            a frozen module, is in the `values` of the report. So is plain data (None, numbers, text,
            bytes, dictionaries, lists and tuples of these), passed or not: it comes back as it was
            saved; dictionaries and lists that are passed are changed in place.

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
        contents = Contents(items, only)
        source = Info(place, items)
        new, report = load(source, contents, rename=rename, strict=strict, cast=cast)
    contents.write(new)
    values = {unquote(name): value for name, value in source.values.items() if "." not in name}
    return dataclasses.replace(report, values={**values, **contents.root})


def info(path: tp.Any, /) -> Info:
    """The contents of a checkpoint: names, shapes and dtypes, numbers, plain data and classes.

    Its arrays are the item `arrays` for Orbax's own functions, a flat dictionary by name.

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
    >>> found.nbytes
    36
    """
    return Info(locate(_orbax.folder(path)))
