"""Arrays and their description in the folders of Orbax: writing, and reading a part.

A folder has two items.  `arrays` is a flat dictionary of arrays by name, which Orbax alone can read,
too; `nnxlite` is JSON that describes them and the objects they come from: shapes, dtypes and checksums,
numbers and texts themselves, aliases, classes and static settings as text.  Reading executes nothing.

Orbax writes into a folder of another name and renames it when it is complete.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import glob
import json
import os
import re
import typing as tp
import zlib

import jax
import numpy as np

from nnxlite._base.errors import importing
from nnxlite._base.jax import key_name
from nnxlite.checkpoint._checksums import checksum, local_sum
from nnxlite.checkpoint._contents import PYTHON_TYPES, Contents, Leaf, Spec, name_of
from nnxlite.checkpoint._errors import CheckpointError, DamagedError, NotFoundError, together
from nnxlite.checkpoint._files import looks_like, raw_form
from nnxlite.checkpoint._plain import FIXED, Table, checked_table
from nnxlite.checkpoint.untrusted import LARGEST, is_file, parse_json, read_json, shape_of, strings
from nnxlite.distributed import agreed, exchange

ARRAYS, ABOUT = "arrays", "nnxlite"
UNFINISHED = ".orbax-checkpoint-tmp"
FORMATS = (1, 2)
"""2 where there is a leaf that only plain data has, which earlier versions do not read."""

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
        checksums: CRC-32 of the arrays that one process had as a whole.
        sums: of arrays that were spread over several processes, see `_checksums`.
        values: numbers and texts, by name.
        aliases, settings, classes: see `Contents`.
        table: of the containers of plain data; None for one of an earlier version.
        keys: where Orbax has each array, for a tree that it wrote without nnxlite.
    """

    specs: dict[str, Spec]
    checksums: dict[str, int]
    values: dict[str, tp.Any]
    aliases: dict[str, str]
    settings: dict[str, str]
    classes: dict[str, str]
    sums: dict[str, int] = dataclasses.field(default_factory=dict)
    table: Table | None = None
    keys: dict[str, tuple[tp.Any, ...]] | None = None

    def as_json(self) -> dict[str, tp.Any]:
        """The description as JSON has it."""
        leaves: dict[str, tp.Any] = {}
        for name, spec in self.specs.items():
            leaves[name] = {"dtype": spec.dtype, "shape": list(spec.shape)}
            if name in self.checksums:
                leaves[name]["crc32"] = self.checksums[name]
            if name in self.sums:
                leaves[name]["sum64"] = self.sums[name]
            if name in self.values:
                value = self.values[name]
                leaves[name]["value"] = _as_json(value, spec)
        about = {
            "format": FORMATS[any(spec.is_plain for spec in self.specs.values())],
            "leaves": leaves,
            "aliases": self.aliases,
            "settings": self.settings,
            "classes": self.classes,
            "containers": self.table or {},
        }
        return sealed(about)

    @classmethod
    def from_json(cls, given: tp.Any, where: tp.Any) -> Stored:
        """What was stored; CheckpointError for a later format, DamagedError for anything else.

        Nothing but what `as_json` writes is accepted: of each leaf a shape, the name of a dtype that
        JAX has, and a checksum, or a value of one of the types in `PYTHON_TYPES`.
        """
        try:
            if type(given["format"]) is int and given["format"] > FORMATS[-1]:
                raise CheckpointError(
                    f"{where} was written by a later version of nnxlite (format {given['format']}; "
                    f"this version reads {FORMATS[-1]}). Upgrade nnxlite."
                )
            if given["format"] not in FORMATS or ("crc32" in given and sealed(given) != given):
                raise ValueError("its content is not what was written")
            specs: dict[str, Spec] = {}
            found: dict[str, dict[str, tp.Any]] = {"crc32": {}, "sum64": {}, "value": {}}
            for name, entry in given["leaves"].items():
                specs[name] = spec = _stored_spec(name, entry)
                kind, value = _stored_value(name, spec, entry)
                if kind is not None:
                    found[kind][name] = value
            tables = [strings(given[table]) for table in ("aliases", "settings", "classes")]
            containers = checked_table(given["containers"]) if "containers" in given else None
            sums = found["sum64"]
            return cls(specs, found["crc32"], found["value"], *tables, sums=sums, table=containers)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise DamagedError(
                f"{where}: {ABOUT}/metadata is damaged ({type(error).__name__}: {error})."
            ) from error


