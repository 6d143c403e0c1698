"""An optimizer goes on after the layers of its model were stacked, and unstacked again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx
from tests.nn.quick import QUICK, normal

X = jnp.asarray(normal(8, 4))


class Net(nnx.Module):
    def __init__(self, count=3):
        self.blocks = nnx.List(nnx.Linear(4, 4, **QUICK, rngs=nnx.Rngs(i)) for i in range(count))
        self.head = nnx.Linear(4, 1, **QUICK, rngs=nnx.Rngs(9))

    def __call__(self, x):
        if isinstance(self.blocks, nnx.List):
            for block in self.blocks:
                x = jnp.tanh(block(x))
        else:
            layer = lambda x, block: jnp.tanh(block(x))
            x = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        return self.head(x)


@nnx.jit
def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def make(tx=None, **options):
    model = Net(**options)
    tx = tx or optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def stack(model, optimizer):
    model.blocks = nnx.stack_layers(model.blocks)
    nnx.restack(optimizer, model)


def test_losses_are_those_of_the_unrolled_model():
    model, optimizer = make()
    expected = [float(step(model, optimizer, X)) for _ in range(6)]
    mesh = nnx.make_mesh(data=2, model=4)
    model, optimizer = make()
    nnx.shard((model, optimizer), mesh, {"**.blocks.*.kernel": (None, "model"), "**": None})
    losses = [float(step(model, optimizer, X)) for _ in range(2)]
    stack(model, optimizer)
    moment = optimizer.opt_state[1][0].mu["blocks"]["kernel"]
    for variable in (model.blocks.kernel, moment):
        assert variable.shape == (3, 4, 4) and type(variable) is not nnx.Variable
        assert tuple(variable.value.sharding.spec) == (None, None, "model")
    losses += [float(step(model, optimizer, X)) for _ in range(2)]
    assert int(optimizer.step.value) == int(optimizer.opt_state[1][0].count.value) == 4
    model.blocks = nnx.unstack_layers(model.blocks)
    nnx.restack(optimizer, model)
    assert tuple(optimizer.opt_state[1][0].nu["blocks"][2]["kernel"].value.sharding.spec) == (
        None,
        "model",
    )
    losses += [float(step(model, optimizer, X)) for _ in range(2)]
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


def test_frozen_layers_and_a_stack_of_one():
    model, optimizer = make(count=1)
    stack(model, optimizer)
    assert optimizer.opt_state[1][0].mu["blocks"]["kernel"].shape == (1, 4, 4)
    model = Net()
    nnx.freeze(model.blocks)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    stack(model, optimizer)
    assert optimizer.without_state == {("blocks", "kernel"), ("blocks", "bias")}
    assert sorted(optimizer.opt_state[0].mu) == ["head"]


def test_refusals():
    model, optimizer = make()
    before = optimizer.opt_state
    longer, shorter = Net(4), Net(2)
    for other in (longer, shorter):
        other.blocks = nnx.stack_layers(other.blocks)
    with pytest.raises(
        ValueError, match=r"mu\.blocks\.bias' is float32\[3, 4\] .* float32\[4, 4\]"
    ):
        nnx.restack(optimizer, longer)
    with pytest.raises(
        ValueError, match=r"mu\.blocks\.bias' is float32\[3, 4\] .* float32\[2, 4\]"
    ):
        nnx.restack(optimizer, shorter)
    with pytest.raises(ValueError, match=r"state at '1\.0\.mu\.head\.bias', for a parameter that"):
        nnx.restack(optimizer, nnx.Dict(blocks=model.blocks))
    with pytest.raises(
        ValueError, match=r"has no state for '1\.0\.mu\.tail\.bias', which the model"
    ):
        nnx.restack(optimizer, nnx.Dict(tail=model.head))
    assert optimizer.opt_state is before


def test_a_transformation_that_treats_a_stack_differently():
    whole = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: jnp.zeros(p.ndim), params), optax.sgd(1.0).update
    )
    model, optimizer = make(whole)
    model.blocks = nnx.stack_layers(model.blocks)
    with pytest.raises(ValueError) as info:
        nnx.restack(optimizer, model)
    assert "'blocks.bias' is float32[3, 1] from what the optimizer has, and float32[2] for" in str(
        info.value
    )
