"""Recurrent networks: cells by hand, `RNN` against a loop, lengths, order, and state in cells."""

from __future__ import annotations

import inspect
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
PAIRS = (nnx.LSTMCell, nnx.OptimizedLSTMCell)  # cells whose carry is a pair


def cell_of(kind, **kwargs):
    return kind(3, 4, **{**QUICK, "rngs": nnx.Rngs(0), **kwargs})


def some_carry(kind, *batch):
    arrays = tuple(jnp.asarray(normal(*batch, 4, seed=i)) for i in (5, 6))
    return arrays if kind in PAIRS else arrays[0]


def loop(cell, xs, carry):
    """The cell in a Python loop over (batch, time, features): last carry and outputs."""
    ys = []
    for i in range(xs.shape[1]):
        carry, y = cell(carry, xs[:, i])
        ys.append(y)
    return carry, jnp.stack(ys, axis=1)


def assert_close(ours, wanted, **options):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **options), ours, wanted)


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


# Cells ------------------------------------------------------------------------------------------


def test_a_residual_cell_adds_its_carry():
    cell, carry = cell_of(nnx.SimpleCell, residual=True), some_carry(nnx.SimpleCell, 2)
    total = cell.dense_i(X[:, 0]) + cell.dense_h(carry) + carry
    assert_close(cell(carry, X[:, 0])[0], jnp.tanh(total), rtol=1e-5)


def test_activations_are_arguments():
    options = {"gate_fn": jnp.ones_like, "activation_fn": lambda x: x}
    (c, h), _ = cell_of(nnx.LSTMCell, **options)(some_carry(nnx.LSTMCell, 2), X[:, 0])
    np.testing.assert_array_equal(c, h)
    relu = cell_of(nnx.SimpleCell, activation_fn=nnx.relu)
    assert (relu(some_carry(nnx.SimpleCell, 2), X[:, 0])[0] >= 0).all()


@pytest.mark.parametrize("kind", CELLS)
def test_recurrent_kernels_are_orthogonal_and_metadata_goes_to_the_parameters(kind):
    metadata = {f"{n}_metadata": {"of": n} for n in ("kernel", "recurrent_kernel", "bias")}
    cell = kind(3, 4, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16, **metadata)
    for path, param in nnx.to_flat_state(nnx.state(cell)):
        recurrent = path[-1] == "kernel" and param.shape[0] == 4
        assert param.of == ("recurrent_kernel" if recurrent else path[-1])
        assert param.dtype == jnp.bfloat16
        if recurrent:
            square = np.asarray(param.value, np.float32)
            np.testing.assert_allclose(square @ square.T, np.eye(4), atol=3e-2)


@pytest.mark.parametrize("kind", CELLS)
def test_the_first_carry_is_zero_in_the_dtype_of_the_parameters(kind):
    carry = cell_of(kind, param_dtype=jnp.bfloat16).initialize_carry((2, 5, 3))
    assert isinstance(carry, tuple) == (kind in PAIRS)
    for array in jax.tree.leaves(carry):
        assert array.shape == (2, 5, 4) and array.dtype == jnp.bfloat16 and not array.any()


@pytest.mark.parametrize("kind", CELLS)
def test_a_random_carry_draws_one_key_for_each_array(kind):
    number = 2 if kind in PAIRS else 1
    for source in (nnx.Rngs(carry=3), nnx.Rngs(carry=3).carry, nnx.Rngs(3)):
        arrays = jax.tree.leaves(cell_of(kind).initialize_carry((2, 3), source, quick))
        stream, same = source["carry"] if isinstance(source, nnx.Rngs) else source, nnx.Rngs(3)
        assert int(stream.count.value) == len(arrays) == number
        for array in arrays:
            np.testing.assert_array_equal(array, quick(same(), (2, 4)))
    first, *rest = jax.tree.leaves(
        cell_of(kind, carry_init=quick).initialize_carry((2, 3), jax.random.key(3))
    )
    assert all((first != other).any() for other in rest)


