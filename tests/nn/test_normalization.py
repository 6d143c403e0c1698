"""Normalisation of activations: what the reference lacks or gives otherwise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn.quick import normal

X = normal(4, 5, 6) * 3 + 1


def normalized(x, axes, epsilon, mask=True):
    """By moments along some axes, in float64."""
    x, options = np.asarray(x, np.float64), {"where": mask, "keepdims": True}
    mean, var = x.mean(axes, **options), x.var(axes, **options)
    return (x - mean) / np.sqrt(var + epsilon)


NORMS = {  # class: arguments
    nnx.BatchNorm: (6,),
    nnx.LayerNorm: (6,),
    nnx.RMSNorm: (6,),
    nnx.GroupNorm: (6, 3),
    nnx.InstanceNorm: (6,),
}


def test_the_slow_variance_keeps_its_digits_where_the_mean_is_large():
    x = jnp.asarray(normal(8, 64) + 1e4)
    wanted = normalized(x, (1,), 1e-6)
    slow = nnx.LayerNorm(64, use_fast_variance=False, rngs=nnx.Rngs(0))(x)
    fast = nnx.LayerNorm(64, rngs=nnx.Rngs(0))(x)
    np.testing.assert_allclose(slow, wanted, atol=5e-3)
    assert np.abs(fast - wanted).max() > 0.1


def test_groups_along_some_axes():
    """The reference counts the other axes as well."""
    y = nnx.GroupNorm(6, 3, reduction_axes=-1, rngs=nnx.Rngs(0))(jnp.asarray(X))
    wanted = normalized(X.reshape(4, 5, 3, 2), (3,), 1e-6).reshape(X.shape)
    np.testing.assert_allclose(y, wanted, rtol=1e-3, atol=1e-3)


def test_a_captured_layer_can_be_used_inside_a_transform_when_it_does_not_train():
    layer = nnx.BatchNorm(6, use_running_average=True, rngs=nnx.Rngs(0))
    assert jax.jit(lambda x: layer(x))(jnp.asarray(X)).shape == X.shape
    with pytest.raises(nnx.TraceContextError, match="BatchStat"):
        jax.jit(lambda x: layer(x, use_running_average=False))(jnp.asarray(X))


def test_running_averages_carry_no_gradient():
    def average(x):
        layer = nnx.BatchNorm(6, rngs=nnx.Rngs(0))
        layer(x)
        return layer.mean.value.sum() + layer.var.value.sum()

    np.testing.assert_array_equal(jax.grad(average)(jnp.asarray(X)), np.zeros_like(X))


# Over devices and named axes ------------------------------------------------------------------


def over_devices(layer, x, mask=None):
    """The layer applied to each part of `x` along its first axis, with a named axis over it."""
    graphdef, state = nnx.split(layer)

    def one(x, mask):
        layer = nnx.merge(graphdef, state, copy=True)
        return layer(x, mask=mask), nnx.to_pure_dict(nnx.state(layer, nnx.BatchStat))

    return jax.vmap(one, in_axes=(0, None if mask is None else 0), axis_name="devices")(x, mask)


@pytest.mark.parametrize("fast", [True, False])
def test_masked_moments_count_the_elements_of_all_devices(fast):
    """The reference averages the means of the devices, which gives each device the same weight."""
    x = jnp.asarray(X.reshape(2, 2, 5, 6))
    mask = np.ones(x.shape, bool)
    mask[1, :, 1:] = False
    layer = nnx.BatchNorm(6, axis_name="devices", use_fast_variance=fast, rngs=nnx.Rngs(0))
    y, _ = over_devices(layer, x, jnp.asarray(mask))
    wanted = normalized(X, (0, 1), 1e-5, mask.reshape(X.shape))
    np.testing.assert_allclose(y.reshape(X.shape), wanted, rtol=1e-4, atol=1e-5)


def test_groups_of_devices_have_their_own_moments():
    layer = nnx.BatchNorm(
        6, axis_name="devices", axis_index_groups=[[0, 1], [2, 3]], rngs=nnx.Rngs(0)
    )
    graphdef, state = nnx.split(layer)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("devices",))
    spec = jax.sharding.PartitionSpec("devices")
    call = lambda x: nnx.merge(graphdef, state, copy=True)(x)
    run = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    x = normal(8, 6)
    wanted = np.concatenate([normalized(x[:4], (0,), 1e-5), normalized(x[4:], (0,), 1e-5)])
    np.testing.assert_allclose(run(jnp.asarray(x)), wanted, rtol=1e-4, atol=1e-5)


# Bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, fast", [*zip(NORMS, [True, False, True, False, True])])
def test_moments_of_no_elements_make_no_nan(kind, fast):
    """An example of padding only has a finite result, not magnified, and a finite gradient."""
    norm = kind(*NORMS[kind], use_fast_variance=fast, rngs=nnx.Rngs(0))
    x = jnp.asarray(normal(2, 3, 6))
    nothing = jnp.zeros((2, 3, 1), bool)
    np.testing.assert_allclose(norm(x, mask=nothing), x, rtol=1e-5)
    part = nothing.at[0].set(True)
    grads = nnx.grad(lambda norm, x: (norm(x, mask=part) ** 2).sum(), argnums=(0, 1))(norm, x)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_a_batch_without_elements_leaves_the_running_averages():
    norm = nnx.BatchNorm(2, momentum=0.5, rngs=nnx.Rngs(0))
    norm(jnp.array([[1.0, 2.0], [3.0, 6.0]]))
    norm(jnp.zeros((0, 2)))
    norm(jnp.ones((3, 2)), mask=jnp.zeros((3, 1), bool))
    assert (norm.mean.value.tolist(), norm.var.value.tolist()) == ([1.0, 2.0], [1.0, 2.5])
    norm(jnp.full((2, 2), 9.0), mask=jnp.array([True, False]))  # of the first feature only
    assert (norm.mean.value.tolist(), norm.var.value.tolist()) == ([5.0, 2.0], [0.5, 2.5])


def test_running_averages_keep_their_precision_in_half_precision():
    """In float16 a variance of 1e6 is infinite, and 1000.4 is 1000.5."""
    for dtype in ("float16", "bfloat16"):
        norm = nnx.BatchNorm(2, dtype=dtype, use_running_average=True, rngs=nnx.Rngs(0))
        norm.mean.value, norm.var.value = jnp.array([1e5, 100.4]), jnp.array([1e6, 1.0])
        y = norm(jnp.array([[1024, 101]], dtype))
        assert y.dtype == dtype
        np.testing.assert_allclose(y.astype(jnp.float32), [[-98.976, 0.6]], rtol=4e-3)


def test_running_averages_of_float32_do_not_round_inputs_of_float64():
    norm = nnx.BatchNorm(1, epsilon=0.0, use_running_average=True, rngs=nnx.Rngs(0))
    norm.var.value = jnp.array([3.0])
    with jax.enable_x64(True):
        y = norm(jnp.ones((1, 1), "float64"))
    np.testing.assert_allclose(y, [[1 / np.sqrt(3)]], rtol=1e-15)


def test_averages_that_were_cast_go_on_in_float32():
    """In bfloat16, a momentum of 0.99 stopped them on the way."""
    norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    nnx.cast(norm, "bfloat16")
    x = jnp.full((4, 2), 3, "bfloat16")
    norm.eval()
    assert norm(x).dtype == norm.mean.dtype == "bfloat16"
    norm.train()
    for _ in range(500):
        norm(x)
    np.testing.assert_allclose(norm.mean[...], 3 * (1 - 0.99**500), rtol=1e-4)
    np.testing.assert_allclose(norm.var[...], 0.99**500, rtol=1e-4)
    assert norm.mean.dtype == norm.var.dtype == jnp.float32
