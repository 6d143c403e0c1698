"""`PReLU`, an activation that learns.  Importing this also makes `pickle` store JAX's functions by name.

Modules have activations as attributes, and some of JAX's are compiled functions, which have no pickle of
their own.
"""

from __future__ import annotations

import copyreg
import operator
import sys
import typing as tp

import jax
import jax.numpy as jnp

from nnxlite.nn._common import NO_METADATA, Metadata
from nnxlite.nn.dtypes import Dtype, PromoteDtypeFn, default_promote_dtype
from nnxlite.objects._module import Module
from nnxlite.variables._kinds import Param


class PReLU(Module):
    """A leaky rectifier whose slope for negative inputs is learned: `where(x >= 0, x, slope * x)`.

    The result has the shape of the input, and its dtype where `dtype` is None.  Source: He et al.,
    "Delving Deep into Rectifiers" (2015).

    Args:
        negative_slope_init: the first value of the slope.
        dtype: dtype of the computation; None for that of the input.
        param_dtype: dtype of the slope.
        promote_dtype: brings input and slope to `dtype`.
        negative_slope_metadata: metadata of the slope.

    Attributes:
        negative_slope: Param of shape ().

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> nnx.PReLU(0.5)(jnp.array([-2.0, 3.0])).tolist()
    [-1.0, 3.0]
    """

    negative_slope: Param[jax.Array]

    def __init__(
        self,
        negative_slope_init: float = 0.01,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        promote_dtype: PromoteDtypeFn = default_promote_dtype,
        negative_slope_metadata: Metadata = NO_METADATA,
    ) -> None:
        self.negative_slope = Param(
            jnp.asarray(negative_slope_init, param_dtype), **negative_slope_metadata
        )
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """The rectified input, of the same shape.

        Args:
            inputs: an array of any shape.
        """
        slope = self.negative_slope[...]
        if self.dtype is None:
            inputs = jnp.asarray(inputs)
            slope = slope.astype(inputs.dtype)
        else:
            inputs, slope = self.promote_dtype((inputs, slope), dtype=self.dtype)
        return jnp.where(inputs >= 0, inputs, slope * inputs)


def _by_name(fun: tp.Any) -> tp.Any:
    """How to pickle a compiled function: by name if it is JAX's own, else as it says itself.

    A user's functions are not pickled by name, because cloudpickle sends their code.
    """
    module, name = getattr(fun, "__module__", None) or "", getattr(fun, "__qualname__", "")
    if module.partition(".")[0] == "jax":
        try:
            if operator.attrgetter(name)(sys.modules[module]) is fun:
                return name
        except (AttributeError, KeyError):
            pass
    return fun.__reduce_ex__(4)


for _kind in (type(jax.jit(_by_name)), jax.custom_jvp):
    copyreg.pickle(_kind, _by_name)  # pyright: ignore[reportArgumentType]