@pytest.mark.parametrize("kind", CELLS)
def test_cells_keep_no_stream_unless_asked(kind):
    rngs = nnx.Rngs(0, carry=1)
    assert cell_of(kind, rngs=rngs).rngs is None
    assert int(rngs.carry.count.value) == 0
    cell = cell_of(kind, rngs=rngs, keep_rngs=True, carry_init=quick)
    assert cell.rngs.tag == "carry" and int(rngs.carry.count.value) == 1
    one, other = cell.initialize_carry((3,)), cell.initialize_carry((3,))
    assert (jax.tree.leaves(one)[0] != jax.tree.leaves(other)[0]).any()


@pytest.mark.parametrize("kind", CELLS)
def test_messages_of_cells(kind):
    cell, carry, name = cell_of(kind), some_carry(kind, 2), kind.__name__
    for state, x in ((carry, jnp.ones((2, 4))), (jax.tree.map(lambda a: a[:, :3], carry), X[:, 0])):
        with pytest.raises(TypeError, match=rf"Linear at `.*` of {name} expects . feature"):
            cell(state, x)
    with pytest.raises(TypeError, match=rf"{name} got a carry of shape \(2, 4\) for .*\(3, 3\)"):
        cell(carry, jnp.ones((3, 3)))
    with pytest.raises(
        ValueError,
        match=f"{name}: RNGs must be provided to initialize the cell carry.*keep_rngs=True",
    ):
        cell.initialize_carry((2, 3), carry_init=quick)
    with pytest.raises(TypeError, match=f"{name}: `rngs` must be an Rngs.* or a key, got int"):
        cell.initialize_carry((2, 3), 1)
    expected = "takes a carry of two arrays, .memory, hidden.*; got int|expects 4 feature"
    with pytest.raises(TypeError, match=expected):
        cell(3, X[:, 0])


@pytest.mark.parametrize("kind", [*CELLS, nnx.All, nnx.Any])
@pytest.mark.parametrize("method", ["__init__", "initialize_carry"])
def test_wrong_arguments_name_the_public_class(kind, method):
    if not hasattr(kind, method):
        return
    with pytest.raises(
        TypeError, match=rf"^{kind.__name__}\.{method}\(\) got an unexpected keyword"
    ):
        getattr(kind, method)(None, 4, 4, prefered_element_type=None)


class OwnCell(nnx.GRUCell):
    """A cell of a user."""


def test_a_users_cell_has_the_methods_of_its_base():
    assert OwnCell.__init__ is nnx.GRUCell.__init__
    assert OwnCell(2, 3, rngs=nnx.Rngs(0)).initialize_carry((1, 2)).shape == (1, 3)
    assert inspect.signature(nnx.GRUCell) == inspect.signature(nnx.LSTMCell)


CLOSURES = {
    "grad": lambda f, x: jax.grad(lambda x: f(x).sum())(x),
    "vmap": lambda f, x: jax.vmap(f)(x),
    "jit": lambda f, x: jax.jit(lambda x: f(x))(x),
    "scan": lambda f, x: jax.lax.scan(lambda c, x: (c, f(x)), 0, x[None])[1][0],
    "nnx.grad": lambda f, x: nnx.grad(lambda x: f(x).sum())(x),
    "remat": lambda f, x: jax.checkpoint(lambda x: f(x))(x),
}


@pytest.mark.parametrize("how, both", [*zip(CLOSURES, [False, True] * 3)])
def test_an_rnn_whose_carry_is_zeros_can_be_in_a_closure(how, both):
    """As any other layer without state: a constant carry needs no key."""
    make = lambda **options: nnx.RNN(nnx.LSTMCell(4, 4, rngs=nnx.Rngs(0)), **options)
    model, other = make(), make(rngs=False)
    if both:
        model, other = nnx.Bidirectional(model, make()), nnx.Bidirectional(other, other, rngs=False)
    x = jnp.ones((2, 3, 4))
    found, expected = CLOSURES[how](model, x), CLOSURES[how](other, x)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert int(model.rngs.count[...]) == 0
    model(x)
    assert int(model.rngs.count[...]) == (4 if both else 2)  # as in the reference


def test_a_random_carry_in_a_closure_is_refused():
    cell = nnx.GRUCell(4, 4, carry_init=nnx.initializers.normal(), rngs=nnx.Rngs(0))
    stream = nnx.Rngs(0).carry
    with pytest.raises(nnx.TraceContextError, match="Cannot mutate RngCount"):
        jax.jit(lambda x: nnx.RNN(cell, rngs=stream)(x))(jnp.ones((2, 3, 4)))


