"""Recurrent cells, which `RNN` runs over sequences.

A cell maps a carry and one position of the input to a new carry and an output.  The carry is an
array of `hidden_features`, or two for the long short-term memory, in `param_dtype` unless the
caller passes another initial carry.
"""

from __future__ import annotations

import functools
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import TraceContextError, short_type, under_own_name
from nnxlite.nn import _common, initializers
from nnxlite.nn._common import KEYLESS, NO_METADATA, Arguments, KeySource, Metadata
from nnxlite.nn.activations import sigmoid, tanh
from nnxlite.nn.dtypes import Dtype, PromoteDtypeFn, default_promote_dtype
from nnxlite.nn.initializers import Initializer
from nnxlite.nn.linear import Linear, default_kernel_init
from nnxlite.objects._fields import data
from nnxlite.objects._module import Module, layer_name
from nnxlite.objects._rngs import Rngs, RngStream

__all__ = ["GRUCell", "LSTMCell", "OptimizedLSTMCell", "RNNCellBase", "SimpleCell"]

Activation = tp.Callable[..., jax.Array]
MakeLinear = tp.Callable[..., Linear]
Memory = tuple[jax.Array, jax.Array]
"""The carry of long short-term memory: memory and hidden array."""


def orthogonal_init(
    key: jax.Array, shape: tp.Sequence[int], dtype: tp.Any = jnp.float32
) -> jax.Array:
    """An orthogonal matrix, also in half-precision dtypes, for which JAX has no decomposition."""
    exact = jnp.promote_types(dtype, jnp.float32)
    return initializers.orthogonal()(key, tuple(shape), exact).astype(dtype)


def modified_orthogonal(
    key: jax.Array, shape: tp.Sequence[int], dtype: tp.Any = jnp.float32
) -> jax.Array:
    """An orthogonal matrix, computed in JAX's default floating dtype and cast to `dtype`."""
    return initializers.orthogonal()(key, tuple(shape)).astype(dtype)


class RNNCellBase(Module):
    """Base of cells, which `RNN` runs over a sequence.

    A subclass defines `__call__`, `initialize_carry` and `num_feature_axes`.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> class Total(nnx.RNNCellBase):
    ...     num_feature_axes = 1
    ...     def initialize_carry(self, input_shape, rngs=None, carry_init=None):
    ...         return jnp.zeros(input_shape)
    ...     def __call__(self, carry, inputs):
    ...         return carry + inputs, carry + inputs
    >>> nnx.RNN(Total())(jnp.ones((1, 4, 1))).ravel().tolist()
    [1.0, 2.0, 3.0, 4.0]
    """

    def __call__(self, carry: tp.Any, inputs: tp.Any) -> tuple[tp.Any, tp.Any]:
        """One step: the new carry, and the output.

        Args:
            carry: the carry, with the structure and shapes of the one from `initialize_carry`.
            inputs: one position of the input, (*batch, *features).
        """
        self._nnx_lacks("__call__")

    def initialize_carry(
        self,
        input_shape: tuple[int, ...],
        rngs: KeySource | None = None,
        carry_init: Initializer | None = None,
    ) -> tp.Any:
        """The initial carry.

        Args:
            input_shape: the shape of one position of the input, (*batch, *features).
            rngs: the source of random keys.
            carry_init: an initializer; takes precedence over the cell's own.
        """
        self._nnx_lacks("initialize_carry")

    @property
    def num_feature_axes(self) -> int:
        """The number of axes of one position of the input that are not batch axes; they are last."""
        self._nnx_lacks("num_feature_axes")

    def _nnx_lacks(self, member: str) -> tp.NoReturn:
        raise NotImplementedError(f"{layer_name(self)} is an RNN cell and must define `{member}`.")


def _initialize_carry(count: int) -> tp.Callable[..., tp.Any]:
    """The method of a cell whose carry is so many arrays."""

    def initialize_carry(
        self: tp.Any,
        input_shape: tuple[int, ...],
        rngs: KeySource | None = None,
        carry_init: Initializer | None = None,
    ) -> tp.Any:
        """The initial carry: an array (*batch, hidden_features), or two for long short-term memory.

        Args:
            input_shape: the shape of one position of the input, (*batch, in_features).
            rngs: the source of a key for each array, from the stream "carry"; takes precedence over
                the cell's own stream.  A constant carry needs none.
            carry_init: an initializer; takes precedence over the cell's own.  Zeros by default.

        Raises ValueError if the carry is random and the cell has no source of keys.
        """
        init = self.carry_init if carry_init is None else carry_init
        init = initializers.zeros if init is None else init
        keyless = rngs is None and self.rngs is None and init in KEYLESS
        shape = (*input_shape[:-1], self.hidden_features)
        source = RngStream(rngs, tag="carry") if isinstance(rngs, jax.Array) else rngs

        def key() -> tp.Any:
            if keyless:
                return None
            purpose = "RNGs must be provided to initialize the cell carry"
            try:
                return _common.draw_key(self, source, self.rngs, "carry", purpose, "keep_rngs=True")
            except TraceContextError:  # a stream of an outer trace level cannot advance
                if init in KEYLESS:
                    return None
                raise

        arrays = tuple(init(key(), shape, self.param_dtype) for _ in range(count))
        return arrays if count > 1 else arrays[0]

    return initialize_carry


