"""`find_nan`: where the first value that is not finite comes from.

The function runs on copies of its arguments, without compilation, while every method call of its
modules is observed.  The arrays that a call returns pass through a probe: an identity that looks at the
values, and, where they are differentiated, at the gradients that come back.
"""

from __future__ import annotations

import dataclasses
import functools
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._errors import path_text
from nnxlite._outline import array_text
from nnxlite.boundary import parameter_names
from nnxlite.graph import iter_graph
from nnxlite.inspect._calls import CopiedCall, Path, is_called
from nnxlite.variables import Variable

Where = tp.Literal["argument", "output", "gradient", "result"]


@dataclasses.dataclass(frozen=True)
class Range:
    """The values of one array in short.

    Attributes:
        name: which array: a path.
        type: its dtype and shape, as `float32[2,3]`.
        low, high: the least and the greatest finite value; NaN if none is finite.
        nans, infinities: how many values are NaN, and how many infinite.
    """

    name: str
    type: str
    low: float
    high: float
    nans: int
    infinities: int

    @property
    def finite(self) -> bool:
        """Whether all values are finite."""
        return not (self.nans or self.infinities)

    def __str__(self) -> str:
        text = f"{self.name}: {self.type} from {self.low:.3g} to {self.high:.3g}"
        counts = (self.nans, "NaN"), (self.infinities, "infinite")
        return ", ".join([text, *(f"{count:,} {kind}" for count, kind in counts if count)])


@dataclasses.dataclass(frozen=True)
class NotFinite:
    """Where the first values that are not finite were found; `str` gives it as text.

    Attributes:
        where: "argument" if they were there before the call, "output" of a module, "gradient" that came
            back to the output of a module, or "result" of the function.
        path: of the module (or of the array, for an argument or a result), from the arguments.
        module: the class of the module and, unless it is `__call__`, its method; else "".
        values: the array.
        inputs: the arrays that the module was called with.
    """

    where: Where
    path: str
    module: str
    values: Range
    inputs: tuple[Range, ...] = ()

    def __str__(self) -> str:
        who = f"{self.path} ({self.module})" if self.module else self.path
        lines = [f"First not finite: the {self.where} of {who}", f"  {self.values}"]
        if self.where in ("argument", "result"):
            lines = [f"First not finite: the {self.where} {self.values}"]
        if self.inputs:
            lines += ["  called with", *(f"    {one}" for one in self.inputs)]
        return "\n".join(lines)


def find_nan(fun: tp.Callable[..., tp.Any], /, *args: tp.Any, **kwargs: tp.Any) -> NotFinite | None:
    """The first value that is not finite in a call of a function; None if all are finite.

    It looks at the arguments, then at what the methods of their modules return, in the order in which
    they return, then at the gradients of these outputs, in the order in which they come back, and
    finally at the result. The function runs operation by operation, so the call is slow, and the
    first one slowest: give it the loss where the whole step is not needed. The arguments stay as they
    are. Objects that the function does not take as arguments are not looked at.

    Args:
        fun: a function, such as a training step, which may be under `jit`, `grad` and other transforms;
            a module; or a method of one.
        args, kwargs: its arguments.

    Returns:
        A `NotFinite`, or None.

    Raises:
        Exception: whatever the function itself raises.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> class Log(nnx.Module):
    ...     def __call__(self, x):
    ...         return jnp.log(x)
    >>> model = nnx.Sequential(nnx.relu, Log())
    >>> found = nnx.find_nan(lambda model, x: model(x).sum(), model, -jnp.ones((1, 2)))
    >>> found.where, found.path, found.module
    ('output', 'model.layers.1', 'Log')
    """
    search = _Search()
    copied = CopiedCall(fun, args, kwargs)
    for path, root in zip(copied.beginnings, copied.values):
        search.look("argument", path, root)
    if search.first:
        return search.first[0]
    result = copied.run(search.call)
    for where in ("output", "gradient"):
        for one in search.first:
            if one.where == where:
                return one
    search.look("result", ("result",), result)
    return search.first[0] if search.first else None


