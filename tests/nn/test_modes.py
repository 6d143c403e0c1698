"""Modes go through a whole model to every layer that has one, and can be seen in its text form."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn.catalogue import LAYERS

MODES = ("deterministic", "use_running_average")


class Model(nnx.Module):
    """A layer as a model holds it: in a list, and under a name."""

    def __init__(self, layer):
        self.blocks = nnx.List([layer])


def modes(model):
    """All modes of a model by path."""
    return {
        (*path, mode): getattr(node, mode)
        for path, node in nnx.iter_graph(model)
        for mode in MODES
        if isinstance(node, nnx.Module) and hasattr(node, mode)
    }


def modes_in_text(model):
    return re.findall(rf"\b(?:{'|'.join(MODES)})=(\w+)", repr(model))


HAVE_MODES = [
    "Sequential",
    "BatchNorm",
    "SpectralNorm",
    "MultiHeadAttention",
    "MultiHeadAttention, decoding",
    "MultiHeadAttention, recording weights",
    "Dropout",
]


def test_layers_with_modes():
    layers = {name: layer.make(nnx.Rngs(0)) for name, layer in LAYERS.items()}
    assert {name for name, layer in layers.items() if modes(Model(layer))} == {*HAVE_MODES}


@pytest.mark.parametrize("name", HAVE_MODES)
def test_modes_reach_every_layer_and_are_seen_in_the_text(name):
    model = Model(LAYERS[name].make(nnx.Rngs(0)))
    paths = modes(model)
    for change, value in ((model.eval, True), (model.train, False)):
        change()
        assert modes(model) == dict.fromkeys(paths, value)
        assert modes_in_text(model) == [str(value)] * len(paths)

    seen = nnx.view(model, **dict.fromkeys({path[-1] for path in paths}, True))
    assert modes(seen) == dict.fromkeys(paths, True)
    assert modes_in_text(seen) == ["True"] * len(paths)
    assert modes(model) == dict.fromkeys(paths, False)
    for variable, shared in zip(
        jax.tree.leaves(nnx.state(model), is_leaf=is_variable),
        jax.tree.leaves(nnx.state(seen), is_leaf=is_variable),
        strict=True,
    ):
        assert variable is shared


def is_variable(x):
    return isinstance(x, nnx.Variable)


# A decoding step and a record are written in every mode; SpectralNorm divides its weights again.
@pytest.mark.parametrize("name", ["Sequential", "BatchNorm", "MultiHeadAttention", "Dropout"])
def test_a_model_that_does_not_train_is_a_function(name):
    row = LAYERS[name]
    layer, run, x = row.make(nnx.Rngs(0)), row.run, row.x
    trained = run(layer, x)
    left = values(layer)
    layer.eval()
    y = run(layer, x)
    np.testing.assert_array_equal(run(layer, x), y)
    for value, before in zip(values(layer), left, strict=True):
        np.testing.assert_array_equal(value, before)
    assert not np.array_equal(y, trained)
    layer.train()
    run(layer, x)
    assert any(not np.array_equal(a, b) for a, b in zip(values(layer), left, strict=True))


def values(layer):
    """All numbers of a layer."""
    return [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(nnx.state(layer))
    ]


def test_decoding_is_a_mode():
    layer = LAYERS["MultiHeadAttention"].make(nnx.Rngs(0))
    seen = nnx.view(layer, decode=True, batch_size=2, max_length=3)
    assert "decode=True" in repr(seen) and "decode=False" in repr(layer)
    assert seen.cached_key.shape == (2, 3, 1, 2) and layer.cached_key is None