class _Cell(RNNCellBase):
    """What the cells of this file share: their attributes, and how their carry is made."""

    in_features: int
    hidden_features: int
    activation_fn: Activation
    dtype: Dtype | None
    param_dtype: Dtype
    carry_init: Initializer | None
    promote_dtype: PromoteDtypeFn
    rngs: RngStream | None
    _nnx_recurrent_init: tp.ClassVar[Initializer] = staticmethod(orthogonal_init)

    def __init_subclass__(cls, **options: tp.Any) -> None:
        super().__init_subclass__(**options)
        if cls.__module__ == __name__ and not cls.__name__.startswith("_"):
            names = ("__init__", "initialize_carry")
            under_own_name(cls, *(name for name in names if name not in vars(cls)))

    def _nnx_set_up(self, arguments: Arguments) -> tuple[MakeLinear, MakeLinear]:
        """Set the attributes; returns makers of projections of the input and of the hidden array.

        They are called with the number of output features and `use_bias`.
        """
        arguments.set_attributes()
        values = arguments.values
        rngs = values["rngs"]
        self.rngs = data(_common.own_stream(self, rngs, "carry") if values["keep_rngs"] else None)
        self.carry_init = values["carry_init"]
        names = ("dtype", "param_dtype", "bias_init", "promote_dtype", "bias_metadata", "rngs")
        linear = functools.partial(Linear, **arguments.passed_on(*names))
        kernel = arguments.passed_on("kernel_init", "kernel_metadata")
        recurrent = arguments.passed_on("kernel_init", "kernel_metadata", prefix="recurrent_")
        recurrent["kernel_init"] = recurrent["kernel_init"] or self._nnx_recurrent_init
        of_input = functools.partial(linear, self.in_features, **kernel)
        of_hidden = functools.partial(linear, self.hidden_features, **recurrent)
        return of_input, of_hidden

    initialize_carry = _initialize_carry(1)

    @property
    def num_feature_axes(self) -> int:
        """1: only the last axis of one position of the input is a feature axis."""
        return 1


def _check_batch(cell: tp.Any, inputs: jax.Array, *hidden: jax.Array) -> None:
    """Raise TypeError unless batch axes of input and carry broadcast; `Linear` checks features."""
    for shape in map(np.shape, hidden):
        if _common.broadcast_shape(shape[:-1], np.shape(inputs)[:-1]) is None:
            raise TypeError(
                f"{layer_name(cell)} got a carry of shape {shape} for an input of shape "
                f"{np.shape(inputs)}: their batch axes must broadcast."
            )


