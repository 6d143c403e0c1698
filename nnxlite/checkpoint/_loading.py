"""Loading arrays by name into objects: first everything is checked, then read, then written."""

from __future__ import annotations

import dataclasses
import typing as tp
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite.checkpoint._contents import Contents, Leaf, Spec, cast_to, in_arrays, spec_of
from nnxlite.checkpoint._errors import CheckpointError, MismatchError
from nnxlite.checkpoint._matching import Comparison, check, match
from nnxlite.checkpoint._operations import Tie, same_bits
from nnxlite.checkpoint._report import Mismatch, Report
from nnxlite.checkpoint._rules import (
    Constant,
    Conversion,
    Entry,
    Ignore,
    any_matches,
    conversions,
    has,
    without_rule,
)
from nnxlite.filters import to_predicate
from nnxlite.training.patterns import Pattern


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


def load(
    source: Source,
    model: tp.Any,
    *,
    only: tp.Any = ...,
    entries: Sequence[Entry] | None = None,
    rename: tp.Mapping[str, str] | None = None,
    strict: bool = True,
    cast: bool | None = False,
) -> Report:
    """Load what a source has into a model; `entries` are those of a mapping."""
    contents, wanted = Contents(model, only), only_of(only)
    if entries is not None:
        if rename is not None:
            raise ValueError("Pass `mapping` or `rename`, not both: the rules of a mapping rename.")
        reads, report = compare(source, contents, wanted, entries, strict=strict, cast=cast)
        contents.write(dict(_read(source, reads, report, contents, cast)))
        return dataclasses.replace(report, values={"model": contents.root})
    sources, report = match(
        source.specs,
        contents,
        source=source.text,
        only=lambda name: wanted(contents.leaves[name]),
        rename=rename,
        strict=strict,
        cast=cast,
    )
    contents.write(
        {
            name: placed(source.read(old), contents.leaves[name], cast is None)
            for name, old in sources.items()
        }
    )
    return dataclasses.replace(report, values={"model": contents.root})


Read: tp.TypeAlias = tuple[Conversion, list[str]]
"""A conversion, with the foreign names that there are for it."""


def compare(
    source: Source,
    contents: Contents,
    only: tp.Callable[[Leaf], bool],
    entries: Sequence[Entry],
    *,
    strict: bool,
    cast: bool | None,
) -> tuple[list[Read], Report]:
    """What a mapping has to read from a source, once it is known to match."""
    made = conversions(entries, contents, strict)
    comparison = Comparison(source.text, contents, cast)
    comparison.missing += without_rule(entries, made, contents.leaves, only)
    reads: list[Read] = []
    for conversion in made:
        names = [name for name in conversion.ours if only(contents.leaves[name])]
        if names and (present := _add(comparison, source.specs, conversion, names)):
            reads.append((conversion, present))
    used = {name for conversion in made for name in conversion.foreign}
    used |= {entry.foreign for entry in entries if isinstance(entry, Constant)}
    ignored = [Pattern(entry.foreign) for entry in entries if isinstance(entry, Ignore)]
    comparison.left_over = [
        name for name in source.specs if name not in used and not any_matches(ignored, name)
    ]
    report = comparison.report
    check(report, contents, strict)
    return reads, report


def _add(
    comparison: Comparison, specs: tp.Mapping[str, Spec], conversion: Conversion, names: list[str]
) -> list[str]:
    """Compare what one conversion needs for some of ours; the foreign names to read, if it suits."""
    present = [name for name in conversion.foreign if name in specs]
    absent = [name for name in conversion.foreign if name not in specs]
    if absent and not (present and has(conversion.rule, Tie)):
        comparison.missing += names
        comparison.foreign.update(dict.fromkeys(names, absent[0]))
        return []
    dtype = specs[present[0]].dtype
    for name in present:
        needed = Spec(conversion.foreign_shape[name], dtype)
        if specs[name] != needed:
            stored = f"{specs[name]} as {name}"
            comparison.misshapen += [Mismatch(n, stored, str(needed)) for n in names]
            return []
    leaves = comparison.wanted.leaves
    cast = comparison.cast if conversion.cast is None else True
    good = [n for n in names if comparison.fits(n, Spec(leaves[n].spec.shape, dtype), cast)]
    comparison.renamed += [(f, name) for f in present for name in good if f != name]
    return present if good else []


def _read(
    source: Source, reads: list[Read], report: Report, contents: Contents, cast: bool | None
) -> Iterator[tuple[str, tp.Any]]:
    """The new values by name, one conversion after the other; MismatchError for ties that differ."""
    restored = set(report.restored)
    for conversion, names in reads:
        arrays = [source.read(name) for name in names]
        for name, array in zip(names, arrays):
            if has(conversion.rule, Tie) and not same_bits(arrays[0], array):
                raise MismatchError(
                    f"{source.text} has different values for '{names[0]}' and '{name}', which "
                    f"{conversion.rule} ties. Nothing was changed. To load only '{names[0]}', leave the "
                    f"other to Ignore({name!r}).",
                    report,
                )
        for name, array in zip(conversion.ours, conversion.load(arrays)):
            if name in restored:
                yield name, placed(array, contents.leaves[name], cast is None)


def placed(array: np.ndarray, leaf: Leaf, stored_dtype: bool = False) -> tp.Any:
    """An array in the form, sharding and dtype of a leaf, or in its own dtype; a copy."""
    spec, sharding = leaf.spec, leaf.sharding
    if spec.is_python:
        return spec.as_python(array.item())
    if spec.key_impl:
        data = np.array(array)
        if sharding is None:
            return jax.random.wrap_key_data(jnp.asarray(data), impl=spec.key_impl)
        data = jax.make_array_from_callback(data.shape, sharding, data.__getitem__)
        return jax.random.wrap_key_data(data, impl=spec.key_impl)
    dtype = jnp.dtype(in_arrays(array.dtype.name if stored_dtype else spec.dtype, leaf))
    if array.dtype != dtype:
        array = cast_to(array, dtype, leaf.name if stored_dtype else None)
    if isinstance(leaf.value, (np.ndarray, np.generic)):
        copied = np.array(array, dtype)
        return copied if isinstance(leaf.value, np.ndarray) else copied[()]
    if sharding is None:
        new = jnp.asarray(np.array(array, dtype, order="C"))
    else:
        new = jax.make_array_from_callback(
            spec.shape,
            sharding,
            lambda index: np.array(array[index], dtype, order="C"),
            dtype=dtype,
        )
    return new.block_until_ready()  # or the memory of several transfers adds up
