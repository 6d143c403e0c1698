"""`Mapping`: how names and layouts of foreign weights relate to those of a model; loading and exporting.

Loading first checks everything, then reads, then writes.  Without a mapping, each array is for the one
of its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import typing as tp
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite.checkpoint._contents import Contents, Leaf, Spec, spec_of
from nnxlite.checkpoint._loading import load_model
from nnxlite.checkpoint._report import CheckpointError, Report
from nnxlite.checkpoint._rules import Conversion, Entry, MappingError, conversions, same_bits
from nnxlite.filters import Filter

_PYTHON = {"Python bool": "bool", "Python int": "int64", "Python float": "float64"}
"""The dtypes that Python numbers are written in."""


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
            A dictionary of NumPy arrays (bfloat16 and the like are dtypes of `ml_dtypes`), and of typed
            random keys.

        Raises:
            MappingError: if the mapping does not suit the model, or has no rule for an array of it.

        See the example of the class.
        """
        specs, arrays = exported(model, only, self.entries)
        return {
            name: jax.random.wrap_key_data(jnp.asarray(array), impl=impl) if impl else array
            for name, array in arrays
            for impl in [specs[name].key_impl]
        }


class Arrays:
    """Arrays in memory, a `Source`; CheckpointError for a value that is not an array."""

    text = "The dictionary"
    aliases: dict[str, str] = {}

    def __init__(self, arrays: tp.Mapping[str, tp.Any]) -> None:
        self._arrays = dict(_flattened(arrays, ""))
        self.specs: dict[str, Spec] = {}
        for name, array in self._arrays.items():
            spec = spec_of(array)
            if spec is None or spec.dtype == "Python str":
                raise CheckpointError(f"'{name}' is a {type(array).__name__}, not an array.")
            self.specs[name] = spec

    def open(self, wanted: tp.Mapping[str, tp.Any]) -> Callable[[str], np.ndarray]:
        """See `Source`; of random keys, their data."""
        return self._read

    def _read(self, name: str) -> np.ndarray:
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


def exported(
    model: tp.Any, only: Filter, entries: tuple[Entry, ...] | None
) -> tuple[dict[str, Spec], Iterator[tuple[str, np.ndarray]]]:
    """What leaves a model, under foreign names if there are entries of a mapping.

    Returns:
        Shape and dtype of each array, by name, those with the largest items first; and the arrays in
        the same order, each made when it is asked for; of random keys, their data.
    """
    contents = Contents(model, only)
    leaves = contents.leaves
    for name, leaf in contents.chosen.items():
        _check_concrete(name, leaf)
    made, left = (
        ([Conversion({n: x.spec.shape}, {n: x.spec.shape}) for n, x in leaves.items()], [])
        if entries is None
        else conversions(entries, contents)
    )
    problems = [f"{name}: no rule is for it; add one, or Keep({name!r})." for name in left]
    owners: dict[str, Conversion] = {}
    specs: dict[str, Spec] = {}
    tied: list[Conversion] = []
    wanted = [c for c in made if not contents.chosen.keys().isdisjoint(c.ours)]
    for conversion in sorted(wanted, key=lambda c: c.is_tied):  # what an array belongs to is first
        first = next(iter(conversion.foreign))
        if conversion.is_tied and first in owners:
            tied.append(conversion)
            continue
        found = {leaves[name].spec.dtype for name in conversion.ours}
        dtypes = sorted(_PYTHON.get(dtype, dtype) for dtype in found)
        if len(dtypes) > 1:
            problems.append(f"{first}: ours are of {' and '.join(dtypes)}.")
        owners.update(dict.fromkeys(conversion.foreign, conversion))
        specs.update((name, Spec(shape, dtypes[0])) for name, shape in conversion.foreign.items())
    if problems:
        raise MappingError(
            f"The mapping cannot save {type(contents.root).__name__}; nothing was written:",
            problems,
        )

    def arrays_of(conversion: Conversion) -> Iterator[tuple[str, np.ndarray]]:
        hosts = [_host(leaves[name]) for name in conversion.ours]
        return zip(conversion.foreign, conversion.save(hosts))

    for conversion in tied:
        ((name, array),) = arrays_of(conversion)
        owner = owners[name]
        if not same_bits(array, dict(arrays_of(owner))[name]):
            raise MappingError(
                f"'{next(iter(conversion.ours))}' and '{next(iter(owner.ours))}' are tied, as both are "
                f"saved as '{name}', and differ. Nothing was written. Share one Variable between them, "
                "or save one of them under another foreign name."
            )
    size = lambda c: specs[next(iter(c.foreign))].itemsize
    order = sorted(dict.fromkeys(owners.values()), key=size, reverse=True)  # all are aligned
    specs = {name: specs[name] for c in order for name in c.foreign}
    return specs, (pair for c in order for pair in arrays_of(c))


def _check_concrete(name: str, leaf: Leaf) -> None:
    if isinstance(leaf.value, jax.ShapeDtypeStruct):
        raise CheckpointError(f"'{name}' is abstract, and has no value to be saved.")
    if isinstance(leaf.value, jax.Array) and not (
        leaf.value.is_fully_addressable or leaf.value.is_fully_replicated
    ):
        raise CheckpointError(
            f"'{name}' is spread over several processes. Gather it first "
            "(jax.experimental.multihost_utils.process_allgather), or use nnx.checkpoint.save, "
            "with which every process writes its part."
        )


def _host(leaf: Leaf) -> np.ndarray:
    """The value as NumPy's; the model does not keep this copy."""
    value = leaf.value
    if leaf.spec.is_python:
        return np.asarray(value, _PYTHON[leaf.spec.dtype])
    if leaf.spec.key_impl:
        value = jax.random.key_data(value)
    if isinstance(value, jax.Array):
        if not value.is_fully_addressable:
            value = value.addressable_data(0)
        with contextlib.suppress(RuntimeError):  # where JAX was told to do without the CPU
            value = jax.device_put(value, jax.local_devices(backend="cpu")[0])
    return np.asarray(value)
