"""Safetensors files: plain files of named arrays, one or several with an index.

A file is the length of its header (8 bytes), the header (JSON: dtype, shape and position of each
array, and a dictionary of texts), and the bytes of the arrays.  Nothing in it is executed.  The
package `safetensors` checks a header, sizes included, before anything else is read; arrays are then
mapped one at a time, so that what is not used is not read.  Writing goes through here as well,
since the package needs all arrays at once.

Checkpoints of several files have an index (JSON) that says which file has which array.  A file is
replaced in one step, and an index after its files, which never have the names of files that exist:
whatever happens, the old arrays or the new ones are there.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import math
import os
import re
import struct
import typing as tp
from collections.abc import Iterable, Iterator
from pathlib import Path, PureWindowsPath

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import importing
from nnxlite.checkpoint._contents import KEY_IMPLS, Spec
from nnxlite.checkpoint._errors import CheckpointError, DamagedError, NotFoundError
from nnxlite.checkpoint.replacing import replacing
from nnxlite.checkpoint.untrusted import parse_json, read_json, shape_of, strings

SUFFIX, INDEX = ".safetensors", ".safetensors.index.json"
KEYS = "nnxlite.keys"
"""Where a header has the implementations of random keys, by name."""

CODES = {
    "bool": "BOOL",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
"""The code of each dtype in a header."""

_DTYPES = {code: name for name, code in CODES.items()}


class Stored(tp.NamedTuple):
    """An array in a file; of random keys, `shape` is that of their data."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: str
    spec: Spec


