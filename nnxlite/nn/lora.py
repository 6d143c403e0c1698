"""Low-rank adaptation: `LoRA` adds a trainable product of two thin matrices to a frozen layer.

    y = x @ lora_a @ lora_b + base_module(x)

The matrices are `LoRAParam`s, a kind of their own, so that a filter separates them from the
`Param`s of the base: train `nnx.LoRAParam`, freeze the rest.  The second matrix is zero at first,
so that an adapted model starts with the results of its base.  Source: Hu et al., "LoRA: Low-Rank
Adaptation of Large Language Models" (2021).
"""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp

from nnxlite.nn import initializers
from nnxlite.nn._common import (
    NO_METADATA,
    Metadata,
    OutSharding,
    check_size,
    feature_mismatch,
    new_param,
)
from nnxlite.nn.dtypes import Dtype, PromoteDtypeFn, default_promote_dtype
from nnxlite.nn.initializers import Initializer
from nnxlite.nn.linear import Linear
from nnxlite.nn.lora_kernel import low_rank
from nnxlite.objects._module import Module
from nnxlite.objects._rngs import Rngs
from nnxlite.objects._scopes import layer_name
from nnxlite.variables._kinds import Param
from nnxlite.variables._variable import Variable

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
        check_size(self, "in_features", in_features)
        check_size(self, "lora_rank", lora_rank)
        check_size(self, "out_features", out_features)
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
        self.lora_a = new_param(self, rngs, a_initializer, a, param_dtype, a_metadata, kind)
        self.lora_b = new_param(self, rngs, b_initializer, b, param_dtype, b_metadata, kind)

    def __call__(self, x: jax.Array, **kwargs: tp.Any) -> jax.Array:
        """The adapted result, (..., in_features) -> (..., out_features).

        Args:
            x: array whose last axis has the size `in_features`.
            **kwargs: passed on to the base module.
        """
        x, a, b = self.promote_dtype((x, self.lora_a[...], self.lora_b[...]), dtype=self.dtype)
        if x.shape[-1:] != a.shape[:1]:
            raise TypeError(feature_mismatch(self, x, a, "lora_a"))
        y = low_rank(x, a, b)
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
        check_size(self, "lora_rank", lora_rank)
        super().__init__(in_features, out_features, rngs=rngs, **kwargs)
        self.lora = LoRA(
            in_features,
            lora_rank,
            out_features,
            dtype=lora_dtype,
            param_dtype=lora_param_dtype,
            a_initializer=a_initializer,
            b_initializer=b_initializer,
            lora_param_type=lora_param_type,
            promote_dtype=lora_promote_dtype,
            rngs=rngs,
            a_metadata=a_metadata,
            b_metadata=b_metadata,
        )

    def __call__(self, x: jax.Array, out_sharding: OutSharding = None) -> jax.Array:
        """The adapted image of `x`, (..., in_features) -> (..., out_features).

        Args:
            x: array whose last axis has the size `in_features`.
            out_sharding: sharding of the Linear's product, where the mesh has explicit axes.
        """
        return Linear.__call__(self, x, out_sharding=out_sharding) + self.lora(x)
