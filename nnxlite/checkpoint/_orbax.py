"""Arrays and their description in the folders of Orbax: writing, and reading a part.

A folder has two items.  `arrays` is a flat dictionary of arrays by name, which Orbax alone can read,
too; `nnxlite` is JSON that describes them and the objects they come from: shapes, dtypes and checksums,
numbers and texts themselves, aliases, classes and static settings as text.  Reading executes nothing.

Orbax writes into a folder of another name and renames it when it is complete.
"""

from __future__ import annotations

import dataclasses
import json
import typing as tp
import zlib

import jax
import numpy as np

from nnxlite._jax import key_name
from nnxlite.checkpoint._contents import Contents, Leaf, Spec, name_of
from nnxlite.checkpoint._errors import CheckpointError, DamagedError, NotFoundError
from nnxlite.checkpoint._files import looks_like

ARRAYS, ABOUT = "arrays", "nnxlite"
FORMAT = 1

if tp.TYPE_CHECKING:
    import orbax.checkpoint as ocp
    from etils import epath


def orbax() -> tp.Any:
    """The package `orbax.checkpoint`; ImportError with the remedy where it is not installed."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            'Checkpoints need Orbax: pip install "nnxlite[checkpoint]".', name="orbax"
        ) from error
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
        values: numbers and texts, by name.
        aliases, settings, classes: see `Contents`.
        keys: where Orbax has each array, for a tree that it wrote without nnxlite.
    """

    specs: dict[str, Spec]
    checksums: dict[str, int]
    values: dict[str, tp.Any]
    aliases: dict[str, str]
    settings: dict[str, str]
    classes: dict[str, str]
    keys: dict[str, tuple[tp.Any, ...]] | None = None

    def as_json(self) -> dict[str, tp.Any]:
        """The description as JSON has it."""
        leaves: dict[str, tp.Any] = {}
        for name, spec in self.specs.items():
            leaves[name] = {"dtype": spec.dtype, "shape": list(spec.shape)}
            if name in self.checksums:
                leaves[name]["crc32"] = self.checksums[name]
            if name in self.values:
                value = self.values[name]
                parts = [value.real, value.imag] if isinstance(value, complex) else value
                leaves[name]["value"] = parts
        return {
            "format": FORMAT,
            "leaves": leaves,
            "aliases": self.aliases,
            "settings": self.settings,
            "classes": self.classes,
        }

    @classmethod
    def from_json(cls, given: tp.Any, where: tp.Any) -> Stored:
        """What was stored; CheckpointError for another format, DamagedError for anything else."""
        try:
            if given["format"] > FORMAT:
                raise CheckpointError(
                    f"{where} was written by a later version of nnxlite (format {given['format']}; "
                    f"this version reads {FORMAT}). Upgrade nnxlite."
                )
            specs, checksums, values = {}, {}, {}
            for name, entry in given["leaves"].items():
                shape = tuple(int(size) for size in entry["shape"])
                specs[name] = Spec(shape, str(entry["dtype"]))
                if "crc32" in entry:
                    checksums[name] = int(entry["crc32"])
                if "value" in entry:
                    value = entry["value"]
                    values[name] = complex(*value) if isinstance(value, list) else value
            tables = [dict(given[table]) for table in ("aliases", "settings", "classes")]
            return cls(specs, checksums, values, *tables)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise DamagedError(
                f"{where}: {ABOUT}/metadata is damaged ({type(error).__name__}: {error})."
            ) from error


def arguments(contents: Contents, leaves: tp.Mapping[str, Leaf]) -> ocp.args.Composite:
    """What Orbax is to save."""
    ocp = orbax()
    arrays: dict[str, tp.Any] = {}
    checksums: dict[str, int] = {}
    for name, leaf in leaves.items():
        if isinstance(leaf.value, jax.ShapeDtypeStruct):
            raise CheckpointError(f"'{name}' is abstract: there is no value to save.")
        if leaf.spec.is_python or 0 in leaf.spec.shape:
            continue
        value = jax.random.key_data(leaf.value) if leaf.spec.key_impl else leaf.value
        arrays[name] = value if isinstance(value, jax.Array) else np.asarray(value)
        if not isinstance(value, jax.Array) or value.is_fully_addressable:
            checksums[name] = checksum(value)
    stored = Stored(
        {name: leaf.spec for name, leaf in leaves.items()},
        checksums,
        {name: leaf.value for name, leaf in leaves.items() if leaf.spec.is_python},
        contents.aliases,
        contents.settings(),
        contents.classes(),
    )
    args = {ABOUT: ocp.args.JsonSave(stored.as_json())}
    if arrays:  # Orbax refuses an empty item
        args[ARRAYS] = ocp.args.PyTreeSave(arrays)
    return ocp.args.Composite(**args)


