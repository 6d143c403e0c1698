"""TrainState: an immutable pytree of model, optimizer state and step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx


class Dense(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones((2, 3)))
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.calls.value += 1
        return x @ self.kernel.value


class WithRest(nnx.TrainState):
    rest: nnx.State


def make(**kwargs):
    graphdef, params, rest = nnx.split(Dense(), nnx.Param, ...)
    return WithRest.create(graphdef, params=params, tx=optax.adam(0.1), rest=rest, **kwargs)


def loss(params, state, x):
    y, _ = state.apply(params, "rest")(x)
    return y.sum()


def test_apply_calls_the_model_by_states_or_field_names():
    state = make()
    x = jnp.ones((1, 2))
    y, (graphdef, new) = state.apply("params", "rest")(x)
    np.testing.assert_array_equal(y, jnp.full((1, 3), 2.0))
    assert graphdef == state.graphdef and new["calls"].value == 1
    np.testing.assert_array_equal(state.apply(state.params, state.rest)(x)[0], y)
    assert state.rest["calls"].value == 0


def test_a_train_state_is_a_pytree_for_plain_jax():
    state = make(step=5)
    paths = [jax.tree_util.keystr(k) for k, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert ".params['kernel'].value" in paths and ".rest['calls'].value" in paths
    assert ".step" in paths and state.step == 5

    @jax.jit
    def step(state, x):
        return state.apply_gradients(jax.grad(loss)(state.params, state, x))

    new = step(step(state, jnp.ones((1, 2))), jnp.ones((1, 2)))
    assert isinstance(new, WithRest) and new.step == 7
    assert step._cache_size() == 1


def assign(state):
    state.step = 3


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (assign, AttributeError, "step"),
        (lambda state: state.replace(nope=3), TypeError, "nope"),
        (lambda state: make(nope=3), TypeError, "nope"),
        (
            lambda state: state.apply("nope"),
            AttributeError,
            "WithRest has no field 'nope'; its fields: graphdef",
        ),
        (
            lambda state: state.apply_gradients(nnx.State({"bias": jnp.ones(3)})),
            ValueError,
            "missing from the gradients: kernel; not among the parameters: bias",
        ),
        (
            lambda state: state.apply_gradients(nnx.as_pure(state.params)),
            ValueError,
            "their containers or Variables differ",
        ),
    ],
)
def test_what_a_train_state_refuses(call, error, message):
    state = make()
    with pytest.raises(error, match=message):
        call(state)
    assert state.replace(step=3).step == 3 and state.step == 0
