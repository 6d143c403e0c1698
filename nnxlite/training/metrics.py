"""Metrics: figures accumulated over many batches, in Variables.

A metric has three methods: `update` adds a batch, `compute` returns the figure so far, `reset`
restarts it.  All its state is `MetricState`, so a metric is an ordinary argument of `nnx.jit`, and
can be stacked, sharded and saved like a model.
"""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import short_type
from nnxlite._base.jax import Tracer
from nnxlite._state._flat import content
from nnxlite.filters import Filter
from nnxlite.graph._functional import split
from nnxlite.objects._pytree import Pytree
from nnxlite.training._leaves import flatten, write_together
from nnxlite.training.train_state import Struct
from nnxlite.variables._variable import Variable

__all__ = ["Accuracy", "Average", "Metric", "MetricState", "MultiMetric", "Statistics", "Welford"]

T = tp.TypeVar("T")

# Compiled, since `jnp.zeros` runs its operations one by one: a loop that resets its metrics after every
# ten steps takes 5 % longer with it (bench `loops`).
_zeros = jax.jit(jnp.zeros, static_argnums=(0, 1))


class MetricState(Variable[T]):
    """A Variable that belongs to a metric.

    >>> import nnxlite as nnx
    >>> sorted(nnx.state(nnx.metrics.Average(), nnx.metrics.MetricState))
    ['count', 'total']
    """


class Metric(Pytree):
    """Base of all metrics: subclasses define `__init__`, `reset`, `update` and `compute`.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> class Largest(nnx.Metric):
    ...     def __init__(self):
    ...         self.value = nnx.metrics.MetricState(jnp.array(-jnp.inf))
    ...     def reset(self):
    ...         self.value[...] = -jnp.inf
    ...     def update(self, *, values):
    ...         self.value[...] = jnp.maximum(self.value[...], values.max())
    ...     def compute(self):
    ...         return self.value[...]
    >>> largest = Largest()
    >>> largest.update(values=jnp.array([1.0, 3.0]))
    >>> float(largest.compute())
    3.0
    """

    def __init__(self) -> None:
        raise NotImplementedError(_must_define(self, "__init__"))

    def reset(self) -> None:
        """Discard all batches."""
        raise NotImplementedError(_must_define(self, "reset"))

    def update(self, **kwargs: tp.Any) -> None:
        """Add a batch.

        Args:
            kwargs: what the metric is computed of, by name.
        """
        raise NotImplementedError(_must_define(self, "update"))

    def compute(self) -> tp.Any:
        """The figure so far."""
        raise NotImplementedError(_must_define(self, "compute"))

    def split(self, *filters: Filter) -> tp.Any:
        """The definition and state of the metric: `nnx.split(metric, *filters)`.

        Args:
            filters: Variable types, strings, predicates, ...
        """
        return split(self, *filters)


def _must_define(metric: Metric, method: str) -> str:
    return f"Must override `{method}()` method in {type(metric).__name__}: Metric is a base class."


class Average(Metric):
    """The mean of all values.

    Args:
        argname: the keyword argument of `update` with the values.

    Attributes:
        total: float32, the sum of the values.
        count: int32, their number.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> loss = nnx.metrics.Average("loss")
    >>> loss.update(loss=jnp.array([1.0, 2.0, 3.0]))
    >>> loss.update(loss=6.0)
    >>> float(loss.compute())
    3.0
    """

    def __init__(self, argname: str = "values") -> None:
        self.argname = argname
        self.total = MetricState(jnp.zeros((), jnp.float32))
        self.count = MetricState(jnp.zeros((), jnp.int32))

    def reset(self) -> None:
        """Discard all values."""
        self.total.value = _zeros(np.shape(self.total.value), jnp.float32)
        self.count.value = _zeros(np.shape(self.count.value), jnp.int32)

    def update(self, mask: tp.Any = None, **kwargs: tp.Any) -> None:
        """Add values.

        Args:
            mask: broadcast together with the values; those where it is zero or False are skipped,
                NaN included. Other numbers are weights; their sum in each update, rounded down, is
                added to the count.
            **kwargs: the values under the metric's `argname`, a number or an array of any shape;
                other arguments are ignored, so that several metrics can be updated together.

        Raises TypeError if the argument is missing, is not numeric, or the mask and the values do
        not broadcast.
        """
        values, weights = _batch(self, self.argname, kwargs, mask)
        if weights is None:
            total, number = values.sum(dtype=jnp.float32), values.size
        else:
            # In float32: in the dtype of the values a weight of 0.5 would be True, or 0.
            weighted = values.astype(jnp.float32) * weights.astype(jnp.float32)
            total = weighted.sum(where=weights != 0)
            exact = jnp.issubdtype(weights.dtype, jnp.integer) or weights.dtype == bool
            number = weights.sum(dtype=jnp.int32 if exact else jnp.float32).astype(jnp.int32)
        self.total.value = self.total.value + total
        self.count.value = self.count.value + number

    def compute(self) -> jax.Array:
        """The mean, float32; NaN without values."""
        return self.total.value / self.count.value


