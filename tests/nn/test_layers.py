"""Linear layers, convolutions, pools, sequences and activations: what the catalogue leaves out."""

import copy
import functools
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import nnxlite as nnx
from nnxlite.nn import activations
from nnxlite.nn.dtypes import promote_dtype
from tests.nn.quick import QUICK, normal, quick

# Linear maps ------------------------------------------------------------------------------------


def test_parameters_can_be_exchanged_and_added():
    layer = nnx.Linear(3, 4, use_bias=False, **QUICK, rngs=nnx.Rngs(0))
    assert layer.bias is None
    layer.bias = nnx.Param(jnp.ones(4))  # the status of the attribute is data from the start
    assert [path for path, _ in nnx.to_flat_state(nnx.state(layer))] == [("bias",), ("kernel",)]
    np.testing.assert_allclose(layer(jnp.zeros(3)), np.ones(4))
    layer.kernel, layer.bias = nnx.Param(jnp.ones((2, 5))), None
    assert layer(jnp.ones((7, 2))).shape == (7, 5)


def test_products_get_the_options_of_jaxs_own():
    seen = []

    def product(*args, **options):
        seen.append(options)
        return 2 * lax.dot_general(*args, **options)

    x, f32 = normal(2, 3), jnp.float32
    for make, own in (
        (nnx.Linear, {"dot_general": product}),
        (nnx.LinearGeneral, {"dot_general": product}),
        (nnx.LinearGeneral, {"dot_general_cls": lambda: product}),
    ):
        seen.clear()
        plain, layer = (make(3, 4, **QUICK, **o, rngs=nnx.Rngs(0)) for o in ({}, own))
        bias = layer.bias.value
        np.testing.assert_allclose(layer(x) - bias, 2 * (plain(x) - bias), rtol=1e-5, atol=1e-6)
        layer.preferred_element_type = f32
        layer(x)
        usual = {"precision": None, "out_sharding": None}
        assert seen == [usual, {**usual, "preferred_element_type": f32}]


def test_linear_general_keeps_batch_axes_as_a_hashable_mapping():
    layer = nnx.LinearGeneral(3, 4, batch_axis={0: 2}, **QUICK, rngs=nnx.Rngs(0))
    assert layer.batch_axis == {0: 2} and len(layer.batch_axis) == 1
    assert hash(layer.batch_axis) == hash(nnx.clone(layer).batch_axis)
    assert repr(layer.batch_axis) == "FrozenMapping({0: 2})"


def test_biases_broadcast_where_rank_promotion_is_forbidden():
    with jax.numpy_rank_promotion("raise"):
        assert nnx.Linear(3, 4, **QUICK, rngs=nnx.Rngs(0))(jnp.ones((2, 3))).shape == (2, 4)
        assert nnx.Conv(3, 4, 3, rngs=nnx.Rngs(0))(jnp.ones((2, 8, 3))).shape == (2, 8, 4)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
def test_small_integers_count_from_the_end_of_a_large_table(dtype):
    embed = nnx.Embed(300, 1, embedding_init=quick, rngs=nnx.Rngs(0))
    last = 255 if dtype == "uint8" else -1
    expected = np.asarray(embed.embedding[...])[[last, 5]]
    np.testing.assert_array_equal(embed(jnp.array([last, 5], dtype)), expected)


def test_arrays_that_agree_are_not_cast():
    x, y = jnp.ones(2), jnp.ones(3)
    assert promote_dtype((x, None, y))[0] is x
    assert promote_dtype((x, y), dtype=jnp.float32)[1] is y
    assert promote_dtype((x,), dtype="float32")[0] is x


# Convolutions and pools -------------------------------------------------------------------------


def test_conv_takes_another_convolution_and_lists():
    seen = {}

    def convolution(lhs, rhs, strides, padding, **options):
        seen.update(options, strides=strides, padding=padding)
        return lax.conv_general_dilated(lhs, rhs, strides, padding, **options)

    circular = functools.partial(nnx.Conv, 2, 4, [3], [2], padding="CIRCULAR", **QUICK)
    own = {"conv_general_dilated": convolution, "preferred_element_type": jnp.float32}
    layer, plain = circular(**own, rngs=nnx.Rngs(0)), circular(rngs=nnx.Rngs(0))
    x = normal(1, 6, 2)
    np.testing.assert_array_equal(layer(x), plain(x))
    assert (seen["strides"], seen["padding"]) == ((2,), "VALID")
    assert seen["preferred_element_type"] is jnp.float32
    layer = nnx.Conv(2, 4, [3, 3], [1, 2], padding=[[1, 2], 0], **QUICK, rngs=nnx.Rngs(0))
    assert (layer.kernel_size, layer.strides) == ((3, 3), (1, 2))
    assert layer.padding == ((1, 2), 0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32, jnp.uint8])
