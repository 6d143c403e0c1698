"""The file of an exported call: a zip archive, nothing in it compressed, nothing of it executed.

`manifest.json` has the signature, the versions, and the SHA-256 of every other entry; `program` is what
`jax.export` makes of the program; `weights/PATH.npy` is an array each, which NumPy can read (dtypes
that NumPy does not know as unsigned integers of the same size).
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import math
import re
import struct
import typing as tp
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import importing
from nnxlite.checkpoint.replacing import replacing
from nnxlite.checkpoint.untrusted import parse_json, printable, shape_of, strings
from nnxlite.serving import _trees
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
    with replacing(Path(path)) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(PROGRAM, code)
        for aval in signature.weights:
            buffer = io.BytesIO()
            array = np.asarray(to_data(weights[aval.path]))
            known = array.view(_storage(array.dtype))
            np.lib.format.write_array(buffer, known, allow_pickle=False)
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


def read(path: Path) -> tuple[jax.export.Exported, dict[str, jax.Array], Signature]:
    """What `write` wrote, checked."""
    if path.exists() and not path.is_file():  # to open a pipe would wait for ever
        raise ValueError(f"{path} is not an exported call: it is not a file.")
    with open(path, "rb") as file:
        if not zipfile.is_zipfile(file):
            file.seek(0)
            raise ValueError(
                f"{path} is not an exported call, or only a part of one: it is not a zip archive, and "
                f"begins with {file.read(8)!r}."
            )
        broken = (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, struct.error)
        try:
            archive = zipfile.ZipFile(file)
        except (*broken, ValueError) as error:  # a name that cannot be decoded is a ValueError
            raise ValueError(f"{path} is damaged: {error}.") from error
        try:
            with archive:
                _check_entries(path, archive)
                return _read(path, archive)
        except broken as error:
            raise ValueError(f"{path} is damaged: {error}.") from error


def _check_entries(path: Path, archive: zipfile.ZipFile) -> None:
    """Raise ValueError for an archive that `write` has not written: entries twice, or compressed.

    What is not compressed cannot be larger than the file.
    """
    names: set[str] = set()
    for info in archive.infolist():
        if info.filename in names:
            raise ValueError(f"{path} was changed: it has {info.filename!r} twice.")
        names.add(info.filename)
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise ValueError(f"{path} was changed: {info.filename!r} is compressed.")
        if info.flag_bits & 1:
            raise ValueError(f"{path} was changed: {info.filename!r} is encrypted.")


def _read(
    path: Path, archive: zipfile.ZipFile
) -> tuple[jax.export.Exported, dict[str, jax.Array], Signature]:
    entries = {info.filename: info for info in archive.infolist()}
    if MANIFEST not in entries:
        raise ValueError(
            f"{path} is not an exported call: it has no {MANIFEST}, but {sorted(entries)[:5]}."
        )
    try:
        manifest = parse_json(archive.read(MANIFEST))
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
        signature, digests = _signature(manifest["signature"]), strings(manifest["sha256"])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: {MANIFEST} is not complete: {error!r}.") from error
    expected = {PROGRAM, *(_entry(aval.path) for aval in signature.weights)}
    for names, what in (
        (expected - entries.keys(), "lacks"),
        (entries.keys() - expected - {MANIFEST}, "has the unexpected entries"),
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
    wanted = [*signature.weights, *signature.avals]
    if len(program.in_avals) != len(wanted):
        raise ValueError(
            f"{path} was changed: its program has {len(program.in_avals)} operands, and its manifest "
            f"{len(wanted)}."
        )
    for aval, operand in zip(wanted, program.in_avals):
        dtype, shape = _data_form(aval)
        if (jnp.dtype(dtype), tuple(map(str, shape))) != (
            operand.dtype,
            tuple(map(str, operand.shape)),
        ):
            raise ValueError(
                f"{path} was changed: {aval.path} is {aval} in its manifest, and {operand} in its "
                "program."
            )
    results = len(_trees.leaves_of(signature.outputs))
    if len(program.out_avals) != results:
        raise ValueError(
            f"{path} was changed: its program has {len(program.out_avals)} results, and its manifest "
            f"{results}."
        )
    for number, impl in signature.keys.items():
        dtype, shape = _data_form(Aval("", f"key:{impl}", ()))
        result = program.out_avals[number]
        if (jnp.dtype(dtype), shape) != (result.dtype, result.shape[result.ndim - len(shape) :]):
            raise ValueError(f"{path} was changed: {result} is a result, and no keys of {impl}.")
    return program, weights, signature


def _signature(fields: dict[str, tp.Any]) -> Signature:
    """The signature in a manifest; ValueError or the like for anything else."""
    avals, weights = (
        tuple(_aval(entry) for entry in _list(fields[name], list)) for name in ("avals", "weights")
    )
    if any(isinstance(size, str) for aval in weights for size in aval.shape):
        raise ValueError("a weight has a size that varies")
    inputs = tuple(_list(fields["inputs"], object))
    given = [number for structure in inputs for number in _trees.leaves_of(structure)]
    parameters = tuple(_list(fields["parameters"], str))
    donated = tuple(_list(fields["donated"], int))
    keys = {int(number): _impl(impl) for number, impl in strings(fields["keys"]).items()}
    results = _trees.leaves_of(fields["outputs"])
    if results != list(range(len(results))) or not set(keys) <= set(results):
        raise ValueError("its results are not numbered from 0")
    if given != list(range(len(avals))) or len(parameters) != len(inputs):
        raise ValueError("its arguments do not have the leaves that it lists")
    if not set(donated) <= set(given):
        raise ValueError("it donates what is not an argument")
    return Signature(
        name=printable(str(fields["name"])),
        parameters=parameters,
        inputs=inputs,
        avals=avals,
        outputs=fields["outputs"],
        keys=keys,
        weights=weights,
        donated=donated,
        platforms=tuple(_list(fields["platforms"], str)),
        vjp_order=int(fields["vjp_order"]),
    )


def _list(entries: tp.Any, kind: type) -> list[tp.Any]:
    if not isinstance(entries, list) or not all(isinstance(entry, kind) for entry in entries):
        raise ValueError(f"{repr(entries)[:80]} is not a list of {kind.__name__}")
    return entries


def _aval(entry: list[tp.Any]) -> Aval:
    path, dtype, shape = entry
    fixed = shape_of([0 if isinstance(size, str) else size for size in shape])
    aval = Aval(
        str(path), str(dtype), tuple(s if isinstance(s, str) else f for s, f in zip(shape, fixed))
    )
    _data_form(aval)
    return aval


def _data_form(aval: Aval) -> tuple[str, tuple[int | str, ...]]:
    """The dtype and shape in which an array crosses; of random keys, those of their data."""
    if aval.dtype.startswith("key:"):
        impl = _impl(aval.dtype[4:])
        data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))
        return data.dtype.name, (*aval.shape, *data.shape)
    if re.fullmatch(r"\w+", aval.dtype) is None or jnp.dtype(aval.dtype).name != aval.dtype:
        raise ValueError(f"{aval.dtype[:80]!r} is not the name of a dtype")
    return aval.dtype, aval.shape


def _impl(name: str) -> str:
    """The name of an implementation of random keys; ValueError for one that JAX does not have."""
    jax.eval_shape(lambda: jax.random.key(0, impl=name))
    return name


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
    name, sizes = _data_form(aval)
    dtype, shape = jnp.dtype(name), tuple(map(int, sizes))
    size = math.prod(shape) * dtype.itemsize
    if not size <= info.file_size <= size + HEADER:
        raise ValueError(
            f"{path} was changed: {info.filename} has {info.file_size} bytes, and {aval} needs {size}."
        )
    buffer = io.BytesIO(_checked(path, archive, info.filename, digests))
    try:
        np.lib.format.read_magic(buffer)  # version 1.0, unless another program wrote it
        form = np.lib.format.read_array_header_1_0(buffer)
    except Exception as error:  # NumPy parses the header as Python, and raises what its parser does
        raise ValueError(f"{path}: {info.filename} cannot be read: {error}") from error
    # Compared before there is room for the array, which the header may claim to be of any size.
    data = buffer.read()
    if form != (shape, False, _storage(dtype)) or len(data) != size:
        raise ValueError(
            f"{path} was changed: {info.filename} contains {form[2]}{list(form[0])} in {len(data)} "
            f"bytes, and its manifest says {aval}."
        )
    array = np.frombuffer(data, form[2]).reshape(shape)
    if name == "bool" and (array.view(np.uint8) > 1).any():
        raise ValueError(f"{path} was changed: {info.filename} has bytes other than 0 and 1.")
    return from_data(jnp.asarray(array.view(dtype)), aval.dtype)


def _entry(path: str) -> str:
    return f"weights/{path}.npy"


def _storage(dtype: np.dtype[tp.Any]) -> np.dtype[tp.Any]:
    """The dtype under which an array is stored: its own, if NumPy alone knows it."""
    return dtype if dtype.kind in "?biufc" else np.dtype(f"u{dtype.itemsize}")


def _check_flatbuffers() -> None:
    with importing(
        "Saving and loading exported calls needs the package flatbuffers: pip install "
        '"nnxlite[serving]".'
    ):
        importlib.import_module("flatbuffers")