class Statistics(Struct):
    """The result of `Welford`.

    Attributes:
        mean: the mean of the values.
        standard_error_of_mean: the standard deviation divided by the root of their number.
        standard_deviation: that of the values as a population (divided by n, not n - 1).

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> spread = nnx.metrics.Welford()
    >>> spread.update(values=jnp.array([1.0, 3.0]))
    >>> float(spread.compute().mean)
    2.0
    """

    mean: jax.Array
    standard_error_of_mean: jax.Array
    standard_deviation: jax.Array


class Welford(Metric):
    """Mean and standard deviation of all values, in one pass and without cancellation.

    The update of B. P. Welford (Technometrics 4, 1962), in the form for batches of T. F. Chan,
    G. H. Golub and R. J. LeVeque (1979).

    Args:
        argname: the keyword argument of `update` with the values.

    Attributes:
        count: int32, the number of values.
        mean: float32, their mean.
        m2: float32, the sum of their squared deviations from it.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> spread = nnx.metrics.Welford()
    >>> spread.update(values=jnp.array([1.0, 3.0]))
    >>> spread.update(values=jnp.array([5.0, 7.0]))
    >>> statistics = spread.compute()
    >>> float(statistics.mean), round(float(statistics.standard_deviation), 4)
    (4.0, 2.2361)
    """

    def __init__(self, argname: str = "values") -> None:
        self.argname = argname
        self.count = MetricState(jnp.zeros((), jnp.int32))
        self.mean = MetricState(jnp.zeros((), jnp.float32))
        self.m2 = MetricState(jnp.zeros((), jnp.float32))

    def reset(self) -> None:
        """Discard all values."""
        self.count.value = _zeros(np.shape(self.count.value), jnp.int32)
        self.mean.value = _zeros(np.shape(self.mean.value), jnp.float32)
        self.m2.value = _zeros(np.shape(self.m2.value), jnp.float32)

    def update(self, **kwargs: tp.Any) -> None:
        """Add values: as `Average.update`, with the mask among the keyword arguments.

        The mask only selects values; its numbers are not weights. The moments of a batch that is
        an array of NumPy, or in float64, are computed in float64.

        Args:
            kwargs: the values, and the mask.
        """
        values, weights = _batch(self, self.argname, kwargs, kwargs.get("mask"))
        xp: tp.Any = jnp
        dtype = jax.dtypes.canonicalize_dtype(np.promote_types(values.dtype, np.float32))
        if isinstance(values, np.ndarray) and not isinstance(weights, Tracer):
            xp, dtype = np, np.float64
        values = xp.asarray(values, dtype)
        if not values.size:
            return
        if weights is None:
            number, batch_mean, batch_m2 = values.size, values.mean(), values.var() * values.size
        else:
            chosen = xp.asarray(weights) != 0
            number = chosen.sum(dtype=jnp.int32)
            batch_mean = values.sum(where=chosen) / xp.maximum(number, 1)
            batch_m2 = ((values - batch_mean) ** 2).sum(where=chosen)
        before, mean = self.count.value, self.mean.value
        count = before + number
        total = jnp.maximum(count, 1)
        delta = batch_mean - mean
        m2 = batch_m2 + delta * delta * number * before / total
        self.count.value = count.astype(before.dtype)
        self.mean.value = (mean + delta * number / total).astype(mean.dtype)
        self.m2.value = (self.m2.value + m2).astype(self.m2.value.dtype)

    def compute(self) -> Statistics:
        """Mean, standard error and standard deviation; without values the latter two are NaN."""
        count = self.count.value
        deviation = jnp.sqrt(self.m2.value / count)
        return Statistics(self.mean.value, deviation / jnp.sqrt(count), deviation)


