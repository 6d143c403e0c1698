"""The dtypes of a model: `cast` changes those of its parameters, a `Policy` also those it computes in.

A layer has two: `param_dtype`, in which its parameters are stored, and `dtype`, in which it computes
(None: what inputs and parameters promote to).  Both are settings of the layer, so that a model says
what it does, and is compiled again after a change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import typing as tp

import jax
import jax.numpy as jnp

from nnxlite._base.errors import path_text
from nnxlite._base.jax import is_ref
from nnxlite._state._definition import State
from nnxlite.filters import Filter, Not, to_predicate
from nnxlite.graph._edit import update as update_node
from nnxlite.graph._rebuild import Path
from nnxlite.graph._walk import iter_graph, matched
from nnxlite.nn import BatchNorm, Embed, GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from nnxlite.objects._pytree import Pytree
from nnxlite.training.metrics import MetricState
from nnxlite.training.optimizer import OptState
from nnxlite.variables._variable import Variable

__all__ = ["Policy", "cast"]

T = tp.TypeVar("T")
Dtype: tp.TypeAlias = tp.Any

NORMS = (BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm)
"""The layers that a policy leaves in float32."""

ADDED_UP = (OptState, MetricState)
"""Variables in which small numbers are added up."""

_FULL = jnp.dtype("float32")


def cast(model: tp.Any, dtype: Dtype, *, only: Filter = Not(ADDED_UP), keep: Filter = None) -> None:  # noqa: B008 - a value
    """Cast the floating arrays of a model in place, and set the `param_dtype` of its layers to match.

    Integers, random keys, bools and complex numbers stay as they are, and so does, by default, the
    state of optimizers and metrics. Shared arrays are cast once. A layer still computes in its `dtype`,
    which only a `Policy` changes (an `Embed` that computed in the dtype of its table still does).

    Args:
        model: an object, or a pytree of objects; also an abstract one.
        dtype: a floating dtype, or its name: "bfloat16", "float32", ...
        only: a filter for the leaves to cast; by default all but `OptState` and `MetricState`.
        keep: a filter for leaves to leave as they are, such as `nnx.PathContains("norm")`.

    Raises:
        ValueError: for a dtype that is not a floating one, a filter that matches no floating leaf, or
            an array reference, whose dtype is fixed. Nothing is changed then.

    >>> import nnxlite as nnx
    >>> model = nnx.MLP(4, 2, 8, 1, rngs=nnx.Rngs(0))
    >>> nnx.cast(model, "bfloat16", keep=nnx.PathContains("bias"))
    >>> model.layers[0].kernel.dtype, model.layers[0].bias.dtype, model.layers[0].param_dtype
    (dtype(bfloat16), dtype('float32'), dtype(bfloat16))
    """
    target = floating_dtype(dtype, "cast")
    chosen = dict(matched(model, only, _is_float_leaf, "floating array", "cast"))
    if keep not in (None, False):
        for path, _ in matched(model, keep, _is_float_leaf, "floating array", "cast"):
            chosen.pop(path, None)
    layers = list(_cast_layers(model, set(map(id, chosen.values()))))
    _write(model, [(path, leaf, target) for path, leaf in chosen.items()])
    for layer in layers:
        if isinstance(layer, Embed) and jnp.dtype(layer.dtype) == jnp.dtype(layer.param_dtype):
            layer.dtype = target
        layer.param_dtype = target


def _write(model: tp.Any, chosen: tp.Iterable[tuple[Path, tp.Any, Dtype]]) -> None:
    """Cast some leaves of a model, each to its dtype."""
    new: dict[Path, tp.Any] = {}
    for path, leaf, dtype in chosen:
        value = leaf.get_raw_value() if isinstance(leaf, Variable) else leaf
        if is_ref(value):
            raise ValueError(
                f"{path_text(path)} is an array reference, whose dtype is fixed. Cast the model that "
                "nnx.to_arrays makes of it, and use nnx.to_refs on that."
            )
        new[(0, *path)] = jax.tree.map(functools.partial(_as, dtype=dtype), value)
    update_node((model,), State.from_flat_path(new))


def _cast_layers(model: tp.Any, done: set[int]) -> tp.Iterator[tp.Any]:
    """The layers whose `param_dtype` is another one once these leaves are cast.

    A layer with parameters of its own counts as cast if one of them is, any other if all floating
    leaves below it are.
    """
    for _, layer in iter_graph(model):
        if isinstance(layer, Pytree) and "param_dtype" in vars(layer):
            own = [id(leaf) in done for leaf in vars(layer).values() if _is_float_leaf(leaf)]
            below = [id(leaf) in done for _, leaf in iter_graph(layer) if _is_float_leaf(leaf)]
            if any(own) or (not own and below and all(below)):
                yield layer


def _is_layer(node: tp.Any) -> bool:
    return isinstance(node, Pytree) and {"dtype", "param_dtype"} <= vars(node).keys()


def _within(path: Path, places: tp.Container[Path]) -> bool:
    """Whether a path begins with one of the `places`."""
    return any(path[:length] in places for length in range(len(path) + 1))


def _is_float(value: tp.Any) -> bool:
    return hasattr(value, "shape") and jnp.issubdtype(getattr(value, "dtype", int), jnp.floating)


def _is_float_leaf(node: tp.Any) -> bool:
    """Whether a node is a Variable or an array with a floating array in it."""
    if isinstance(node, Variable):
        return any(map(_is_float, jax.tree.leaves(node.get_raw_value())))
    return not isinstance(node, Pytree) and _is_float(node)


def _as(value: tp.Any, dtype: Dtype) -> tp.Any:
    if not _is_float(value):
        return value
    abstract = isinstance(value, jax.ShapeDtypeStruct)
    return value.update(dtype=dtype) if abstract else value.astype(dtype)


def floating_dtype(dtype: Dtype, caller: str) -> tp.Any:
    """A dtype given by name or otherwise; ValueError unless it is a floating one."""
    known = None
    with contextlib.suppress(TypeError):  # not a dtype at all
        known = dtype if dtype is None else jnp.dtype(dtype)  # jnp.dtype(None) is float64
    if known is None or not jnp.issubdtype(known, jnp.floating):
        raise ValueError(
            f"{caller}: {dtype if known is None else known.name!r} is not a floating dtype, in which a "
            "model could compute. These are float16, bfloat16, float32, float64."
        )
    return known


@dataclasses.dataclass(frozen=True)
class Policy:
    """In which dtypes a model stores its parameters, computes, and gives its results.

    Args:
        param: dtype of parameters and other floating arrays of the model.
        compute: dtype that layers compute in; None: that of the parameters.
        output: dtype of results, for `cast_output`; None: that of the computation.
        keep: a filter for layers which store and compute in float32, such as the last one. Those that
            normalize do so in any case.

    Raises:
        ValueError: for a dtype that is not a floating one.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> policy = nnx.Policy(compute="bfloat16", output="float32")
    >>> model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.LayerNorm(8, rngs=nnx.Rngs(0)))
    >>> policy.apply(model)
    >>> print(model)
    Sequential
      layers: List
        0: Linear(in_features=4, out_features=8, dtype=bfloat16)
          kernel: Param float32[4,8]
          bias: Param float32[8]
        1: LayerNorm(num_features=8, dtype=float32)
          scale: Param float32[8]
          bias: Param float32[8]
    Param: 56 (224 B)
    >>> model.layers[0](jnp.ones((1, 4))).dtype
    dtype(bfloat16)
    """

    param: Dtype = "float32"
    compute: Dtype = None
    output: Dtype = None
    keep: Filter = None

    def __post_init__(self) -> None:
        value = floating_dtype(self.param, "Policy")
        for name in ("param", "compute", "output"):  # None is that of the one before
            if (given := getattr(self, name)) is not None:
                value = floating_dtype(given, "Policy")
            object.__setattr__(self, name, value)
        to_predicate(self.keep)

    def apply(self, model: tp.Any, filter: Filter = ..., /) -> None:
        """Set the `dtype` of layers, and cast their parameters, in place.

        A layer is any object with the attributes `dtype` and `param_dtype`. Optimizers and metrics stay
        as they are. A compiled function is compiled again.

        Args:
            model: an object, or a pytree of objects.
            filter: the layers, by class, path or predicate; by default all.

        Raises:
            ValueError: if the filter, or `keep`, unless it is the default, matches no layer.
        """
        chosen = matched(model, filter, _is_layer, "layer", "Policy.apply")
        full = {path for path, layer in chosen if isinstance(layer, NORMS)}
        if self.keep not in (None, False):
            called = "Policy.apply with `keep`"
            full |= {path for path, _ in matched(model, self.keep, _is_layer, "layer", called)}
        layers = {()} if filter is ... else {path for path, _ in chosen}
        leaves = [
            (path, leaf, _FULL if _within(path, full) else self.param)
            for path, leaf in iter_graph(model)
            if _within(path, layers) and _is_float_leaf(leaf) and not isinstance(leaf, ADDED_UP)
        ]
        _write(model, leaves)
        for path, layer in chosen:
            in_full = _within(path, full)
            layer.param_dtype = _FULL if in_full else self.param
            layer.dtype = _FULL if in_full else self.compute

    def cast_output(self, tree: T) -> T:
        """A tree, such as the result of a model, with its floating arrays in the dtype of results.

        Args:
            tree: any pytree.

        >>> import nnxlite as nnx, jax.numpy as jnp
        >>> nnx.Policy(compute="bfloat16", output="float32").cast_output(jnp.ones(2, "bfloat16")).dtype
        dtype('float32')
        """
        return jax.tree.map(lambda x: _as(x, self.output), tree)
