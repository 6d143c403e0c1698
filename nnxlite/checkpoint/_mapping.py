"""`Mapping`: how names and layouts of foreign weights relate to those of a model; loading and exporting.

Loading first checks everything, then reads, then writes.  Without a mapping, each array is for the one
of its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import typing as tp
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.jax import key_name
from nnxlite.checkpoint._contents import Contents, Leaf, spec_of
from nnxlite.checkpoint._loading import Source, load_model
from nnxlite.checkpoint._report import CheckpointError, Report
from nnxlite.checkpoint._rules import Conversion, Entry, MappingError, conversions
from nnxlite.filters import Filter


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
        self._arrays = {
            ".".join(str(key_name(key)) for key in keys): _as_array(value) for keys, value in pairs
        }
        self.specs = {}
        for name, array in self._arrays.items():
            spec = spec_of(array)
            if spec is None or spec.dtype == "Python str":
                raise CheckpointError(f"'{name}' is a {type(array).__name__}, not an array.")
            self.specs[name] = spec

    def read(self, name: str) -> np.ndarray:
        """See `Source`."""
        array = self._arrays[name]
        return np.asarray(jax.random.key_data(array) if self.specs[name].key_impl else array)


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
    value = leaf.value
    if isinstance(value, jax.ShapeDtypeStruct):
        raise CheckpointError(f"'{leaf.name}' is abstract, and has no value to be saved.")
    if leaf.spec.is_python:
        return np.asarray(value)
    if leaf.spec.key_impl:
        value = jax.random.key_data(value)
    if isinstance(value, jax.Array):
        if not (value.is_fully_addressable or value.is_fully_replicated):
            raise CheckpointError(
                f"'{leaf.name}' is spread over several processes. Gather it first "
                "(jax.experimental.multihost_utils.process_allgather), or use nnx.checkpoint.save, "
                "with which every process writes its part."
            )
        if not value.is_fully_addressable:
            value = value.addressable_data(0)
        with contextlib.suppress(RuntimeError):  # where JAX was told to do without the CPU
            value = jax.device_put(value, jax.local_devices(backend="cpu")[0])
    return np.asarray(value)