def test_what_a_cell_must_define():
    cell = nnx.RNNCellBase()
    for member, use in {
        "__call__": lambda: cell(None, None),
        "initialize_carry": lambda: cell.initialize_carry((1,)),
        "num_feature_axes": lambda: cell.num_feature_axes,
    }.items():
        with pytest.raises(NotImplementedError, match=f"RNNCellBase is an RNN cell.*`{member}`"):
            use()


# RNN against a loop -----------------------------------------------------------------------------


def test_several_feature_axes():
    class Image(Digits):
        num_feature_axes = 2

    y = nnx.RNN(Image())(jnp.ones((7, 3, 4, 5)))
    assert y.shape == (7, 3, 4, 5) and float(y[0, 2, 0, 0]) == 111


# Order and lengths ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "options", "carry", "outputs"),
    [
        (None, {}, [1234, 5678], [[1, 12, 123, 1234], [5, 56, 567, 5678]]),
        (None, {"reverse": True}, [4321, 8765], [[4, 43, 432, 4321], [8, 87, 876, 8765]]),
        (
            None,
            {"reverse": True, "keep_order": True},
            [4321, 8765],
            [[4321, 432, 43, 4], [8765, 876, 87, 8]],
        ),
        (None, {"keep_order": True}, [1234, 5678], [[1, 12, 123, 1234], [5, 56, 567, 5678]]),
        ([2, 3], {}, [12, 567], [[1, 12], [5, 56, 567]]),
        ([2, 3], {"reverse": True}, [21, 765], [[2, 21], [7, 76, 765]]),
        ([2, 3], {"reverse": True, "keep_order": True}, [21, 765], [[21, 2], [765, 76, 7]]),
        # After no position at all the carry is the one at the start; the reference gives that at
        # the end of the padding.
        ([0, 4], {"reverse": True}, [0, 8765], [[], [8, 87, 876, 8765]]),
        ([0, 1], {}, [0, 5], [[], [5]]),
    ],
)
@pytest.mark.parametrize("time_major", [False, True])
def test_order_and_lengths(lengths, options, carry, outputs, time_major):
    layer = nnx.RNN(Digits(), return_carry=True, time_major=time_major, **options)
    x = DIGITS.swapaxes(0, 1) if time_major else DIGITS
    given = None if lengths is None else jnp.asarray(lengths)
    last, ys = layer(x, seq_lengths=given)
    assert numbers(last) == carry
    ys = numbers(ys.swapaxes(0, 1) if time_major else ys)
    assert [y[:n] for y, n in zip(ys, lengths or [4, 4], strict=True)] == outputs
    # options of a call go before those of the layer
    plain = nnx.RNN(Digits())(
        x, seq_lengths=given, return_carry=True, time_major=time_major, **options
    )
    assert_close(plain, layer(x, seq_lengths=given))


def test_one_length_for_all():
    carry, _ = nnx.RNN(Digits(), return_carry=True)(DIGITS, seq_lengths=jnp.asarray(3))
    assert numbers(carry) == [123, 567]


# State in cells ---------------------------------------------------------------------------------


class Noisy(nnx.RNNCellBase):
    """A cell that counts its steps and drops out at random."""

    num_feature_axes = 1

    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, kernel_init=quick, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.steps = nnx.Variable(jnp.array(0))

    def initialize_carry(self, input_shape, rngs=None, carry_init=None):
        return jnp.zeros(input_shape)

    def __call__(self, carry, inputs):
        self.steps += 1
        carry = self.dropout(jnp.tanh(self.linear(inputs)) + carry)
        return carry, carry


def noisy():
    return Noisy(nnx.Rngs(params=0, dropout=1))


def test_state_ends_as_after_a_loop():
    in_loop, cell = noisy(), noisy()
    layer = nnx.RNN(cell)
    for _ in range(2):
        _, wanted = loop(in_loop, X, jnp.zeros((2, 3)))
        np.testing.assert_allclose(layer(X), wanted, rtol=1e-4, atol=1e-5)
    assert int(cell.steps.value) == 10
    assert int(cell.dropout.rngs.count.value) == int(in_loop.dropout.rngs.count.value) == 10


