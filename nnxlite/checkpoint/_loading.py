"""Loading arrays by name into objects: first everything is checked, then read, then written."""

from __future__ import annotations

import typing as tp
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._patterns import Pattern
from nnxlite.checkpoint._contents import PYTHON_TYPES, Contents, Leaf, Spec, spec_of
from nnxlite.checkpoint._errors import CheckpointError, MismatchError
from nnxlite.checkpoint._mapping import (
    Constant,
    Conversion,
    Ignore,
    Keep,
    Mapping,
    conversions,
    has,
    names_of_constant,
)
from nnxlite.checkpoint._matching import check, compatible, match, nearest
from nnxlite.checkpoint._operations import Tie, as_dtype, same_bits
from nnxlite.checkpoint._report import Mismatch, Report
from nnxlite.filters import to_predicate


class Source(tp.Protocol):
    """Where arrays come from: files, or a dictionary."""

    text: str
    specs: dict[str, Spec]

    def read(self, name: str) -> np.ndarray:
        """An array, which must be copied if it is to stay; of random keys, their data."""
        ...


class Arrays:
    """Arrays in memory, by name.

    Attributes:
        text: for messages.
        specs: shape and dtype of each array, by name.

    Raises:
        CheckpointError: for a value that is not an array.
    """

    def __init__(self, arrays: tp.Mapping[str, tp.Any]) -> None:
        self.text = "The dictionary"
        self._arrays = dict(_flattened(arrays, ""))
        self.specs: dict[str, Spec] = {}
        for name, array in self._arrays.items():
            spec = spec_of(array)
            if spec is None or spec.dtype == "Python str":
                raise CheckpointError(f"'{name}' is a {type(array).__name__}, not an array.")
            self.specs[name] = spec

    def read(self, name: str) -> np.ndarray:
        """An array as NumPy's; of random keys, their data."""
        array = self._arrays[name]
        return np.asarray(jax.random.key_data(array) if self.specs[name].key_impl else array)


def _flattened(arrays: tp.Mapping[str, tp.Any], prefix: str) -> Iterator[tuple[str, tp.Any]]:
    for key, value in arrays.items():
        if isinstance(value, tp.Mapping):
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _as_array(value)


def _as_array(value: tp.Any) -> tp.Any:
    """JAX's arrays as they are; PyTorch's without a copy."""
    if isinstance(value, (jax.Array, np.ndarray, np.generic)) or not hasattr(value, "__array__"):
        return value
    try:
        return np.asarray(value)
    except TypeError:  # NumPy has no bfloat16 of its own
        return jnp.from_dlpack(value)


def only_of(only: tp.Any) -> tp.Callable[[Leaf], bool]:
    """Whether a leaf matches a filter."""
    predicate = to_predicate(only)
    return lambda leaf: predicate(leaf.path, leaf.owner)


class Reads(tp.NamedTuple):
    """What is to be read: for each conversion the foreign names that there are."""

    conversions: list[tuple[Conversion, list[str]]]
    report: Report


def load(
    source: Source,
    model: tp.Any,
    *,
    only: tp.Any = ...,
    mapping: Mapping | None = None,
    rename: tp.Mapping[str, str] | None = None,
    strict: bool = True,
    cast: bool | None = False,
) -> Report:
    """Load what a source has into a model."""
    contents, wanted = Contents(model), only_of(only)
    if mapping is None:
        matching = match(
            source.specs,
            contents,
            source=source.text,
            only=lambda name: wanted(contents.leaves[name]),
            rename=rename,
            strict=strict,
            cast=cast,
        )
        report = matching.report
        new = {
            name: placed(source.read(old), contents.leaves[name], cast is None)
            for name, old in matching.sources.items()
        }
    elif rename is not None:
        raise ValueError("Pass `mapping` or `rename`, not both: the rules of a mapping rename.")
    else:
        reads = reads_of(source, contents, wanted, mapping, strict=strict, cast=cast)
        report, new = reads.report, {}
        restored = set(report.restored)
        for conversion, names in reads.conversions:
            arrays = [source.read(name) for name in names]
            _check_tied(conversion, names, arrays, report)
            for name, array in zip(conversion.ours, conversion.load(arrays)):
                if name in restored:
                    new[name] = placed(array, contents.leaves[name], cast is None)
    contents.write(new)
    return report


