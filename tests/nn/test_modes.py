"""Modes go through a whole model to every layer that has one, and can be seen in its text form."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn.catalogue import LAYERS

MODES = ("deterministic", "use_running_average")


def model_of(name):
    """A layer as a model has it: in a list, and under a name."""
    return nnx.Dict(blocks=nnx.List([LAYERS[name].make(nnx.Rngs(0))]))


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


def variables(model):
    is_variable = lambda x: isinstance(x, nnx.Variable)
    return jax.tree.leaves(nnx.state(model), is_leaf=is_variable)


@pytest.mark.parametrize("name", LAYERS)
def test_modes_reach_every_layer_and_are_seen_in_the_text(name):
    model = model_of(name)
    paths = modes(model)
    for change, value in ((model.eval, True), (model.train, False)):
        change()
        assert modes(model) == dict.fromkeys(paths, value)
        assert modes_in_text(model) == [str(value)] * len(paths)

    seen = nnx.view(model, **dict.fromkeys({path[-1] for path in paths}, True))
    assert modes(seen) == dict.fromkeys(paths, True)
    assert modes_in_text(seen) == ["True"] * len(paths)
    assert modes(model) == dict.fromkeys(paths, False)
    assert all(a is b for a, b in zip(variables(model), variables(seen), strict=True))


# A decoding step and a record are written in every mode; SpectralNorm divides its weights again.
@pytest.mark.parametrize("name", ["Sequential", "BatchNorm", "MultiHeadAttention", "Dropout"])
def test_a_model_that_does_not_train_is_a_function(name):
    row = LAYERS[name]
    layer, run, x = row.make(nnx.Rngs(0)), row.run, row.x
    trained = run(layer, x)
    left = jax.tree.leaves(nnx.state(layer))
    layer.eval()
    y = run(layer, x)
    np.testing.assert_array_equal(run(layer, x), y)
    assert all(a is b for a, b in zip(jax.tree.leaves(nnx.state(layer)), left, strict=True))
    assert not np.array_equal(y, trained)
    layer.train()
    run(layer, x)
    assert any(a is not b for a, b in zip(jax.tree.leaves(nnx.state(layer)), left, strict=True))


def test_decoding_is_a_mode():
    layer = LAYERS["MultiHeadAttention"].make(nnx.Rngs(0))
    seen = nnx.view(layer, decode=True, batch_size=2, max_length=3)
    assert "decode=True" in repr(seen) and "decode=False" in repr(layer)
    assert seen.cached_key.shape == (2, 3, 1, 4) and layer.cached_key is None
