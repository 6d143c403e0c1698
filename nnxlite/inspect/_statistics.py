"""`statistics`: the values that each module returns in one call, and the gradient of each parameter.

The function runs on copies of its arguments, without compilation, while the method calls of its
modules are watched.  What a call returns is summarized in a callback, which has its values under `grad`,
`vmap` and `scan` as well; several calls of one method are summarized together.  Where the result is a
loss, a second call on other copies is differentiated.
"""

from __future__ import annotations

import dataclasses
import math
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.outline import array_text
from nnxlite._base.text import clip
from nnxlite.filters import Filter, to_predicate
from nnxlite.graph._functional import flat_pairs, merge, split
from nnxlite.inspect._calls import CopiedCall, Path
from nnxlite.inspect._nan import is_float, is_opaque, measure
from nnxlite.inspect._tabulate import PathCell, printed
from nnxlite.variables._kinds import Param
from nnxlite.variables._variable import Variable


@dataclasses.dataclass(frozen=True)
class OutputStatistics:
    """The floating values that a method of one module returned, in all its calls.

    Attributes:
        path: of the module and, unless it is `__call__`, its method.
        module: the class of the module.
        calls: how often it returned such values; for each lane of a `vmap`.
        elements: how many values.
        mean, std, min, max: of the finite ones; NaN if there is none.
        zeros, nonfinite: the shares that are zero, and NaN or infinite, from 0 to 1.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> report = nnx.statistics(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.zeros((1, 2)))
    >>> report.outputs[""].module, report.outputs[""].elements, report.outputs[""].zeros
    ('Linear', 3, 1.0)
    """

    path: str
    module: str
    calls: int
    elements: int
    mean: float
    std: float
    min: float
    max: float
    zeros: float
    nonfinite: float


@dataclasses.dataclass(frozen=True)
class GradientStatistics:
    """The gradient of the result with respect to one Variable.

    Attributes:
        path: of the Variable.
        type: its dtype and shape, as `float32[2,3]`.
        gradient_norm: the Euclidean norm of the gradient.
        norm: that of the Variable.
        ratio: the first divided by the second; infinite where only the second is zero, 0 where both are.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> model = nnx.Dict(w=nnx.Param(jnp.array(2.0)))
    >>> row = nnx.statistics(lambda m: m.w ** 2, model).gradients["m.w"]
    >>> row.gradient_norm, row.norm, row.ratio
    (4.0, 2.0, 2.0)
    """

    path: str
    type: str
    gradient_norm: float
    norm: float
    ratio: float


@dataclasses.dataclass(frozen=True, repr=False)
class Statistics:
    """What `statistics` measured; `print` shows tables, `report[path]` is one row.

    Attributes:
        outputs: by path of the module, in the order in which they are first called.
        gradients: by path of the Variable; empty if the result is not a loss.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> report = nnx.statistics(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((1, 2)))
    >>> list(report.outputs), report.gradients
    ([''], {})
    """

    outputs: dict[str, OutputStatistics]
    gradients: dict[str, GradientStatistics]

    def __getitem__(self, path: str) -> tp.Any:
        """The `OutputStatistics` of a module, or the `GradientStatistics` of a Variable.

        Raises KeyError for a path without any.
        """
        rows: dict[str, tp.Any] = {**self.gradients, **self.outputs}
        if path not in rows:
            known = clip(", ".join(map(repr, (*self.outputs, *self.gradients))), 400)
            raise KeyError(f"No statistics for {path!r}; there are some for {known or 'nothing'}.")
        return rows[path]

    def to_dict(self) -> dict[str, tp.Any]:
        """All of it as dicts, strings and numbers, for `json.dumps`."""
        return dataclasses.asdict(self)

    def __repr__(self) -> str:
        tables = []
        if self.outputs:
            heads = "module", "type", "calls", "mean", "std", "min", "max", "zeros", "not finite"
            rows = [
                (row.path, row.module, f"{row.calls:,}", *map(_number, (row.mean, row.std)),
                 *map(_number, (row.min, row.max)), f"{row.zeros:.1%}", f"{row.nonfinite:.1%}")
                for row in self.outputs.values()
            ]  # fmt: skip
            tables.append(_table(heads, rows))
        if self.gradients:
            heads = "parameter", "type", "gradient norm", "norm", "ratio"
            rows = [
                (row.path, row.type, *map(_number, (row.gradient_norm, row.norm, row.ratio)))
                for row in self.gradients.values()
            ]
            tables.append(_table(heads, rows))
        return "".join(tables) or "no floating values"


def _number(value: float) -> str:
    return f"{value:.3g}"


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i > 1 else "left")
    for path, kind, *numbers in rows:
        table.add_row(PathCell(path), Text(kind), *numbers)
    return printed(table)