def sealed(about: dict[str, tp.Any]) -> dict[str, tp.Any]:
    """A description with the CRC-32 of its content; those of earlier versions have none."""
    content = {name: value for name, value in about.items() if name != "crc32"}
    return {**content, "crc32": zlib.crc32(json.dumps(content, sort_keys=True).encode())}


def _stored_spec(name: str, entry: tp.Any) -> Spec:
    """The shape and dtype of an entry; ValueError for what no leaf has."""
    spec = Spec(shape_of(entry["shape"]), entry["dtype"])
    if "/" in name:  # see `name_of`; Orbax makes paths of names
        raise ValueError(f"{_shown(name)} is not the name of a leaf")
    if not (spec.is_python and not spec.shape) and spec.key_impl is None:
        if _dtype(spec.dtype).name != spec.dtype:
            raise ValueError(f"{_shown(spec.dtype)} is not the name of a dtype")
    return spec


def _dtype(name: str) -> np.dtype:
    """The dtype of a name; ValueError for what is not a single word, which NumPy would parse."""
    if re.fullmatch(r"[<>|]?\w+(\[\w+\])?", name) is None:
        raise ValueError(f"{_shown(name)} is not the name of a dtype")
    return jax.numpy.dtype(name)


def _shown(value: tp.Any) -> str:
    return repr(value)[:80]


def _stored_value(name: str, spec: Spec, entry: tp.Any) -> tuple[str | None, tp.Any]:
    """The value of a number or text, or the checksum of an array, and under which key it is."""
    if not spec.is_python:
        kind = "sum64" if "sum64" in entry else "crc32"
        if 0 in spec.shape and kind not in entry:
            return None, None
        if type(entry[kind]) is not int:
            raise ValueError(f"the checksum of {_shown(name)} is not a number")
        return kind, entry[kind]
    type_, value = PYTHON_TYPES.get(spec.dtype, str), entry["value"]
    if spec.dtype in FIXED:
        type_ = type(None)
    if type_ is complex and isinstance(value, list) and [type(x) for x in value] == [float] * 2:
        value = complex(*value)
    if type(value) is not type_:
        raise ValueError(f"{_shown(name)} is {_shown(value)}, which is not a {spec}")
    if spec.is_plain:
        fixed = FIXED.get(spec.dtype)
        value = base64.b64decode(str(value), validate=True) if fixed is None else fixed()
    return "value", value


def _as_json(value: tp.Any, spec: Spec) -> tp.Any:
    """A value of Python as JSON has it; see `_stored_value`."""
    if spec.dtype in FIXED:
        return None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return [value.real, value.imag] if isinstance(value, complex) else value