class Files:
    """The arrays of a safetensors file, of a folder with one, or of an index and its files.

    Attributes:
        text: the path, for messages.
        specs: shape and dtype of each array, by name.

    Raises:
        NotFoundError: if there is nothing at the path, or a file of the index is missing.
        DamagedError: for anything but valid files.
        ImportError: without the package `safetensors`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        found = located(Path(path))
        self.text = str(found)
        self._stored = indexed(found) if found.name.endswith(".json") else stored_in(found)
        self.specs = {name: stored.spec for name, stored in self._stored.items()}

    def read(self, name: str) -> np.ndarray:
        """An array, mapped from its file; copy what outlives it."""
        path, offset, shape, dtype, _ = self._stored[name]
        if math.prod(shape) == 0:
            return np.empty(shape, jnp.dtype(dtype))
        try:
            array = np.memmap(path, jnp.dtype(dtype), "r", offset, shape)
        except (OSError, ValueError) as error:
            raise DamagedError(f"{path} has changed since its header was read: {error}") from error
        if dtype == "bool" and (array.view(np.uint8) > 1).any():
            # XLA computes with the byte: a truth value of 2 would be neither equal to True nor False.
            raise DamagedError(f"{path} has bytes in {name!r} that are no truth values.")
        return array


def located(path: Path) -> Path:
    """The file, or index, that a path stands for."""
    try:
        return _located(path)
    except OSError as error:
        if isinstance(error, NotFoundError):
            raise
        raise NotFoundError(f"{path} cannot be found: {error.strerror}.") from error


def _located(path: Path) -> Path:
    if path.is_dir():
        for name in (f"model{SUFFIX}", f"model{INDEX}"):
            if (path / name).is_file():
                return path / name
        there = sorted(p.name for p in path.iterdir())
        files = [name for name in there if (path / name).is_file()]
        found = [n for n in files if n.endswith(INDEX)] or [n for n in files if n.endswith(SUFFIX)]
        if len(found) == 1:
            return path / found[0]
        what = (
            f"several: {', '.join(found[:4])}; pass one of them" if found else _other_files(there)
        )
        raise NotFoundError(f"There is no model{SUFFIX} in the folder {path}; {what}.")
    if path.is_file():
        return path
    index = path.with_name(path.name.removesuffix(SUFFIX) + INDEX)
    if index.is_file():
        return index
    parent = path.parent
    there = sorted(p.name for p in parent.iterdir()) if parent.is_dir() else None
    what = _other_files(there) if there is not None else "nor is there its folder"
    raise NotFoundError(f"There is no file {path}; {what}.")


def _other_files(names: list[str]) -> str:
    shown = ", ".join(names[:6]) + (" ..." if len(names) > 6 else "")
    text = f"there are {shown}" if names else "it is empty"
    if any(name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt")) for name in names):
        text += (
            ". Files of pickles can run any code, and are never read here: save them again "
            "with safetensors"
        )
    return text


def stored_in(path: Path) -> dict[str, Stored]:
    """What the header of a file says."""
    with importing('Reading safetensors needs the package: pip install "nnxlite[checkpoint]".'):
        from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, framework="np") as opened:
            metadata = opened.metadata() or {}
    except (SafetensorError, OSError, MemoryError) as error:
        raise DamagedError(f"{path} is no safetensors file: {_reason(path, error)}") from error
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = parse_json(file.read(length))
        header.pop("__metadata__", None)
        fields = {
            name: (shape_of(entry["shape"]), entry["dtype"], int(entry["data_offsets"][0]))
            for name, entry in header.items()
        }
    except (OSError, struct.error, ValueError, TypeError, KeyError) as error:
        raise DamagedError(f"{path} has a header that is not valid: {error}.") from error
    impls = _impls(path, metadata)
    return {
        name: _stored(path, name, shape, code, 8 + length + offset, impls.get(name))
        for name, (shape, code, offset) in fields.items()
    }


def _impls(path: Path, metadata: tp.Mapping[str, str]) -> dict[str, str]:
    try:
        return strings(parse_json(metadata.get(KEYS, "{}").encode()))
    except ValueError as error:
        raise DamagedError(
            f"{path} has no valid list of random keys: {metadata[KEYS][:80]!r}."
        ) from error


def _stored(
    path: Path, name: str, shape: tuple[int, ...], code: str, offset: int, impl: str | None
) -> Stored:
    if code not in _DTYPES:
        raise DamagedError(
            f"{path} has {name!r} in the dtype {code}, which JAX has no arrays of; known are "
            f"{', '.join(_DTYPES)}."
        )
    dtype = _DTYPES[code]
    spec = Spec(shape, dtype) if impl is None else Spec(shape[:-1], f"key<{impl}>")
    if impl in KEY_IMPLS and raw_form(spec) != (dtype, shape):
        raise DamagedError(
            f"{path} has {name!r} as random keys of {impl}, and as {dtype}{list(shape)}, which are none."
        )
    return Stored(path, offset, shape, dtype, spec)


MAGIC = {
    b"PK\x03\x04": "a zip archive, such as torch.save and numpy.savez write",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
    b"\x93NUMPY": "an array of numpy.save",
    b"\x89HDF": "an HDF5 file",
    b"GGUF": "a GGUF file",
    b"version https://git-lfs": "a pointer of Git LFS, without its content (run git lfs pull)",
    b"<": "a page of HTML or XML, perhaps of a failed download",
}


def looks_like(start: bytes) -> str:
    """What the first bytes of a file say it is, if they say anything: `it looks like a pickle. ...`."""
    for magic, kind in MAGIC.items():
        if start.startswith(magic):
            pickled = "torch.save" in kind or "pickle" in kind
            return f"it looks like {kind}." + (
                " Pickles can run any code, and are never read here." if pickled else ""
            )
    return ""


def _reason(path: Path, error: Exception) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        start = file.read(64)
        if not start:
            return "it is empty."
        if kind := looks_like(start):
            return kind
        (length,) = struct.unpack("<Q", start[:8].ljust(8, b"\0"))
        size = path.stat().st_size
        if start[8:9] == b"{" and 8 + length > size:
            return (
                f"its header should have {length:,} bytes, the file has {size:,}: it was cut short."
            )
    return f"{error}. It was cut short or changed."


def indexed(path: Path) -> dict[str, Stored]:
    """What an index lists, from all of its files."""
    try:
        weight_map = strings(read_json(path)["weight_map"])
        by_file: dict[str, list[str]] = collections.defaultdict(list)
        for name, file in weight_map.items():
            by_file[file].append(name)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedError(
            f'{path} is no index of safetensors files, which has {{"weight_map": {{name: file}}}}: '
            f"{type(error).__name__}: {error}"
        ) from error
    for file in by_file:
        normal = os.path.normpath(file)
        if (
            os.path.isabs(file)
            or PureWindowsPath(file).drive
            or "\\" in file
            or normal.split(os.sep)[0] in ("..", ".")
        ):
            raise DamagedError(f"{path} refers to {repr(file)[:200]}, which is not in its folder.")
        with contextlib.suppress(OSError):  # a name may be too long
            if (path.parent / file).is_file():
                continue
        raise NotFoundError(
            f"{path} lists {repr(file)[:200]}, and there is no such file beside it."
        )
    found: dict[str, Stored] = {}
    for file, names in by_file.items():
        stored = stored_in(path.parent / file)
        if absent := [name for name in names if name not in stored]:
            raise DamagedError(
                f"{path} lists {absent[0]!r} in {file!r}, which does not have it"
                + (f", nor {len(absent) - 1} others." if len(absent) > 1 else ".")
            )
        for name, entry in stored.items():
            if weight_map.get(name, file) == file:
                found[name] = entry
    return found


class Outgoing(tp.Protocol):
    """What is to be written."""

    specs: dict[str, Spec]

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """The arrays with their names, in the order of `specs`; of random keys, their data."""
        ...


def write(
    path: Path, outgoing: Outgoing, metadata: tp.Mapping[str, str], max_shard_bytes: int | None
) -> None:
    """Write one file, or several with an index if they would be larger than that."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stem = path.name.removesuffix(SUFFIX)
    index = path.with_name(stem + INDEX)
    shards = _shards(outgoing.specs, max_shard_bytes)
    arrays = outgoing.arrays()
    if len(shards) == 1:
        with replacing(path) as file:
            _write_arrays(file, outgoing.specs, arrays, metadata)
        index.unlink(missing_ok=True)
        _remove_shards(path.parent, stem)
        return
    names = _free_names(path.parent, stem, len(shards))
    try:
        for name, specs in zip(names, shards):
            with replacing(path.with_name(name)) as file:
                _write_arrays(file, specs, arrays, metadata)
        weight_map = {name: file for file, specs in zip(names, shards) for name in specs}
        total = sum(map(_size, outgoing.specs.values()))
        text = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        with replacing(index) as file:
            file.write(json.dumps(text, indent=2).encode() + b"\n")
    except BaseException:
        if not (index.exists() and names[0] in index.read_text("utf-8", "replace")):
            for name in names:
                path.with_name(name).unlink(missing_ok=True)
        raise
    path.unlink(missing_ok=True)
    _remove_shards(path.parent, stem, but=names)


