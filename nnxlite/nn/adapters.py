"""Low-rank adapters for the kernels of any model: put in, merged, taken out, in place.

    kernel  ->  base + alpha / rank * (lora_a @ lora_b)

The attribute that was a Variable becomes a `LoRAKernel`, which contains that same Variable as `base` and
reads like it.  The layers of the library multiply their input by the thin matrices, as `LoRA` does;
other objects read the sum.  A kernel with several axes is adapted as the matrix of its input axes by
its output axes.  The layers of a stack, made by `vmap`, have an adapter each.
"""

from __future__ import annotations

import math
import typing as tp

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from nnxlite._base.errors import listed, path_text, short_type
from nnxlite.filters import All, Filter, Not
from nnxlite.graph._freezing import freeze, matches
from nnxlite.graph._functional import state as state_of
from nnxlite.graph._rebuild import Path
from nnxlite.graph._walk import iter_graph
from nnxlite.nn._common import check_rate, params_key
from nnxlite.nn.conv import Conv, ConvTranspose
from nnxlite.nn.dtypes import Dtype
from nnxlite.nn.embed import Embed
from nnxlite.nn.initializers import Initializer
from nnxlite.nn.linear import Einsum, Linear, LinearGeneral
from nnxlite.nn.lora import LoRALinear, LoRAParam, default_a_initializer, default_b_initializer
from nnxlite.nn.lora_kernel import LoRAKernel as LoRAKernel
from nnxlite.nn.lora_kernel import entries_of_matrices
from nnxlite.nn.stochastic import Dropout
from nnxlite.nn.weight_normalization import SpectralNorm, WeightNorm
from nnxlite.objects._fields import data
from nnxlite.objects._pytree import Pytree
from nnxlite.objects._rngs import Rngs
from nnxlite.variables._kinds import Param
from nnxlite.variables._variable import Variable

if tp.TYPE_CHECKING:
    from nnxlite._state._definition import State


def _adapted(
    base: Variable[jax.Array],
    stacked: int,
    outputs: int,
    *,
    rank: int,
    alpha: float,
    dropout: float,
    param_dtype: Dtype,
    a_initializer: Initializer,
    rngs: Rngs,
) -> LoRAKernel:
    """A kernel with a new adapter; see `LoRAKernel`."""
    split = base.ndim - outputs
    stack, rows = base.shape[:stacked], math.prod(base.shape[stacked:split])
    columns = math.prod(base.shape[split:])
    key = params_key("lora.inject", rngs)
    a = _stacked(a_initializer, stack)(key, (rows, rank), param_dtype)
    b = default_b_initializer(key, (*stack, rank, columns), param_dtype)
    a, b = _placed(base, stacked, outputs, (a, b))
    of_a, of_b = _annotations(base, stacked, outputs)
    return LoRAKernel(
        base,
        LoRAParam(a, **of_a),
        LoRAParam(b, **of_b),
        rank=rank,
        alpha=alpha,
        outputs=outputs,
        dropout=Dropout(dropout, rngs=rngs) if dropout else None,
    )


def _stacked(init: Initializer, stack: tuple[int, ...]) -> tp.Any:
    """An initializer for a stack of matrices, each as if it were alone."""
    if not stack:
        return init

    def make(key: jax.Array, shape: tuple[int, ...], dtype: tp.Any) -> jax.Array:
        keys = jax.random.split(key, math.prod(stack))
        return jax.vmap(lambda k: init(k, shape, dtype))(keys).reshape(*stack, *shape)

    return make


def _annotations(
    base: Variable[tp.Any], stacked: int, outputs: int
) -> tuple[dict[str, tp.Any], dict[str, tp.Any]]:
    """Sharding metadata for the two matrices, from that of their kernel."""
    names = base.sharding_names
    if not isinstance(names, (tuple, PartitionSpec)) or len(names) != base.ndim:
        return {}, {}
    of_a, of_b = entries_of_matrices(tuple(names), stacked, outputs)
    return {"sharding_names": of_a}, {"sharding_names": of_b}