def arguments(contents: Contents, leaves: tp.Mapping[str, Leaf]) -> ocp.args.Composite:
    """What Orbax is to save; all processes agree that it can be."""
    ocp = orbax()
    arrays: dict[str, tp.Any] = {}
    checksums: dict[str, int] = {}
    sums: dict[str, int] = {}
    several = jax.process_count() > 1
    with together("nnx.checkpoint: what is to be saved"):
        for name, leaf in leaves.items():
            if isinstance(leaf.value, jax.ShapeDtypeStruct):
                raise CheckpointError(f"'{name}' is abstract: there is no value to save.")
            if leaf.spec.is_python or 0 in leaf.spec.shape:
                continue
            value = jax.random.key_data(leaf.value) if leaf.spec.key_impl else leaf.value
            if isinstance(value, jax.Array) and not value.addressable_shards:
                raise CheckpointError(
                    f"'{name}' lies on devices of other processes only; a checkpoint needs arrays of "
                    "which each process has a part. Make its mesh of jax.devices()."
                )
            if isinstance(value, jax.Array) and several and value.is_fully_replicated:
                value = np.asarray(value.addressable_data(0))
            arrays[name] = value if isinstance(value, jax.Array) else np.asarray(value)
            if not isinstance(value, jax.Array) or value.is_fully_addressable:
                checksums[name] = checksum(value)
            else:
                sums[name] = local_sum(value)
        values = {name: leaf.value for name, leaf in leaves.items() if leaf.spec.is_python}
    if several:
        sums = _same_in_all(leaves, checksums, values, sums)
    stored = Stored(
        {name: leaf.spec for name, leaf in leaves.items()},
        checksums,
        values,
        contents.aliases,
        contents.settings(),
        contents.classes(),
        sums,
        contents.table(leaves),
    )
    args = {ABOUT: ocp.args.JsonSave(stored.as_json())}
    if arrays:  # Orbax refuses an empty item
        args[ARRAYS] = ocp.args.PyTreeSave(arrays)
    return ocp.args.Composite(**args)


def _same_in_all(
    leaves: tp.Mapping[str, Leaf],
    checksums: dict[str, int],
    values: dict[str, tp.Any],
    sums: dict[str, int],
) -> dict[str, int]:
    """The sums of all processes, added; CheckpointError where they have different things to save."""
    mine = {
        name: [str(leaf.spec), checksums.get(name), repr(values.get(name))]
        for name, leaf in leaves.items()
    }
    sides = [json.loads(t) for t in exchange("nnx.checkpoint: checksums", json.dumps([mine, sums]))]
    first = sides[0][0]
    for index, (theirs, _) in enumerate(sides):
        for name in first.keys() | theirs.keys():
            if (one := first.get(name)) != (other := theirs.get(name)):
                raise CheckpointError(_disagreement(name, one, other, index))
    return {name: sum(side[1].get(name, 0) for side in sides) % 2**64 for name in sums}


def _disagreement(name: str, one: tp.Any, other: tp.Any, index: int) -> str:
    if one is None or other is None:
        has, lacks = (index, 0) if one is None else (0, index)
        return (
            f"'{name}' is among what process {has} saves, and not process {lacks}. All processes "
            "have to save the same objects."
        )
    if one[0] != other[0]:
        return f"'{name}' is {one[0]} in process 0 and {other[0]} in process {index}."
    shown = "" if one[2] == "None" else f": {one[2]} and {other[2]}"
    return (
        f"'{name}' is on no common mesh, and has different values in process 0 and process "
        f"{index}{shown}. A checkpoint has one value for all: make it the same (the same seed, data "
        "that goes over all processes), put it on the mesh, or leave it out by `only=`."
    )


def write(path: epath.Path, args: ocp.args.Composite) -> None:
    """Save into a new folder, which is there when it is complete; CheckpointError if it cannot be.

    With several processes each writes its part of the arrays, and the first one all else. What one
    cannot do, all report: they agree after each step, and inside a step none waits for another.
    """
    if jax.process_count() == 1:
        write_alone(path, args)
        return
    ocp = orbax()
    unfinished = path.parent / f"{path.name}{UNFINISHED}"
    handler = ocp.PyTreeCheckpointHandler()
    first = jax.process_index() == 0
    try:
        with together(f"nnx.checkpoint: making {unfinished}"):
            if first:
                (unfinished / ABOUT).mkdir(parents=True)
                (unfinished / ARRAYS).mkdir()
        with together(f"nnx.checkpoint: writing {path}"):
            if ARRAYS in args.keys():
                handler.save(unfinished / ARRAYS, args=args[ARRAYS])
        with together(f"nnx.checkpoint: completing {path}"):
            if first:
                handler.finalize(unfinished / ARRAYS)
                (unfinished / ABOUT / "metadata").write_text(json.dumps(args[ABOUT].item))
                unfinished.rename(path)
    except Exception as error:
        if first and unfinished.exists():
            unfinished.rmtree()
        raise not_written(path.parent, error) from error