class _Search:
    """What was found in one search, in order."""

    def __init__(self) -> None:
        self.first: list[NotFinite] = []

    def look(self, where: Where, beginning: Path, tree: tp.Any) -> None:
        """Look at the arrays in an argument, or in the result."""
        for path, leaf in _arrays(tree):
            full = path_text((*beginning, *path))
            values = _range_of(full, leaf, *measure(leaf))
            if not values.finite:
                self.first.append(NotFinite(where, full, "", values))

    def call(
        self, call: tp.Any, where: Path, obj: tp.Any, name: str, args: tp.Any, kwargs: tp.Any
    ) -> tp.Any:
        """Make a call, with probes on what it returns."""
        outputs = call(obj, *args, **kwargs)
        path = path_text(where)
        module = type(obj).__name__ + ("" if name == "__call__" else f".{name}")
        inputs = [
            (".".join(map(str, keys)), leaf)
            for keys, leaf in _arrays(_named(obj, name, args, kwargs))
        ]
        leaves, treedef = jax.tree.flatten(outputs, is_leaf=is_opaque)
        probed = [
            self._probe(f"output {i}" if leaves[1:] else "output", leaf, path, module, inputs)
            if is_float(leaf)
            else leaf
            for i, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(treedef, probed)

    def _probe(
        self, name: str, leaf: tp.Any, path: str, module: str, inputs: list[tuple[str, tp.Any]]
    ) -> tp.Any:
        """The array; its values, and its gradient if it gets one, are looked at."""

        def note(where: Where, values: tp.Any, others: tp.Sequence[tp.Any]) -> None:
            seen = _range_of(name, leaf, *values)
            if not seen.finite:
                pairs = zip(inputs, others)
                ranges = tuple(_range_of(n, x, *measured) for (n, x), measured in pairs)
                self.first.append(NotFinite(where, path, module, seen, ranges))

        measured = [measure(jax.lax.stop_gradient(x)) for _, x in inputs]
        jax.debug.callback(
            functools.partial(note, "output"), measure(jax.lax.stop_gradient(leaf)), measured
        )
        return _with_gradient(lambda values: note("gradient", values, ()), leaf)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient(note: tp.Callable[[tp.Any], None], x: jax.Array) -> jax.Array:
    return x


def _forward(note: tp.Callable[[tp.Any], None], x: jax.Array) -> tuple[jax.Array, None]:
    return x, None


def _backward(note: tp.Callable[[tp.Any], None], _: None, gradient: jax.Array) -> tuple[jax.Array]:
    jax.debug.callback(note, measure(gradient))
    return (gradient,)


_with_gradient.defvjp(_forward, _backward)


def _named(obj: tp.Any, name: str, args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]) -> tp.Any:
    """The arguments of a call by name."""
    names = parameter_names(getattr(obj, name))
    return {**{names[i] if i < len(names) else i: arg for i, arg in enumerate(args)}, **kwargs}


def is_float(value: tp.Any) -> bool:
    is_array = isinstance(value, (jax.Array, np.ndarray)) and value.size > 0
    return is_array and jnp.issubdtype(value.dtype, jnp.floating)


def is_opaque(value: tp.Any) -> bool:
    return isinstance(value, Variable) or is_called(value)


def _arrays(tree: tp.Any) -> tp.Iterator[tuple[tuple[tp.Any, ...], tp.Any]]:
    """The floating arrays in a tree of objects, with their paths."""
    for path, value in iter_graph(tree):
        array = value.get_value() if isinstance(value, Variable) else value
        if is_float(array):
            yield path, array


def measure(x: tp.Any) -> tuple[tp.Any, ...]:
    """The least and greatest finite value, and how many are NaN or infinite."""
    with jax.disable_jit(False):  # one program for each shape, not one for each operation
        return _measure(x)


@jax.jit
def _measure(x: tp.Any) -> tuple[tp.Any, ...]:
    finite, x = jnp.isfinite(x), jnp.asarray(x, jnp.float32)
    low = jnp.min(jnp.where(finite, x, jnp.inf))
    high = jnp.max(jnp.where(finite, x, -jnp.inf))
    nothing = ~finite.any()
    low, high = (jnp.where(nothing, jnp.nan, end) for end in (low, high))
    return low, high, jnp.isnan(x).sum(), jnp.isinf(x).sum()


def _range_of(
    name: str, array: tp.Any, low: tp.Any, high: tp.Any, nans: tp.Any, infinities: tp.Any
) -> Range:
    return Range(name, array_text(array), float(low), float(high), int(nans), int(infinities))
