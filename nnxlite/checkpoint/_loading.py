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
from nnxlite.checkpoint._matching import changed, check, compatible, match, nearest
from nnxlite.checkpoint._operations import Tie, same_bits
from nnxlite.checkpoint._report import Mismatch, Report
from nnxlite.checkpoint._rules import (
    Constant,
    Conversion,
    Entry,
    Ignore,
    Keep,
    Rule,
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
        comparison = compare(source, contents, wanted, entries, strict=strict, cast=cast)
        contents.write(dict(comparison.read()))
        return dataclasses.replace(comparison.report, values={"model": contents.root})
    matching = match(
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
            for name, old in matching.sources.items()
        }
    )
    return dataclasses.replace(matching.report, values={"model": contents.root})


def compare(
    source: Source,
    contents: Contents,
    only: tp.Callable[[Leaf], bool],
    entries: Sequence[Entry],
    *,
    strict: bool,
    cast: bool | None,
) -> Comparison:
    """What a mapping has to read from a source, once it is known to match."""
    made = conversions(entries, contents, strict)
    comparison = Comparison(source, contents, cast)
    comparison.missing += without_rule(entries, made, contents.leaves, only)
    for conversion in made:
        names = [name for name in conversion.ours if only(contents.leaves[name])]
        if names:
            comparison.add(conversion, names)
    used = {name for conversion in made for name in conversion.foreign}
    ignored: list[Pattern] = []
    for entry in entries:
        match entry:
            case Constant(foreign):
                used.add(foreign)
            case Ignore(foreign):
                ignored.append(Pattern(foreign))
            case Rule() | Keep():
                pass
    comparison.left_over = [
        name for name in source.specs if name not in used and not any_matches(ignored, name)
    ]
    check(comparison.report, contents, strict)
    return comparison


@dataclasses.dataclass
class Comparison:
    """What a source has, beside what the conversions of a mapping need of it.

    Attributes:
        source, contents, cast: as of `load`.
        reads: conversions, with the foreign names that there are for each.
        restored, missing, misshapen, casts, renamed, left_over, foreign: as in a `Report`.
    """

    source: Source
    contents: Contents
    cast: bool | None
    reads: list[tuple[Conversion, list[str]]] = dataclasses.field(default_factory=list)
    restored: list[str] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)
    misshapen: list[Mismatch] = dataclasses.field(default_factory=list)
    casts: list[Mismatch] = dataclasses.field(default_factory=list)
    renamed: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    left_over: list[str] = dataclasses.field(default_factory=list)
    foreign: dict[str, str] = dataclasses.field(default_factory=dict)

    def add(self, conversion: Conversion, names: list[str]) -> None:
        """Compare what one conversion needs, for those of its arrays that are wanted."""
        specs = self.source.specs
        present = [name for name in conversion.foreign if name in specs]
        absent = [name for name in conversion.foreign if name not in specs]
        if absent and not (present and has(conversion.rule, Tie)):
            self.missing += names
            self.foreign.update(dict.fromkeys(names, absent[0]))
            return
        dtype = specs[present[0]].dtype
        needed = {name: Spec(conversion.foreign_shape[name], dtype) for name in present}
        for name in present:
            if specs[name] != needed[name]:
                stored = f"{specs[name]} as {name}"
                self.misshapen += [Mismatch(n, stored, str(needed[name])) for n in names]
                return
        good = [name for name in names if self._check_dtype(conversion, name, dtype)]
        if good:
            self.reads.append((conversion, present))
            self.restored += good
            self.renamed += [(f, name) for f in present for name in good if f != name]

    def _check_dtype(self, conversion: Conversion, name: str, dtype: str) -> bool:
        """Whether arrays of this dtype can be loaded into one of ours."""
        leaf = self.contents.leaves[name]
        wanted = leaf.spec
        stored = Spec(wanted.shape, dtype)
        good = compatible(stored, wanted, self.cast if conversion.cast is None else True)
        if not good:
            self.misshapen.append(Mismatch(name, str(stored), str(wanted)))
        elif (change := changed(stored, leaf, self.cast)) is not None:
            self.casts.append(change)
        return good

    @property
    def report(self) -> Report:
        """All of this."""
        sought = {name: self.foreign.get(name, name) for name in self.missing}
        near = nearest(list(sought.values()), self.left_over)
        return Report(
            self.source.text,
            restored=tuple(self.restored),
            missing=tuple(self.missing),
            unexpected=tuple(self.left_over),
            misshapen=tuple(self.misshapen),
            cast=tuple(self.casts),
            renamed=tuple(self.renamed),
            near={name: near[other] for name, other in sought.items() if other in near},
            foreign=self.foreign,
        )

    def read(self) -> Iterator[tuple[str, tp.Any]]:
        """The new values by name, one conversion after the other.

        Raises:
            MismatchError: for foreign arrays that are tied, and not equal.
        """
        restored = set(self.restored)
        for conversion, names in self.reads:
            arrays = [self.source.read(name) for name in names]
            if has(conversion.rule, Tie):
                self._check_tied(conversion, names, arrays)
            for name, array in zip(conversion.ours, conversion.load(arrays)):
                if name in restored:
                    yield name, placed(array, self.contents.leaves[name], self.cast is None)

    def _check_tied(
        self, conversion: Conversion, names: list[str], arrays: list[np.ndarray]
    ) -> None:
        for name, array in zip(names, arrays):
            if not same_bits(arrays[0], array):
                raise MismatchError(
                    f"{self.source.text} has different values for '{names[0]}' and '{name}', which "
                    f"{conversion.rule} ties. Nothing was changed. To load only '{names[0]}', leave the "
                    f"other to Ignore({name!r}).",
                    self.report,
                )


def placed(array: np.ndarray, leaf: Leaf, stored_dtype: bool = False) -> tp.Any:
    """An array in the form, sharding and dtype of a leaf, or in its own dtype; a copy."""
    spec = leaf.spec
    if spec.is_python:
        return spec.as_python(array.item())
    if spec.key_impl:
        keys = jax.random.wrap_key_data(jnp.asarray(np.array(array)), impl=spec.key_impl)
        return keys if leaf.sharding is None else jax.device_put(keys, leaf.sharding)
    dtype = jnp.dtype(in_arrays(array.dtype.name if stored_dtype else spec.dtype, leaf))
    if array.dtype != dtype:
        array = cast_to(array, dtype, leaf.name if stored_dtype else None)
    if isinstance(leaf.value, (np.ndarray, np.generic)):
        copied = np.array(array, dtype)
        return copied if isinstance(leaf.value, np.ndarray) else copied[()]
    if leaf.sharding is None:
        new = jnp.asarray(np.array(array, dtype, order="C"))
    else:
        new = jax.make_array_from_callback(
            spec.shape,
            leaf.sharding,
            lambda index: np.array(array[index], dtype, order="C"),
            dtype=dtype,
        )
    return new.block_until_ready()  # or the memory of several transfers adds up
