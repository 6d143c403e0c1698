"""Ring attention: `dot_product_attention`, over a sequence that lies on several devices."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from tests.nn.quick import QUICK, normal


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((2, 4), ("data", "sequence"), axis_types=(kind,) * 2)


QUERY, KEY, VALUE = (jnp.asarray(normal(2, 8, heads, 4, seed=heads)) for heads in (4, 2, 2))
MASK = jnp.asarray(np.random.default_rng(0).random((2, 1, 8, 8)) < 0.7)
MASK = MASK.at[0, 0, 3].set(False)  # a query without any key


def loss_and_grads(attend, query, key, value, mask, causal):
    def loss_of(query, key, value, mask):
        return jnp.sum(jnp.sin(attend(query, key, value, mask=mask, is_causal=causal)))

    return jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1, 2)))(query, key, value, mask)


@pytest.mark.parametrize(
    ("kind", "masked", "causal"),
    [(AxisType.Auto, False, True), (AxisType.Auto, True, False), (AxisType.Explicit, True, True)],
)
def test_values_and_gradients(kind, masked, causal):
    mask = MASK if masked else None
    expected = loss_and_grads(nnx.dot_product_attention, QUERY, KEY, VALUE, mask, causal)
    with jax.set_mesh(mesh_of(kind)):
        arrays = [jax.device_put(x, P("data", "sequence")) for x in (QUERY, KEY, VALUE)]
        mask = jax.device_put(mask, P("data", None, "sequence")) if masked else None
        got = loss_and_grads(nnx.ring_attention, *arrays, mask, causal)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
    for one, other in zip(got[1], expected[1]):
        np.testing.assert_allclose(one, other, atol=1e-5)
        assert tuple(one.sharding.spec)[:2] == ("data", "sequence")


def test_bfloat16_and_sequences_of_two_lengths():
    query, key, value = (x.astype(jnp.bfloat16) for x in (QUERY, KEY[:, :4], VALUE[:, :4]))
    mask = MASK[:, :, :, :4] | True
    attend = functools.partial(nnx.ring_attention, mesh=mesh_of())
    y = jax.jit(attend)(query, key, value, mask)
    assert y.dtype == jnp.bfloat16
    expected = nnx.dot_product_attention(query, key, value, mask=mask)
    np.testing.assert_allclose(
        np.asarray(y, np.float32), np.asarray(expected, np.float32), atol=2e-2
    )


def test_no_device_has_all_keys_nor_all_weights():
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(x, P("data", "sequence")) for x in (QUERY, KEY, VALUE)]
        f = jax.jit(lambda q, k, v: nnx.ring_attention(q, k, v, is_causal=True))
        program = f.lower(*arrays).compile().as_text()
    assert "collective-permute" in program and "all-gather" not in program
    assert "f32[1,2,2,8" not in program and "f32[1,8,2,4]" not in program


def layer(**options):
    return nnx.MultiHeadAttention(
        4, 8, num_kv_heads=2, decode=False, **QUICK, **options, rngs=nnx.Rngs(0)
    )


def test_in_a_layer_with_rotary_positions_under_nnx_grad():
    x = jnp.asarray(normal(2, 8, 8))
    loss_of = lambda m, x: jnp.sum(m(x, is_causal=True) ** 2)
    f = nnx.jit(nnx.value_and_grad(loss_of))
    rotated = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())
    expected, grads = f(layer(attention_fn=rotated), x)
    attend = functools.partial(nnx.ring_attention, mesh=mesh_of())
    got, its = f(layer(attention_fn=functools.partial(rotated, attention_fn=attend)), x)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(its), jax.tree.leaves(grads)):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


def test_inside_a_shard_map_the_arrays_are_parts():
    mesh = mesh_of()
    part = P("data", "sequence")
    f = jax.shard_map(
        lambda q, k, v: nnx.ring_attention(q, k, v, is_causal=True),
        mesh=mesh,
        in_specs=part,
        out_specs=part,
        check_vma=False,
    )
    expected = nnx.dot_product_attention(QUERY, KEY, VALUE, is_causal=True)
    np.testing.assert_allclose(jax.jit(f)(QUERY, KEY, VALUE), expected, atol=1e-5)


@pytest.mark.parametrize("broadcast", [False, True])
def test_dropout_keeps_the_mean_and_its_gradient(broadcast):
    mesh = jax.make_mesh((2,), ("sequence",), axis_types=(AxisType.Auto,))
    query, key = jnp.zeros((1, 4, 2, 4)), jnp.zeros((1, 256, 2, 4))
    value = jnp.ones((1, 256, 2, 3))

    def mean_of(value, rate=0.5):
        y = nnx.ring_attention(
            query,
            key,
            value,
            dropout_rng=jax.random.key(0),
            dropout_rate=rate,
            broadcast_dropout=broadcast,
            mesh=mesh,
        )
        return y.mean()

    y, grad = jax.jit(jax.value_and_grad(mean_of))(value)
    assert abs(y - 1) < 0.15 and y != 1
    np.testing.assert_allclose((grad * value).sum(), y, rtol=1e-5)  # the same weights both ways
    dropped = np.mean(np.asarray(grad[0, :, 0, 0]) == 0)
    assert (0.0 < dropped < 0.2) if not broadcast else dropped < 0.2


def test_the_gradient_through_dropout():
    mesh = jax.make_mesh((2,), ("sequence",), axis_types=(AxisType.Auto,))

    def loss_of(query):
        y = nnx.ring_attention(
            query, KEY, VALUE, dropout_rng=jax.random.key(0), dropout_rate=0.3, mesh=mesh
        )
        return jnp.sum(jnp.sin(y))

    direction, step = jnp.asarray(normal(*QUERY.shape, seed=9)), 1e-2

    @jax.jit
    def slopes(queries):
        low, high = jax.lax.map(loss_of, queries)
        return (high - low) / (2 * step), jnp.vdot(jax.grad(loss_of)(QUERY), direction)

    measured, computed = slopes(jnp.stack([QUERY - step * direction, QUERY + step * direction]))
    np.testing.assert_allclose(computed, measured, rtol=1e-2)


def test_refusals():
    mesh = mesh_of()

    def refusal(*arrays, error=ValueError, **options):
        given = {"mesh": mesh, **options}
        with pytest.raises(error) as info:
            nnx.ring_attention(*(arrays or (QUERY, KEY, VALUE)), **given)
        return str(info.value)

    assert "the query has length 6 (shape (2, 6, 4, 4)), which the 4 devices along the mesh" in (
        refusal(QUERY[:, :6], KEY, VALUE)
    )
    assert "the key has length 7" in refusal(QUERY, KEY[:, :7], VALUE[:, :7])
    assert "the mesh with axes ('data', 'sequence') has no axis 'context'" in refusal(
        axis="context"
    )
    assert "needs a mesh with the axis 'sequence'. Pass mesh=..., or call it within" in refusal(
        mesh=None
    )
    assert "cannot record the weights" in refusal(module=nnx.Module())
    assert "dropout_rng is required when dropout_rate > 0" in refusal(dropout_rate=0.5)
    assert "ring_attention got a mask of shape (2, 8, 3), which does not broadcast" in refusal(
        mask=jnp.ones((2, 8, 3)), error=TypeError
    )
    sharded = nnx.MultiHeadAttention(
        2, 8, attention_fn=nnx.ring_attention, decode=False, rngs=nnx.Rngs(0)
    )
    with pytest.raises(ValueError, match="ring_attention needs a mesh"):
        sharded(jnp.ones((1, 4, 8)))
