"""Linear, LinearGeneral and Einsum: values against numpy, attributes, and messages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import nnxlite as nnx
from tests.nn.quick import QUICK, normal

NORMAL = jax.nn.initializers.normal(1.0)


def test_parameters_are_data_and_the_rest_is_static():
    layer = nnx.Linear(3, 4, use_bias=False, **QUICK, rngs=nnx.Rngs(0))
    assert layer.bias is None
    layer.bias = nnx.Param(jnp.ones(4))  # the status of the attribute is data from the start
    assert [path for path, _ in nnx.to_flat_state(nnx.state(layer))] == [("bias",), ("kernel",)]
    np.testing.assert_allclose(layer(jnp.zeros(3)), np.ones(4))


def test_linear_follows_a_kernel_that_was_exchanged():
    layer = nnx.Linear(3, 4, use_bias=False, **QUICK, rngs=nnx.Rngs(0))
    layer.kernel = nnx.Param(jnp.ones((2, 5)))
    assert layer(jnp.ones((7, 2))).shape == (7, 5)


def test_linear_takes_other_products():
    seen = {}

    def product(lhs, rhs, dimensions, **options):
        seen.update(options)
        return 2 * lax.dot_general(lhs, rhs, dimensions)

    plain = nnx.Linear(3, 4, use_bias=False, **QUICK, rngs=nnx.Rngs(0))
    doubled = nnx.Linear(3, 4, use_bias=False, dot_general=product, **QUICK, rngs=nnx.Rngs(0))
    x = normal(2, 3)
    np.testing.assert_allclose(doubled(x), 2 * plain(x), rtol=1e-6)
    assert seen == {"precision": None, "out_sharding": None}
    doubled.preferred_element_type = jnp.float32
    doubled(x)
    assert seen["preferred_element_type"] is jnp.float32


def test_linear_takes_another_promotion():
    layer = nnx.Linear(
        3,
        4,
        promote_dtype=lambda args, dtype: nnx.nn.dtypes.promote_dtype(args, dtype=jnp.float16),
        rngs=nnx.Rngs(0),
    )
    assert layer(jnp.ones(3)).dtype == jnp.float16


def test_linear_draws_its_kernel_then_its_bias():
    rngs = nnx.Rngs(params=0)
    layer = nnx.Linear(3, 4, bias_init=NORMAL, rngs=rngs)
    keys = nnx.Rngs(params=0)
    kernel = nnx.initializers.lecun_normal()(keys.params(), (3, 4), jnp.float32)
    np.testing.assert_array_equal(layer.kernel.value, kernel)
    np.testing.assert_array_equal(layer.bias.value, NORMAL(keys.params(), (4,), jnp.float32))
    assert rngs.params.count.value == 2


def test_linear_general_takes_a_class_of_products():
    calls = []

    class Product:
        def __call__(self, *args, **options):
            calls.append(options)
            return lax.dot_general(*args, **options)

    layer = nnx.LinearGeneral(3, 4, dot_general_cls=Product, **QUICK, rngs=nnx.Rngs(0))
    plain = nnx.LinearGeneral(3, 4, **QUICK, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer(jnp.ones((2, 3))), plain(jnp.ones((2, 3))))
    assert len(calls) == 1


def test_linear_general_keeps_batch_axes_as_a_hashable_mapping():
    layer = nnx.LinearGeneral(3, 4, batch_axis={0: 2}, **QUICK, rngs=nnx.Rngs(0))
    assert layer.batch_axis == {0: 2} and len(layer.batch_axis) == 1
    assert hash(layer.batch_axis) == hash(nnx.clone(layer).batch_axis)
    assert repr(layer.batch_axis) == "FrozenMapping({0: 2})"


def test_einsum_takes_an_equation_for_one_call():
    layer = nnx.Einsum("ab,bc->ac", (3, 4), **QUICK, rngs=nnx.Rngs(0))
    x = normal(5, 2, 3)
    np.testing.assert_allclose(
        layer(x, "tba, ac -> tbc"), x @ np.asarray(layer.kernel.value), rtol=1e-5
    )
    assert layer.einsum_str == "ab,bc->ac"


@pytest.mark.parametrize("rank_promotion", ["raise"])
def test_biases_broadcast_where_rank_promotion_is_forbidden(rank_promotion):
    with jax.numpy_rank_promotion(rank_promotion):
        assert nnx.Linear(3, 4, **QUICK, rngs=nnx.Rngs(0))(jnp.ones((2, 3))).shape == (2, 4)
        conv = nnx.Conv(3, 4, 3, rngs=nnx.Rngs(0))
        assert conv(jnp.ones((2, 8, 3))).shape == (2, 8, 4)
