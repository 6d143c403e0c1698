"""Low-rank adaptation: trainable products of two thin matrices, added to frozen kernels.

    y = x @ kernel + alpha / rank * (x @ lora_a @ lora_b)

The matrices are `LoRAParam`s, a kind of their own, so that a filter separates them from the
`Param`s of the base: train `nnx.LoRAParam`, freeze the rest.  The second matrix is zero at first,
so that an adapted model starts with the results of its base.  Source: Hu et al., "LoRA: Low-Rank
Adaptation of Large Language Models" (2021).

`LoRA` and `LoRALinear` are layers to build with.  `inject` adapts the kernels of any model in place: the
attribute that was a Variable becomes a `LoRAKernel`, which contains that same Variable as `base` and
reads like it.  The layers of the library multiply their input by the thin matrices, as `LoRA` does;
transposed, grouped or masked convolutions, an `Einsum` whose output does not end with the kernel's last
axis, and other objects read the sum.  A kernel with several axes is adapted as the matrix of its input
axes by its output axes.  The layers of a stack, made by `vmap`, have an adapter each.
"""

from __future__ import annotations

import math
import typing as tp

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from nnxlite._base.errors import listed, path_text, short_type
from nnxlite._base.jax import as_integer
from nnxlite.filters import All, Filter, Not
from nnxlite.graph._rebuild import Path
from nnxlite.graph._walk import find_duplicates, freeze, iter_graph, matched
from nnxlite.nn import _common, initializers
from nnxlite.nn._common import NO_METADATA, Arguments, Metadata, OutSharding
from nnxlite.nn.conv import Conv, ConvTranspose
from nnxlite.nn.dtypes import Dtype, PromoteDtypeFn, default_promote_dtype
from nnxlite.nn.embed import Embed
from nnxlite.nn.initializers import Initializer
from nnxlite.nn.linear import Einsum, Linear, LinearGeneral
from nnxlite.nn.lora_kernel import LoRAKernel as LoRAKernel
from nnxlite.nn.lora_kernel import entries_of_matrices
from nnxlite.nn.stochastic import Dropout
from nnxlite.nn.weight_normalization import SpectralNorm, WeightNorm
from nnxlite.objects._module import Module, layer_name
from nnxlite.objects._pytree import Pytree
from nnxlite.objects._rngs import Rngs
from nnxlite.variables._kinds import Param
from nnxlite.variables._variable import Variable

__all__ = ["LoRA", "LoRALinear", "LoRAParam"]

A = tp.TypeVar("A")

default_a_initializer: tp.Final[Initializer] = initializers.he_uniform()
default_b_initializer: tp.Final[Initializer] = initializers.zeros_init()


class LoRAParam(Param[A]):
    """The kind of the two matrices of a low-rank adaptation.

    >>> import nnxlite as nnx
    >>> lora = nnx.LoRA(4, 2, 4, rngs=nnx.Rngs(0))
    >>> sorted(nnx.state(lora, nnx.LoRAParam))
    ['lora_a', 'lora_b']
    """