def test_what_is_only_read_is_not_written():
    layer = nnx.RNN(noisy())
    kernel, key = layer.cell.linear.kernel.value, layer.cell.dropout.rngs.key.value
    layer(X)
    assert layer.cell.linear.kernel.value is kernel
    assert layer.cell.dropout.rngs.key.value is key
    cell = cell_of(nnx.GRUCell)
    captured = nnx.RNN(cell, rngs=False)  # reads only: fit to be captured
    assert jax.jit(lambda x: captured(x))(X).shape == (2, 5, 4)


def test_streams_can_be_broadcast_over_the_steps():
    layer = nnx.RNN(noisy(), broadcast_rngs="dropout")
    y = layer(jnp.ones((2, 5, 3)))
    dropped = y == 0
    assert dropped.any() and (dropped == dropped[:, :1]).all()
    assert int(layer.cell.dropout.rngs.count.value) == 1
    assert int(layer.cell.steps.value) == 5
    again = layer(jnp.ones((2, 5, 3)))
    assert ((again == 0) != dropped).any()
    assert int(layer.cell.dropout.rngs.count.value) == 2


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


def test_what_all_steps_share_they_only_read():
    axes = nnx.StateAxes({nnx.Param: None, ...: nnx.Carry()})
    layer, plain = nnx.RNN(noisy(), state_axes=axes), nnx.RNN(noisy())
    np.testing.assert_allclose(layer(X), plain(X), rtol=1e-5)
    layer = nnx.RNN(noisy(), state_axes={nnx.RngState: nnx.Carry, ...: None})
    with pytest.raises(ValueError, match=r"writes '.*steps', which is broadcast"):
        layer(X)
    assert int(layer.cell.steps.value) == 0


# Streams of RNN ---------------------------------------------------------------------------------


def test_an_rnn_keeps_a_stream_for_the_carry():
    own = nnx.RNN(cell_of(nnx.LSTMCell))
    assert own.rngs.tag == "carry" and int(own.rngs.count.value) == 0
    np.testing.assert_array_equal(
        jax.random.key_data(own.rngs.key.value), jax.random.key_data(jax.random.key(0))
    )
    own(X)
    assert int(own.rngs.count.value) == 2
    own(X, initial_carry=some_carry(nnx.LSTMCell, 2))
    assert int(own.rngs.count.value) == 2

    rngs = nnx.Rngs(0, carry=1)
    forked = nnx.RNN(cell_of(nnx.GRUCell), rngs=rngs)
    assert int(rngs.carry.count.value) == 1
    forked(X, rngs=rngs)
    assert int(rngs.carry.count.value) == 2 and int(forked.rngs.count.value) == 0
    assert nnx.RNN(cell_of(nnx.GRUCell), rngs=False).rngs is None
    assert nnx.RNN(cell_of(nnx.GRUCell), rngs=rngs.carry).rngs.tag == "carry"
    with pytest.raises(ValueError, match="RNN: Expected rngs to be an Rngs, .* a bool; got int"):
        nnx.RNN(cell_of(nnx.GRUCell), rngs=3)


def test_a_random_carry_uses_the_stream():
    layer = nnx.RNN(cell_of(nnx.GRUCell, carry_init=quick))
    cell, start = cell_of(nnx.GRUCell), quick(nnx.Rngs(0)(), (2, 4))
    np.testing.assert_allclose(layer(X), loop(cell, X, start)[1], rtol=1e-4, atol=1e-5)


# Bidirectional ----------------------------------------------------------------------------------


def both(**options):
    return nnx.Bidirectional(nnx.RNN(Digits()), nnx.RNN(Digits()), **options)


def test_bidirectional_runs_both_ways_and_joins_the_outputs():
    y = both()(DIGITS)
    assert y.shape == (2, 4, 2)
    assert numbers(y[..., :1]) == [[1, 12, 123, 1234], [5, 56, 567, 5678]]
    assert numbers(y[..., 1:]) == [[4321, 432, 43, 4], [8765, 876, 87, 8]]
    carries, _ = both(return_carry=True)(DIGITS)
    assert numbers(carries) == ([1234, 5678], [4321, 8765])


