"""`Mapping`: how the names and layouts of foreign weights relate to those of a model.

Its entries are in `_rules.py`, and what is done with them in `_loading.py` and `_saving.py`.
"""

from __future__ import annotations

import dataclasses
import typing as tp
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from nnxlite.checkpoint._loading import Arrays, load
from nnxlite.checkpoint._report import Report
from nnxlite.checkpoint._rules import Entry
from nnxlite.checkpoint._saving import exported
from nnxlite.filters import Filter


@dataclasses.dataclass(frozen=True, init=False)
class Mapping:
    """How foreign names and layouts relate to those of a model, for loading and for saving.

    In patterns, `*` stands for any text within a segment of a dotted name, `**` for any number of
    segments, and `{i}` for one segment; what they match on one side is filled in on the other.

    Args:
        entries: `Rule`s, and `Constant`, `Ignore`, `Keep` for what only one side has.

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
                    f"Mapping: {entry!r} is not a Rule, Constant, Ignore or Keep of nnx.checkpoint."
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
        return load(
            Arrays(arrays), model, only=only, entries=self.entries, strict=strict, cast=cast
        )

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
        exports = exported(model, only, self.entries)
        return {
            name: jax.random.wrap_key_data(jnp.asarray(array), impl=impl) if impl else array
            for name, array in exports.arrays()
            for impl in [exports.specs[name].key_impl]
        }
