"""The file of an exported call: a zip archive, nothing in it compressed, nothing of it executed.

`manifest.json` has the signature, the versions, and the SHA-256 of every other entry; `program` is what
`jax.export` makes of the program; `weights/PATH.npy` is an array each, which NumPy can read (dtypes
that NumPy does not know as unsigned integers of the same size).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import math
import os
import tempfile
import typing as tp
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite.serving._signature import Aval, Signature, from_data, to_data

FORMAT, VERSION = "nnxlite.exported", 1
PROGRAM, MANIFEST = "program", "manifest.json"
HEADER = 4096
"""Bytes that the header of an `.npy` entry may take."""


def write(
    path: tp.Any,
    program: jax.export.Exported,
    weights: dict[str, jax.Array],
    signature: Signature,
) -> None:
    """Write a file; it appears under its name when it is complete."""
    _check_flatbuffers()
    code = bytes(program.serialize(vjp_order=signature.vjp_order))
    digests = {PROGRAM: hashlib.sha256(code).hexdigest()}
    path = Path(path)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w+b") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                archive.writestr(PROGRAM, code)
                for aval in signature.weights:
                    buffer = io.BytesIO()
                    array = np.asarray(to_data(weights[aval.path]))
                    np.lib.format.write_array(buffer, _known(array), allow_pickle=False)
                    entry = _entry(aval.path)
                    digests[entry] = hashlib.sha256(buffer.getbuffer()).hexdigest()
                    archive.writestr(entry, buffer.getbuffer())
                manifest = {
                    "format": FORMAT,
                    "version": VERSION,
                    "jax": jax.__version__,
                    "signature": signature._asdict(),
                    "sha256": digests,
                }
                archive.writestr(MANIFEST, json.dumps(manifest, indent=1))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read(path: Path) -> tuple[jax.export.Exported, dict[str, jax.Array], Signature]:
    """What `write` wrote, checked."""
    with open(path, "rb") as file:
        if not zipfile.is_zipfile(file):
            file.seek(0)
            raise ValueError(
                f"{path} is not an exported call, or only a part of one: it is no zip archive, and "
                f"begins with {file.read(8)!r}."
            )
        try:
            with zipfile.ZipFile(file) as archive:
                return _read(path, archive)
        except zipfile.BadZipFile as error:
            raise ValueError(f"{path} is damaged: {error}.") from error


def _read(
    path: Path, archive: zipfile.ZipFile
) -> tuple[jax.export.Exported, dict[str, jax.Array], Signature]:
    entries = {info.filename: info for info in archive.infolist()}
    if MANIFEST not in entries:
        raise ValueError(
            f"{path} is not an exported call: it has no {MANIFEST}, but {sorted(entries)[:5]}."
        )
    try:
        manifest = json.loads(archive.read(MANIFEST))
        found = manifest.get("format"), manifest.get("version")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}: {MANIFEST} cannot be read: {error}.") from error
    if found[0] != FORMAT:
        raise ValueError(f"{path} has the format {found[0]!r}, not {FORMAT!r}.")
    if found[1] != VERSION:
        raise ValueError(
            f"{path} has version {found[1]!r} of its format; this nnxlite reads version {VERSION}."
        )
    try:
        signature, digests = _signature(manifest["signature"]), dict(manifest["sha256"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {MANIFEST} is not complete: {error!r}.") from error
    expected = {PROGRAM, *(_entry(aval.path) for aval in signature.weights)}
    for names, what in (
        (expected - entries.keys(), "lacks"),
        (entries.keys() - expected - {MANIFEST}, "has, besides what it should,"),
        (expected - digests.keys(), "has no SHA-256 of"),
    ):
        if names:
            raise ValueError(f"{path} was changed: it {what} {sorted(names)[:5]}.")
    weights = {
        aval.path: _weight(path, archive, entries[_entry(aval.path)], aval, digests)
        for aval in signature.weights
    }
    data = _checked(path, archive, PROGRAM, digests)
    _check_flatbuffers()
    try:
        program = jax.export.deserialize(bytearray(data))
    except Exception as error:
        raise ValueError(
            f"{path}: its program was written with JAX {manifest.get('jax')}, and JAX "
            f"{jax.__version__} cannot read it: {error}"
        ) from error
    wanted = len(signature.weights) + len(signature.avals)
    if len(program.in_avals) != wanted:
        raise ValueError(
            f"{path} was changed: its program has {len(program.in_avals)} operands, and its manifest "
            f"{wanted}."
        )
    return program, weights, signature


def _signature(fields: dict[str, tp.Any]) -> Signature:
    avals, weights = (
        tuple(Aval(path, dtype, tuple(shape)) for path, dtype, shape in fields[name])
        for name in ("avals", "weights")
    )
    return Signature(
        name=str(fields["name"]),
        parameters=tuple(fields["parameters"]),
        inputs=tuple(fields["inputs"]),
        avals=avals,
        outputs=fields["outputs"],
        keys={int(number): str(impl) for number, impl in fields["keys"].items()},
        weights=weights,
        donated=tuple(fields["donated"]),
        platforms=tuple(fields["platforms"]),
        vjp_order=int(fields["vjp_order"]),
    )


def _checked(path: Path, archive: zipfile.ZipFile, entry: str, digests: dict[str, str]) -> bytes:
    data = archive.read(entry)
    found = hashlib.sha256(data).hexdigest()
    if found != digests[entry]:
        raise ValueError(
            f"{path} was changed: the SHA-256 of {entry} is {found[:12]}..., and that in the manifest "
            f"{digests[entry][:12]}..."
        )
    return data


def _weight(
    path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, aval: Aval, digests: dict[str, str]
) -> jax.Array:
    if aval.dtype.startswith("key:"):
        template = jax.eval_shape(
            lambda: jax.random.key_data(jax.random.key(0, impl=aval.dtype[4:]))
        )
        shape, dtype = (*aval.shape, *template.shape), np.dtype(np.uint32)
    else:
        shape, dtype = aval.shape, jnp.dtype(aval.dtype)
    size = math.prod(map(int, shape)) * dtype.itemsize
    if not size <= info.file_size <= size + HEADER or info.compress_size != info.file_size:
        raise ValueError(
            f"{path} was changed: {info.filename} has {info.file_size} bytes, and {aval} needs {size}."
        )
    buffer = io.BytesIO(_checked(path, archive, info.filename, digests))
    try:
        array = np.lib.format.read_array(buffer, allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{path}: {info.filename} cannot be read: {error}") from error
    if array.shape != shape or array.dtype != _storage(dtype):
        raise ValueError(
            f"{path} was changed: {info.filename} contains {array.dtype}{list(array.shape)}, and its "
            f"manifest says {aval}."
        )
    return from_data(jnp.asarray(array.view(dtype)), aval.dtype)


def _entry(path: str) -> str:
    return f"weights/{path}.npy"


def _storage(dtype: np.dtype[tp.Any]) -> np.dtype[tp.Any]:
    """The dtype under which an array is stored: its own, if NumPy alone knows it."""
    return dtype if dtype.kind in "?biufc" else np.dtype(f"u{dtype.itemsize}")


def _known(array: np.ndarray) -> np.ndarray:
    return array.view(_storage(array.dtype))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _check_flatbuffers() -> None:
    try:
        importlib.import_module("flatbuffers")
    except ImportError as error:
        raise ImportError(
            "Saving and loading exported calls needs the package flatbuffers: pip install "
            '"nnxlite[serving]".'
        ) from error
