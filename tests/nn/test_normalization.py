"""Normalisation of activations and weights: what the reference lacks or gives otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn.quick import QUICK, normal, quick

X = normal(4, 5, 6) * 3 + 1


def normalized(x, axes, epsilon, mask=True):
    """By moments along some axes, in float64."""
    x, options = np.asarray(x, np.float64), {"where": mask, "keepdims": True}
    mean, var = x.mean(axes, **options), x.var(axes, **options)
    return (x - mean) / np.sqrt(var + epsilon)


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


@pytest.mark.parametrize("fast", [True, False])
def test_masked_moments_count_the_elements_of_all_devices(fast):
    """The reference averages the means of the devices, which gives each device the same weight."""
    x = jnp.asarray(X.reshape(2, 2, 5, 6))
    mask = np.ones(x.shape, bool)
    mask[1, :, 1:] = False
    layer = nnx.BatchNorm(6, axis_name="devices", use_fast_variance=fast, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(layer)
    call = lambda x, mask: nnx.merge(graphdef, state, copy=True)(x, mask=mask)
    y = jax.vmap(call, axis_name="devices")(x, jnp.asarray(mask))
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


# Running averages -----------------------------------------------------------------------------


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
    norm.mean[...] = jnp.full(2, 2.75)
    for _ in range(20):
        norm(x)
    np.testing.assert_allclose(norm.mean[...], 3 - 0.25 * 0.99**20, rtol=1e-4)
    np.testing.assert_allclose(norm.var[...], 0.99**20, rtol=1e-4)
    assert norm.mean.dtype == norm.var.dtype == jnp.float32


# Weights ----------------------------------------------------------------------------------------

ROWS = jnp.asarray(normal(2, 3))


def linear(**kwargs):
    return nnx.Linear(3, 4, **QUICK, **kwargs, rngs=nnx.Rngs(0))


class Block(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 5, **QUICK, rngs=rngs)
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.layers = [nnx.Linear(5, 2, **QUICK, rngs=rngs)]
        self.table = nnx.Param(jnp.asarray(normal(2, 3, 4)))
        self.statistic = nnx.BatchStat(jnp.ones((2, 2)))

    def __call__(self, x):
        return self.layers[0](self.norm(self.first(x)))


def weights(layer):
    return {path: v.value for path, v in nnx.to_flat_state(nnx.state(layer.layer_instance))}


def test_all_parameters_of_two_or_more_dimensions_have_estimates_by_path():
    layer = nnx.SpectralNorm(Block(), n_steps=40, rngs=nnx.Rngs(0))
    paths = {("first", "kernel"): 5, ("layers", 0, "kernel"): 2, ("table",): 4}
    assert set(layer.batch_stats) == {(*p, n) for p in paths for n in ("u", "sigma")}
    for path, columns in paths.items():
        assert layer.batch_stats[(*path, "u")].shape == (1, columns)
        assert isinstance(layer.batch_stats[(*path, "sigma")], nnx.BatchStat)
    before = weights(layer)
    layer(ROWS)
    after = weights(layer)
    for path in paths:
        norm = np.linalg.norm(np.asarray(after[path]).reshape(-1, after[path].shape[-1]), 2)
        np.testing.assert_allclose(norm, 1.0, rtol=1e-4)
    for path in (("first", "bias"), ("norm", "scale"), ("statistic",)):
        assert after[path] is before[path]
    assert after[("norm", "mean")] is not before[("norm", "mean")]


def test_estimates_are_kept_only_when_asked_and_in_training():
    # In the reference the mode has the opposite sense, so that eval() switches updates on.
    layer = nnx.SpectralNorm(linear(), rngs=nnx.Rngs(0))
    frozen = nnx.SpectralNorm(linear(), update_stats=False, rngs=nnx.Rngs(0))

    def updates(layer, *args):
        before = [stat.value for stat in layer.batch_stats.values()]
        layer(ROWS, *args)
        (changed,) = {a is not b.value for a, b in zip(before, layer.batch_stats.values())}
        return changed

    assert updates(layer) and not updates(layer, False)
    assert updates(frozen, True) and not updates(frozen)
    layer.eval()
    assert not updates(layer)
    layer.train()
    assert updates(layer) and not updates(nnx.view(layer, use_running_average=True))
    layer.set_view()
    assert layer.use_running_average is False
    nnx.cast(layer, "bfloat16")  # the estimates keep the dtype of their variables
    layer(ROWS)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(layer))} == {jnp.dtype("bfloat16")}


def test_calling_twice_changes_nothing_more_whatever_the_sign_of_the_scale():
    # The reference stores the product, so that a negative scale turns the weight round every time.
    layer, scales = nnx.WeightNorm(linear(), rngs=nnx.Rngs(0)), np.array([2.0, -3.0, 0.0, 1.0])
    start = np.asarray(layer.layer_instance.kernel.value)
    layer.scales[("kernel",)].value = jnp.asarray(scales)
    kernel = start / np.linalg.norm(start, axis=0) * scales
    wanted = ROWS @ kernel + layer.layer_instance.bias.value
    for _ in range(3):
        np.testing.assert_allclose(layer(ROWS), wanted, rtol=1e-4, atol=1e-6)
    lengths = np.linalg.norm(layer.layer_instance.kernel.value, axis=0)
    np.testing.assert_allclose(lengths[[0, 1, 3]], [2.0, 3.0, 1.0], rtol=1e-5)


def test_scales_are_drawn_unless_they_are_constants():
    rngs = nnx.Rngs(0)
    nnx.WeightNorm(linear(), rngs=rngs)  # ones
    assert int(rngs.default.count.value) == 0
    layer = nnx.WeightNorm(linear(), scale_init=quick, param_dtype=jnp.bfloat16, rngs=rngs)
    assert int(rngs.default.count.value) == 1
    wanted = quick(nnx.Rngs(0)(), (4,), jnp.bfloat16)
    np.testing.assert_array_equal(layer.scales[("kernel",)].value, wanted)


def test_further_arguments_reach_the_module():
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    layer = nnx.WeightNorm(norm, variable_filter=None, rngs=nnx.Rngs(0))
    mean = norm.mean.value
    layer(ROWS, True, mask=None)
    assert norm.mean.value is mean
    layer(ROWS, use_running_average=False)
    assert norm.mean.value is not mean


def test_shared_weights_are_normalised_once():
    class Tied(nnx.Module):
        def __init__(self):
            self.a = linear()
            self.b = nnx.Linear(3, 4, rngs=nnx.Rngs(1))
            self.b.kernel = self.a.kernel

        def __call__(self, x):
            return self.a(x) + self.b(x)

    for kind, kept in ((nnx.SpectralNorm, "batch_stats"), (nnx.WeightNorm, "scales")):
        layer = kind(Tied(), rngs=nnx.Rngs(0))
        assert {path[0] for path in getattr(layer, kept)} == {"a"}
        layer(ROWS)
        assert layer.layer_instance.a.kernel is layer.layer_instance.b.kernel


@pytest.mark.parametrize("value", [1e-4, 0.0, 300.0])
@pytest.mark.parametrize("wrapper", [nnx.WeightNorm, nnx.SpectralNorm])
def test_weights_of_half_precision_are_normalized_in_float32(wrapper, value):
    """Squares in float16 overflow above 255, and vanish below 2e-4, together with epsilon."""
    layer = linear(param_dtype=jnp.float16)
    layer.kernel.value = jnp.full((3, 4), value, jnp.float16)
    norm = wrapper(layer, param_dtype=jnp.float16, rngs=nnx.Rngs(0))
    for _ in range(3):
        norm(ROWS.astype(jnp.float16))
    kernel = np.asarray(layer.kernel.value)
    assert kernel.dtype == np.float16
    size = np.linalg.norm(kernel.astype(np.float32)[:, 0])
    if wrapper is nnx.SpectralNorm:
        size *= np.sqrt(kernel.shape[1])
    np.testing.assert_allclose(size, 1.0 if value else 0.0, rtol=2e-3)