def test_bidirectional_options():
    assert numbers(both(merge_fn=jnp.add)(DIGITS))[0] == [4322, 444, 166, 1238]
    time_first = both(time_major=True)(DIGITS.swapaxes(0, 1))
    np.testing.assert_array_equal(time_first.swapaxes(0, 1), both()(DIGITS))
    lengths = jnp.asarray([2, 3])
    (forward, backward), y = both()(DIGITS, seq_lengths=lengths, return_carry=True)
    assert (numbers(forward), numbers(backward)) == ([12, 567], [21, 765])
    assert numbers(y[0, :2, 1:]) == [21, 2]
    start = (jnp.ones((2, 1)), 2 * jnp.ones((2, 1)))
    y = both()(DIGITS, initial_carry=start)
    assert (numbers(y[0, :1, :1]), numbers(y[0, -1:, 1:])) == ([11], [24])
    # whatever the options of the two, and of a call that wants an RNN
    contrary = nnx.Bidirectional(
        nnx.RNN(Digits(), reverse=True), nnx.RNN(Digits(), time_major=True)
    )
    np.testing.assert_array_equal(contrary(DIGITS, reverse=True, keep_order=False), both()(DIGITS))


def test_bidirectional_takes_an_rnn_of_rnns():
    inner = both()
    assert nnx.Bidirectional(inner, nnx.RNN(Digits()))(DIGITS).shape == (2, 4, 3)


def test_streams_of_bidirectional():
    rnn = lambda: nnx.RNN(cell_of(nnx.GRUCell))
    layer = nnx.Bidirectional(rnn(), rnn())
    layer(X)
    counts = [int(m.rngs.count.value) for m in (layer, layer.forward_rnn, layer.backward_rnn)]
    assert counts == [2, 0, 0]
    layer = nnx.Bidirectional(rnn(), rnn(), rngs=False)
    layer(X)
    assert layer.rngs is None
    assert int(layer.forward_rnn.rngs.count.value) == int(layer.backward_rnn.rngs.count.value) == 1
    rngs = nnx.Rngs(carry=1)
    layer(X, rngs=rngs)
    assert int(rngs.carry.count.value) == 2


def test_one_object_for_both_directions_is_told(caplog):
    rnn = nnx.RNN(Digits())
    with caplog.at_level(logging.WARNING):
        layer = nnx.Bidirectional(rnn, rnn)
    assert "one object for both directions" in caplog.text
    assert layer(DIGITS).shape == (2, 4, 2)


# Bad input --------------------------------------------------------------------------------------


def test_messages_of_rnn():
    layer = nnx.RNN(Digits())
    with pytest.raises(ValueError, match=r"RNN runs Digits along a time axis.* has shape \(3,\)"):
        layer(jnp.ones(3))
    with pytest.raises(ValueError, match=r"seq_lengths of shape \(3,\) for inputs with .*\(2,\)"):
        layer(DIGITS, seq_lengths=jnp.asarray([1, 2, 3]))
    with pytest.raises(TypeError, match="integers as seq_lengths, got float32"):
        layer(DIGITS, seq_lengths=jnp.asarray([1.0, 2.0]))
    for lengths in ([0, 5], [-1, 2]):
        with pytest.raises(ValueError, match=r"seq_lengths from .* for inputs of 4 positions"):
            layer(DIGITS, seq_lengths=jnp.asarray(lengths))
    with pytest.raises(TypeError, match="takes Carry, None or the number of an axis; got 'a'"):
        nnx.RNN(noisy(), state_axes={...: "a"})


def test_a_carry_of_another_structure_is_told():
    class Growing(Digits):
        def __call__(self, carry, inputs):
            return (carry, inputs), inputs

    with pytest.raises(TypeError, match="must return a carry of the structure it got: it got.*and"):
        nnx.RNN(Growing())(DIGITS)


def test_a_cell_that_changes_its_structure_is_told():
    class Changing(Digits):
        def __call__(self, carry, inputs):
            self.fresh = nnx.Variable(inputs)
            return carry, inputs

    layer = nnx.RNN(Changing())
    with pytest.raises(TypeError, match="the body changes attributes .'fresh'. of 'cell'"):
        layer(DIGITS)
    assert not hasattr(layer.cell, "fresh")
