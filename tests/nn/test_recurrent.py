"""Recurrent networks: what the catalogue and the comparison with the reference leave out."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn.quick import normal, quick

QUICK = {"kernel_init": quick, "recurrent_kernel_init": quick, "bias_init": quick}
X = jnp.asarray(normal(2, 5, 3))
CELLS = [nnx.SimpleCell, nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell]


class Digits(nnx.RNNCellBase):
    """Appends its input, a digit, to the number it carries."""

    num_feature_axes = 1

    def initialize_carry(self, input_shape, rngs=None, carry_init=None):
        return jnp.zeros(input_shape)

    def __call__(self, carry, inputs):
        carry = carry * 10 + inputs
        return carry, carry


DIGITS = jnp.asarray([[1.0, 2, 3, 4], [5, 6, 7, 8]])[..., None]


def numbers(tree):
    return jax.tree.map(lambda a: np.squeeze(a, -1).astype(int).tolist(), tree)


@pytest.mark.parametrize("kind", CELLS)
def test_cells_in_half_precision_have_orthogonal_kernels_and_a_carry_of_that_dtype(kind):
    """(the reference refuses them)"""
    cell = kind(3, 4, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    for array in jax.tree.leaves(cell.initialize_carry((2, 5, 3))):
        assert (array.shape, array.dtype) == ((2, 5, 4), jnp.bfloat16) and not array.any()
    for path, param in nnx.to_flat_state(nnx.state(cell)):
        assert param.dtype == jnp.bfloat16
        if path[-1] == "kernel" and param.shape[0] == 4:
            square = np.asarray(param.value, np.float32)
            np.testing.assert_allclose(square @ square.T, np.eye(4), atol=3e-2)


@pytest.mark.parametrize("kind", [*CELLS, nnx.All, nnx.Any])
def test_wrong_arguments_name_the_public_class(kind):
    for method in ("__init__", "initialize_carry"):
        if hasattr(kind, method):
            text = rf"^{kind.__name__}\.{method}\(\) got an unexpected keyword"
            with pytest.raises(TypeError, match=text):
                getattr(kind, method)(None, 4, 4, prefered_element_type=None)
    own = type("OwnCell", (nnx.GRUCell,), {})
    assert own.__init__ is nnx.GRUCell.__init__


@pytest.mark.parametrize(
    "how, both",
    [
        (lambda f, x: jax.grad(lambda x: f(x).sum())(x), True),
        (lambda f, x: jax.lax.scan(lambda c, x: (c, f(x)), 0, x[None])[1][0], True),
        (lambda f, x: nnx.grad(lambda x: f(x).sum())(x), False),
    ],
    ids=["grad", "scan", "nnx.grad"],
)
def test_an_rnn_whose_carry_is_zeros_can_be_in_a_closure(how, both):
    """As any other layer without state: a constant carry needs no key."""
    make = lambda **options: nnx.RNN(nnx.LSTMCell(4, 4, rngs=nnx.Rngs(0)), **options)
    model, other = make(), make(rngs=False)
    if both:
        model, other = nnx.Bidirectional(model, make()), nnx.Bidirectional(other, other, rngs=False)
    x = jnp.ones((2, 3, 4))
    np.testing.assert_allclose(how(model, x), how(other, x), rtol=1e-6)
    assert int(model.rngs.count[...]) == 0
    model(x)
    assert int(model.rngs.count[...]) == (4 if both else 2)  # as in the reference


def test_a_random_carry_in_a_closure_is_refused():
    cell = nnx.GRUCell(4, 4, carry_init=nnx.initializers.normal(), rngs=nnx.Rngs(0))
    stream = nnx.Rngs(0).carry
    with pytest.raises(nnx.TraceContextError, match="Cannot mutate RngCount"):
        jax.jit(lambda x: nnx.RNN(cell, rngs=stream)(x))(jnp.ones((2, 3, 4)))


def test_several_feature_axes():
    class Image(Digits):
        num_feature_axes = 2

    y = nnx.RNN(Image())(jnp.ones((7, 3, 4, 5)))
    assert y.shape == (7, 3, 4, 5) and float(y[0, 2, 0, 0]) == 111


@pytest.mark.parametrize(
    ("lengths", "options", "carry", "outputs"),
    [
        ([2, 3], {"reverse": True, "keep_order": True}, [21, 765], [[21, 2], [765, 76, 7]]),
        # After no position at all the carry is the one at the start; the reference gives that at
        # the end of the padding.
        ([0, 4], {"reverse": True}, [0, 8765], [[], [8, 87, 876, 8765]]),
        (3, {}, [123, 567], [[1, 12, 123], [5, 56, 567]]),
    ],
    ids=["ordered", "none", "number"],
)
def test_order_and_lengths(lengths, options, carry, outputs):
    """By options of the layer, or of a call, which go before them."""
    x, given = DIGITS.swapaxes(0, 1), jnp.asarray(lengths)
    options = {**options, "time_major": True, "return_carry": True}
    by_layer = nnx.RNN(Digits(), **options)(x, seq_lengths=given)
    for last, ys in (by_layer, nnx.RNN(Digits())(x, seq_lengths=given, **options)):
        assert numbers(last) == carry
        rows = zip(numbers(ys.swapaxes(0, 1)), outputs)
        assert [y[: len(wanted)] for y, wanted in rows] == outputs


class Noisy(Digits):
    """A cell that counts its steps and drops out at random."""

    def __init__(self):
        rngs = nnx.Rngs(params=0, dropout=1)
        self.linear = nnx.Linear(3, 3, kernel_init=quick, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.steps = nnx.Variable(jnp.array(0))

    def __call__(self, carry, inputs):
        self.steps += 1
        carry = self.dropout(jnp.tanh(self.linear(inputs)) + carry)
        return carry, carry


def test_variables_can_have_a_slice_for_each_step():
    class Weighted(Digits):
        def __init__(self, axis):
            weights = jnp.asarray([1.0, 0.0, 2.0, 1.0])
            self.weight = nnx.Param(weights[None] if axis else weights)
            self.seen = nnx.BatchStat(jnp.zeros(4))

        def __call__(self, carry, inputs):
            self.seen.value = self.seen.value + inputs[0, 0]
            carry = carry * 10 + self.weight.value * inputs
            return carry, carry

    for axis in (0, 1):
        axes = {nnx.Param: axis, nnx.BatchStat: 0, ...: nnx.Carry}
        layer = nnx.RNN(Weighted(axis), state_axes=axes)
        assert numbers(layer(DIGITS))[0] == [1, 10, 106, 1064]
        assert isinstance(layer.state_axes, nnx.StateAxes)
        assert layer.cell.weight.shape == ((1, 4) if axis else (4,))
        np.testing.assert_array_equal(layer.cell.seen.value, [1, 2, 3, 4])


def test_what_is_only_read_is_not_written():
    layer = nnx.RNN(Noisy())
    kernel, key = layer.cell.linear.kernel.value, layer.cell.dropout.rngs.key.value
    layer(X)
    assert layer.cell.linear.kernel.value is kernel
    assert layer.cell.dropout.rngs.key.value is key and int(layer.cell.steps.value) == 5
    layer = nnx.RNN(Noisy(), state_axes={nnx.RngState: nnx.Carry, ...: None})
    with pytest.raises(ValueError, match=r"writes '.*steps', which is broadcast"):
        layer(X)
    assert int(layer.cell.steps.value) == 0


def test_a_cell_keeps_the_structure_of_its_carry_and_its_own():
    class Growing(Digits):
        def __call__(self, carry, inputs):
            return (carry, inputs), inputs

    class Changing(Digits):
        def __call__(self, carry, inputs):
            self.fresh = nnx.Variable(inputs)
            return carry, inputs

    with pytest.raises(TypeError, match="must return a carry of the structure it got: it got.*and"):
        nnx.RNN(Growing())(DIGITS)
    layer = nnx.RNN(Changing())
    with pytest.raises(TypeError, match="the body changes attributes .'fresh'. of 'cell'"):
        layer(DIGITS)
    assert not hasattr(layer.cell, "fresh")


def test_bidirectional_runs_both_ways_whatever_the_options_of_the_two_say():
    rnn = lambda **options: nnx.RNN(Digits(), **options)
    layer = nnx.Bidirectional(rnn(reverse=True), rnn(time_major=True))
    y = layer(DIGITS, reverse=True, keep_order=False)
    assert numbers(y[..., :1]) == [[1, 12, 123, 1234], [5, 56, 567, 5678]]
    assert numbers(y[..., 1:]) == [[4321, 432, 43, 4], [8765, 876, 87, 8]]
    assert nnx.Bidirectional(layer, rnn())(DIGITS).shape == (2, 4, 3)
    y = layer(DIGITS, initial_carry=jnp.ones((2, 2, 1)))  # one array of both carries
    assert [numbers(y[:, -1:, 0]), numbers(y[:, :1, 1])] == [[11234, 15678], [14321, 18765]]


def test_one_object_for_both_directions_gives_a_warning(caplog):
    rnn = nnx.RNN(Digits())
    with caplog.at_level(logging.WARNING):
        layer = nnx.Bidirectional(rnn, rnn)
    assert "one object for both directions" in caplog.text
    assert layer(DIGITS).shape == (2, 4, 2)
