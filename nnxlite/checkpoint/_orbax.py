"""Arrays and their description in the folders of Orbax: writing, and reading a part.

A folder has two items.  `arrays` is a flat dictionary of arrays by name, which Orbax can also read by
itself; `nnxlite` is JSON that describes them and the objects they come from: shapes and dtypes,
numbers and texts themselves, aliases and classes.  Reading executes nothing.

Orbax writes into a folder of another name and renames it when it is complete.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import json
import typing as tp
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from nnxlite._base.errors import importing
from nnxlite._base.jax import key_name
from nnxlite.checkpoint._contents import FIXED, Contents, Spec, name_of
from nnxlite.checkpoint._loading import Source
from nnxlite.checkpoint._report import CheckpointError, DamagedError, NotFoundError, together
from nnxlite.checkpoint._safetensors import PICKLES
from nnxlite.distributed import exchange

ARRAYS, ABOUT, UNFINISHED = "arrays", "nnxlite", ".orbax-checkpoint-tmp"
FORMAT = 3
"""Formats 1 and 2 have a checksum for each array, which is not read, and 1 has no plain data."""

if tp.TYPE_CHECKING:
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


# Writing ------------------------------------------------------------------------------------------


class Content(tp.NamedTuple):
    """What is to be saved: arrays by name, and JSON by the name of its file."""

    arrays: dict[str, tp.Any]
    texts: dict[str, tp.Any]


def content_of(contents: Contents) -> Content:
    """What is to be saved of the chosen leaves; all processes agree that it can be."""
    arrays: dict[str, tp.Any] = {}
    leaves: dict[str, tp.Any] = {}
    same: dict[str, str] = {}  # what each process describes alike
    mine: list[str] = []  # arrays of which each process has a copy of its own
    with together("nnx.checkpoint: what is to be saved"):
        for name, leaf in contents.chosen.items():
            value, spec = leaf.value, leaf.spec
            leaves[name] = {"dtype": spec.dtype, "shape": list(spec.shape)}
            same[name] = str(spec)
            if isinstance(value, jax.ShapeDtypeStruct):
                raise CheckpointError(f"'{name}' is abstract: it has no value to save.")
            if spec.is_python:
                leaves[name]["value"] = _as_json(value, spec)
                same[name] += f" {value!r}"
            if spec.is_python or 0 in spec.shape:
                continue
            value = jax.random.key_data(value) if spec.key_impl else value
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
    about = {
        "format": FORMAT,
        "leaves": leaves,
        "aliases": contents.aliases,
        "settings": {},  # of format 3 at first
        "classes": contents.classes(),
        "containers": contents.table(),
    }
    if jax.process_count() > 1:
        check_same_in_all(same, {name: arrays[name] for name in mine})
    return Content(arrays, {f"{ABOUT}/metadata": about})


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


def check_same_in_all(parts: dict[str, str], mine: tp.Mapping[str, tp.Any]) -> None:
    """Raise CheckpointError where the processes have different things to save; they exchange one hash.

    Args:
        parts: a description of each leaf that this process saves, by name.
        mine: arrays that are on no mesh of all processes, so that each has a copy of its own.
    """
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


def begin(path: epath.Path, content: Content) -> Callable[[], None]:
    """Start to write a new folder, which is there when it is complete.

    Arrays have been copied when this returns: the objects may change, and donate them.

    Of several processes each writes its part of the arrays, and the first one all else. What one
    cannot do, all report: they agree after each step, and inside a step none waits for another.

    Returns:
        A function that waits, and completes the folder; it may run in another thread.

    Both raise CheckpointError if it cannot be written; then nothing of it is left.
    """
    unfinished = path.parent / f"{path.name}{UNFINISHED}"
    first = jax.process_index() == 0
    handler = orbax().PyTreeCheckpointHandler()
    futures: list[tp.Any] = []

    @contextlib.contextmanager
    def agreeing(what: str) -> Iterator[None]:
        try:
            with together(f"nnx.checkpoint: {what} {path}"):
                yield
        except Exception as error:
            handler.close()
            if first and unfinished.exists():
                unfinished.rmtree()
            raise not_written(path.parent, error) from error

    with agreeing("making"):
        if first and unfinished.exists():
            unfinished.rmtree()  # of a process that was ended
        if first:
            for name in (ABOUT, ARRAYS):
                (unfinished / name).mkdir(parents=True)
    with agreeing("copying"):
        if content.arrays:  # Orbax refuses an empty tree
            args = orbax().args.PyTreeSave(content.arrays)
            saving = handler.async_save(unfinished / ARRAYS, args=args)
            with ThreadPoolExecutor(1) as thread:  # the caller's may have an event loop of its own
                futures += thread.submit(asyncio.run, saving).result() or ()

    def complete() -> None:
        with agreeing("writing"):
            for future in futures:
                future.result()
        with agreeing("completing"):
            if first and content.arrays:
                handler.finalize(unfinished / ARRAYS)
            if first:
                for name, text in content.texts.items():
                    (unfinished / name).parent.mkdir(exist_ok=True)
                    (unfinished / name).write_text(json.dumps(text))
                unfinished.rename(path)
        handler.close()

    return complete


def not_written(folder: epath.Path, error: Exception) -> CheckpointError:
    """The error for a checkpoint that could not be written."""
    return CheckpointError(
        f"The checkpoint could not be written into {folder}, and those that are there are as they were. "
        f"{type(error).__name__}: {str(error).splitlines()[0][:500]}"
    )


# Reading ------------------------------------------------------------------------------------------


def complete_steps(path: epath.Path) -> list[int]:
    """The steps in the folder of a manager whose checkpoints are complete, in ascending order."""
    return sorted(int(found.name) for found in path.iterdir() if found.name.isdecimal())


@dataclasses.dataclass
class Folder(Source):
    """A checkpoint: what a folder contains, without its arrays, which `open` reads.

    Attributes:
        path: of the folder.
        values: numbers and texts, by name.
        classes: see `Contents`.
        is_foreign: whether Orbax wrote it without nnxlite.
    """

    path: epath.Path = dataclasses.field(kw_only=True)
    values: tp.Mapping[str, tp.Any] = dataclasses.field(default_factory=dict)
    classes: tp.Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_foreign: bool = False

    def with_keys(self, contents: Contents) -> tp.Self:
        """The same, with random keys in place of their data, which Orbax does not tell apart."""
        for name in self.specs if self.is_foreign else ():
            leaf, data = contents.leaves.get(name), self.specs[name]
            form = leaf.spec.shape if leaf is not None and leaf.spec.key_impl else None
            if leaf is not None and data.dtype == "uint32" and data.shape[:-1] == form:
                self.specs[name] = leaf.spec
        return self


def read_folder(path: epath.Path, items: tp.Collection[str] = ()) -> Folder:
    """The checkpoint in a folder.

    Args:
        path: of the folder.
        items: the requested names; a tree that Orbax wrote without nnxlite can be only one item.

    Raises:
        NotFoundError: if there is none; the message says what is there instead.
        DamagedError: where it cannot be read.
        CheckpointError: for a later format.
    """
    about = path / ABOUT / "metadata"
    try:
        if about.exists():
            return _described(path, json.loads(about.read_text()))
    except CheckpointError:
        raise
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(
            f"{path}: {ABOUT}/metadata is damaged ({type(error).__name__}: {error})."
        ) from error
    if not (path / "_METADATA").exists():
        raise NotFoundError(f"No checkpoint at {path}: {_what_is(path)}.")
    arrays = _read_tree(path, items)
    specs = {name: Spec(x.shape, x.dtype.name) for name, x in arrays.items()}
    reads = lambda wanted: arrays.__getitem__
    return Folder(_text(path, specs), specs, reads, path=path, is_foreign=True)


def _text(path: epath.Path, names: tp.Iterable[str]) -> str:
    return f"The checkpoint {path} (of {', '.join(items_of(names))})"


def _described(path: epath.Path, about: tp.Any) -> Folder:
    """The folder that a description, which `content_of` made, is of."""
    if about["format"] > FORMAT:
        raise CheckpointError(
            f"{path} was written by a later version of nnxlite (format {about['format']}; "
            f"this version reads {FORMAT}). Upgrade nnxlite."
        )
    leaves = about["leaves"]
    specs = {name: Spec(tuple(entry["shape"]), entry["dtype"]) for name, entry in leaves.items()}
    python = {name: spec for name, spec in specs.items() if spec.is_python}
    values = {name: _of_json(leaves[name]["value"], spec) for name, spec in python.items()}

    def read(wanted: tp.Mapping[str, tp.Any]) -> Callable[[str], tp.Any]:
        arrays = _read_arrays(path, specs, wanted)
        return lambda n: values[n] if n in values else _checked(path, n, specs[n], arrays.get(n))

    known = {"aliases": about["aliases"], "table": about.get("containers", {})}
    known |= {"values": values, "classes": about["classes"]}
    return Folder(_text(path, specs), specs, read, path=path, **known)


def _read_arrays(
    path: epath.Path, specs: dict[str, Spec], wanted: tp.Mapping[str, tp.Any]
) -> dict[str, tp.Any]:
    """Some of the arrays, in the dtypes that they were stored in.

    Args:
        path: of the checkpoint.
        specs: what each is.
        wanted: their names, each with a sharding, or None for a NumPy array.
    """
    ocp = orbax()
    args: dict[str, tp.Any] = {}
    several = jax.process_count() > 1
    for name, sharding in wanted.items():
        spec = specs[name]
        if spec.is_python or 0 in spec.shape:
            continue
        whole = sharding is None or (several and sharding.is_fully_addressable)
        if whole or spec.key_impl or jax.dtypes.canonicalize_dtype(spec.dtype) != spec.dtype:
            args[name] = ocp.RestoreArgs(restore_type=np.ndarray)
        else:
            args[name] = ocp.ArrayRestoreArgs(sharding=sharding, global_shape=spec.shape)
    if not args:
        return {}
    item = dict.fromkeys(args, 0)
    partial = ocp.args.PyTreeRestore(item, restore_args=args, partial_restore=True)
    return _read(path, path / ARRAYS, lambda _: partial)


def _checked(path: epath.Path, name: str, spec: Spec, array: tp.Any) -> tp.Any:
    """An array that was read; DamagedError where it is not what the description says."""
    dtype, shape = spec.raw
    if 0 in spec.shape:
        array = np.zeros(shape, dtype)
    if not hasattr(array, "dtype"):  # Orbax leaves what it was given where it found nothing
        raise DamagedError(f"{path} is damaged: '{name}' is not what was saved.")
    if (array.dtype, array.shape) != (dtype, shape):
        got = f"{array.dtype}{list(array.shape)}, saved as {spec}"
        raise DamagedError(f"{path} is damaged: '{name}' is not what was saved ({got}).")
    if spec.key_impl:
        return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=spec.key_impl)
    return array


def _read(path: epath.Path, item: epath.Path, args: Callable[[tp.Any], tp.Any]) -> tp.Any:
    """The tree of arrays in a folder of Orbax; DamagedError for whatever TensorStore or Orbax says.

    Not by a Checkpointer: it would wait for other processes, which may have failed.

    Args:
        path: of the checkpoint.
        item: the folder.
        args: what to read, made with the handler that reads.
    """
    try:
        with contextlib.closing(orbax().PyTreeCheckpointHandler()) as handler:
            return handler.restore(item, args=args(handler))
    except Exception as error:
        raise DamagedError(
            f"{path} is damaged or cannot be read: {str(error).splitlines()[0][:300]}"
        ) from error


def _read_tree(path: epath.Path, items: tp.Collection[str]) -> dict[str, tp.Any]:
    """The arrays of a pytree that Orbax wrote without nnxlite, such as a State of Flax, by name."""
    if len(items) > 1:
        raise CheckpointError(
            f"{path} was written by Orbax without nnxlite.checkpoint, as one tree: restore one item of "
            f"it, not {', '.join(items)}."
        )
    as_numpy = orbax().RestoreArgs(restore_type=np.ndarray)

    def whole(handler: tp.Any) -> tp.Any:
        args = jax.tree.map(lambda _: as_numpy, handler.metadata(path).tree)
        return orbax().args.PyTreeRestore(restore_args=args)

    pairs = jax.tree_util.tree_leaves_with_path(_read(path, path, whole))
    arrays = {tuple(map(key_name, keys)): leaf for keys, leaf in pairs if hasattr(leaf, "shape")}
    boxed = all(keys[-1] in ("value", "raw_value") for keys in arrays)  # Variables of Flax
    return {name_of([*items, *keys[: -1 if boxed else None]]): x for keys, x in arrays.items()}


def items_of(names: tp.Iterable[str]) -> list[str]:
    """The first parts of names."""
    return list(dict.fromkeys(name.partition(".")[0] for name in names))


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
    if steps := complete_steps(path):
        shown = ", ".join(map(str, steps[-3:]))
        return f"it is a folder of several (steps {shown}): open it with nnx.checkpoint.Manager"
    return f"the folder contains {', '.join(names[:5])}" if names else "the folder is empty"