def _placed(
    base: Variable[jax.Array], stacked: int, outputs: int, matrices: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The two matrices on the devices of their kernel, divided as it is."""
    value = base.get_value()
    sharding = getattr(value, "sharding", None)
    if isinstance(value, Tracer) or not isinstance(sharding, NamedSharding):
        return matrices
    mesh, spec = sharding.mesh, sharding.spec
    entries = (*spec, *(None,) * (base.ndim - len(spec)))
    of_a, of_b = (
        NamedSharding(mesh, PartitionSpec(*of_one))
        for of_one in entries_of_matrices(entries, stacked, outputs)
    )
    return jax.device_put(matrices[0], of_a), jax.device_put(matrices[1], of_b)


class _Form(tp.NamedTuple):
    """The kernel of a class of layers: its attribute, how many axes it has, and how many outputs."""

    name: str
    axes: tp.Callable[[tp.Any], int]
    outputs: tp.Callable[[tp.Any], int] = lambda layer: 1


_FORMS: dict[type, _Form] = {
    Linear: _Form("kernel", lambda m: 2),
    LinearGeneral: _Form(
        "kernel",
        lambda m: len(m.batch_axis) + len(m.in_features) + len(m.out_features),
        lambda m: len(m.out_features),
    ),
    Einsum: _Form("kernel", lambda m: len(m.kernel_shape)),
    Embed: _Form("embedding", lambda m: 2),
    Conv: _Form("kernel", lambda m: len(m.kernel_size) + 2),
    ConvTranspose: _Form("kernel", lambda m: len(m.kernel_size) + 2),
}


def _form_of(layer: tp.Any) -> _Form | None:
    return next((_FORMS[cls] for cls in type(layer).__mro__ if cls in _FORMS), None)


def _can_be_adapted(node: tp.Any, weight: str | None) -> bool:
    """Whether an object is a layer with a kernel."""
    if weight is None:
        return _form_of(node) is not None
    value = vars(node).get(weight) if isinstance(node, Pytree) else None
    return isinstance(value, (Variable, LoRAKernel))


def _name_of(layer: tp.Any, weight: str | None) -> str:
    return weight or tp.cast(_Form, _form_of(layer)).name


def _axes_of(layer: tp.Any, weight: str | None) -> tuple[int, int]:
    """How many axes of a layer's kernel are those of a stack, in front, and how many the outputs."""
    form = _form_of(layer)
    if form is None or weight not in (None, form.name):
        return 0, 1
    return getattr(layer, form.name).ndim - form.axes(layer), form.outputs(layer)


def inject(
    model: tp.Any,
    filter: Filter,
    *,
    rank: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    weight: str | None = None,
    param_dtype: Dtype = jnp.float32,
    a_initializer: Initializer = default_a_initializer,
    freeze_base: bool = True,
    rngs: Rngs,
) -> None:
    """Adapt the kernels of layers in place, each by a product of two thin matrices (LoRA).

    `Linear`, `LinearGeneral` (and so `MultiHeadAttention`), `Einsum`, `Embed`, `Conv` and
    `ConvTranspose` can be adapted, and with `weight` any other object. The second matrix is zero at
    first: the model computes what it did. Shared layers and kernels have one adapter.

    Args:
        model: an object, or a pytree of objects.
        filter: the layers: a class such as `nnx.Linear`, `nnx.PathContains("query")`, a predicate
            of path and layer, `...` for all.
        rank: columns of the first matrix and rows of the second.
        alpha: the product counts `alpha / rank` times; by default once.
        dropout: the probability with which, in training, the adapter of a layer does not see an
            element of its input. (Where a layer of your own reads its kernel, or a convolution has a
            mask, an input feature is dropped for all examples.)
        weight: the attribute that contains the kernel, for layers of your own: a Variable whose last
            axis is the output's. It reads as the adapted kernel, which takes memory of that size.
        param_dtype: dtype of the two matrices.
        a_initializer: initializer of the first matrix.
        freeze_base: freeze all `Param`s of `model` but `LoRAParam`s; see `nnx.freeze`.
        rngs: the stream "params" is drawn once for each kernel, "dropout" if there is dropout.

    Raises:
        ValueError: if the filter matches no such layer, a layer is adapted already, a `SpectralNorm`
            or `WeightNorm` works on it, its kernel is not a floating array of two or more axes,
            or `rank` or `dropout` is out of range. Nothing is changed then.

    >>> import nnxlite as nnx
    >>> model = nnx.MLP(4, 2, 8, 1, rngs=nnx.Rngs(0))
    >>> nnx.lora.inject(model, nnx.Linear, rank=2, alpha=4, rngs=nnx.Rngs(1))
    >>> grads = nnx.grad(lambda m: m(nnx.Rngs(0).normal((1, 4))).sum())(model)
    >>> list(grads.layers[0].kernel)
    ['lora_a', 'lora_b']
    """
    _check_settings(rank, dropout)
    layers = matches(model, filter, lambda x: _can_be_adapted(x, weight), "layer", "lora.inject")
    _check_kernels(model, layers, weight)
    made: dict[int, LoRAKernel] = {}
    for _, layer in layers:
        base = getattr(layer, _name_of(layer, weight))
        if id(base) not in made:
            made[id(base)] = _adapted(
                base,
                *_axes_of(layer, weight),
                rank=rank,
                alpha=float(rank if alpha is None else alpha),
                dropout=dropout,
                param_dtype=param_dtype,
                a_initializer=a_initializer,
                rngs=rngs,
            )
    for _, layer in layers:
        name = _name_of(layer, weight)
        setattr(layer, name, made[id(getattr(layer, name))])
    if freeze_base:
        freeze(model, All(Param, Not(LoRAParam)))


def _check_settings(rank: tp.Any, dropout: float) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"lora.inject: rank must be a whole number, 1 or more, got {rank!r}.")
    check_rate("lora.inject", "dropout", dropout)