def reads_of(
    source: Source,
    contents: Contents,
    only: tp.Callable[[Leaf], bool],
    mapping: Mapping,
    *,
    strict: bool,
    cast: bool | None,
) -> Reads:
    """What a mapping has to read from a source, once it is known to match."""
    made = conversions(mapping, contents, strict)
    ruled = {name for conversion in made for name in conversion.ours}
    keep = [Pattern(entry.ours) for entry in mapping.entries if isinstance(entry, Keep)]
    reads: list[tuple[Conversion, list[str]]] = []
    restored: list[str] = []
    missing = [
        name
        for name, leaf in contents.leaves.items()
        if name not in ruled and only(leaf) and not _any_matches(keep, name)
    ]
    foreign: dict[str, str] = {}
    misshapen, casts = [], []
    renamed: list[tuple[str, str]] = []
    for conversion in made:
        names = [name for name in conversion.ours if only(contents.leaves[name])]
        if not names:
            continue
        present = [name for name in conversion.foreign if name in source.specs]
        absent = [name for name in conversion.foreign if name not in source.specs]
        if absent and not (present and has(conversion.rule, Tie)):
            missing += names
            foreign.update(dict.fromkeys(names, absent[0]))
            continue
        dtype = source.specs[present[0]].dtype
        allowed = cast if conversion.cast is None else True
        fits: list[str] = []
        for name in names:
            spec = contents.leaves[name].spec
            bad = next((f for f in present if not _stored_well(f, source, conversion, dtype)), None)
            if bad is not None:
                like = Spec(conversion.foreign_shape[bad], dtype)
                misshapen.append(Mismatch(name, f"{source.specs[bad]} as {bad}", str(like)))
            elif not compatible(Spec(spec.shape, dtype), spec, allowed):
                misshapen.append(Mismatch(name, str(Spec(spec.shape, dtype)), str(spec)))
            else:
                fits.append(name)
                if cast is not None and dtype != spec.dtype:
                    casts.append(Mismatch(name, str(Spec(spec.shape, dtype)), str(spec)))
        if fits:
            reads.append((conversion, present))
            restored += fits
            renamed += [(f, name) for f in present for name in fits if f != name]
    ignored = [Pattern(entry.foreign) for entry in mapping.entries if isinstance(entry, Ignore)]
    used = {name for conversion in made for name in conversion.foreign}
    for entry in mapping.entries:
        if isinstance(entry, Constant):
            used.update(names_of_constant(entry, contents.leaves))
    left_over = [n for n in source.specs if n not in used and not _any_matches(ignored, n)]
    by_foreign = nearest([foreign.get(name, name) for name in missing], left_over)
    near = {n: by_foreign[f] for n in missing if (f := foreign.get(n, n)) in by_foreign}
    report = Report(
        source.text,
        restored=tuple(restored),
        missing=tuple(missing),
        unexpected=tuple(left_over),
        misshapen=tuple(misshapen),
        cast=tuple(casts),
        renamed=tuple(renamed),
        near=near,
        foreign=foreign,
    )
    check(report, contents, strict)
    return Reads(reads, report)


def _any_matches(patterns: list[Pattern], name: str) -> bool:
    return any(pattern.match(name) is not None for pattern in patterns)


def _stored_well(name: str, source: Source, conversion: Conversion, dtype: str) -> bool:
    spec = source.specs[name]
    return spec.shape == conversion.foreign_shape[name] and spec.dtype == dtype


def _check_tied(
    conversion: Conversion, names: list[str], arrays: list[np.ndarray], report: Report
) -> None:
    if has(conversion.rule, Tie):
        for name, array in zip(names, arrays):
            if not same_bits(arrays[0], array):
                raise MismatchError(
                    f"{report.source} has different values for '{names[0]}' and '{name}', which "
                    f"{conversion.rule} ties. Nothing was changed.",
                    report,
                )


def placed(array: np.ndarray, leaf: Leaf, stored_dtype: bool = False) -> tp.Any:
    """An array in the form, sharding and dtype of a leaf, or in its own dtype; a copy."""
    spec = leaf.spec
    if spec.is_python:
        return PYTHON_TYPES[spec.dtype](array.item())
    if spec.key_impl:
        keys = jax.random.wrap_key_data(jnp.asarray(np.array(array)), impl=spec.key_impl)
        return keys if leaf.sharding is None else jax.device_put(keys, leaf.sharding)
    dtype = array.dtype if stored_dtype else as_dtype(spec.dtype)
    if isinstance(leaf.value, (np.ndarray, np.generic)):
        copied = np.array(array, dtype)
        return copied if isinstance(leaf.value, np.ndarray) else copied[()]
    if leaf.sharding is None:
        return jnp.asarray(np.array(array, dtype, order="C"))
    return jax.make_array_from_callback(
        spec.shape,
        leaf.sharding,
        lambda index: np.array(array[index], dtype, order="C"),
        dtype=dtype,
    )
