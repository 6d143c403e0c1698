"""`save_safetensors` and `load_safetensors`: plain files of named arrays, read by everybody."""

from __future__ import annotations

import os
import typing as tp
from pathlib import Path

import jax

from nnxlite.checkpoint._files import SUFFIX, Files, check_specs, write
from nnxlite.checkpoint._loading import load
from nnxlite.checkpoint._mapping import Mapping
from nnxlite.checkpoint._report import Report
from nnxlite.checkpoint._saving import exported
from nnxlite.filters import Filter


def save_safetensors(
    path: str | os.PathLike[str],
    model: tp.Any,
    *,
    only: Filter = ...,
    mapping: Mapping | None = None,
    max_shard_bytes: int | None = None,
    metadata: tp.Mapping[str, str] | None = None,
) -> None:
    """Save the arrays of a model to a safetensors file, or to several with an index.

    Names are paths joined by dots: `blocks.0.attention.kernel`; an array that several paths lead to
    is saved once, under the first.  The arrays of one file are copied to the memory of the host before
    it is written: pass `max_shard_bytes` where that is too much.  Whatever happens meanwhile, there are
    the old files or the new ones.  Typed random keys are saved as their data.

    Args:
        path: a file that ends in `.safetensors`, or a folder, which gets a `model.safetensors`.
        model: an object or pytree of objects; its static attributes are not saved.
        only: a filter for the Variables to be saved.
        mapping: the names and layouts to be saved, if others than those of the model.
        max_shard_bytes: arrays of more bytes than that in total are saved to several files, none of
            them larger unless it has a single array, and an index `model.safetensors.index.json`.
        metadata: texts for the header; by default `{"format": "pt"}`, which some readers ask for.

    In programs of several processes, the first one writes.

    Raises:
        CheckpointError: for a leaf that is not an array of a dtype of this format, or is abstract.
        MappingError: if the mapping does not suit the model.
        OSError: if the files cannot be written.

    >>> import tempfile
    >>> import nnxlite as nnx
    >>> folder = tempfile.mkdtemp()
    >>> nnx.save_safetensors(folder, nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> model = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))  # no arrays yet
    >>> nnx.load_safetensors(folder, model).restored
    ('bias', 'kernel')
    """
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise ValueError(
            f"save_safetensors: max_shard_bytes is {max_shard_bytes}; pass at least 1."
        )
    target = Path(path)
    if target.is_dir() or target.suffix != SUFFIX:
        target = target / f"model{SUFFIX}"
    outgoing = exported(model, only, None if mapping is None else mapping.entries)
    check_specs(outgoing.specs)
    if jax.process_index() == 0:
        texts = {"format": "pt"} if metadata is None else metadata
        write(target, outgoing, texts, max_shard_bytes)


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
            that they have in the file. Without x64 JAX has no arrays of 64 bits: those are cast to 32
            bits then, and listed under `cast` in the report, unless their values are outside of that
            range, which is an error.

    Returns:
        A `Report`: what was restored, what was not, what was cast; `report.values["model"]` is the
        model, another one where it cannot be changed (a frozen module, or one of Equinox).

    Raises:
        NotFoundError: (a FileNotFoundError) if there is no such file.
        DamagedError: for a file that is damaged, or of another kind.
        MismatchError: if names, shapes or dtypes do not match, with the `Report`.
        MappingError: if the mapping does not suit the model.
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
    return load(
        Files(path), model, only=only, entries=entries, rename=rename, strict=strict, cast=cast
    )