def write_alone(path: epath.Path, args: ocp.args.Composite) -> None:
    """`write` for a single process."""
    ocp = orbax()
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(path, args=args)
    except Exception as error:
        for unfinished in unfinished_of(path):
            unfinished.rmtree()
        raise not_written(path.parent, error) from error


def unfinished_of(path: epath.Path) -> tp.Iterator[epath.Path]:
    """What Orbax has left beside the folder of a checkpoint that it could not complete."""
    if path.parent.exists():  # a name may contain what is special in patterns: `run[1]`
        yield from path.parent.glob(f"{glob.escape(path.name)}{UNFINISHED}*")


def registry() -> tp.Any:
    """Handlers for Orbax's manager that write in the background, and fail in all processes or in none.

    Those of Orbax would wait ten minutes for a process that failed.
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


def with_order(number: int) -> dict[str, tp.Any]:
    """What Orbax is to write beside a checkpoint, so that `read_order` reads the number."""
    return {"nnxlite": {"order": number}}


def read_order(path: epath.Path) -> int:
    """The number that was saved beside a checkpoint; 0 where there is none."""
    try:
        number = read_json(path / "_CHECKPOINT_METADATA")["custom_metadata"]["nnxlite"]["order"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return number if type(number) is int else 0


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
        given = read_json(about)
    except (ValueError, OSError) as error:
        raise DamagedError(f"{path}: {ABOUT}/metadata is damaged: {error}.") from error
    return Stored.from_json(given, path)


def _stored_tree(path: epath.Path, items: tp.Collection[str]) -> Stored:
    """The description of a pytree that Orbax wrote without nnxlite, such as a State of Flax."""
    if len(items) > 1:
        raise CheckpointError(
            f"{path} was written by Orbax without nnxlite.checkpoint, as one tree: restore one item of "
            f"it, not {', '.join(items)}."
        )
    ocp = orbax()
    try:
        _check_files(path)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            tree = checkpointer.metadata(path).item_metadata.tree
    except Exception as error:
        raise DamagedError(f"{path}/_METADATA cannot be read: {error}") from error
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    keys = {tuple(key_name(key) for key in path): leaf for path, leaf in pairs}
    boxed = all(path[-1] in ("value", "raw_value") for path in keys)  # Variables of Flax
    specs, found = {}, {}
    for names, leaf in keys.items():
        if getattr(leaf, "shape", None) is not None:
            name = name_of([*items, *names])
            name = name.rpartition(".")[0] if boxed else name
            specs[name], found[name] = Spec(tuple(leaf.shape), np.dtype(leaf.dtype).name), names
    return Stored(specs, {}, {}, {}, {}, {}, keys=found)


def _what_is(path: epath.Path) -> str:
    """What a path that has no checkpoint has, in words."""
    if not path.exists():
        near = [p.name for p in path.parent.iterdir()] if path.parent.exists() else []
        unfinished = [n for n in near if n.startswith(f".{path.name}.")]
        if unfinished:
            return f"saving it was interrupted, and only the unfinished {unfinished[0]} is there"
        return "there is no such folder"
    if not path.is_dir():
        if not is_file(path):
            return "it is neither a folder nor a file"
        with path.open("rb") as file:
            start = file.read(64)
        if start[8:9] == b"{":
            return "it is a file of safetensors, for nnx.load_safetensors"
        return f"it is a file, and {looks_like(start)}".removesuffix(", and ").removesuffix(".")
    names = sorted(p.name for p in path.iterdir())
    if (path / ARRAYS / "_METADATA").exists():
        return f"its arrays are there, but not their description, {ABOUT}/metadata"
    if steps := [name for name in names if name.isdecimal()]:
        shown = ", ".join(sorted(steps, key=int)[-3:])
        return f"it is a folder of several (steps {shown}): open it with nnx.checkpoint.Manager"
    if any(
        name.startswith(("_METADATA", "manifest.ocdbt", "_CHECKPOINT_METADATA")) for name in names
    ):
        return "it was written by Orbax, but not by nnxlite.checkpoint"
    return f"the folder contains {', '.join(names[:5])}" if names else "the folder is empty"


def read_arrays(
    path: epath.Path, stored: Stored, wanted: tp.Mapping[str, tp.Any], verify: bool = True
) -> dict[str, tp.Any]:
    """Some of the arrays, in the dtypes that they were stored in.

    Args:
        path: of the checkpoint.
        stored: its description.
        wanted: stored names, each with a sharding, or None for a NumPy array.
        verify: whether checksums are compared.

    Raises DamagedError naming an array that cannot be read, or has changed.
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
    arrays: dict[str, tp.Any] = {}
    if args:
        try:
            if stored.keys is None:
                _check_sizes(path, {name: stored.specs[name] for name in args})
            arrays = _read(path, args, stored.keys)
        except Exception as error:  # of TensorStore, JSON, Orbax
            raise DamagedError(
                f"{path} is damaged or cannot be read: {str(error).splitlines()[0][:300]}"
            ) from error
    return {name: _checked(path, name, stored, arrays, verify) for name in wanted}