class SimpleCell(_Cell):
    """The basic recurrent cell: `h' = activation(dense_i(x) + dense_h(h))`, which is its output too.

    Args:
        in_features: features of the input.
        hidden_features: features of the carry and the output.
        dtype: dtype of the projections.
        param_dtype: dtype of the parameters and of the initial carry.
        carry_init: initializer of the carry; zeros by default.
        residual: add the carry before the activation.
        activation_fn: the activation.
        kernel_init, recurrent_kernel_init, bias_init: initializers of the projections.
        promote_dtype: casts input and parameters to the dtype of the computation.
        keep_rngs: whether the cell has a random stream for the carry, forked from "carry".
        rngs: the stream "params" is drawn for `dense_h`, then for `dense_i`.
        kernel_metadata, recurrent_kernel_metadata, bias_metadata: metadata of the parameters.

    Attributes:
        dense_i: `Linear` of the input, with a bias.
        dense_h: `Linear` of the carry.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> cell = nnx.SimpleCell(3, 4, rngs=nnx.Rngs(0))
    >>> carry = cell.initialize_carry((2, 3))
    >>> carry, y = cell(carry, jnp.ones((2, 3)))
    >>> carry.shape, y.shape
    ((2, 4), (2, 4))
    """

    residual: bool

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        dtype: Dtype | None = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        carry_init: Initializer | None = None,
        residual: bool = False,
        activation_fn: Activation = tanh,
        kernel_init: Initializer = default_kernel_init,
        recurrent_kernel_init: Initializer = orthogonal_init,
        bias_init: Initializer = initializers.zeros,
        promote_dtype: PromoteDtypeFn = default_promote_dtype,
        keep_rngs: bool = False,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        recurrent_kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ) -> None:
        of_input, of_hidden = self._nnx_set_up(Arguments(self, locals()))
        self.dense_h = of_hidden(hidden_features, use_bias=False)
        self.dense_i = of_input(hidden_features)

    def __call__(self, carry: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One step: the new carry, twice.

        Args:
            carry: (*batch, hidden_features).
            inputs: (*batch, in_features).
        """
        _check_batch(self, inputs, carry)
        total = self.dense_i(inputs) + self.dense_h(carry)
        if self.residual:
            total = total + carry
        new = self.activation_fn(total)
        return new, new


class _GatedCell(_Cell):
    """A cell with gates; subclasses make their projections in `_nnx_build`."""

    gate_fn: Activation

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        gate_fn: Activation = sigmoid,
        activation_fn: Activation = tanh,
        kernel_init: Initializer = default_kernel_init,
        recurrent_kernel_init: Initializer | None = None,
        bias_init: Initializer = initializers.zeros,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        carry_init: Initializer | None = None,
        promote_dtype: PromoteDtypeFn = default_promote_dtype,
        keep_rngs: bool = False,
        rngs: Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        recurrent_kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ) -> None:
        self._nnx_build(*self._nnx_set_up(Arguments(self, locals())))

    def _nnx_build(self, of_input: MakeLinear, of_hidden: MakeLinear) -> None:
        """Make the projections, with the functions that `_nnx_set_up` returns."""
        self._nnx_lacks("_nnx_build")


def _memory_step(
    cell: tp.Any, carry: Memory, inputs: jax.Array, gates: tp.Callable[..., tp.Iterable[jax.Array]]
) -> tuple[Memory, jax.Array]:
    """One step of long short-term memory.

    Args:
        cell: the cell.
        carry: memory and hidden array.
        inputs: (*batch, in_features).
        gates: maps a hidden array to input gate, forget gate, candidate and output gate, before
            their activations.
    """
    if not isinstance(carry, (tuple, list)) or len(carry) != 2:
        raise TypeError(
            f"{layer_name(cell)} takes a carry of two arrays, (memory, hidden), as "
            f"initialize_carry makes it; got {short_type(carry)}."
        )
    c, h = carry
    _check_batch(cell, inputs, c, h)
    i, f, g, o = gates(h)
    new_c = cell.gate_fn(f) * c + cell.gate_fn(i) * cell.activation_fn(g)
    new_h = cell.gate_fn(o) * cell.activation_fn(new_c)
    return (new_c, new_h), new_h


class _MemoryCell(_GatedCell):
    """A cell whose carry is two arrays, memory and hidden array."""

    initialize_carry = _initialize_carry(2)


class LSTMCell(_MemoryCell):
    """Long short-term memory (Hochreiter and Schmidhuber 1997, doi:10.1162/neco.1997.9.8.1735).

        i = gate(ii(x) + hi(h))        f = gate(if_(x) + hf(h))
        g = activation(ig(x) + hg(h))  o = gate(io(x) + ho(h))
        c' = f * c + i * g             h' = o * activation(c')

    The carry is (c, h), the output h'.  `OptimizedLSTMCell` computes the same with two products
    instead of eight.

    Args:
        in_features: features of the input.
        hidden_features: features of the carry and the output.
        gate_fn: activation of the gates.
        activation_fn: activation of candidate and output.
        kernel_init, recurrent_kernel_init, bias_init: initializers of the projections.
        dtype: dtype of the projections; None: what input and parameters promote to.
        param_dtype: dtype of the parameters and of the initial carry.
        carry_init: initializer of the carry; zeros by default.
        promote_dtype: casts input and parameters to the dtype of the computation.
        keep_rngs: whether the cell has a random stream for the carry, forked from "carry".
        rngs: the stream "params" is drawn for ii, if_, ig, io, hi, hf, hg, ho, in this order.
        kernel_metadata, recurrent_kernel_metadata, bias_metadata: metadata of the parameters.

    Attributes:
        ii, if_, ig, io: `Linear`s of the input.
        hi, hf, hg, ho: `Linear`s of the hidden array, with biases.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> cell = nnx.LSTMCell(3, 4, rngs=nnx.Rngs(0))
    >>> (c, h), y = cell(cell.initialize_carry((2, 3)), jnp.ones((2, 3)))
    >>> c.shape, h.shape, y.shape
    ((2, 4), (2, 4), (2, 4))
    """

    _nnx_recurrent_init = staticmethod(modified_orthogonal)

    def _nnx_build(self, of_input: MakeLinear, of_hidden: MakeLinear) -> None:
        size = self.hidden_features
        self.ii = of_input(size, use_bias=False)
        self.if_ = of_input(size, use_bias=False)
        self.ig = of_input(size, use_bias=False)
        self.io = of_input(size, use_bias=False)
        self.hi = of_hidden(size)
        self.hf = of_hidden(size)
        self.hg = of_hidden(size)
        self.ho = of_hidden(size)

    def __call__(self, carry: Memory, inputs: jax.Array) -> tuple[Memory, jax.Array]:
        """One step: the new carry, and its second array as the output.

        Args:
            carry: memory and hidden array, both (*batch, hidden_features).
            inputs: (*batch, in_features).
        """
        pairs = (self.ii, self.hi), (self.if_, self.hf), (self.ig, self.hg), (self.io, self.ho)
        gates = lambda h: [of_input(inputs) + of_hidden(h) for of_input, of_hidden in pairs]
        return _memory_step(self, carry, inputs, gates)


class OptimizedLSTMCell(_MemoryCell):
    """Long short-term memory, with the kernels of all gates side by side in two matrices.

    It computes the same as `LSTMCell`; the columns are those of i, f, g and o, in this order.

    Args: as in `LSTMCell`, but the stream "params" is drawn for `dense_i`, then for `dense_h`.

    Attributes:
        dense_i: `Linear` of the input, to four times `hidden_features`.
        dense_h: `Linear` of the hidden array, with a bias.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> cell = nnx.OptimizedLSTMCell(3, 4, rngs=nnx.Rngs(0))
    >>> (c, h), y = cell(cell.initialize_carry((2, 3)), jnp.ones((2, 3)))
    >>> cell.dense_i.kernel.shape, y.shape
    ((3, 16), (2, 4))
    """

    def _nnx_build(self, of_input: MakeLinear, of_hidden: MakeLinear) -> None:
        self.dense_i = of_input(4 * self.hidden_features, use_bias=False)
        self.dense_h = of_hidden(4 * self.hidden_features)

    def __call__(self, carry: Memory, inputs: jax.Array) -> tuple[Memory, jax.Array]:
        """One step: the new carry, and its second array as the output.

        Args:
            carry: memory and hidden array, both (*batch, hidden_features).
            inputs: (*batch, in_features).
        """
        gates = lambda h: jnp.split(self.dense_i(inputs) + self.dense_h(h), 4, axis=-1)
        return _memory_step(self, carry, inputs, gates)


class GRUCell(_GatedCell):
    """The gated recurrent unit (Cho et al. 2014, https://arxiv.org/abs/1406.1078).

    With the columns of `dense_i` and `dense_h` in three parts, for r, z and n:

        r = gate(i_r(x) + h_r(h))     z = gate(i_z(x) + h_z(h))
        n = activation(i_n(x) + r * h_n(h))
        h' = (1 - z) * n + z * h

    The carry is h, the output h'.

    Args: as in `LSTMCell`, but the stream "params" is drawn for `dense_i`, then for `dense_h`.

    Attributes:
        dense_i: `Linear` of the input, to three times `hidden_features`, with a bias.
        dense_h: `Linear` of the hidden array.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> cell = nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))
    >>> carry, y = cell(cell.initialize_carry((2, 3)), jnp.ones((2, 3)))
    >>> carry.shape, y.shape
    ((2, 4), (2, 4))
    """

    def _nnx_build(self, of_input: MakeLinear, of_hidden: MakeLinear) -> None:
        self.dense_i = of_input(3 * self.hidden_features)
        self.dense_h = of_hidden(3 * self.hidden_features, use_bias=False)

    def __call__(self, carry: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One step: the new carry, twice.

        Args:
            carry: (*batch, hidden_features).
            inputs: (*batch, in_features).
        """
        h = carry
        _check_batch(self, inputs, h)
        gates = self.dense_i(inputs), self.dense_h(h)
        (i_r, i_z, i_n), (h_r, h_z, h_n) = (jnp.split(each, 3, axis=-1) for each in gates)
        r = self.gate_fn(i_r + h_r)
        z = self.gate_fn(i_z + h_z)
        n = self.activation_fn(i_n + r * h_n)
        new = (1.0 - z) * n + z * h
        return new, new
