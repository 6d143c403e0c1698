"""Activations and initializers: JAX's own functions under our names, also in pickles."""

from __future__ import annotations

import copy
import functools
import pickle

import cloudpickle
import jax
import pytest

import nnxlite as nnx
from nnxlite.nn import activations

ACTIVATIONS = sorted(name for name in vars(activations) if name[0].islower() and name != "tanh")
INITIALIZERS = sorted(
    name
    for name, value in vars(nnx.initializers).items()
    if callable(value) and name[0].islower() and name not in ("zeros_init", "ones_init")
)


def test_activations_and_initializers_are_jaxs_own():
    for name in ACTIVATIONS:
        assert getattr(nnx, name) is getattr(jax.nn, name)
    for name in INITIALIZERS:
        assert getattr(nnx.initializers, name) is getattr(jax.nn.initializers, name)


@pytest.mark.parametrize("library", [pickle, cloudpickle], ids=lambda m: m.__name__)
def test_activations_pickle_by_name(library):
    for name in (*ACTIVATIONS, "tanh"):
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
