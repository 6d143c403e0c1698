"""`EMA`: an exponential moving average of a model's Variables.

An average moves by `1 - decay` of a difference, which is less than bfloat16 or float16 can add to a
number of that size: in them it stops moving on the way.  So averages are stored in float32 at least, and
`apply_to` casts them to the dtypes of the model.
"""

from __future__ import annotations

import numbers
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import path_text, short_type
from nnxlite._state._definition import State
from nnxlite._state._flat import content
from nnxlite.filters import Filter
from nnxlite.graph._functional import merge, split
from nnxlite.graph._functional import state as state_of
from nnxlite.objects._fields import data
from nnxlite.objects._pytree import Pytree
from nnxlite.training._leaves import compare, flatten, is_inexact, misshapen, pairs, write_together
from nnxlite.variables._variable import is_variable

A = tp.TypeVar("A")


class EMA(Pytree):
    """Averages of Variables: `average = decay * average + (1 - decay) * value` at each update.

    Args:
        params: the model (or a State) whose Variables are averaged; the averages start as copies.
        decay: the weight of the past, between 0 and 1.
        only: a filter for the Variables to average.
        graph: False refuses models with shared references.

    Attributes:
        params: the State of averages, in Variables with the kinds and metadata of the originals.

    Averages are float32, or of a wider dtype that the values have. Integers, bools and keys are not
    averaged: the latest value is stored.

    Raises:
        TypeError: if `decay` is not a number, or a selected leaf is an array without Variable.
        ValueError: if `decay` is not between 0 and 1.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
    >>> model.kernel.value = jnp.array([[1.0]])
    >>> ema = nnx.EMA(model, decay=0.5, only=nnx.Param)
    >>> model.kernel.value = jnp.array([[3.0]])
    >>> ema.update(model)
    >>> averaged = ema.apply_to(model)
    >>> float(averaged.kernel.value[0, 0]), float(model.kernel.value[0, 0])
    (2.0, 3.0)
    """

    params: State

    def __init__(
        self, params: tp.Any, decay: float, *, only: Filter = ..., graph: bool | None = None
    ) -> None:
        if not isinstance(decay, jax.Array) or decay.shape:
            if not isinstance(decay, numbers.Real) or isinstance(decay, bool):
                raise TypeError(f"decay must be a number between 0 and 1, got {decay!r}.")
            if not 0 <= float(decay) <= 1:
                raise ValueError(f"decay must be between 0 and 1, got {decay!r}.")
        selected = state_of(params, only, graph=graph)
        for path, leaf in pairs(selected):
            if not is_variable(leaf):
                raise TypeError(
                    f"EMA averages Variables, and the leaf at {path_text(path)} is not one: "
                    f"{short_type(leaf)}. Select Variables with the filter `only`, such as "
                    "only=nnx.Param."
                )
        start = lambda x: x.replace(jax.tree.map(_wide, content(x)), ref=False)
        self.graph = graph
        self.decay = decay
        self.filter = only
        self.params = data(jax.tree.map(start, selected, is_leaf=is_variable))

    def update(self, updates: tp.Any) -> None:
        """Update the averages with the present values of a model, or of a State.

        Args:
            updates: the model, or a State of it.

        Raises:
            ValueError: before any change, if its paths or shapes are not those of the averages.
        """
        given = state_of(updates, self.filter, graph=self.graph)
        matched = self._nnx_matched(given, "update", "averaged Variables")
        average = lambda old, new: _average(self.decay, old, new)
        write_together([(v, jax.tree.map(average, content(v), content(x))) for v, x in matched])

    def _nnx_matched(self, given: tp.Any, what: str, of: str | None = None) -> list[tp.Any]:
        """The averages, each with the leaf of another State at its path; ValueError for another form."""
        if wrong := compare(self.params, given, what, of):
            raise ValueError(f"The structure of the {what} is not that of the average: {wrong}.")
        known = dict(pairs(given))
        matched = [(average, known[path]) for path, average in pairs(self.params)]
        old, new = ([content(pair[n]) for pair in matched] for n in (0, 1))
        if wrong := misshapen(self.params, old, new, what, "average"):
            raise ValueError(f"The {what} does not have the shapes of the average: {wrong}.")
        return matched

    def apply_to(self, model: A) -> A:
        """A copy of a model that has the averages in place of the averaged Variables.

        The objects are new; the Variables are those of this EMA or, if not averaged, those of the
        model itself. Where the model has a lower precision than the average (bfloat16, float16), the
        Variable is a copy in the dtype of the model, which later updates of the average do not change.

        Args:
            model: a model with the structure of the averaged one.

        Raises:
            ValueError: if the model does not have a Variable of the same shape at an averaged path.
        """
        graphdef, state = split(model, graph=self.graph)
        cast = [_in_dtype_of(leaf, average) for average, leaf in self._nnx_matched(state, "model")]
        return merge(graphdef, State.merge(state, flatten(self.params)[1].unflatten(cast)))


def _wide(value: tp.Any) -> tp.Any:
    """A value of a model as one of the average: another array, which no call that donates takes."""
    if not isinstance(value, (jax.Array, np.ndarray, numbers.Number)):
        return value
    array = jnp.array(value)
    narrow = is_inexact(array) and array.dtype.itemsize < 4
    return array.astype(jnp.float32) if narrow else array  # drops weak types


def _average(decay: tp.Any, average: tp.Any, value: tp.Any) -> tp.Any:
    stored, wide = _wide(average), _wide(value)
    if not is_inexact(wide):
        return wide
    new = decay * stored + (1 - decay) * wide
    return new if new.dtype == stored.dtype else new.astype(stored.dtype)


def _in_dtype_of(leaf: tp.Any, average: tp.Any) -> tp.Any:
    """The average; in a copy if the leaf of the model has another precision."""
    values, form = jax.tree.flatten(content(average))
    dtypes = [getattr(x, "dtype", None) for x in jax.tree.leaves(content(leaf))]
    same = [d is None or getattr(x, "dtype", d) == d for x, d in zip(values, dtypes)]
    cast = [x if s else x.astype(d) for x, d, s in zip(values, dtypes, same)]
    return average if all(same) else average.replace(form.unflatten(cast))
