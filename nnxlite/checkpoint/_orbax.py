"""Arrays and their description in the folders of Orbax: writing, and reading a part.

A folder has two items.  `arrays` is a flat dictionary of arrays by name, which Orbax can also read by
itself; `nnxlite` is JSON that describes them and the objects they come from: shapes and dtypes,
numbers, text and plain data themselves, aliases and classes.  Reading executes nothing.

Orbax writes into a folder of another name and renames it when it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import typing as tp
from collections.abc import Callable

import jax
import numpy as np

from nnxlite._base.errors import importing
from nnxlite._base.jax import key_name
from nnxlite._base.text import human_bytes
from nnxlite.checkpoint._contents import PLAIN, Contents, Spec, as_json, names_of, of_json
from nnxlite.checkpoint._loading import Source
from nnxlite.checkpoint._report import (
    CheckpointError,
    DamagedError,
    NotFoundError,
    printable,
    together,
)
from nnxlite.checkpoint._weights import PICKLES
from nnxlite.distributed import agreed, exchange

ARRAYS, ABOUT = "arrays", "nnxlite"
FORMAT = 4
"""1 has no plain data; 2 and 3 have a leaf for each part of it, and a table of all containers."""

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


# Writing ------------------------------------------------------------------------------------------


def content_of(contents: Contents) -> ocp.args.Composite:
    """What is to be saved of the chosen leaves; all processes agree that it can be."""
    arrays: dict[str, tp.Any] = {}
    leaves: dict[str, tp.Any] = {}
    same: dict[str, str] = {}  # what each process describes alike
    mine: dict[str, tp.Any] = {}  # arrays of which each process has a copy of its own
    with together("nnx.checkpoint: what is to be saved"):
        for name, leaf in contents.chosen.items():
            spec, value = leaf.spec, leaf.stored
            leaves[name] = {"dtype": spec.dtype, "shape": list(spec.shape)}
            same[name] = f"{spec} {value!r}" if spec.is_python else str(spec)
            if spec.is_python:
                leaves[name]["value"] = as_json(value)
            elif 0 not in spec.shape:
                arrays[name] = value
                if not isinstance(leaf.value, jax.Array) or leaf.value.is_fully_addressable:
                    mine[name] = value
    if jax.process_count() > 1:
        check_same_in_all(same, mine)
    named = {"aliases": contents.aliases, "classes": contents.classes()}
    args = orbax().args
    items = {ABOUT: args.JsonSave({"format": FORMAT, "leaves": leaves, **named})}
    if arrays:  # Orbax refuses an empty item
        items[ARRAYS] = args.PyTreeSave(arrays)
    return args.Composite(**items)


def check_same_in_all(parts: dict[str, str], mine: tp.Mapping[str, tp.Any]) -> None:
    """Raise CheckpointError where the processes have different things to save; they exchange one hash.

    Args:
        parts: a description of each leaf that this process saves, by name.
        mine: arrays that are on no mesh of all processes, so that each has a copy of its own.
    """
    for name, array in mine.items():
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        parts[name] += f" of hash {hashlib.sha256(data).hexdigest()[:16]}"
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


def write(path: epath.Path, content: ocp.args.Composite) -> None:
    """Save into a new folder, which is there when it is complete; CheckpointError if it cannot be.

    Of several processes each writes its part of the arrays, and the first one all else. What one
    cannot do, all report: they agree after each step, and inside a step none waits for another.
    """
    unfinished = path.parent / f"{path.name}.orbax-checkpoint-tmp"
    first = jax.process_index() == 0
    items = dict(content.items())
    try:
        with contextlib.closing(orbax().PyTreeCheckpointHandler()) as handler:
            with together(f"nnx.checkpoint: making {unfinished}"):
                if first and unfinished.exists():
                    unfinished.rmtree()  # of a process that was ended
                for item in items if first else ():
                    (unfinished / item).mkdir(parents=True)
            with together(f"nnx.checkpoint: writing {path}"):
                if ARRAYS in items:
                    handler.save(unfinished / ARRAYS, args=items[ARRAYS])
            with together(f"nnx.checkpoint: completing {path}"):
                if first and ARRAYS in items:
                    handler.finalize(unfinished / ARRAYS)
                if first:
                    (unfinished / ABOUT / "metadata").write_text(json.dumps(items[ABOUT].item))
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

    class Together(ocp.future.ChainedFuture):
        """What is being written in the background; done when it is in all processes."""

        def result(self, timeout: float | None = None) -> None:
            with agreed("nnx.checkpoint.Manager: writing in the background"):
                super().result(timeout)

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
                futures = await super().async_save(directory, *args, **kwargs)
                return [Together(futures or [], lambda: None)]

        handler = Agreeing()
        handlers.add(item, save, handler)
        handlers.add(item, restore, handler)
    return handlers


def not_written(folder: epath.Path, error: Exception) -> CheckpointError:
    """The error for a checkpoint that could not be written."""
    return CheckpointError(
        f"The checkpoint could not be written into {folder}, and those that are there are as they were. "
        f"{type(error).__name__}: {str(error).splitlines()[0][:500]}"
    )


# Reading ------------------------------------------------------------------------------------------


class Info(Source):
    """The contents of a checkpoint, without its arrays.

    Attributes:
        path: of the folder.
        leaves: shape and dtype of each leaf, as text, by name.
        values: the numbers, texts and plain data, by name.
        aliases: further names of what is shared, with the names it is stored by.
        classes: the classes of objects and Variables, by name.
        nbytes: the size of the arrays.

    Args:
        path: of the folder.
        items: the requested names; a tree that Orbax wrote without nnxlite can be only one item.

    Raises:
        NotFoundError: if there is none; the message says what is there instead.
        DamagedError: where it cannot be read.
        CheckpointError: for a later format.

    >>> import nnxlite as nnx, tempfile
    >>> folder = tempfile.mkdtemp() + "/weights"
    >>> nnx.checkpoint.save(folder, model=nnx.Linear(2, 3, rngs=nnx.Rngs(0)), step=7)
    >>> nnx.checkpoint.info(folder)  # doctest: +ELLIPSIS
    /.../weights: 3 leaves, 36 B
    model: Linear with 2 leaves
    step: 7
    """

    def __init__(self, path: epath.Path, items: tp.Collection[str] = ()) -> None:
        self.path = str(path)
        self.values: dict[str, tp.Any] = {}
        self.classes: dict[str, str] = {}
        self._folder = path
        self._arrays: dict[str, tp.Any] | None = None  # all of them, of a tree that Orbax wrote
        about = path / ABOUT / "metadata"
        if about.exists():
            try:
                self._describe(json.loads(about.read_text()))
            except CheckpointError:
                raise
            except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
                raise DamagedError(
                    f"{path}: {ABOUT}/metadata is damaged ({type(error).__name__}: {error})."
                ) from error
        elif (path / "_METADATA").exists():
            self._arrays = _read_tree(path, items)
            self.specs = {name: Spec(x.shape, x.dtype.name) for name, x in self._arrays.items()}
        else:
            raise NotFoundError(f"No checkpoint at {path}: {_what_is(path)}.")
        self.text = f"The checkpoint {path} (of {', '.join(items_of(self.specs))})"

    def _describe(self, given: tp.Any) -> None:
        if given["format"] > FORMAT:
            raise CheckpointError(
                f"{self.path} was written by a later version of nnxlite (format {given['format']}; "
                f"this version reads {FORMAT}). Upgrade nnxlite."
            )
        leaves = given["leaves"] if given["format"] == FORMAT else _upgraded(given)
        self.specs = {n: Spec(tuple(x["shape"]), x["dtype"]) for n, x in leaves.items()}
        for name, spec in self.specs.items():
            if spec.is_python:
                self.values[name] = spec.as_python(of_json(leaves[name]["value"]))
        self.aliases, self.classes = given["aliases"], given["classes"]

    @property
    def leaves(self) -> dict[str, str]:
        """Shape and dtype of each leaf, as text, by name."""
        return {name: str(spec) for name, spec in self.specs.items()}

    @property
    def nbytes(self) -> int:
        """The size of the arrays."""
        return sum(spec.nbytes for spec in self.specs.values())

    def __repr__(self) -> str:
        lines = [f"{self.path}: {len(self.specs):,} leaves, {human_bytes(self.nbytes)}"]
        for item in items_of(self.specs):
            count = sum(name.partition(".")[0] == item for name in self.specs)
            if item in self.specs:
                lines.append(f"{item}: {self.values.get(item, str(self.specs[item]))!r}")
            else:
                kind, leaves = self.classes.get(item, "pytree"), "leaf" if count == 1 else "leaves"
                lines.append(f"{item}: {kind} with {count:,} {leaves}")
        return "\n".join(map(printable, lines))

    def open(self, wanted: tp.Mapping[str, tp.Any]) -> Callable[[str], tp.Any]:
        """A function from a name to a value; DamagedError for what is not as the description says.

        Args:
            wanted: the names that will be asked for, each with a sharding, or None for a NumPy array.
        """
        ocp = orbax()
        args: dict[str, tp.Any] = {}
        several = jax.process_count() > 1
        for name, sharding in wanted.items():
            spec = self.specs[name]
            if spec.is_python or 0 in spec.shape:
                continue
            whole = sharding is None or (several and sharding.is_fully_addressable)
            if whole or spec.key_impl or jax.dtypes.canonicalize_dtype(spec.dtype) != spec.dtype:
                args[name] = ocp.RestoreArgs(restore_type=np.ndarray)
            else:
                args[name] = ocp.ArrayRestoreArgs(sharding=sharding, global_shape=spec.shape)
        arrays = self._arrays or {}
        if args and self._arrays is None:
            item = dict.fromkeys(args, 0)
            partial = ocp.args.PyTreeRestore(item, restore_args=args, partial_restore=True)
            arrays = _read(self._folder, self._folder / ARRAYS, lambda _: partial)
        return lambda name: self._checked(name, arrays.get(name))

    def _checked(self, name: str, array: tp.Any) -> tp.Any:
        """One leaf as it was stored; DamagedError where it is not what the description says."""
        spec = self.specs[name]
        if spec.is_python:
            return self.values[name]
        dtype, shape = spec.raw
        if 0 in spec.shape:
            return np.zeros(shape, jax.numpy.dtype(dtype))
        # Orbax leaves what it was given where it found nothing.
        found = Spec(array.shape, array.dtype.name) if hasattr(array, "dtype") else None
        if found != Spec(shape, dtype):
            got = f" ({found}, saved as {spec})" if found else ""
            raise DamagedError(f"{self.path} is damaged: '{name}' is not what was saved{got}.")
        return array


def _upgraded(given: dict[str, tp.Any]) -> dict[str, tp.Any]:
    """The leaves of a former format as this one has them: the parts of plain data as one."""
    leaves, table = dict(given["leaves"]), given.get("containers", {})

    def whole(name: str) -> tp.Any:
        if name in table:
            kind, children = table[name]
            return [kind, [(key, whole(child)) for key, child in children]]
        kind, _, rest = given["leaves"][name]["dtype"].partition(" ")
        if kind == "empty":
            return [rest, []]
        value = given["leaves"][name]["value"]
        return ["bytes", value] if rest == "bytes" else value

    for item in items_of(leaves):
        parts = {name: x for name, x in leaves.items() if name.partition(".")[0] == item}
        if item in parts and Spec((), parts[item]["dtype"]).is_python:
            continue
        plain = item in {*table, *parts} and all("value" in entry for entry in parts.values())
        plain = plain and item not in items_of(given["classes"])
        for name, entry in parts.items():
            if plain or entry["dtype"].startswith(("None", "empty")):
                del leaves[name]
        if plain:
            leaves[item] = {"dtype": PLAIN, "shape": [], "value": whole(item)}
    return leaves


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
        form = lambda leaf: as_numpy if hasattr(leaf, "shape") else None  # as it is, such as text
        args = jax.tree.map(form, handler.metadata(path).tree)
        return orbax().args.PyTreeRestore(restore_args=args)

    pairs = jax.tree_util.tree_leaves_with_path(_read(path, path, whole))
    arrays = {tuple(map(key_name, keys)): leaf for keys, leaf in pairs if hasattr(leaf, "shape")}
    boxed = all(keys[-1:] in (("value",), ("raw_value",)) for keys in arrays)  # Variables of Flax
    names = names_of([*items, *keys[: -1 if boxed else None]] for keys in arrays)
    return dict(zip(names, arrays.values()))


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
    if steps := [name for name in names if name.isdecimal()]:
        shown = ", ".join(sorted(steps, key=int)[-3:])
        return f"it is a folder of several (steps {shown}): open it with nnx.checkpoint.Manager"
    return f"the folder contains {', '.join(names[:5])}" if names else "the folder is empty"