def _check_sizes(path: epath.Path, specs: dict[str, Spec]) -> None:
    """Raise ValueError where arrays are not of the sizes that the description says.

    TensorStore makes room for what a file claims before it looks at a value: a file of a kilobyte may
    claim terabytes, and to fail at that ends the process.
    """
    import tensorstore

    _check_files(path / ARRAYS)
    where = (path / ARRAYS).as_posix() + "/"
    base = where if "://" in where else {"driver": "file", "path": where}
    files = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    forms = [
        (name, [files.read(f"{name}/{form}") for form in (".zarray", "zarr.json")])
        for name in specs
    ]
    for name, reads in forms:
        there = [read.result() for read in reads]
        claims = [_claimed(parse_json(one.value)) for one in there if one.state == "value"]
        dtype, shape = raw_form(specs[name])
        for claimed, chunk, claimed_dtype in claims:
            if (claimed, claimed_dtype) != (shape, jax.numpy.dtype(dtype)) or any(
                size > max(1, whole) for size, whole in zip(chunk, shape, strict=True)
            ):
                raise ValueError(
                    f"'{name}' has the form {claimed_dtype.name}{list(claimed)} in chunks of "
                    f"{list(chunk)}, and was saved as {specs[name]}"
                )
        if not claims:
            raise ValueError(f"'{name}' is not there")


def _check_files(folder: epath.Path) -> None:
    """Raise ValueError where a folder has what Orbax would wait for, or read without an end.

    It reads files as a whole, except for those with the numbers, in the folders `d`.
    """
    for place, _, names in os.walk(folder):
        for name in names:
            file = os.path.join(place, name)
            if not os.path.isfile(file):
                raise ValueError(f"{file} is not a file")
            if os.path.basename(place) != "d" and os.path.getsize(file) > LARGEST:
                raise ValueError(f"{file} has {os.path.getsize(file):,} bytes")


def _claimed(form: tp.Any) -> tuple[tuple[int, ...], tuple[int, ...], np.dtype]:
    """The shape, the shape of the chunks and the dtype that a file of Zarr, version 2 or 3, says."""
    if "chunks" in form:
        return shape_of(form["shape"]), shape_of(form["chunks"]), _dtype(form["dtype"])
    chunk = form["chunk_grid"]["configuration"]["chunk_shape"]
    return shape_of(form["shape"]), shape_of(chunk), _dtype(form["data_type"])