def statistics(
    fun: tp.Callable[..., tp.Any], /, *args: tp.Any, wrt: Filter = Param, **kwargs: tp.Any
) -> Statistics:
    """The values that each module returns in one call, and the gradient of each parameter.

    Mean, standard deviation, range, and the shares of zeros and of values that are not finite, of all
    that a method of a module returns in the call.  If the result is a loss (a floating scalar, alone or
    first in a tuple), also the norm of its gradient with respect to each parameter, beside the norm of
    the parameter.  Nothing is compiled, so the call is slow; the arguments stay as they are.

    Args:
        fun: a module, a method of one, or a function, such as a loss; what it calls may be under `jit`,
            `grad`, `vmap` and other transforms.
        args, kwargs: its arguments.
        wrt: a filter that selects the Variables whose gradients are measured.

    Returns:
        `Statistics`, with the rows of `outputs` and `gradients` by path as text, such as "l1" and
        "l1.kernel"; with the name of the argument in front if `fun` is a function: "model.l1".

    Raises:
        KeyError: from `report[path]`, for a path that is not in the report.
        Exception: whatever the function itself raises.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> class Net(nnx.Module):
    ...     def __init__(self, rngs):
    ...         self.l1 = nnx.Linear(2, 3, kernel_init=nnx.initializers.ones, rngs=rngs)
    ...     def __call__(self, x):
    ...         return nnx.relu(self.l1(x))
    >>> model, x = Net(nnx.Rngs(0)), jnp.array([[1.0, 2.0], [-1.0, -2.0]])
    >>> report = nnx.statistics(model, x)
    >>> report["l1"].mean, report["l1"].max, report[""].zeros
    (0.0, 3.0, 0.5)
    >>> report = nnx.statistics(lambda model, x: model(x).sum(), model, x)
    >>> round(report["model.l1.kernel"].gradient_norm ** 2, 3)
    15.0
    """
    collected: dict[str, _Collected] = {}

    def watch(
        call: tp.Any, path: Path, obj: tp.Any, name: str, args: tp.Any, kwargs: tp.Any
    ) -> tp.Any:
        where = _text((*path, *([] if name == "__call__" else [name])))
        into = collected.setdefault(where, _Collected(type(obj).__name__))
        outputs = call(obj, *args, **kwargs)
        leaves = jax.tree.leaves(outputs, is_leaf=is_opaque)
        floats = [jax.lax.stop_gradient(leaf) for leaf in leaves if is_float(leaf)]
        if floats:
            jax.debug.callback(into.add, list(map(_moments, floats)))
        return outputs

    result = CopiedCall(fun, args, kwargs).run(watch)
    outputs = {path: found.summary(path) for path, found in collected.items() if found.calls}
    loss = _loss(result)
    gradients = {} if loss is None else _gradients(CopiedCall(fun, args, kwargs), wrt)
    return Statistics(outputs, gradients)


def _text(path: Path) -> str:
    return ".".join(map(str, path))


# Outputs -------------------------------------------------------------------------------------


def _moments(x: tp.Any) -> tuple[tp.Any, ...]:
    """Mean of the finite values, sum of their squared distances from it, zeros, and the range."""
    finite, wide = jnp.isfinite(x), jnp.asarray(x, jnp.float32)
    count = jnp.maximum(finite.sum(), 1)
    mean = jnp.sum(wide, where=finite) / count
    squares = jnp.sum((wide - mean) ** 2, where=finite)
    return x.size, mean, squares, (x == 0).sum(), *measure(x)


class _Collected:
    """The outputs of one method so far."""

    def __init__(self, module: str) -> None:
        self._module = module
        self.calls = 0
        self._size = self._finite = self._zeros = 0
        self._mean = self._squares = 0.0
        self._low = self._high = math.nan

    def add(self, arrays: list[tuple[tp.Any, ...]]) -> None:
        """Add what one call returned."""
        self.calls += 1
        for size, mean, squares, zeros, low, high, nans, infinities in arrays:
            finite = int(size) - int(nans) - int(infinities)
            self._size += int(size)
            self._zeros += int(zeros)
            if finite:  # Chan, Golub and LeVeque 1979
                delta, total = float(mean) - self._mean, self._finite + finite
                self._squares += float(squares) + delta**2 * self._finite * finite / total
                self._mean += delta * finite / total
                self._finite = total
            self._low = float(np.fmin(self._low, low))
            self._high = float(np.fmax(self._high, high))

    def summary(self, path: str) -> OutputStatistics:
        """All of them."""
        n = self._finite
        mean, std = (self._mean, math.sqrt(self._squares / n)) if n else (math.nan, math.nan)
        shares = self._zeros / self._size, (self._size - n) / self._size
        return OutputStatistics(
            path, self._module, self.calls, self._size, mean, std, self._low, self._high, *shares
        )


# Gradients -----------------------------------------------------------------------------------


def _loss(result: tp.Any) -> tp.Any:
    """The floating scalar that a result is, or begins with, if it does."""
    first: tp.Any = result[0] if isinstance(result, tuple) and result else result
    return first if is_float(first) and first.ndim == 0 else None


def _gradients(copied: CopiedCall, wrt: Filter) -> dict[str, GradientStatistics]:
    """The gradients of the loss that a call returns."""
    select = to_predicate(wrt)

    def chosen(path: Path, leaf: tp.Any) -> bool:
        path = (*copied.beginnings[path[0]], *path[1:])
        return isinstance(leaf, Variable) and is_float(leaf.get_raw_value()) and select(path, leaf)

    graphdef, params, rest = split(copied.values, chosen, ...)
    gradients = jax.grad(
        lambda params: _loss(copied.apply(merge(graphdef, params, rest, copy=True)))
    )(params)
    rows = {}
    for (path, variable), (_, gradient) in zip(flat_pairs(params), flat_pairs(gradients)):
        where = _text((*copied.beginnings[path[0]], *path[1:]))
        value = variable.get_raw_value()
        of_gradient, norm = (_norm(x) for x in (gradient.get_raw_value(), value))
        ratio = of_gradient / norm if norm else (math.inf if of_gradient else 0.0)
        rows[where] = GradientStatistics(where, array_text(value), of_gradient, norm, ratio)
    return rows


def _norm(x: tp.Any) -> float:
    return float(jnp.linalg.norm(jnp.asarray(x, jnp.float32).ravel()))