class LoRA(Module):
    """A low-rank linear map, added to a base module if there is one.

    Maps `(..., in_features)` to `(..., out_features)`.

    Args:
        in_features, out_features: sizes of the last axis before and after.
        lora_rank: the size between the two matrices.
        base_module: the module (or function) to adapt.
        dtype: dtype of the computation; None: what input and matrices promote to.
        param_dtype: dtype of the matrices.
        a_initializer, b_initializer: initializers of the two matrices.
        lora_param_type: kind of the two matrices.
        promote_dtype: casts input and matrices to the dtype of the computation.
        rngs: the stream "params" is drawn once for each matrix.
        a_metadata, b_metadata: metadata of the two matrices, such as a sharding.

    Attributes:
        lora_a: LoRAParam of shape (in_features, lora_rank).
        lora_b: LoRAParam of shape (lora_rank, out_features).

    Raises:
        TypeError: for a size that is not a whole number, or an input of another size.
        ValueError: for a base module that is not callable.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> rngs = nnx.Rngs(0)
    >>> base = nnx.Linear(3, 4, rngs=rngs)
    >>> adapted = nnx.LoRA(3, 2, 4, base_module=base, rngs=rngs)
    >>> x = jnp.ones((5, 3))
    >>> bool((adapted(x) == base(x)).all())
    True
    """

    lora_a: Variable[jax.Array]
    lora_b: Variable[jax.Array]

    def __init__(
        self,
        in_features: int,
        lora_rank: int,
        out_features: int,
        *,
        base_module: tp.Callable[..., tp.Any] | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        a_initializer: Initializer = default_a_initializer,
        b_initializer: Initializer = default_b_initializer,
        lora_param_type: type[Variable[tp.Any]] = LoRAParam,
        promote_dtype: PromoteDtypeFn = default_promote_dtype,
        rngs: Rngs,
        a_metadata: Metadata = NO_METADATA,
        b_metadata: Metadata = NO_METADATA,
    ) -> None:
        Arguments(self, locals()).sizes("in_features", "lora_rank", "out_features")
        if base_module is not None and not callable(base_module):
            raise ValueError(
                f"{layer_name(self)}: `base_module` must be callable, got {type(base_module).__name__}."
            )
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.lora_param_type = lora_param_type
        self.base_module = base_module
        self.promote_dtype = promote_dtype
        a, b = (in_features, lora_rank), (lora_rank, out_features)
        kind = lora_param_type
        self.lora_a = _common.new_param(self, rngs, a_initializer, a, param_dtype, a_metadata, kind)
        self.lora_b = _common.new_param(self, rngs, b_initializer, b, param_dtype, b_metadata, kind)

    def __call__(self, x: jax.Array, **kwargs: tp.Any) -> jax.Array:
        """The adapted result, (..., in_features) -> (..., out_features).

        Args:
            x: array whose last axis has the size `in_features`.
            **kwargs: passed on to the base module.
        """
        x, a, b = self.promote_dtype((x, self.lora_a[...], self.lora_b[...]), dtype=self.dtype)
        if x.shape[-1:] != a.shape[:1]:
            raise TypeError(_common.feature_mismatch(self, x, a, "lora_a"))
        y = x @ a @ b
        if self.base_module is not None:
            y = y + self.base_module(x, **kwargs)
        return y


class LoRALinear(Linear):
    """A `Linear` with a low-rank adaptation.

    Maps `(..., in_features)` to `(..., out_features)`.

    Args:
        in_features, out_features: sizes of the last axis before and after.
        lora_rank: the size between the two matrices.
        lora_dtype: dtype of the adaptation's computation.
        lora_param_dtype: dtype of the matrices.
        a_initializer, b_initializer: initializers of the two matrices.
        lora_param_type: kind of the two matrices.
        lora_promote_dtype: casts input and matrices to the dtype of the computation.
        rngs: the stream "params" is drawn for the Linear first, then once for each matrix.
        a_metadata, b_metadata: metadata of the two matrices.
        **kwargs: arguments of `Linear`.

    Attributes:
        kernel, bias: as in `Linear`.
        lora: the `LoRA` whose result is added.

    >>> import nnxlite as nnx
    >>> layer = nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0))
    >>> [".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(layer, nnx.LoRAParam))]
    ['lora.lora_a', 'lora.lora_b']
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        lora_rank: int,
        lora_dtype: Dtype | None = None,
        lora_param_dtype: Dtype = jnp.float32,
        a_initializer: Initializer = default_a_initializer,
        b_initializer: Initializer = default_b_initializer,
        lora_param_type: type[Variable[tp.Any]] = LoRAParam,
        lora_promote_dtype: PromoteDtypeFn = default_promote_dtype,
        rngs: Rngs,
        a_metadata: Metadata = NO_METADATA,
        b_metadata: Metadata = NO_METADATA,
        **kwargs: tp.Any,
    ) -> None:
        arguments = Arguments(self, locals())
        arguments.sizes("lora_rank")
        super().__init__(in_features, out_features, rngs=rngs, **kwargs)
        options = arguments.passed_on("dtype", "param_dtype", "promote_dtype", prefix="lora_")
        names = ("a_initializer", "b_initializer", "a_metadata", "b_metadata")
        options |= arguments.passed_on(*names, "lora_param_type", "rngs")
        self.lora = LoRA(in_features, lora_rank, out_features, **options)

    def __call__(self, x: jax.Array, out_sharding: OutSharding = None) -> jax.Array:
        """The adapted image of `x`, (..., in_features) -> (..., out_features).

        Args:
            x: array whose last axis has the size `in_features`.
            out_sharding: sharding of the Linear's product, where the mesh has explicit axes.
        """
        return Linear.__call__(self, x, out_sharding=out_sharding) + self.lora(x)


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
            element of its input. (Where a layer reads the sum, an input feature is dropped for all
            examples.)
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
    rank, alpha = as_integer(rank), None if alpha is None else float(alpha)
    if type(rank) is not int or rank < 1:
        raise ValueError(f"lora.inject: rank must be a whole number, 1 or more, got {rank!r}.")
    _common.check_rate("lora.inject", "dropout", dropout)
    layers = matched(model, filter, lambda x: _form(x, weight) is not None, "layer", "lora.inject")
    kernels = [
        _Kernel(path, layer, *tp.cast(_Form, _form(layer, weight))) for path, layer in layers
    ]
    _check_kernels(model, kernels)
    made: dict[int, LoRAKernel] = {}
    for kernel in kernels:
        if id(kernel.base) not in made:
            a, b = _matrices(kernel, rank, param_dtype, a_initializer, rngs)
            made[id(kernel.base)] = LoRAKernel(
                kernel.base,
                a,
                b,
                rank=rank,
                alpha=float(rank) if alpha is None else alpha,
                outputs=kernel.outputs,
                dropout=_dropout(kernel, dropout, rngs) if dropout else None,
            )
    for kernel in kernels:
        setattr(kernel.layer, kernel.name, made[id(kernel.base)])
    if freeze_base:
        freeze(model, All(Param, Not(LoRAParam)))


_Form: tp.TypeAlias = tuple[str, int, int]
"""The attribute of a layer's kernel, how many axes in front are a stack's, and how many are outputs."""


def _form(layer: tp.Any, weight: str | None) -> _Form | None:
    """The form of a layer's kernel, or of the attribute `weight` of any object, if there is one."""
    match layer:
        case LinearGeneral():
            outputs = len(layer.out_features)
            form = "kernel", len(layer.batch_axis) + len(layer.in_features) + outputs, outputs
        case Linear():
            form = "kernel", 2, 1
        case Einsum():
            form = "kernel", len(layer.kernel_shape), 1
        case Conv() | ConvTranspose():
            form = "kernel", len(layer.kernel_size) + 2, 1
        case Embed():
            form = "embedding", 2, 1
        case _:
            form = None, 0, 0
    name, axes, outputs = form
    if name is not None and weight in (None, name):
        return name, getattr(layer, name).ndim - axes, outputs
    value = vars(layer).get(weight) if weight and isinstance(layer, Pytree) else None
    return (weight, 0, 1) if weight and isinstance(value, (Variable, LoRAKernel)) else None


