"""TrainState: an immutable pytree of model, optimizer state and step."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx

X = jnp.ones((1, 2))


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


def test_apply_calls_the_model_by_states_or_field_names():
    state = make()
    y, (graphdef, new) = state.apply("params", "rest")(X)
    np.testing.assert_array_equal(y, jnp.full((1, 3), 2.0))
    assert graphdef == state.graphdef and new["calls"].value == 1
    np.testing.assert_array_equal(state.apply(state.params, state.rest)(X)[0], y)
    assert state.rest["calls"].value == 0


BIAS = nnx.State({"bias": jnp.ones(3)})
MISSING = "missing from the gradients: kernel; not among the parameters: bias"
NO_FIELD = "WithRest has no field 'nope'; its fields: graphdef"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda state: setattr(state, "step", 3), AttributeError, "step"),
        (lambda state: state.replace(nope=3), TypeError, "nope"),
        (lambda state: make(nope=3), TypeError, "nope"),
        (lambda state: state.apply("nope"), AttributeError, NO_FIELD),
        (lambda state: state.apply_gradients(BIAS), ValueError, MISSING),
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
