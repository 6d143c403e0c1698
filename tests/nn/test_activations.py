"""Activations: JAX's own, and PReLU."""

from __future__ import annotations

import copy
import functools
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from nnxlite.nn import activations

NAMES = sorted(name for name in vars(activations) if not name.startswith("_"))


@pytest.mark.parametrize("name", sorted({*NAMES} - {"PReLU", "tanh"}))
def test_activations_are_jaxs_own(name):
    assert getattr(nnx, name) is getattr(jax.nn, name)


@pytest.mark.parametrize(
    ("x", "options", "expected"),
    [
        (jnp.float32, {}, "float32"),
        (jnp.bfloat16, {}, "bfloat16"),
        (jnp.bfloat16, {"dtype": jnp.float32}, "float32"),
        (jnp.float32, {"param_dtype": jnp.bfloat16}, "float32"),
    ],
)
def test_prelu_computes_in_the_wanted_dtype(x, options, expected):
    layer = nnx.PReLU(**options)
    assert layer.negative_slope.dtype == options.get("param_dtype", jnp.float32)
    assert layer(jnp.ones(2, x)).dtype == expected


def test_prelu_keeps_metadata():
    assert nnx.PReLU(negative_slope_metadata={"tag": 1}).negative_slope.get_metadata("tag") == 1


@pytest.mark.parametrize("name", sorted({*NAMES} - {"PReLU"}))
@pytest.mark.parametrize("library", [pickle, cloudpickle], ids=lambda m: m.__name__)
def test_activations_pickle_by_name(name, library):
    function = getattr(nnx, name)
    assert library.loads(library.dumps(function)) is function
    assert copy.deepcopy(function) is function


def test_a_model_with_activations_pickles():
    model = nnx.Sequential(nnx.relu, nnx.PReLU(), jax.nn.silu)
    back = pickle.loads(pickle.dumps(model))
    assert back.layers[0] is nnx.relu and back.layers[2] is nnx.silu
    assert nnx.graphdef(back) == nnx.graphdef(model)


def test_compiled_functions_of_a_user_keep_their_way():
    shift = 3.0

    @jax.jit
    def compiled(x):
        return x + shift

    @jax.custom_jvp
    def custom(x):
        return x + shift

    for function in (compiled, custom, jax.jit(functools.partial(lambda x: x))):
        with pytest.raises((pickle.PicklingError, AttributeError)):
            pickle.dumps(function)
    assert cloudpickle.loads(cloudpickle.dumps(compiled))(1.0) == 4.0