def _check_kernels(model: tp.Any, layers: list[tuple[Path, tp.Any]], weight: str | None) -> None:
    """Raise ValueError for layers that cannot be adapted, or are so already."""
    bases = {id(kernel.base) for kernel in _kernels(model)}
    adapted = [
        path_text(path)
        for path, layer in layers
        if isinstance(layer, LoRALinear)
        or isinstance(value := getattr(layer, _name_of(layer, weight)), LoRAKernel)
        or id(value) in bases
    ]
    if adapted:
        raise ValueError(
            f"lora.inject: already adapted: {listed(adapted)}. Choose other layers, or call "
            "nnx.lora.remove(model) first (after nnx.lora.merge, to keep what they learned)."
        )
    wrappers = [(p, w) for p, w in iter_graph(model) if isinstance(w, (SpectralNorm, WeightNorm))]
    for path, layer in layers:
        name = path_text((*path, _name_of(layer, weight)))
        for outer, wrapper in wrappers:
            if path[: len(outer)] == outer:
                raise ValueError(
                    f"lora.inject: {type(wrapper).__name__} at {path_text(outer)} sets {name} in "
                    "each call, so it cannot be adapted. Choose other layers."
                )
        kernel = getattr(layer, _name_of(layer, weight))
        if kernel.ndim < 2 or not jnp.issubdtype(kernel.dtype, jnp.inexact):
            raise ValueError(
                f"lora.inject: {name} is {short_type(kernel)}; a kernel that can be adapted is a "
                "floating array of two or more axes."
            )


def _kernels(model: tp.Any) -> list[LoRAKernel]:
    return [node for _, node in iter_graph(model) if isinstance(node, LoRAKernel)]


def _all_kernels(model: tp.Any, caller: str) -> list[LoRAKernel]:
    """The adapted kernels of a model; raises ValueError where there is none."""
    kernels = _kernels(model)
    if not kernels:
        raise ValueError(
            f"lora.{caller}: {type(model).__name__} has no adapters. nnx.lora.inject(model, filter, "
            "rank=..., rngs=...) puts some in."
        )
    return kernels