class Accuracy(Average):
    """The fraction of correct predictions.

    Args:
        threshold: None for several classes, of which the one with the largest logit is predicted;
            for two classes, the float from which on a value predicts class 1.
        *args, **kwargs: as for `Average`.

    Raises TypeError if `threshold` is neither None nor a float.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> accuracy = nnx.metrics.Accuracy()
    >>> logits = jnp.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    >>> accuracy.update(logits=logits, labels=jnp.array([1, 0, 0]))
    >>> round(float(accuracy.compute()), 4)
    0.6667
    """

    def __init__(self, threshold: float | None = None, *args: tp.Any, **kwargs: tp.Any) -> None:
        if threshold is not None and not isinstance(threshold, float):
            raise TypeError(
                f"Expected threshold to be a float, or None, got {short_type(threshold)} {threshold!r}."
            )
        self.threshold = threshold
        super().__init__(*args, **kwargs)

    def update(self, *, logits: tp.Any, labels: tp.Any, mask: tp.Any = None, **_: tp.Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # its arguments are named
        """Add predictions.

        Args:
            logits: shape `(*batch, classes)`, or `(*batch,)` with a threshold.
            labels: integers of shape `(*batch,)`; with a threshold, those above 0 are class 1.
            mask: broadcast together with the labels; those where it is zero or False are skipped.

        Raises:
            ValueError: if the numbers of axes do not match or the labels are not integers.
            TypeError: if the shapes do not match.
        """
        logits, labels = jnp.asarray(logits), jnp.asarray(labels)
        several = self.threshold is None
        if logits.ndim != labels.ndim + several:
            task, more = ("multi-class", "+1") if several else ("binary", "")
            raise ValueError(
                f"For {task} classification, expected logits.ndim==labels.ndim{more}, got logits "
                f"{short_type(logits)} and labels {short_type(labels)}."
            )
        if not (jnp.issubdtype(labels.dtype, jnp.integer) or labels.dtype == bool):
            raise ValueError(
                f"Expected labels.dtype==jnp.int32, or another integer dtype, got {short_type(labels)}."
            )
        if logits.shape[: labels.ndim] != labels.shape:
            raise TypeError(
                f"logits {short_type(logits)} and labels {short_type(labels)} are of different batches."
            )
        if several:
            correct = logits.argmax(axis=-1) == labels
        else:
            correct = (logits >= self.threshold) == (labels > 0)
        super().update(mask=mask, **{self.argname: correct})


_METHODS = ("reset", "update", "compute")


class MultiMetric(Metric):
    """Several metrics with one `update` for all.

    Args:
        **metrics: the metrics by name; each becomes an attribute.

    Raises:
        TypeError: if a value does not have the methods of a metric.
        ValueError: if a name is `reset`, `update` or `compute`.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> metrics = nnx.MultiMetric(
    ...     accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
    ... )
    >>> logits, labels = jnp.array([[0.1, 0.9], [0.8, 0.2]]), jnp.array([1, 1])
    >>> metrics.update(logits=logits, labels=labels, loss=jnp.array([0.2, 1.8]))
    >>> {name: float(value) for name, value in metrics.compute().items()}
    {'accuracy': 0.5, 'loss': 1.0}
    """

    def __init__(self, **metrics: tp.Any) -> None:
        self._metric_names = tuple(metrics)
        for name, metric in metrics.items():
            if name in _METHODS:
                raise ValueError(
                    f"A metric cannot be named {name!r}: that is a method of every metric."
                )
            if not all(callable(getattr(metric, m, None)) for m in _METHODS):
                raise TypeError(
                    f"{name!r} must be a Metric (with reset, update and compute), got "
                    f"{type(metric).__name__}."
                )
            setattr(self, name, metric)

    def _nnx_metrics(self) -> dict[str, tp.Any]:
        return {name: getattr(self, name) for name in self._metric_names}

    def reset(self) -> None:
        """Reset every metric."""
        for metric in self._nnx_metrics().values():
            metric.reset()

    def update(self, **updates: tp.Any) -> None:
        """Update every metric with all arguments; if one raises an error, none has changed.

        The argument `mask` is one for all metrics, or a dict of masks by the names of metrics; it
        is passed only to metrics that have one.

        Args:
            updates: arguments of the metrics, by name.
        """
        mask = updates.pop("mask", None)
        before = [(v, content(v)) for v in flatten(split(self)[1])[0] if isinstance(v, MetricState)]
        for name, metric in self._nnx_metrics().items():
            own = mask.get(name) if isinstance(mask, dict) else mask
            try:
                metric.update(**(updates if own is None else {**updates, "mask": own}))
            except BaseException as error:
                write_together(before)
                error.add_note(f"This was the metric {name!r} of {type(self).__name__}.")
                raise

    def compute(self) -> dict[str, tp.Any]:
        """The figure of every metric, by name."""
        return {name: metric.compute() for name, metric in self._nnx_metrics().items()}


def _batch(
    metric: Metric, argname: str, arguments: tp.Mapping[str, tp.Any], mask: tp.Any
) -> tuple[tp.Any, jax.Array | None]:
    """The values for a metric and the mask, as arrays of one shape; NumPy's are left to NumPy."""
    where = f"{type(metric).__name__}.update"
    if argname not in arguments:
        given = ", ".join(sorted(arguments)) or "none"
        raise TypeError(f"{where}: Expected keyword argument {argname!r}; given: {given}.")
    given = arguments[argname]
    try:
        values = jnp.asarray(None if isinstance(given, (str, bytes)) else given)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{where} needs numbers as {argname!r}, got {short_type(given)}."
        ) from error
    xp: tp.Any = np if isinstance(given, (np.ndarray, np.generic)) else jnp
    values = values if xp is jnp else np.asarray(given)  # JAX has cut them to 32 bits
    if mask is None:
        return values, None
    mask = jnp.asarray(mask)
    try:
        shape = jnp.broadcast_shapes(values.shape, mask.shape)
    except ValueError as error:
        raise TypeError(
            f"{where}: a mask {short_type(mask)} does not broadcast with {argname} {short_type(values)}."
        ) from error
    return xp.broadcast_to(values, shape), jnp.broadcast_to(mask, shape)