class _Kernel(tp.NamedTuple):
    """A kernel to adapt: where it is, and its form."""

    path: Path
    layer: tp.Any
    name: str
    stacked: int
    outputs: int

    @property
    def base(self) -> tp.Any:
        """The Variable."""
        return getattr(self.layer, self.name)


def _matrices(
    kernel: _Kernel, rank: int, dtype: Dtype, init: Initializer, rngs: Rngs
) -> tuple[LoRAParam[jax.Array], LoRAParam[jax.Array]]:
    """The two matrices of a kernel's adapter, annotated and placed on devices as the kernel is."""
    base, stacked = kernel.base, kernel.stacked
    split = base.ndim - kernel.outputs
    stack, rows = base.shape[:stacked], math.prod(base.shape[stacked:split])
    key = _common.params_key("lora.inject", rngs)
    if stack:  # each matrix as if it were alone
        keys = jax.random.split(key, math.prod(stack))
        a = jax.vmap(lambda k: init(k, (rows, rank), dtype))(keys).reshape(*stack, rows, rank)
    else:
        a = init(key, (rows, rank), dtype)
    b = default_b_initializer(key, (*stack, rank, math.prod(base.shape[split:])), dtype)

    def divided(entries: tp.Sequence[tp.Any]) -> tuple[tp.Any, tp.Any]:
        return entries_of_matrices(entries, stacked, kernel.outputs)

    value, names = base.get_value(), base.sharding_names
    sharding = getattr(value, "sharding", None)
    if isinstance(sharding, NamedSharding) and not isinstance(value, Tracer):
        spec = (*sharding.spec, *(None,) * (base.ndim - len(sharding.spec)))
        specs = tuple(NamedSharding(sharding.mesh, PartitionSpec(*x)) for x in divided(spec))
        a, b = jax.device_put((a, b), specs)
    if not isinstance(names, (tuple, PartitionSpec)) or len(names) != base.ndim:
        return LoRAParam(a), LoRAParam(b)
    of_a, of_b = divided(tuple(names))
    return LoRAParam(a, sharding_names=of_a), LoRAParam(b, sharding_names=of_b)


def _dropout(kernel: _Kernel, rate: float, rngs: Rngs) -> Dropout:
    """A dropout for the input of a kernel's adapter; in a stack each layer has a key."""
    layer, stack = Dropout(rate, rngs=rngs), kernel.base.shape[: kernel.stacked]
    if layer.rngs is not None and stack:
        layer.rngs = layer.rngs.split(stack)
    return layer


