"""`LoRAKernel`: a kernel with a low-rank adapter, which a layer computes with on the side of its input.

    y = product(x, base) + alpha / rank * product(dropout(x), lora_a) @ lora_b

`product` is the layer's own, and linear in the kernel.  The first thin matrix is a kernel of the same
layer with `rank` output features, and the second one maps these to the outputs, so that nothing as large
as the kernel is formed.  `LoRA` is the same for a plain matrix product.

An object that the library does not know reads its attribute like an array: then, and only then, the
sum `base + alpha / rank * lora_a @ lora_b` is formed.
"""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from nnxlite.objects._fields import data, dataclass
from nnxlite.objects._pytree import Pytree
from nnxlite.variables._operators import ArrayOperators
from nnxlite.variables._variable import Variable

if tp.TYPE_CHECKING:
    from nnxlite.nn.stochastic import Dropout

Product: tp.TypeAlias = tp.Callable[..., jax.Array]
"""A product that a layer computes, such as `jax.lax.dot_general` or a quantised one."""


class Adapter(tp.NamedTuple):
    """The matrices of an adapter, for one call of a layer.

    Attributes:
        a: a kernel with the input axes of the layer's, and `rank` outputs.
        b: shape (rank, *output axes), times `alpha / rank`.
        dropped: applies dropout to what the first of them is multiplied by.
    """

    a: jax.Array
    b: jax.Array
    dropped: tp.Callable[[jax.Array], jax.Array]


@dataclass(eq=False)
class LoRAKernel(Pytree, ArrayOperators[jax.Array]):
    """A kernel with a low-rank adapter; it reads like the Variable that it replaces.

    `nnx.lora.inject` makes these.

    Attributes:
        base: the Variable that was there before.
        lora_a: LoRAParam of shape (*stack, rows, rank), where the kernel is a matrix (rows, columns).
        lora_b: LoRAParam of shape (*stack, rank, columns), zero at first.
        rank, alpha: the product of the two matrices counts `alpha / rank` times.
        outputs: how many of the kernel's last axes are the columns; those before them are the rows.
        dropout: a `Dropout` for the inputs of the adapter, or None.

    >>> import nnxlite as nnx
    >>> layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    >>> nnx.lora.inject(layer, nnx.Linear, rank=2, rngs=nnx.Rngs(1))
    >>> layer.kernel.shape, layer.kernel.lora_a.shape, layer.kernel.lora_b.shape
    ((3, 4), (3, 2), (2, 4))
    """

    base: Variable[jax.Array]
    lora_a: Variable[jax.Array]
    lora_b: Variable[jax.Array]
    rank: int
    alpha: float
    outputs: int
    dropout: Dropout | None = data()

    def get_value(self, *, index: tp.Any = ...) -> jax.Array:
        """The adapted kernel, of the base's shape and dtype."""
        value = self._nnx_adapted(self.base.get_value(), self.dropout)
        return value if index is Ellipsis else value[index]

    def _nnx_adapted(self, base: jax.Array, dropout: Dropout | None = None) -> jax.Array:
        a = self.lora_a.get_value()
        if dropout is not None:  # no input is known here: a row is dropped for all of them
            a = a * dropout(jnp.ones((*a.shape[:-1], 1), a.dtype))
        delta = jnp.matmul(a, self.lora_b.get_value()) * (self.alpha / self.rank)
        return (base + delta.reshape(base.shape)).astype(base.dtype)

    def __getitem__(self, index: tp.Any) -> jax.Array:
        return self.get_value(index=index)

    @property
    def value(self) -> jax.Array:
        """The adapted kernel."""
        return self.get_value()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel."""
        return self.base.shape

    @property
    def ndim(self) -> int:
        """The number of axes of the kernel."""
        return self.base.ndim

    @property
    def dtype(self) -> tp.Any:
        """The dtype of the kernel."""
        return self.base.dtype


def weight_of(kernel: tp.Any) -> jax.Array:
    """The array of a kernel, without an adapter: a layer adds that on the side of its input."""
    return kernel.base[...] if isinstance(kernel, LoRAKernel) else kernel[...]


def adapter_of(kernel: tp.Any, dtype: tp.Any) -> Adapter | None:
    """The adapter of a layer's kernel; None where there is none.

    Args:
        kernel: a Variable, or a `LoRAKernel`.
        dtype: of the computation.
    """
    if not isinstance(kernel, LoRAKernel):
        return None
    shape, rank = kernel.base.shape, kernel.rank
    split = len(shape) - kernel.outputs
    a = lax.reshape(kernel.lora_a.get_value(), (*shape[:split], rank))
    b = lax.reshape(kernel.lora_b.get_value(), (rank, *shape[split:]))
    dropped = (lambda x: x) if kernel.dropout is None else kernel.dropout
    return Adapter(a.astype(dtype), b.astype(dtype) * (kernel.alpha / rank), dropped)


def add_adapter(
    y: jax.Array, x: jax.Array, kernel: tp.Any, product: Product, options: dict[str, tp.Any]
) -> jax.Array:
    """`y`, a layer's product with its kernel, plus that with the kernel's adapter, if there is one.

    Args:
        y: array of shape (..., *output axes).
        x: the input, in the dtype of the computation.
        kernel: a Variable, or a `LoRAKernel`.
        product: multiplies an input by a kernel that has `rank` outputs: `product(x, a, **options)`.
        options: keywords of a product, among them perhaps the sharding of `y`.
    """
    adapter = adapter_of(kernel, x.dtype)
    if adapter is None:
        return y
    a, b, dropped = adapter
    z = product(dropped(x), a, **thin_options(options, y.ndim - b.ndim + 1))
    delta = lax.dot_general(z, b, (((z.ndim - 1,), (0,)), ((), ())), **options)
    return y + delta.astype(y.dtype)


def entries_of_matrices(
    entries: tp.Sequence[tp.Any], stacked: int, outputs: int
) -> tuple[tuple[tp.Any, ...], tuple[tp.Any, ...]]:
    """One entry for each axis of the two matrices, from one for each axis of their kernel.

    An entry is the name or mesh axis that an axis is divided by.  Rows and columns are several axes in
    one: they are divided as the first of these is.

    Args:
        entries: those of the kernel.
        stacked: how many axes in front are those of a stack.
        outputs: how many of the last axes are the columns.
    """
    stack, split = tuple(entries[:stacked]), len(entries) - outputs
    return (*stack, entries[stacked], None), (*stack, None, entries[split])


def thin_options(options: dict[str, tp.Any], axes: int) -> dict[str, tp.Any]:
    """The options of a product whose output has `axes` axes of the whole one, and one of size `rank`."""
    sharding = options.get("out_sharding")
    if sharding is None:
        return options
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    thin = PartitionSpec(*(*spec, *(None,) * axes)[:axes], None)
    if isinstance(sharding, NamedSharding):
        thin = NamedSharding(sharding.mesh, thin)
    return options | {"out_sharding": thin}
