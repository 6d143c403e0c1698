"""Parity of recurrent cells and networks with the reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn.quick import normal, quick
from tests.parity.layers import (
    assert_equal_results,
    assert_equal_state,
    ref,
)

QUICK = {"kernel_init": quick, "recurrent_kernel_init": quick, "bias_init": quick}
X = jnp.asarray(normal(2, 5, 3))
CELLS = ["SimpleCell", "LSTMCell", "OptimizedLSTMCell", "GRUCell"]

pytestmark = [  # warnings of the reference
    pytest.mark.filterwarnings("ignore:keep_rngs argument is deprecated"),
    pytest.mark.filterwarnings("ignore:carry_init is provided in __init__"),
]


def cell_of(lib, name, *, fast=True, **kwargs):
    options = {**(QUICK if fast else {}), **kwargs}
    return getattr(lib, name)(3, 4, **options, rngs=lib.Rngs(0, params=1))


def carry_of(name, *batch, dtype=jnp.float32):
    arrays = tuple(jnp.asarray(normal(*batch, 4, seed=i), dtype) for i in (5, 6))
    return arrays if "LSTM" in name else arrays[0]


@pytest.mark.parametrize("options", [{}, {"param_dtype": jnp.complex64}], ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_starts_as_the_reference_in_every_precision(name, wide, options):
    with jax.enable_x64(wide):
        options = {"kernel_init": quick, **options}
        ours, theirs = (getattr(lib, name)(3, 4, **options, rngs=lib.Rngs(0)) for lib in (nnx, ref))
        assert_equal_state(ours, theirs)


def noisy(lib):
    class Noisy(lib.RNNCellBase):
        num_feature_axes = 1

        def __init__(self):
            rngs = lib.Rngs(params=0, dropout=1)
            self.linear = lib.Linear(3, 3, kernel_init=quick, rngs=rngs)
            self.dropout = lib.Dropout(0.5, rngs=rngs)
            self.steps = lib.BatchStat(jnp.array(0))

        def initialize_carry(self, input_shape, rngs=None, carry_init=None):
            return jnp.zeros(input_shape)

        def __call__(self, carry, inputs):
            self.steps.set_value(self.steps.get_value() + 1)
            carry = self.dropout(jnp.tanh(self.linear(inputs)) + carry)
            return carry, carry

    return Noisy()


@pytest.mark.parametrize(
    "options",
    [
        lambda lib: {},
        lambda lib: {"broadcast_rngs": "dropout"},
        lambda lib: {"broadcast_rngs": True},
        lambda lib: {"state_axes": lib.StateAxes({lib.Param: None, ...: lib.Carry})},
    ],
)
def test_state_in_a_cell_ends_as_in_the_reference(options):
    ours, theirs = (lib.RNN(noisy(lib), **options(lib)) for lib in (nnx, ref))
    for _ in range(2):
        assert_equal_results(ours(X), theirs(X), 5)
        assert_equal_state(ours, theirs)


@pytest.mark.parametrize("both", [False, True])
def test_keys_given_to_a_call_are_drawn_as_in_the_reference(both):
    def run(lib):
        cells = [cell_of(lib, "LSTMCell", carry_init=jax.random.normal) for _ in range(2)]
        layer = lib.Bidirectional(*map(lib.RNN, cells)) if both else lib.RNN(cells[0])
        given = carry_of("LSTMCell", 2)
        rngs = lib.Rngs(3, carry=4)
        results = [layer(X, rngs=source) for source in (rngs, rngs.carry, lib.Rngs(5))]
        layer(X, rngs=rngs, initial_carry=(given, given) if both else given)
        return results, int(rngs.carry.count.get_value()), int(layer.rngs.count.get_value())

    ours, theirs = run(nnx), run(ref)
    assert ours[1:] == theirs[1:]
    assert_equal_results(ours[0], theirs[0], 5)


def test_a_missing_stream_raises_what_the_reference_raises():
    for bad in (
        lambda lib, rngs: cell_of(lib, "GRUCell").initialize_carry((2, 3), rngs),
        lambda lib, rngs: lib.GRUCell(3, 4, keep_rngs=True, kernel_init=quick, rngs=rngs),
        lambda lib, rngs: lib.RNN(cell_of(lib, "GRUCell"), rngs=rngs),
        lambda lib, rngs: lib.RNN(cell_of(lib, "GRUCell"))(X, rngs=rngs),
        lambda lib, rngs: lib.MultiHeadAttention(2, 4, dropout_rate=0.5, rngs=rngs),
        lambda lib, rngs: lib.Dropout(0.5, rngs=rngs),
    ):
        kinds = []
        for lib in (nnx, ref):
            with pytest.raises((AttributeError, KeyError), match="No RngStream named") as caught:
                bad(lib, lib.Rngs(params=0))
            kinds.append(caught.type)
        assert kinds[0] is kinds[1]


@pytest.mark.parametrize("name", ["SimpleCell", "GRUCell", "LSTMCell", "OptimizedLSTMCell"])
@pytest.mark.parametrize("sizes", [(4, 3), (2, 5), (4, 5)])
def test_parameters_of_another_size_can_be_loaded(name, sizes):
    results = []
    for lib in (nnx, ref):
        cell, other = (getattr(lib, name)(*n, rngs=lib.Rngs(0)) for n in ((2, 3), sizes))
        lib.update(cell, lib.state(other))
        x = jnp.linspace(-1.0, 1.0, 2 * sizes[0]).reshape(2, -1)
        results.append(cell(other.initialize_carry(x.shape, lib.Rngs(0)), x)[1])
    np.testing.assert_allclose(*results, rtol=1e-5)
