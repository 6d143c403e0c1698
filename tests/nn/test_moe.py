"""Mixtures of experts: routing, capacity, losses, and experts on several devices."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from tests.nn.quick import QUICK, normal, quick

X = jnp.asarray(normal(8, 6, 4))


def make(experts=4, **options):
    return nnx.MoE(
        4, 3, experts, router_init=quick, **QUICK, rngs=nnx.Rngs(0), **{"top_k": 2, **options}
    )


@nnx.jit
def run(layer, x):
    return layer(x)


def by_hand(layer, x, capacity):
    """Token by token, as the papers say it."""
    get = lambda name: np.asarray(getattr(layer, name).value, np.float64)
    out = np.zeros(x.shape)
    logits = np.asarray(x, np.float64) @ get("router")
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    choices = np.argsort(-probabilities, -1)[..., : layer.top_k]
    dropped = 0
    for group in range(x.shape[0]):
        filled = np.zeros(layer.num_experts, int)
        for k in range(layer.top_k):
            for token in range(x.shape[1]):
                expert = choices[group, token, k]
                filled[expert] += 1
                if filled[expert] > capacity:
                    dropped += 1
                    continue
                p = probabilities[group, token]
                gate = p[expert] / (p[choices[group, token]].sum() if layer.normalize else 1)
                hidden = np.asarray(x[group, token]) @ get("up")[expert] + get("up_bias")[expert]
                hidden = np.asarray(layer.activation(jnp.asarray(hidden, jnp.float32)))
                if layer.gate is not None:
                    side = np.asarray(x[group, token]) @ get("gate")[expert]
                    hidden = hidden * (side + get("gate_bias")[expert])
                y = hidden @ get("down")[expert] + get("down_bias")[expert]
                out[group, token] += gate * y
    load = np.bincount(choices.ravel(), minlength=layer.num_experts) / choices.size
    balance = layer.num_experts * (load * probabilities.mean((0, 1))).sum()
    z = np.mean(np.log(np.exp(logits).sum(-1)) ** 2)
    return out, load, dropped / choices.size, balance, z


@pytest.mark.parametrize(
    ("options", "capacity"),
    [
        ({"capacity_factor": 1.0}, 3),  # 6 tokens, 2 choices, 4 experts
        ({"capacity_factor": 2.0, "gated": True}, 6),
        ({"top_k": 1, "capacity_factor": 0.5}, 1),
    ],
)
def test_values_losses_and_load(options, capacity):
    layer = make(**options)
    out, load, dropped, balance, z = by_hand(layer, X, capacity)
    np.testing.assert_allclose(run(layer, X), out, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(layer.load[...], load, atol=1e-6)
    np.testing.assert_allclose(layer.dropped[...], dropped, atol=1e-6)
    np.testing.assert_allclose(layer.balance_loss[...], balance, rtol=1e-5)
    np.testing.assert_allclose(layer.z_loss[...], z, rtol=1e-5)
    expected = 0.5 * balance + 0.25 * z
    np.testing.assert_allclose(nnx.router_loss(layer, balance=0.5, z=0.25), expected, rtol=1e-5)


@pytest.mark.quick
def test_shapes_dtypes_and_a_capacity_of_the_call():
    layer = make(use_bias=False, dtype=jnp.bfloat16, capacity_factor=0.25)
    assert (layer.router.shape, layer.up.shape, layer.down.shape) == ((4, 4), (4, 4, 3), (4, 3, 4))
    assert layer.up_bias is layer.gate is layer.gate_bias is layer.down_bias is None
    y = run(layer, X)
    assert y.shape == X.shape and y.dtype == jnp.bfloat16 and layer.dropped[...] > 0
    assert layer.load[...].dtype == jnp.float32 and layer.z_loss[...].dtype == jnp.float32
    assert nnx.eval_shape(run, layer, X[0]).shape == (6, 4)
    nnx.jit(lambda m, x: m(x, capacity_factor=2.0))(layer, X)
    assert layer.dropped[...] == 0
    assert nnx.eval_shape(run, layer, X.reshape(2, 4, 6, 4)).shape == (2, 4, 6, 4)


@pytest.mark.quick
def test_statistics_keep_their_dtype_whatever_the_input_is():
    layer = make()
    with jax.enable_x64(True):
        layer(X.astype(jnp.float64))
        stats = jax.tree.leaves(nnx.state(layer, nnx.RouterStat))
        assert len(stats) == 4 and all(x.dtype == jnp.float32 for x in stats)
    expected = make()
    expected(X)
    for name in ("balance_loss", "z_loss", "load", "dropped"):
        np.testing.assert_allclose(
            getattr(layer, name)[...], getattr(expected, name)[...], rtol=1e-6
        )


def test_refusals():
    with pytest.raises(
        ValueError, match=r"MoE: top_k must be between 1 and num_experts \(4\), got 5"
    ):
        make(top_k=5)
    with pytest.raises(ValueError, match="MoE: capacity_factor must be positive, got 0"):
        make(capacity_factor=0)
    with pytest.raises(TypeError, match=r"MoE: `num_experts` must be a whole number.*got 2\.5"):
        make(2.5)
    layer = make()
    with pytest.raises(ValueError, match=r"capacity_factor must be positive, got -1"):
        layer(X, capacity_factor=-1)
    with pytest.raises(
        TypeError, match=r"MoE expects an input \(\*batch, tokens, 4\), got one of shape \(6, 3\)"
    ):
        layer(X[0, :, :3])
    with pytest.raises(ValueError, match=r"router_loss: there is no MoE in Linear"):
        nnx.router_loss(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,))
    with (
        jax.set_mesh(mesh),
        pytest.raises(
            ValueError,
            match="MoE: 6 experts cannot be spread evenly over the 4 devices along .*'expert'",
        ),
    ):
        run(make(6), X)


def train(layer, optimizer, x):
    @nnx.jit
    def step(layer, optimizer, x):
        loss_of = lambda m: jnp.mean((m(x) - jnp.sin(x)) ** 2) + nnx.router_loss(m)
        loss, grads = nnx.value_and_grad(loss_of)(layer)
        optimizer.update(layer, grads)
        return loss

    return [float(step(layer, optimizer, x)) for _ in range(3)], step


def optimizer_of(layer):
    return nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)


@pytest.fixture(scope="module")
def one_device():
    layer = make(gated=True)
    return train(layer, optimizer_of(layer), X)[0]


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=lambda kind: kind.name)
def test_experts_on_several_devices(kind, one_device):
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(kind,) * 2)
    layer = make(gated=True)
    optimizer = optimizer_of(layer)
    parts = [f"{name}{end}" for name in ("up", "gate", "down") for end in ("", "_bias")]
    with jax.set_mesh(mesh):
        if kind is AxisType.Auto:
            plan = {f"**.{name}": P("expert") for name in parts}
            nnx.shard((layer, optimizer), mesh, {**plan, "**": None})
        else:
            for name in parts:
                kernel = getattr(layer, name)
                kernel.value = jax.device_put(kernel.value, P("expert"))
            optimizer = optimizer_of(layer)
        x = jax.device_put(X, P(("data", "expert")))
        losses, step = train(layer, optimizer, x)
        program = run.lower(layer, x).compile().as_text()
    np.testing.assert_allclose(losses, one_device, rtol=1e-4)
    moment = optimizer.opt_state[0].mu["up"]
    for variable in (layer.up, moment):
        assert variable.value.sharding.is_equivalent_to(NamedSharding(mesh, P("expert")), 3)
    assert step._cache_size() == 1 or kind is AxisType.Explicit
    kinds = re.findall(r" (all-to-all|all-gather|all-reduce|collective-permute)\(", program)
    # Tokens go and come back; the sums are those of the losses and the load.
    assert sorted(kinds) == ["all-reduce", "all-to-all", "all-to-all"]


def test_stacked_experts_in_a_scan():
    layers = [make(), make()]
    stacked = nnx.stack_layers(layers)
    forward = nnx.scan(lambda x, m: x + m(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    y, expected = nnx.jit(forward)(X, stacked), X
    for layer in layers:
        expected = expected + run(layer, expected)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    assert stacked.load.shape == (2, 4)
    np.testing.assert_allclose(nnx.router_loss(stacked), nnx.router_loss(layers), rtol=1e-5)