def _write_arrays(
    file: tp.BinaryIO,
    specs: dict[str, Spec],
    arrays: Iterator[tuple[str, np.ndarray]],
    metadata: tp.Mapping[str, str],
) -> None:
    """Header and arrays; as many of the arrays as there are specs."""
    texts = dict(metadata)
    if impls := {name: spec.key_impl for name, spec in specs.items() if spec.key_impl}:
        texts[KEYS] = json.dumps(impls)
    header: dict[str, tp.Any] = {"__metadata__": texts} if texts else {}
    offset = 0
    for name, spec in specs.items():
        dtype, shape = raw_form(spec)
        end = offset + _size(spec)
        header[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)  # arrays start at a multiple of 8 bytes
    file.write(struct.pack("<Q", len(encoded)) + encoded)
    for name in specs:
        found, array = next(arrays)
        assert found == name
        little = np.dtype(array.dtype).newbyteorder("<")
        file.write(np.ascontiguousarray(array, little).reshape(-1).view(np.uint8).data)


def raw_form(spec: Spec) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape in which something is written; random keys as their data."""
    if spec.key_impl:
        data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=spec.key_impl)))
        return data.dtype.name, (*spec.shape, *data.shape)
    return spec.dtype, spec.shape


def check_specs(specs: tp.Mapping[str, Spec]) -> None:
    """Raise CheckpointError for what safetensors files cannot contain."""
    for name, spec in specs.items():
        if raw_form(spec)[0] not in CODES:
            raise CheckpointError(
                f"'{name}' is {spec}; safetensors files have arrays of {', '.join(CODES)}. Cast it, or "
                "leave it out by `only=`."
            )


def _size(spec: Spec) -> int:
    dtype, shape = raw_form(spec)
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def _shards(specs: dict[str, Spec], limit: int | None) -> list[dict[str, Spec]]:
    """The arrays of each file, in order; one larger than the limit has its own."""
    shards: list[dict[str, Spec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if limit is not None and shards[-1] and size + _size(spec) > limit:
            shards.append({})
            size = 0
        shards[-1][name] = spec
        size += _size(spec)
    return shards


def _free_names(folder: Path, stem: str, count: int) -> list[str]:
    """Names of files that do not exist yet: `model-00001-of-00003.safetensors`, ..."""
    for attempt in itertools.count(1):
        again = f"-r{attempt}" if attempt > 1 else ""
        names = [f"{stem}-{i + 1:05}-of-{count:05}{again}{SUFFIX}" for i in range(count)]
        if not any((folder / name).exists() for name in names):
            return names
    raise AssertionError


def _remove_shards(folder: Path, stem: str, but: Iterable[str] = ()) -> None:
    """Remove the files of an earlier checkpoint of this name, and of interrupted saves."""
    ours = re.compile(
        rf"{re.escape(stem)}-\d{{5}}-of-\d{{5}}(-r\d+)?{re.escape(SUFFIX)}"
        rf"|\.{re.escape(stem)}(-\d{{5}}-of-.*)?{re.escape(SUFFIX)}(\.index\.json)?\.[0-9a-f]{{8}}\.tmp"
    )
    for path in folder.iterdir():
        if path.name not in but and ours.fullmatch(path.name):
            path.unlink(missing_ok=True)
