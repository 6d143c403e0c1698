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
from nnxlite.training._leaves import compare, flatten, misshapen, pairs, write_together
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
        start = lambda variable: variable.replace(_copied(content(variable)), ref=False)
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
        if wrong := compare(self.params, given, "update", "averaged Variables"):
            raise ValueError(f"The structure of the update is not that of the average: {wrong}.")
        old, new = [[content(leaf) for leaf in flatten(tree)[0]] for tree in (self.params, given)]
        if wrong := misshapen(self.params, old, new, "update", "average"):
            raise ValueError(f"The update does not have the shapes of the average: {wrong}.")
        averaged = [_average(self.decay, a, b) for a, b in zip(old, new)]
        write_together([*zip(flatten(self.params)[0], averaged)])

    def apply_to(self, model: A) -> A:
        """A copy of a model that has the averages in place of the averaged Variables.

        The objects are new; the Variables are those of this EMA or, if not averaged, those of the
        model itself. Where the model has a lower precision than the average (bfloat16, float16), the
        Variable is a copy in the dtype of the model, which later updates of the average do not change.

        Args:
            model: a model with the structure of the averaged one.

        Raises:
            ValueError: if the model does not have a Variable at an averaged path.
        """
        graphdef, state = split(model, graph=self.graph)
        if wrong := compare(self.params, state, "model"):
            raise ValueError(f"The structure of the model is not that of the average: {wrong}.")
        known = dict(pairs(state))
        cast = [_in_dtype_of(known[path], average) for path, average in pairs(self.params)]
        return merge(graphdef, State.merge(state, flatten(self.params)[1].unflatten(cast)))


def _wide(value: tp.Any) -> jax.Array | None:
    """A floating or complex number as an array of 32 bits or more; None for anything else."""
    known = isinstance(value, (jax.Array, np.ndarray, np.generic, float, complex))
    if not known or not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
        return None
    array = jnp.asarray(value)
    return array if array.dtype.itemsize >= 4 else array.astype(jnp.float32)  # drops weak types


def _copied(value: tp.Any) -> tp.Any:
    """A value of a model as one of the average: another array."""
    wide = _wide(value)
    if wide is None and not isinstance(value, (jax.Array, np.ndarray, numbers.Number)):
        return value
    return jnp.array(value if wide is None else wide)


def _average(decay: tp.Any, average: tp.Any, value: tp.Any) -> tp.Any:
    if (wide := _wide(value)) is None:
        return _copied(value)  # a call that donates may take the array of the model
    stored = jnp.asarray(average)
    new = decay * stored + (1 - decay) * wide
    return new if new.dtype == stored.dtype else new.astype(stored.dtype)


def _in_dtype_of(leaf: tp.Any, average: tp.Any) -> tp.Any:
    """The average; in a copy if the leaf of the model has another precision."""
    value, dtype = content(average), getattr(content(leaf), "dtype", None)
    if dtype is None or getattr(value, "dtype", dtype) == dtype:
        return average
    return average.replace(value.astype(dtype))
