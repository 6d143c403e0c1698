"""Arrays and their description in the folders of Orbax: writing, and reading a part.

A folder has two items.  `arrays` is a flat dictionary of arrays by name, which Orbax can also read by
itself; `nnxlite` is JSON that describes them and the objects they come from: shapes and dtypes,
numbers and texts themselves, aliases, classes and static settings as text.  Reading executes nothing.

Orbax writes into a folder of another name and renames it when it is complete.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import typing as tp

import jax
import numpy as np

from nnxlite._base.errors import importing
from nnxlite._base.jax import key_name
from nnxlite.checkpoint._contents import FIXED, Contents, Spec, Table, name_of
from nnxlite.checkpoint._report import CheckpointError, DamagedError, NotFoundError, together
from nnxlite.checkpoint._safetensors import PICKLES
from nnxlite.distributed import agreed, exchange

ARRAYS, ABOUT = "arrays", "nnxlite"
FORMAT = 3
"""Formats 1 and 2, which are read as well, have a checksum for each array."""

if tp.TYPE_CHECKING:
    import orbax.checkpoint as ocp
    from etils import epath


def orbax() -> tp.Any:
    """The package `orbax.checkpoint`; ImportError with the remedy where it is not installed."""
    with importing('Checkpoints need Orbax: pip install "nnxlite[checkpoint]".', name="orbax"):
        import orbax.checkpoint
    return orbax.checkpoint


def folder(path: tp.Any) -> epath.Path:
    """A path, absolute."""
    orbax()
    from etils import epath

    return epath.Path(path).expanduser().resolve()


@dataclasses.dataclass(frozen=True)
class Stored:
    """The description of a checkpoint.

    Attributes:
        specs: shape and dtype of each leaf, by name.
        values: numbers and texts, by name.
        aliases, settings, classes: see `Contents`.
        table: of the containers of plain data; None for one of an earlier version.
        arrays: all of them, of a tree that Orbax wrote without nnxlite.
    """

    specs: dict[str, Spec]
    values: dict[str, tp.Any]
    aliases: dict[str, str]
    settings: dict[str, str]
    classes: dict[str, str]
    table: Table | None = None
    arrays: dict[str, tp.Any] | None = None

    def as_json(self) -> dict[str, tp.Any]:
        """The description as JSON has it."""
        leaves: dict[str, tp.Any] = {}
        for name, spec in self.specs.items():
            leaves[name] = {"dtype": spec.dtype, "shape": list(spec.shape)}
            if name in self.values:
                leaves[name]["value"] = _as_json(self.values[name], spec)
        return {
            "format": FORMAT,
            "leaves": leaves,
            "aliases": self.aliases,
            "settings": self.settings,
            "classes": self.classes,
            "containers": self.table or {},
        }

    @classmethod
    def from_json(cls, given: tp.Any, where: tp.Any) -> Stored:
        """What was stored; CheckpointError for a later format, DamagedError for anything else."""
        try:
            if given["format"] > FORMAT:
                raise CheckpointError(
                    f"{where} was written by a later version of nnxlite (format {given['format']}; "
                    f"this version reads {FORMAT}). Upgrade nnxlite."
                )
            leaves = given["leaves"].items()
            specs = {name: Spec(tuple(entry["shape"]), entry["dtype"]) for name, entry in leaves}
            values = {
                name: _of_json(entry["value"], specs[name])
                for name, entry in leaves
                if specs[name].is_python
            }
            table = given.get("containers")
            if table is not None:
                table = {name: (kind, children) for name, (kind, children) in table.items()}
            texts = (given[name] for name in ("aliases", "settings", "classes"))
            return cls(specs, values, *texts, table=table)
        except CheckpointError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedError(
                f"{where}: {ABOUT}/metadata is damaged ({type(error).__name__}: {error})."
            ) from error


def _as_json(value: tp.Any, spec: Spec) -> tp.Any:
    """A value of Python as JSON has it."""
    if spec.dtype in FIXED:
        return None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return [value.real, value.imag] if isinstance(value, complex) else value


def _of_json(value: tp.Any, spec: Spec) -> tp.Any:
    """The inverse of `_as_json`."""
    match spec.dtype:
        case "Python bytes":
            return base64.b64decode(value)
        case "Python complex":
            return complex(*value)
        case _:
            return spec.as_python(value)


class Content(tp.NamedTuple):
    """What is to be saved: arrays by name, and JSON that describes them."""

    arrays: dict[str, tp.Any]
    about: dict[str, tp.Any]

    def as_arguments(self) -> ocp.args.Composite:
        """The same for a manager of Orbax."""
        args = orbax().args
        items = {ABOUT: args.JsonSave(self.about)}
        if self.arrays:  # Orbax refuses an empty item
            items[ARRAYS] = args.PyTreeSave(self.arrays)
        return args.Composite(**items)


def content_of(contents: Contents) -> Content:
    """What is to be saved of the chosen leaves; all processes agree that it can be."""
    leaves = contents.chosen
    arrays: dict[str, tp.Any] = {}
    several = jax.process_count() > 1
    mine: list[str] = []  # arrays of which each process has a copy of its own
    with together("nnx.checkpoint: what is to be saved"):
        for name, leaf in leaves.items():
            if isinstance(leaf.value, jax.ShapeDtypeStruct):
                raise CheckpointError(f"'{name}' is abstract: it has no value to save.")
            if leaf.spec.is_python or 0 in leaf.spec.shape:
                continue
            value = jax.random.key_data(leaf.value) if leaf.spec.key_impl else leaf.value
            if isinstance(value, jax.Array) and not value.addressable_shards:
                raise CheckpointError(
                    f"'{name}' has no shard on this process; a checkpoint needs arrays of which each "
                    "process has a part. Build its mesh from jax.devices()."
                )
            if not isinstance(value, jax.Array) or value.is_fully_addressable:
                mine.append(name)
            elif value.is_fully_replicated:
                value = np.asarray(value.addressable_data(0))
            arrays[name] = value if isinstance(value, jax.Array) else np.asarray(value)
    stored = Stored(
        {name: leaf.spec for name, leaf in leaves.items()},
        {name: leaf.value for name, leaf in leaves.items() if leaf.spec.is_python},
        contents.aliases,
        contents.settings(),
        contents.classes(),
        contents.table(leaves),
    )
    if several:
        check_same_in_all(stored, {name: arrays[name] for name in mine})
    return Content(arrays, stored.as_json())


def check_same_in_all(stored: Stored, mine: tp.Mapping[str, tp.Any]) -> None:
    """Raise CheckpointError where the processes have different things to save; they exchange one hash.

    Args:
        stored: the description of what this process saves.
        mine: arrays that are on no mesh of all processes, so that each has a copy of its own.
    """
    parts = {
        name: f"{spec} {stored.values[name]!r}" if name in stored.values else str(spec)
        for name, spec in stored.specs.items()
    }
    for name, array in mine.items():
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parts[name] += f" of hash {hashlib.sha256(content.data).hexdigest()[:16]}"
    whole = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    hashes = exchange("nnx.checkpoint: what is saved", whole)
    other = next((index for index, text in enumerate(hashes) if text != hashes[0]), None)
    if other is None:
        return
    told = json.dumps(parts if jax.process_index() in (0, other) else {})
    tables = exchange("nnx.checkpoint: what differs", told)
    first, theirs = json.loads(tables[0]), json.loads(tables[other])
    name = next(n for n in sorted({*first, *theirs}) if first.get(n) != theirs.get(n))
    raise CheckpointError(
        f"'{name}' is on no mesh of all processes, and differs: in process 0 it is "
        f"{first.get(name, 'not saved')}, in process {other} {theirs.get(name, 'not saved')}. A "
        "checkpoint has one value for all. Save the same objects in each process, made with the same "
        "seed and of data that goes over all; put them on the mesh, or leave them out by `only=`."
    )


def write(path: epath.Path, content: Content) -> None:
    """Save into a new folder, which is there when it is complete; CheckpointError if it cannot be.

    Of several processes each writes its part of the arrays, and the first one all else. What one
    cannot do, all report: they agree after each step, and inside a step none waits for another.
    """
    unfinished = path.parent / f"{path.name}.orbax-checkpoint-tmp"
    first = jax.process_index() == 0
    # Orbax refuses an empty tree.
    args = orbax().args.PyTreeSave(content.arrays) if content.arrays else None
    try:
        with contextlib.closing(orbax().PyTreeCheckpointHandler()) as handler:
            with together(f"nnx.checkpoint: making {unfinished}"):
                if first and unfinished.exists():
                    unfinished.rmtree()  # of a process that was ended
                if first:
                    (unfinished / ABOUT).mkdir(parents=True)
                    if args is not None:
                        (unfinished / ARRAYS).mkdir()
            with together(f"nnx.checkpoint: writing {path}"):
                if args is not None:
                    handler.save(unfinished / ARRAYS, args=args)
            with together(f"nnx.checkpoint: completing {path}"):
                if first and args is not None:
                    handler.finalize(unfinished / ARRAYS)
                if first:
                    (unfinished / ABOUT / "metadata").write_text(json.dumps(content.about))
                    unfinished.rename(path)
    except Exception as error:
        if first and unfinished.exists():
            unfinished.rmtree()
        raise not_written(path.parent, error) from error


def registry() -> tp.Any:
    """Handlers for Orbax's manager that write in the background, and fail in all processes or in none.

    With those of Orbax (0.12), a process whose disk is full raises, the others time out, and the next
    save waits in a collective operation without an end.
    """
    ocp = orbax()
    handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
    args = ocp.args
    for item, base, save, restore in (
        (ARRAYS, ocp.PyTreeCheckpointHandler, args.PyTreeSave, args.PyTreeRestore),
        (ABOUT, ocp.JsonCheckpointHandler, args.JsonSave, args.JsonRestore),
    ):

        class Agreeing(base):
            async def async_save(
                self, directory: tp.Any, *args: tp.Any, **kwargs: tp.Any
            ) -> tp.Any:
                return [_Together(await super().async_save(directory, *args, **kwargs) or [])]

        handler = Agreeing()
        handlers.add(item, save, handler)
        handlers.add(item, restore, handler)
    return handlers


class _Together:
    """What is being written in the background; done when it is in all processes."""

    def __init__(self, futures: tp.Sequence[tp.Any]) -> None:
        self.futures = futures

    def result(self, timeout: float | None = None) -> None:
        with agreed("nnx.checkpoint.Manager: writing in the background"):
            for future in self.futures:
                future.result(timeout)

    def cancel(self) -> None:
        for future in self.futures:
            future.cancel()


def not_written(folder: epath.Path, error: Exception) -> CheckpointError:
    """The error for a checkpoint that could not be written."""
    return CheckpointError(
        f"The checkpoint could not be written into {folder}, and those that are there are as they were. "
        f"{type(error).__name__}: {str(error).splitlines()[0][:500]}"
    )


def complete_steps(path: epath.Path) -> list[int]:
    """The steps in the folder of a manager whose checkpoints are complete, in ascending order."""
    return sorted(found.step for found in orbax().path.step.standard_name_format().find_all(path))


def _json(path: epath.Path) -> tp.Any:
    return json.loads(path.read_text())


def read_stored(path: epath.Path, items: tp.Collection[str] = ()) -> Stored:
    """The description of the checkpoint in a folder.

    Args:
        path: of the folder.
        items: the requested names; a tree that Orbax wrote without nnxlite can be only one item.

    Raises:
        NotFoundError: if there is none; the message says what is there instead.
        DamagedError: where it cannot be read.
    """
    about = path / ABOUT / "metadata"
    if not about.exists():
        if (path / "_METADATA").exists():
            return _stored_tree(path, items)
        raise NotFoundError(f"No checkpoint at {path}: {_what_is(path)}.")
    try:
        given = _json(about)
    except (ValueError, OSError) as error:
        raise DamagedError(f"{path}: {ABOUT}/metadata is damaged: {error}.") from error
    return Stored.from_json(given, path)


def _stored_tree(path: epath.Path, items: tp.Collection[str]) -> Stored:
    """A pytree that Orbax wrote without nnxlite, such as a State of Flax, all of which is read."""
    if len(items) > 1:
        raise CheckpointError(
            f"{path} was written by Orbax without nnxlite.checkpoint, as one tree: restore one item of "
            f"it, not {', '.join(items)}."
        )
    ocp = orbax()
    try:
        with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
            as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
            whole = jax.tree.map(lambda _: as_numpy, handler.metadata(path).tree)
            tree = handler.restore(path, args=ocp.args.PyTreeRestore(restore_args=whole))
    except Exception as error:
        raise DamagedError(f"{path}/_METADATA cannot be read: {error}") from error
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    arrays = {tuple(map(key_name, keys)): leaf for keys, leaf in pairs if hasattr(leaf, "shape")}
    boxed = all(keys[-1] in ("value", "raw_value") for keys in arrays)  # Variables of Flax
    named = {name_of([*items, *keys[: -1 if boxed else None]]): x for keys, x in arrays.items()}
    specs = {name: Spec(x.shape, x.dtype.name) for name, x in named.items()}
    return Stored(specs, {}, {}, {}, {}, arrays=named)


def _what_is(path: epath.Path) -> str:
    """What a path that has no checkpoint has, in words."""
    if not path.exists():
        near = [p.name for p in path.parent.iterdir()] if path.parent.exists() else []
        unfinished = [n for n in near if n.startswith(f".{path.name}.")]
        if unfinished:
            return f"saving it was interrupted, and only the unfinished {unfinished[0]} is there"
        return "the folder does not exist"
    if not path.is_dir():
        return f"it is a file, not a folder; nnx.load_safetensors reads files of safetensors. {PICKLES}"
    names = sorted(p.name for p in path.iterdir())
    if steps := [name for name in names if name.isdecimal()]:
        shown = ", ".join(sorted(steps, key=int)[-3:])
        return f"it is a folder of several (steps {shown}): open it with nnx.checkpoint.Manager"
    return f"the folder contains {', '.join(names[:5])}" if names else "the folder is empty"


def read_arrays(
    path: epath.Path, stored: Stored, wanted: tp.Mapping[str, tp.Any]
) -> dict[str, tp.Any]:
    """Some of the arrays, in the dtypes that they were stored in.

    Args:
        path: of the checkpoint.
        stored: its description.
        wanted: stored names, each with a sharding, or None for a NumPy array.

    Raises DamagedError naming an array that cannot be read, or is not what the description says.
    """
    ocp = orbax()
    args: dict[str, tp.Any] = {}
    several = jax.process_count() > 1
    for name, sharding in wanted.items():
        spec = stored.specs[name]
        if spec.is_python or 0 in spec.shape:
            continue
        whole = sharding is None or (several and sharding.is_fully_addressable)
        if whole or spec.key_impl or jax.dtypes.canonicalize_dtype(spec.dtype) != spec.dtype:
            args[name] = ocp.RestoreArgs(restore_type=np.ndarray)
        else:
            args[name] = ocp.ArrayRestoreArgs(sharding=sharding, global_shape=spec.shape)
    arrays = dict(stored.arrays or {})
    if args and stored.arrays is None:
        item = dict.fromkeys(args, 0)
        try:
            # Not by a Checkpointer: it would wait for other processes, which may have failed.
            with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
                partial = ocp.args.PyTreeRestore(item, restore_args=args, partial_restore=True)
                arrays = handler.restore(path / ARRAYS, args=partial)
        except Exception as error:  # of TensorStore, JSON, Orbax
            raise DamagedError(
                f"{path} is damaged or cannot be read: {str(error).splitlines()[0][:300]}"
            ) from error
    return {name: _checked(path, name, stored, arrays) for name in wanted}


def _checked(path: epath.Path, name: str, stored: Stored, arrays: dict[str, tp.Any]) -> tp.Any:
    """One leaf as it was stored; DamagedError where it is not what the description says."""
    spec = stored.specs[name]
    if spec.is_python:
        return stored.values[name]
    if 0 in spec.shape:
        return np.zeros(spec.shape, jax.numpy.dtype(spec.dtype))
    array = arrays.get(name)
    if not hasattr(array, "dtype"):  # Orbax leaves what it was given where it found nothing
        array = None
    form = (spec.shape, jax.numpy.dtype(spec.dtype)) if not spec.key_impl else None
    if array is None or (form and (array.shape, array.dtype) != form):
        got = "" if array is None else f" ({array.dtype}{list(array.shape)}, saved as {spec})"
        raise DamagedError(f"{path} is damaged: '{name}' is not what was saved{got}.")
    if spec.key_impl and array.dtype == np.uint32:
        return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=spec.key_impl)
    return array