def verify_sums(path: epath.Path, stored: Stored, arrays: tp.Mapping[str, tp.Any]) -> None:
    """Compare the sums of arrays that were spread over processes; DamagedError in all of them.

    Args:
        path: of the checkpoint.
        stored: its description.
        arrays: what was read, by stored name; a NumPy array is whole in each process.
    """
    known = {name: arrays[name] for name in stored.sums if name in arrays}
    if not stored.sums:
        return
    spread = {
        name for name, a in known.items() if isinstance(a, jax.Array) and not a.is_fully_addressable
    }
    sums = {name: local_sum(array) for name, array in known.items()}
    if jax.process_count() > 1:
        sides = [json.loads(t) for t in exchange("nnx.checkpoint: sums", json.dumps(sums))]
        if any(side.keys() != sums.keys() for side in sides):
            names = sorted({name for side in sides for name in side.keys() ^ sums.keys()})
            raise CheckpointError(
                f"The processes do not restore the same arrays of {path}: {', '.join(names[:5])} only "
                "in some. Pass the same items, filter and renaming in all."
            )
        for name in spread:
            sums[name] = sum(side[name] for side in sides) % 2**64
    _compare_sums(path, stored, sums)


def check_sums(path: epath.Path, stored: Stored, arrays: tp.Mapping[str, tp.Any]) -> None:
    """`verify_sums` for arrays that this process has read as a whole; waits for no other."""
    sums = {name: local_sum(arrays[name]) for name in stored.sums if name in arrays}
    _compare_sums(path, stored, sums)


def _compare_sums(path: epath.Path, stored: Stored, sums: tp.Mapping[str, int]) -> None:
    for name, value in sums.items():
        if value != stored.sums[name]:
            raise DamagedError(f"{path} is damaged: '{name}' is not what was saved.")


def _read(
    path: epath.Path, args: dict[str, tp.Any], keys: dict[str, tuple[tp.Any, ...]] | None
) -> dict[str, tp.Any]:
    ocp = orbax()
    # Not by a Checkpointer: it would wait for other processes, which may have failed.
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        if keys is None:
            return handler.restore(path / ARRAYS, args=_partial(args))
        whole = jax.tree.map(lambda _: ocp.PLACEHOLDER, handler.metadata(path).tree)
        by_key = {keys[name]: arg for name, arg in args.items()}
        nested = jax.tree_util.tree_map_with_path(
            lambda path, _: by_key.get(tuple(map(key_name, path)), ocp.PLACEHOLDER), whole
        )
        read = handler.restore(path, args=_partial(nested))
    pairs = jax.tree_util.tree_leaves_with_path(read)
    flat = {tuple(key_name(key) for key in path): leaf for path, leaf in pairs}
    return {name: flat[keys[name]] for name in args}


def _partial(args: tp.Any) -> ocp.args.PyTreeRestore:
    ocp = orbax()
    item = jax.tree.map(
        lambda arg: ocp.PLACEHOLDER if arg is ocp.PLACEHOLDER else 0,
        args,
        is_leaf=lambda x: isinstance(x, ocp.RestoreArgs),
    )
    return ocp.args.PyTreeRestore(item=item, restore_args=args, partial_restore=True)


def _checked(
    path: epath.Path, name: str, stored: Stored, arrays: dict[str, tp.Any], verify: bool
) -> tp.Any:
    """One leaf as it was stored; DamagedError where it is not what the description says."""
    spec = stored.specs[name]
    if spec.is_python:
        return stored.values[name]
    if 0 in spec.shape:
        return np.zeros(spec.shape, jax.numpy.dtype(spec.dtype))
    array = arrays.get(name)
    if not hasattr(array, "dtype"):  # Orbax leaves what it was given where it found nothing
        array = None
    right = array is not None and (spec.key_impl or (array.shape, array.dtype) == _form(spec))
    whole = (
        not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated
    )
    if right and verify and whole and name in stored.checksums:
        right = checksum(array) == stored.checksums[name]
    if not right:
        got = "" if array is None else f" ({array.dtype}{list(array.shape)}, saved as {spec})"
        raise DamagedError(f"{path} is damaged: '{name}' is not what was saved{got}.")
    if spec.key_impl and array is not None and array.dtype == np.uint32:
        return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=spec.key_impl)
    return array


def _form(spec: Spec) -> tuple[tp.Any, np.dtype]:
    return spec.shape, jax.numpy.dtype(spec.dtype)