def _check_kernels(model: tp.Any, kernels: list[_Kernel]) -> None:
    """Raise ValueError for kernels that cannot be adapted, or are so already."""
    bases = {id(kernel.base) for kernel in _kernels(model)}
    adapted = [
        path_text(kernel.path)
        for kernel in kernels
        if isinstance(kernel.layer, LoRALinear)
        or isinstance(kernel.base, LoRAKernel)
        or id(kernel.base) in bases
    ]
    if adapted:
        raise ValueError(
            f"lora.inject: already adapted: {listed(adapted)}. Choose other layers, or call "
            "nnx.lora.merge(model) first, or nnx.lora.remove(model) to drop what they learned."
        )
    wrappers = [(p, w) for p, w in iter_graph(model) if isinstance(w, (SpectralNorm, WeightNorm))]
    for kernel in kernels:
        name = path_text((*kernel.path, kernel.name))
        for outer, wrapper in wrappers:
            if kernel.path[: len(outer)] == outer:
                raise ValueError(
                    f"lora.inject: {type(wrapper).__name__} at {path_text(outer)} sets {name} in "
                    "each call, so it cannot be adapted. Choose other layers."
                )
        if kernel.base.ndim < 2 or not jnp.issubdtype(kernel.base.dtype, jnp.inexact):
            raise ValueError(
                f"lora.inject: {name} is {short_type(kernel.base)}; a kernel that can be adapted is a "
                "floating array of two or more axes."
            )


def _kernels(model: tp.Any) -> list[LoRAKernel]:
    return [node for _, node in iter_graph(model) if isinstance(node, LoRAKernel)]


def merge(model: tp.Any) -> None:
    """Write the adapted weights into the kernels, and take the adapters out.

    The attributes are the Variables again that they were before `inject`, so calls cost what they did.
    What is frozen stays so; `nnx.unfreeze` changes that.

    Args:
        model: an object, or a pytree of objects, with adapters.

    Raises:
        ValueError: if the model has no adapters, or also reads an adapted Variable without its adapter.
            Nothing is changed then.

    >>> import nnxlite as nnx
    >>> layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    >>> nnx.lora.inject(layer, ..., rank=2, rngs=nnx.Rngs(1))
    >>> layer.kernel.lora_b[...] += 1.0
    >>> adapted = layer.kernel[...]
    >>> nnx.lora.merge(layer)
    >>> bool((layer.kernel[...] == adapted).all())
    True
    """
    kernels = _adapted(model, "merge")
    bases = {(*path, "base") for path, x in iter_graph(model) if isinstance(x, LoRAKernel)}
    for same in find_duplicates(model):
        tied = [path for path in same if path not in bases]
        if len(tied) < len(same):
            other = path_text(tied[0])
            raise ValueError(
                f"lora.merge: {other} is the Variable that is adapted in "
                f"{path_text(min(set(same) & bases)[:-1])}, without the adapter, so that merging would "
                f"change what it computes. Give {other} a Variable of its own, of the same value."
            )
    values = [kernel._nnx_adapted(kernel.base.get_value()) for kernel in kernels]
    for kernel, value in zip(kernels, values, strict=True):
        kernel.base.set_value(value)
    _take_out(model)


def remove(model: tp.Any) -> None:
    """Take the adapters out: the attributes are the Variables again that they were before `inject`.

    What is frozen stays so; `nnx.unfreeze` changes that.

    Args:
        model: an object, or a pytree of objects, with adapters.

    Raises:
        ValueError: if the model has no adapters.

    >>> import nnxlite as nnx
    >>> layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    >>> kernel = layer.kernel
    >>> nnx.lora.inject(layer, ..., rank=2, rngs=nnx.Rngs(1))
    >>> nnx.lora.remove(layer)
    >>> layer.kernel is kernel
    True
    """
    _adapted(model, "remove")
    _take_out(model)


def _adapted(model: tp.Any, caller: str) -> list[LoRAKernel]:
    """The kernels with adapters; ValueError if there are none."""
    kernels = _kernels(model)
    if not kernels:
        raise ValueError(
            f"lora.{caller}: {type(model).__name__} has no adapters. nnx.lora.inject(model, filter, "
            "rank=..., rngs=...) puts some in."
        )
    return kernels


def _take_out(model: tp.Any) -> None:
    for _, node in list(iter_graph(model)):
        for name, value in list(vars(node).items()) if isinstance(node, Pytree) else ():
            if isinstance(value, LoRAKernel):
                setattr(node, name, value.base)