def checksum(array: tp.Any) -> int:
    """CRC-32 of the elements in C order."""
    whole = np.ascontiguousarray(array)
    return zlib.crc32(whole.reshape(-1).view(np.uint8).data)


def write(path: epath.Path, args: ocp.args.Composite) -> None:
    """Save into a new folder, which is there when it is complete; CheckpointError if it cannot be."""
    ocp = orbax()
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(path, args=args)
    except Exception as error:
        for unfinished in path.parent.glob(f"{path.name}.orbax-checkpoint-tmp*"):
            unfinished.rmtree()
        raise not_written(path.parent, error) from error


def not_written(folder: epath.Path, error: Exception) -> CheckpointError:
    """The error for a checkpoint that could not be written."""
    return CheckpointError(
        f"The checkpoint could not be written into {folder}, and those that are there are as they were. "
        f"{type(error).__name__}: {str(error).splitlines()[0][:500]}"
    )


def read_stored(path: epath.Path, items: tp.Collection[str] = ()) -> Stored:
    """The description of the checkpoint in a folder.

    Args:
        path: of the folder.
        items: the names that are asked for; a tree that Orbax wrote without nnxlite has the only one.

    Raises:
        NotFoundError: where there is none; the message says what there is.
        DamagedError: where it cannot be read.
    """
    about = path / ABOUT / "metadata"
    if not about.exists():
        if (path / "_METADATA").exists():
            return _stored_tree(path, items)
        raise NotFoundError(f"No checkpoint at {path}: {_what_is(path)}.")
    try:
        given = json.loads(about.read_text())
    except ValueError as error:
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
    return Stored(specs, {}, {}, {}, {}, {}, found)


def _what_is(path: epath.Path) -> str:
    """What a path that has no checkpoint has, in words."""
    if not path.exists():
        near = [p.name for p in path.parent.iterdir()] if path.parent.exists() else []
        unfinished = [n for n in near if n.startswith(f".{path.name}.")]
        if unfinished:
            return f"saving it was interrupted, and only the unfinished {unfinished[0]} is there"
        return "there is no such folder"
    if not path.is_dir():
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
    for name, sharding in wanted.items():
        spec = stored.specs[name]
        if spec.is_python or 0 in spec.shape:
            continue
        if sharding is None or spec.key_impl:
            args[name] = ocp.RestoreArgs(restore_type=np.ndarray)
        else:
            args[name] = ocp.ArrayRestoreArgs(sharding=sharding, global_shape=spec.shape)
    arrays: dict[str, tp.Any] = {}
    if args:
        try:
            arrays = _read(path, args, stored.keys)
        except Exception as error:  # of TensorStore, JSON, Orbax
            raise DamagedError(
                f"{path} is damaged or cannot be read: {str(error).splitlines()[0][:300]}"
            ) from error
    return {name: _checked(path, name, stored, arrays, verify) for name in wanted}


def _read(
    path: epath.Path, args: dict[str, tp.Any], keys: dict[str, tuple[tp.Any, ...]] | None
) -> dict[str, tp.Any]:
    ocp = orbax()
    if keys is None:
        items = {ARRAYS: _partial(args)}
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(path, args=ocp.args.Composite(**items))[ARRAYS]
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        whole = jax.tree.map(
            lambda _: ocp.PLACEHOLDER, checkpointer.metadata(path).item_metadata.tree
        )
        by_key = {keys[name]: arg for name, arg in args.items()}
        nested = jax.tree_util.tree_map_with_path(
            lambda path, _: by_key.get(tuple(map(key_name, path)), ocp.PLACEHOLDER), whole
        )
        read = checkpointer.restore(path, args=_partial(nested))
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
    right = array is not None and (spec.key_impl or (array.shape, array.dtype) == _form(spec))
    if right and verify and name in stored.checksums:
        right = checksum(array) == stored.checksums[name]
    if not right:
        raise DamagedError(
            f"{path} is damaged: '{name}' is not what was saved"
            + (
                f" ({array.dtype}{list(array.shape)}, saved as {spec})."
                if array is not None
                else "."
            )
        )
    if spec.key_impl and array is not None and array.dtype == np.uint32:
        return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=spec.key_impl)
    return array


def _form(spec: Spec) -> tuple[tp.Any, np.dtype]:
    return spec.shape, jax.numpy.dtype(spec.dtype)
