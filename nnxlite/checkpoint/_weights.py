"""Weights of other programs: `Mapping`, `save_safetensors`, `load_safetensors`.

A `Mapping` says how names and layouts of foreign weights relate to those of a model. Loading first
checks everything, then reads, then writes.  Without a mapping, each array is for the one of its name.

The package `safetensors` writes files, and checks the header of one, sizes included, before anything
else is read. Arrays are then mapped one at a time, so that what is not used is not read, also those of
dtypes that the package cannot give to NumPy.

Checkpoints of several files have an index (JSON) that says which file has which array.  A file that is
saved takes the place of the old one in one step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import typing as tp
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import importing
from nnxlite._base.jax import key_name
from nnxlite.checkpoint._contents import Contents, Leaf, Spec, spec_of, unique
from nnxlite.checkpoint._loading import Source, load_model
from nnxlite.checkpoint._report import CheckpointError, DamagedError, NotFoundError, Report
from nnxlite.checkpoint._rules import Conversion, Entry, MappingError, conversions
from nnxlite.filters import Filter

__all__ = ["load_safetensors", "save_safetensors"]

SUFFIX, INDEX, HUB = ".safetensors", ".safetensors.index.json", "hf://"
NAMES = (
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64 "
    "float8_e4m3fn float8_e5m2 float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz"
).split()
CODES = (
    "BOOL I8 U8 I16 U16 I32 U32 I64 U64 F16 BF16 F32 F64 C64 "
    "F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ"
).split()
DTYPES = dict(zip(CODES, NAMES))
"""The dtypes of this format by their codes in a header."""


@dataclasses.dataclass(frozen=True, init=False)
class Mapping:
    """How foreign names and layouts relate to those of a model, for loading and for saving.

    In patterns, `*` stands for any text within a segment of a dotted name, `**` for any number of
    segments, and `{i}` for one segment; what they match on one side is filled in on the other.

    Args:
        entries: `Rule`s, and `Ignore`, `Keep` for what only one side has.

    Raises:
        TypeError: for an entry that is none of these.

    >>> import nnxlite as nnx
    >>> import numpy as np
    >>> model = nnx.Sequential(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    >>> mapping = nnx.checkpoint.Mapping([
    ...     nnx.checkpoint.Rule("fc{i}.weight", "layers.{i}.kernel", "out in -> in out"),
    ...     nnx.checkpoint.Rule("fc{i}.bias", "layers.{i}.bias"),
    ... ])
    >>> foreign = {"fc0.weight": np.ones((2, 3), "float32"), "fc0.bias": np.ones(2, "float32")}
    >>> mapping.load(foreign, model)
    The dictionary: 2 restored
    renamed, 2: fc0.weight to layers.0.kernel, fc0.bias to layers.0.bias
    >>> mapping.export(model)["fc0.weight"].shape
    (2, 3)
    """

    entries: tuple[Entry, ...]

    def __init__(self, entries: Iterable[Entry]) -> None:
        object.__setattr__(self, "entries", tuple(entries))
        for entry in self.entries:
            if not isinstance(entry, Entry):
                raise TypeError(
                    f"Mapping: {entry!r} is not a Rule, Ignore or Keep of nnx.checkpoint."
                )

    def load(
        self,
        arrays: tp.Mapping[str, tp.Any],
        model: tp.Any,
        *,
        only: Filter = ...,
        strict: bool = True,
        cast: bool | None = False,
    ) -> Report:
        """Load arrays that are in memory, such as a `state_dict` of PyTorch, into a model.

        Args:
            arrays: arrays by name: NumPy's, JAX's or PyTorch's.  In nested dictionaries, names are
                joined by dots.
            model: the model, which is changed in place; also an abstract one.
            only: a filter for the Variables to be loaded.
            strict: see `nnx.load_safetensors`.
            cast: see `nnx.load_safetensors`.

        Returns:
            The `Report`.

        Raises:
            MappingError: if the mapping does not suit the model.
            MismatchError: if the arrays do not match.

        See the example of the class.
        """
        source = Arrays(arrays)
        return load_model(source, model, only, entries=self.entries, strict=strict, cast=cast)

    def export(self, model: tp.Any, *, only: Filter = ...) -> dict[str, tp.Any]:
        """The arrays of a model under their foreign names and in their foreign layout.

        Args:
            model: the model.
            only: a filter for the Variables to be exported.

        Returns:
            A dictionary of NumPy arrays (bfloat16 and the like are dtypes of `ml_dtypes`); of random
            keys, of their data.

        Raises:
            MappingError: if the mapping does not suit the model, or has no rule for an array of it.

        See the example of the class.
        """
        return exported(model, only, self.entries)


class Arrays(Source):
    """Arrays in memory; CheckpointError for a value that is not an array."""

    text = "The dictionary"

    def __init__(self, arrays: tp.Mapping[str, tp.Any]) -> None:
        pairs = jax.tree_util.tree_leaves_with_path(dict(arrays))
        names = unique([".".join(str(key_name(key)) for key in keys) for keys, _ in pairs])
        self._arrays = {name: _as_array(value) for name, (_, value) in zip(names, pairs)}
        self.specs = {}
        for name, array in self._arrays.items():
            spec = spec_of(array)
            if spec is None or spec.dtype == "Python str":
                raise CheckpointError(f"'{name}' is a {type(array).__name__}, not an array.")
            self.specs[name] = spec

    def read(self, name: str) -> np.ndarray:
        """See `Source`."""
        array, spec = self._arrays[name], self.specs[name]
        # A number has no dtype of its own: `placed` compares it with the range of the leaf's.
        dtype = object if spec.is_python else None
        return np.asarray(jax.random.key_data(array) if spec.key_impl else array, dtype)


def _as_array(value: tp.Any) -> tp.Any:
    """JAX's arrays as they are; PyTorch's without a copy."""
    if isinstance(value, (jax.Array, np.ndarray, np.generic)) or not hasattr(value, "__array__"):
        return value
    value = value.detach() if hasattr(value, "detach") else value  # from its gradient
    try:
        return np.asarray(value)
    except TypeError:  # NumPy has no bfloat16 of its own
        return jnp.from_dlpack(value)


def exported(
    model: tp.Any, only: Filter, entries: tuple[Entry, ...] | None
) -> dict[str, np.ndarray]:
    """The arrays of a model, under foreign names if there are entries of a mapping.

    Of random keys there is their data.
    """
    contents = Contents({"model": model}, only, named=False)
    leaves = contents.leaves
    if entries is None:
        made, left = [Conversion({name: ()}, {name: ()}) for name in leaves], []
    else:
        made, left = conversions(entries, contents)
    made = [c for c in made if not contents.chosen.keys().isdisjoint(c.ours)]
    problems = [f"{name}: no rule is for it; add one, or Keep({name!r})." for name in left]
    for conversion in made:
        dtypes = sorted({leaves[name].spec.dtype for name in conversion.ours})
        if len(dtypes) > 1:
            problems.append(
                f"{next(iter(conversion.foreign))}: ours are of {' and '.join(dtypes)}."
            )
    if problems:
        message = f"The mapping cannot save {type(model).__name__}; nothing was written:"
        raise MappingError(message, problems)
    arrays: dict[str, np.ndarray] = {}
    for foreign, ours, rule in made:
        arrays.update(zip(foreign, rule.to_foreign([_host(leaves[name]) for name in ours])))
    return arrays


def _host(leaf: Leaf) -> np.ndarray:
    """The value as NumPy's; the model does not keep this copy."""
    value = leaf.stored
    if isinstance(value, jax.Array):
        if not value.is_fully_addressable:
            raise CheckpointError(
                f"'{leaf.name}' is spread over several processes. Gather it first "
                "(jax.experimental.multihost_utils.process_allgather), or use nnx.checkpoint.save, "
                "with which every process writes its part."
            )
        with contextlib.suppress(RuntimeError):  # where JAX was told to do without the CPU
            value = jax.device_put(value, jax.local_devices(backend="cpu")[0])
    return np.asarray(value)


# Files ---------------------------------------------------------------------------------------------


def save_safetensors(
    path: str | os.PathLike[str],
    model: tp.Any,
    *,
    only: Filter = ...,
    mapping: Mapping | None = None,
    metadata: tp.Mapping[str, str] | None = None,
) -> None:
    """Save the arrays of a model to a safetensors file.

    Names are paths joined by dots: `blocks.0.attention.kernel`; an array that several paths lead to
    is saved once, under the first.  All arrays are copied to the memory of the host, and then written.
    Whatever happens meanwhile, there is the old file or the new one.  Typed random keys are saved as
    their data.

    Args:
        path: a file that ends in `.safetensors`, or a folder, which gets a `model.safetensors`.
        model: an object or pytree of objects; its static attributes are not saved.
        only: a filter for the Variables to be saved.
        mapping: the names and layouts to be saved, if others than those of the model.
        metadata: texts for the header; by default `{"format": "pt"}`, which some readers ask for.

    In programs of several processes, the first one writes.

    Raises:
        CheckpointError: for a leaf that is not an array of a dtype of this format, or is abstract, and
            for a filter that matches nothing.
        MappingError: if the mapping does not suit the model.
        OSError: if the file cannot be written.

    >>> import tempfile
    >>> import nnxlite as nnx
    >>> folder = tempfile.mkdtemp()
    >>> nnx.save_safetensors(folder, nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> model = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))  # no arrays yet
    >>> nnx.load_safetensors(folder, model).restored
    ('bias', 'kernel')
    """
    target = Path(path)
    if target.is_dir() or target.suffix != SUFFIX:
        target = target / f"model{SUFFIX}"
    arrays = exported(model, only, None if mapping is None else mapping.entries)
    for name, array in arrays.items():
        if array.dtype.name not in NAMES:
            raise CheckpointError(
                f"'{name}' is {Spec(array.shape, array.dtype.name)}; safetensors files have arrays of "
                f"{', '.join(NAMES)}. Cast it, or leave it out by `only=`."
            )
    if jax.process_index() == 0:
        write(target, arrays, {"format": "pt"} if metadata is None else dict(metadata))


def load_safetensors(
    path: str | os.PathLike[str],
    model: tp.Any,
    *,
    only: Filter = ...,
    mapping: Mapping | None = None,
    rename: tp.Mapping[str, str] | None = None,
    strict: bool = True,
    cast: bool | None = False,
) -> Report:
    """Load a safetensors file, or several with an index, into a model.

    Names, shapes and dtypes are compared before any array is read, and the model is changed once
    all have been read.  They are read one at a time, each straight into the sharding of the array
    that it replaces: of a sharded one, a process reads the parts of its own devices.

    Args:
        path: a file, an index (`*.safetensors.index.json`), or a folder with either; or a repository
            of the Hugging Face hub, `"hf://OWNER/NAME"` or `"hf://OWNER/NAME@REVISION"`, which is
            downloaded into its cache by the package `huggingface_hub`.
        model: an object or pytree of objects, which is changed in place; also an abstract one, of
            `nnx.eval_shape`.
        only: a filter for the Variables to be loaded; others keep their values.
        mapping: how the names and layouts in the file relate to those of the model.
        rename: instead of a mapping, patterns of names in the file and what each becomes.
        strict: whether the file must have every array, and nothing else. Otherwise what matches is
            loaded.
        cast: whether to cast to dtypes of less precision or range as well. None: arrays keep the dtypes
            that they have in the file; those of 64 bits, which JAX does not have without x64, are
            refused.

    Returns:
        A `Report`: what was restored, what was not, what was cast; `report.values["model"]` is the
        model, another one where it cannot be changed (a frozen module, or one of Equinox).

    Raises:
        NotFoundError: (a FileNotFoundError) if the file does not exist.
        DamagedError: for a file that is damaged, or of another kind.
        MismatchError: if names, shapes or dtypes do not match, with the `Report`.
        MappingError: if the mapping does not suit the model.
        CheckpointError: for a filter that matches nothing.
        ImportError: without the package `safetensors`.

    After any of these, the model is as it was.

    >>> import tempfile
    >>> import nnxlite as nnx
    >>> folder = tempfile.mkdtemp()
    >>> nnx.save_safetensors(folder, nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> nnx.load_safetensors(folder, nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(1)), strict=False)
    ... # doctest: +ELLIPSIS
    /.../model.safetensors: 1 restored
    unexpected, 1: bias
    """
    entries = None if mapping is None else mapping.entries
    options = {"entries": entries, "rename": rename, "strict": strict, "cast": cast}
    return load_model(Files(path), model, only, **options)


Stored: tp.TypeAlias = tuple[Path, int, Spec]
"""An array in a file, with the position where it begins."""


class Files(Source):
    """The arrays of a safetensors file, a folder with one, an index and its files, or a repository.

    Raises:
        NotFoundError: if there is nothing at the path, or a file of the index is missing.
        DamagedError: for anything but valid files.
        ImportError: without the package `safetensors`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        name = os.fspath(path)
        found = located(_downloaded(name) if name.startswith(HUB) else Path(name))
        self.text = str(found)
        self._stored = indexed(found) if found.name.endswith(".json") else stored_in(found)
        self.specs = {name: spec for name, (_, _, spec) in self._stored.items()}

    def read(self, name: str) -> np.ndarray:
        """See `Source`; an array is mapped from its file."""
        path, offset, spec = self._stored[name]
        if not spec.nbytes:
            return np.empty(spec.shape, jnp.dtype(spec.dtype))
        return np.memmap(path, jnp.dtype(spec.dtype), "r", offset, spec.shape)


def _downloaded(name: str) -> Path:
    """The folder of a repository of the Hugging Face hub, from its cache or the network."""
    with importing(
        f'{name!r} needs huggingface_hub: pip install "nnxlite[pretrained]".',
        name="huggingface_hub",
    ):
        from huggingface_hub import snapshot_download
    repository, _, revision = name.removeprefix(HUB).partition("@")
    wanted = [f"*{SUFFIX}", f"*{INDEX}"]
    return Path(snapshot_download(repository, revision=revision or None, allow_patterns=wanted))


def located(path: Path) -> Path:
    """The file, or index, that a path stands for."""
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.is_file())
        found = [p for p in files if p.name.endswith(INDEX)]
        found = found or [p for p in files if p.name.endswith(SUFFIX)]
        for name in (f"model{SUFFIX}", f"model{INDEX}"):
            if path / name in files:
                return path / name
        if len(found) == 1:
            return found[0]
        names = ", ".join(p.name for p in (found or files)[:6]) or "no file"
        raise NotFoundError(
            f"The folder {path} has no model{SUFFIX}; there is {names}. "
            + ("Pass one of them." if found else PICKLES)
        )
    index = path.with_name(path.name.removesuffix(SUFFIX) + INDEX)
    for file in (path, index):
        if file.is_file():
            return file
    raise NotFoundError(f"No such file: {path}.")


def stored_in(path: Path) -> dict[str, Stored]:
    """What the header of a file says."""
    with importing(NEEDED):
        from safetensors import SafetensorError, safe_open
    with path.open("rb") as file:
        start = file.read(8)
        try:
            with safe_open(path, framework="np"):  # which checks it
                length = int.from_bytes(start, "little")
                header = json.loads(file.read(length))
        except (SafetensorError, OSError, ValueError) as error:
            pickled = start[:1] in (b"\x80", b"P")  # or a zip archive of some
            raise DamagedError(
                f"{path} is not a safetensors file, or only a part of one: {error}."
                f"{f' {PICKLES}' if pickled else ''}"
            ) from error
    header.pop("__metadata__", None)
    found: dict[str, Stored] = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise DamagedError(
                f"{path} has {name!r} in the dtype {entry['dtype']}, which JAX has no arrays of; known "
                f"are {', '.join(DTYPES)}."
            )
        spec = Spec(tuple(entry["shape"]), DTYPES[entry["dtype"]])
        found[name] = path, 8 + length + entry["data_offsets"][0], spec
    return found


NEEDED = 'Files of safetensors need the package: pip install "nnxlite[checkpoint]".'
PICKLES = (
    "Pickles, such as files of PyTorch (.bin, .pt), can run any code and are never read here: save them "
    "again with safetensors."
)


def indexed(path: Path) -> dict[str, Stored]:
    """What an index lists, from all of its files."""
    try:
        weight_map = dict(json.loads(path.read_text("utf-8"))["weight_map"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedError(
            f'{path} is not an index of safetensors files, which has {{"weight_map": {{name: file}}}}: '
            f"{type(error).__name__}: {error}"
        ) from error
    found: dict[str, Stored] = {}
    for file in dict.fromkeys(weight_map.values()):
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise DamagedError(f"{path} refers to {file!r}, which is not in its folder.")
        if not (path.parent / file).is_file():
            raise NotFoundError(f"{path} lists {file!r}, which is not beside it.")
        stored = stored_in(path.parent / file)
        found.update((name, stored[name]) for name in stored if weight_map.get(name, file) == file)
    if absent := [name for name in weight_map if name not in found]:
        name = absent[0]
        raise DamagedError(
            f"{path} lists {name!r} in {weight_map[name]!r}, which does not have it."
        )
    return found


def write(path: Path, arrays: tp.Mapping[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Write arrays to a file that takes its place when it is complete."""
    with importing(NEEDED):
        from safetensors.numpy import save_file
    temporary = path.with_name(f".{path.name}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file({n: np.asarray(x, order="C") for n, x in arrays.items()}, temporary, metadata)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    path.with_name(path.name.removesuffix(SUFFIX) + INDEX).unlink(missing_ok=True)  # of other files