def merge(model: tp.Any) -> None:
    """Write the adapted weights into the kernels, so that calls cost what they did without adapters.

    The former values are stored beside (as Variables, `original`) until `unmerge` or `remove`. While
    a model is merged, its adapters have no effect and no gradient.

    Args:
        model: an object, or a pytree of objects, with adapters.

    Raises:
        ValueError: if there are no adapters, or they are merged already; nothing is changed then.

    >>> import nnxlite as nnx
    >>> layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    >>> nnx.lora.inject(layer, ..., rank=2, rngs=nnx.Rngs(1))
    >>> layer.kernel.lora_b[...] += 1.0
    >>> adapted = layer.kernel[...]
    >>> nnx.lora.merge(layer)
    >>> bool((layer.kernel.base[...] == adapted).all())
    True
    """
    kernels = _all_kernels(model, "merge")
    if any(kernel.original is not None for kernel in kernels):
        raise ValueError("lora.merge: the adapters are merged already; see nnx.lora.unmerge.")
    for kernel in kernels:
        before = kernel.base.get_value()
        adapted = kernel._nnx_adapted(before)
        kernel.original = Variable(before)
        kernel.base.set_value(adapted)


def unmerge(model: tp.Any) -> None:
    """The inverse of `merge`: the kernels get back the values that they had, bit for bit.

    Args:
        model: an object, or a pytree of objects, with merged adapters.

    Raises:
        ValueError: if there are no adapters, or they are not merged; nothing is changed then.

    >>> import nnxlite as nnx
    >>> layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    >>> before = layer.kernel[...]
    >>> nnx.lora.inject(layer, ..., rank=2, rngs=nnx.Rngs(1))
    >>> nnx.lora.merge(layer)
    >>> nnx.lora.unmerge(layer)
    >>> bool((layer.kernel.base[...] == before).all())
    True
    """
    kernels = _all_kernels(model, "unmerge")
    if any(kernel.original is None for kernel in kernels):
        raise ValueError("lora.unmerge: the adapters are not merged; see nnx.lora.merge.")
    for kernel in kernels:
        kernel.base.set_value(tp.cast(tp.Any, kernel.original).get_value())
        kernel.original = data(None)


def remove(model: tp.Any) -> None:
    """Take the adapters out: the attributes are the Variables again that they were before.

    A merged model keeps its merged weights; otherwise the weights are those before `inject`.
    What is frozen stays so; `nnx.unfreeze` changes that.

    Args:
        model: an object, or a pytree of objects, with adapters.

    Raises:
        ValueError: if there are no adapters.

    >>> import nnxlite as nnx
    >>> layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    >>> kernel = layer.kernel
    >>> nnx.lora.inject(layer, ..., rank=2, rngs=nnx.Rngs(1))
    >>> nnx.lora.remove(layer)
    >>> layer.kernel is kernel
    True
    """
    _all_kernels(model, "remove")
    for _, node in list(iter_graph(model)):
        for name, value in list(vars(node).items()) if isinstance(node, Pytree) else ():
            if isinstance(value, LoRAKernel):
                setattr(node, name, value.base)


def adapters(model: tp.Any) -> State[tp.Any, tp.Any]:
    """The weights of a model's adapters alone; `nnx.update(model, state)` writes them back.

    Args:
        model: an object, or a pytree of objects, with adapters.

    Returns:
        A State of the `LoRAParam`s.

    Raises:
        ValueError: if there are none.

    >>> import nnxlite as nnx
    >>> layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    >>> nnx.lora.inject(layer, ..., rank=2, rngs=nnx.Rngs(1))
    >>> list(nnx.lora.adapters(layer).kernel)
    ['lora_a', 'lora_b']
    """
    found = state_of(model, LoRAParam)
    if not found:
        _all_kernels(model, "adapters")
    return found