def test_what_is_padded_never_wins(dtype):
    x = jnp.full((3, 1), 5, dtype)
    np.testing.assert_array_equal(nnx.max_pool(x, (3,), padding="SAME"), x)
    np.testing.assert_array_equal(nnx.min_pool(x, (3,), padding=((1, 1),)), x)
    low = jnp.full((3, 1), jnp.iinfo(dtype).min if dtype == jnp.int32 else 0, dtype)
    np.testing.assert_array_equal(nnx.max_pool(low, (3,), padding="SAME"), low)
    bools = jnp.array([[False], [True], [True]])
    assert nnx.max_pool(bools, (2,)).tolist() == [[True], [True]]
    assert nnx.min_pool(bools, (2,)).tolist() == [[False], [True]]


def test_means_of_small_dtypes_do_not_overflow():
    for dtype, value in (("uint8", 200), ("int8", -100), ("float16", 2000), ("bool", 1)):
        x = jnp.full((49, 1), value, dtype)
        for counts in (True, False):
            mean = nnx.avg_pool(x, (49,), count_include_pad=counts)
            assert mean.dtype == ("float16" if dtype == "float16" else "float32")
            assert mean.tolist() == [[value]]


# Sequential, MLP and Identity -------------------------------------------------------------------


def test_layers_in_one_list_are_told_how_to_be_passed():
    layers = [nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu]
    for given in (layers, tuple(layers), nnx.List(layers)):
        with pytest.raises(TypeError, match=r"one by one: nnx\.Sequential\(\*layers\)"):
            nnx.Sequential(given)(jnp.ones(2))
        model = nnx.Sequential(*given)
        assert model(jnp.ones(2)).shape == (3,) and list(model) == list(model.layers) == layers


def test_identity_gives_its_input_back():
    layer, x = nnx.Identity(3, "ignored", rngs=nnx.Rngs(0)), object()
    assert layer(x, 1, key=2) is x and nnx.to_flat_state(nnx.state(layer)).paths == ()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_mlp_is_its_linears_in_order(depth):
    options = {"activation": nnx.PReLU(0.2), "final_activation": nnx.softmax, "dtype": "bfloat16"}
    mlp = nnx.MLP(3, 2, 8, depth, use_bias=False, **options, rngs=nnx.Rngs(0))
    rngs, x = nnx.Rngs(0), normal(5, 3)
    linear, y = functools.partial(nnx.Linear, dtype="bfloat16", rngs=rngs), x
    for rows in [3, 8, 8][:depth]:
        y = mlp.activation(linear(rows, 8, use_bias=False)(y))
    last = linear(8 if depth else 3, 2)
    np.testing.assert_array_equal(mlp(x), nnx.softmax(last(y)))
    assert [layer.bias is None for layer in mlp.layers] == [True] * depth + [False]
    assert nnx.MLP(3, 2, 8, 1, use_final_bias=False, rngs=rngs).layers[-1].bias is None
    assert ("activation", "negative_slope") in nnx.to_flat_state(nnx.state(mlp)).paths


# Activations and initializers: JAX's own functions under our names ------------------------------

ACTIVATIONS = sorted(name for name in vars(activations) if name[0].islower() and name != "tanh")


def test_activations_and_initializers_are_jaxs_own():
    for name in ACTIVATIONS:
        assert getattr(nnx, name) is getattr(jax.nn, name)
    for name, value in vars(nnx.initializers).items():
        if callable(value) and name[0].islower() and name not in ("zeros_init", "ones_init"):
            assert value is getattr(jax.nn.initializers, name)


@pytest.mark.parametrize("library", [pickle, cloudpickle], ids=lambda m: m.__name__)
def test_activations_pickle_by_name(library):
    for name in (*ACTIVATIONS, "tanh"):
        function = getattr(nnx, name)
        assert library.loads(library.dumps(function)) is function
        assert copy.deepcopy(function) is function
    model = nnx.Sequential(nnx.relu, nnx.PReLU(), jax.nn.silu)
    assert nnx.graphdef(library.loads(library.dumps(model))) == nnx.graphdef(model)


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
