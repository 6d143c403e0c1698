"""Attention: dropout, the layer, its cache, and rotary positions; values are in the catalogue."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn.quick import QUICK, normal

KEY = jax.random.key(0)
call = nnx.jit(nnx.MultiHeadAttention.__call__, static_argnames=("is_causal", "decode"))
X = jnp.asarray(normal(3, 6, 8))


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_scales_what_it_keeps(broadcast):
    query, key = (jnp.asarray(normal(2, 40, 4, 8, seed=seed)) for seed in (1, 2))
    # With the unit vectors as values the result is the weights.
    value = jnp.broadcast_to(np.eye(40, dtype=np.float32)[:, None], (2, 40, 4, 40))
    attend = functools.partial(nnx.dot_product_attention, query, key, value)
    kept = attend(None, None, broadcast, dropout_rng=KEY, dropout_rate=0.25)
    ratio = kept / attend()
    np.testing.assert_allclose(ratio, np.where(ratio > 0.5, 1 / 0.75, 0), rtol=1e-4)
    zero = np.asarray(kept == 0)
    assert abs(zero.mean() - 0.25) < 0.02
    same_everywhere = (zero == zero[:1, :, :1]).all()
    assert same_everywhere == broadcast


def test_kept_angles_are_the_computed_ones():
    kept, x = nnx.RoPE(embedding_size=8, max_seq_len=9), jnp.asarray(normal(5, 8))
    assert kept.cached_sin.shape == kept.cached_cos.shape == (9, 4)
    assert type(kept.cached_sin) is nnx.Variable
    np.testing.assert_array_equal(kept(x), nnx.RoPE()(x))
    far = jnp.asarray([20] * 5)  # given positions need no table
    np.testing.assert_array_equal(kept(x, far), nnx.RoPE()(x, far))
    assert nnx.RoPE().cached_sin is None


# The layer --------------------------------------------------------------------------------------


def layer(*args, decode=False, **kwargs):
    args = args or (2, 8)
    options = {**QUICK, "rngs": nnx.Rngs(0), **kwargs}
    return nnx.MultiHeadAttention(*args, decode=decode, **options)


LAYERS = {
    "plain": ((2, 8), {}),
    "without biases": ((2, 8), {"use_bias": False}),
    "other sizes": ((4, 8, 16, 10), {}),
    "grouped": ((4, 8, 16), {"num_kv_heads": 2}),
    "multi-query": ((4, 8, 16), {"num_kv_heads": 1}),
    "normalised": ((2, 8), {"normalize_qk": True}),
}


def test_the_attention_function_is_chosen_by_argument():
    y = layer()(X, is_causal=True)
    fused = layer(implementation="xla")
    np.testing.assert_allclose(fused(X, is_causal=True), y, atol=1e-5)
    with pytest.raises(ValueError, match="is fused, which excludes recording the weights"):
        fused(X, sow_weights=True)
    seen = {}

    def own(query, key, value, **options):
        seen.update(options)
        return value

    layer(attention_fn=own)(X, sow_weights=False, is_causal=True)
    assert set(seen) == {
        *("mask", "dropout_rng", "dropout_rate", "broadcast_dropout", "deterministic"),
        *("dtype", "precision", "module", "is_causal"),
    }
    layer(attention_fn=own, implementation="cudnn")(X, input_positions=jnp.arange(6))
    assert seen["input_positions"].shape == (6,) and seen["implementation"] == "cudnn"


def test_recorded_weights_add_up_to_one():
    m = layer(4, 8, num_kv_heads=2)
    plain = m(X)
    np.testing.assert_allclose(m(X, sow_weights=True), plain, rtol=1e-4, atol=1e-5)
    (weights,) = nnx.pop(m, nnx.Intermediate)["attention_weights"].value
    assert weights.shape == (3, 4, 6, 6)
    np.testing.assert_allclose(weights.sum(-1), np.ones((3, 4, 6)), rtol=1e-5)


def test_metadata_goes_to_the_parameters():
    shared = layer(kernel_metadata={"of": "kernel"}, bias_metadata={"of": "bias"})
    assert shared.out.kernel.of == "kernel" and shared.out.bias.of == "bias"
    names = ("kernel", "out_kernel", "bias", "out_bias", "query_ln_scale", "key_ln_scale")
    m = layer(normalize_qk=True, **{f"{n}_metadata": {"of": n} for n in names})
    assert {p: v.of for p, v in nnx.to_flat_state(nnx.state(m))} == {
        **{(part, name): name for part in ("query", "key", "value") for name in ("kernel", "bias")},
        **{("out", name): f"out_{name}" for name in ("kernel", "bias")},
        **{(f"{part}_ln", "scale"): f"{part}_ln_scale" for part in ("query", "key")},
    }


def test_output_initializers_follow_the_others_unless_given():
    ones, zeros = nnx.initializers.ones, nnx.initializers.zeros
    m = layer(kernel_init=ones, bias_init=ones)
    assert m.out.kernel.value.min() == m.out.bias.value.min() == 1
    m = layer(kernel_init=ones, bias_init=ones, out_kernel_init=zeros, out_bias_init=zeros)
    assert m.query.kernel.value.min() == m.query.bias.value.min() == 1
    assert m.out.kernel.value.max() == m.out.bias.value.max() == 0


# Dropout and modes of the layer -----------------------------------------------------------------


def test_the_layer_keeps_a_stream_for_dropout_only_where_it_needs_one():
    rngs = nnx.Rngs(0, dropout=1)
    assert layer(rngs=rngs).rngs is None
    assert layer(dropout_rate=0.5, keep_rngs=False, rngs=rngs).rngs is None
    assert int(rngs.dropout.count.value) == 0
    m = layer(dropout_rate=0.5, rngs=rngs)
    assert m.rngs.tag == "dropout" and int(rngs.dropout.count.value) == 1
    assert ("rngs", "count") in nnx.state(m).flat_state().paths


def test_the_key_of_a_call_goes_before_the_layer():
    m = layer(dropout_rate=0.5, keep_rngs=False)
    key = nnx.Rngs(dropout=7).dropout()
    wanted = m(X, deterministic=False, rngs=key)
    for source in (nnx.Rngs(dropout=7), nnx.Rngs(7), nnx.Rngs(dropout=7).dropout):
        np.testing.assert_array_equal(m(X, deterministic=False, rngs=source), wanted)
    own = layer(dropout_rate=0.5)
    np.testing.assert_array_equal(own(X, deterministic=False, rngs=key), wanted)
    assert int(own.rngs.count.value) == 0


def test_modes_of_the_layer():
    m = layer(dropout_rate=0.5, decode=None)
    with pytest.raises(ValueError, match="No `decode` argument was provided"):
        m(X)
    with pytest.raises(ValueError, match="No `deterministic` argument was provided"):
        m(X, decode=False)
    assert m.set_view(deterministic=True, decode=False) is None
    assert (m.deterministic, m.decode) == (True, False)
    np.testing.assert_array_equal(m(X), layer()(X))
    m.set_view()
    assert (m.deterministic, m.decode) == (True, False)
    m.train()
    assert (m(X) != layer()(X)).any()
    m.eval()
    np.testing.assert_array_equal(m(X), layer()(X))


# Decoding ---------------------------------------------------------------------------------------

DECODING = {
    **LAYERS,
    "with rope": (
        (2, 8),
        {"attention_fn": functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())},
    ),
}


@pytest.mark.parametrize(("args", "kwargs"), DECODING.values(), ids=DECODING)
def test_decoding_step_by_step_is_one_causal_call(args, kwargs):
    # With is_causal=True too: the mask of the cache says it all.  Handing the flag on, as earlier
    # releases of the reference do, leaves the one query of a step with the first key alone.
    m = layer(*args, **kwargs)
    whole = call(m, X, is_causal=True)
    m.init_cache(X.shape)
    for i in range(X.shape[1]):
        y = call(m, X[:, i : i + 1], decode=True, is_causal=True)
        np.testing.assert_allclose(y, whole[:, i : i + 1], rtol=1e-4, atol=1e-5)
    assert int(m.cache_index.value) == X.shape[1]


def test_the_cache_has_the_heads_of_the_keys_and_the_asked_dtype():
    m = layer(4, 8, num_kv_heads=2)
    assert m.cached_key is None and m.cached_value is None and m.cache_index is None
    m.init_cache((3, 1, 7, 8), jnp.bfloat16)
    for cache in (m.cached_key, m.cached_value):
        assert isinstance(cache, nnx.Cache)
        assert cache.shape == (3, 1, 7, 2, 2) and cache.dtype == jnp.bfloat16
    assert isinstance(m.cache_index, nnx.Cache) and m.cache_index.dtype == jnp.int32
    y = m(jnp.ones((3, 1, 1, 8)), decode=True)  # projections in float32 are rounded
    assert y.dtype == jnp.float32 and m.cached_key.dtype == jnp.bfloat16


def test_init_cache_empties_the_cache():
    m = layer()
    m.init_cache(X.shape)
    first = m(X[:, :1], decode=True)
    m(X[:, 1:2], decode=True)
    m.init_cache(X.shape)
    assert int(m.cache_index.value) == 0 and not m.cached_key.value.any()
    np.testing.assert_array_equal(m(X[:, :1], decode=True), first)


def test_set_view_makes_a_cache():
    # (the reference accepts both sizes, and makes none)
    m = layer(dtype=jnp.bfloat16)
    m.set_view(decode=True, batch_size=3, max_length=6)
    assert m.decode and m.cached_key.shape == (3, 6, 2, 4) and m.cached_key.dtype == jnp.bfloat16
    m.set_view(batch_size=(2, 3), max_length=4)
    assert m.decode and m.cached_value.shape == (2, 3, 4, 2, 4)


BF16, F32 = jnp.bfloat16, jnp.float32


# every pair of two of these dtypes
@pytest.mark.parametrize(
    ("dtype", "cached", "parameters", "inputs"),
    [
        (dtype, cached, (F32, BF16)[(i + j) % 2], (F32, BF16)[(i + j) // 2 % 2])
        for i, dtype in enumerate([None, BF16, F32])
        for j, cached in enumerate([None, BF16, F32])
    ],
)
def test_a_step_computes_in_the_dtype_of_a_call_without_a_cache(dtype, parameters, inputs, cached):
    m = layer(dtype=dtype, param_dtype=parameters, normalize_qk=True)
    x = X.astype(inputs)
    whole = m(x, is_causal=True)
    m.set_view(decode=True, batch_size=3, max_length=6)
    assert m.cached_key.dtype == m.cached_value.dtype == (dtype or parameters)
    if cached is not None:
        m.init_cache(x.shape, cached)
    steps = jnp.concatenate([m(x[:, :4]), m(x[:, 4:])], axis=1)
    assert steps.dtype == whole.dtype
    assert m.cached_key.dtype == (cached or dtype or parameters)
    exact = whole.dtype == m.cached_key.dtype == F32
    tolerance = 1e-5 if exact else 0.05
    np.testing.assert_allclose(steps.astype(F32), whole.astype(F32), rtol=tolerance, atol=tolerance)


def test_a_stack_of_layers_has_a_cache_for_each():
    make = lambda rngs: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
    stack = nnx.split_rngs(splits=3)(nnx.vmap(make))(nnx.Rngs(0))
    run = nnx.scan(lambda x, m: m(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    whole = nnx.scan(lambda x, m: m(x, is_causal=True), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
        X, stack
    )
    decoder = nnx.view(stack, decode=True, batch_size=3, max_length=6)
    assert decoder.cached_key.shape == (3, 3, 6, 2, 4) and decoder.cache_index.shape == (3,)
    steps = jnp.concatenate([run(X[:, :4], decoder), run(X[:, 4:5], decoder)], axis=1)
    np.testing.assert_allclose(steps, whole[:, :5], rtol=1e-4, atol=1e-5)
    again = nnx.view(decoder, batch_size=3, max_length=6)
    assert again.cached_key is decoder.cached_key
    stack.init_cache(X.shape)
    assert stack.cached_value.shape == (3, 3, 6, 2, 4)


def test_the_remedy_for_a_missing_mode_works():
    model = nnx.Dict(a=layer(decode=None), drop=nnx.Dropout(0.5, deterministic=None))
    with pytest.raises(
        ValueError, match=r"with `model.set_attributes\(decode=False\)` or `nnx.view"
    ):
        model.a(X)
    model.set_attributes(decode=False)
    assert model.a(X).shape == X.shape
    with pytest.raises(ValueError, match=r"with `model.train\(\)`, `model.eval\(\)` or `nnx.view"):
        model.drop(X)
    model.eval()
    assert model.drop(X) is X


@pytest.mark.parametrize("shape", [(3, 1, 1, 6), (1, 6), (2, 1, 6), (6,)])
def test_a_mask_takes_places_of_the_cache_away(shape):
    m = layer()
    mask = np.ones((3, 2, 6, 6), bool)
    mask[..., 1] = False
    whole = m(X, is_causal=True, mask=jnp.asarray(mask))
    m.init_cache(X.shape)
    for i in range(6):
        here = np.broadcast_to(mask[0, 0, 0], shape)
        y = m(X[:, i : i + 1], decode=True, mask=jnp.asarray(here))
        np.testing.assert_allclose(y, whole[:, i : i + 1], rtol=1e-4, atol=1e-5)


def test_a_step_past_the_cache_is_an_error_and_nan_where_it_cannot_be():
    # (the reference goes on, overwriting the last place)
    m = layer()
    m.init_cache((3, 2, 8))
    for i in range(2):
        m(X[:, i : i + 1], decode=True)
    kept = m.cached_key.value
    with pytest.raises(ValueError, match="cannot decode position 2: all 2 entries"):
        m(X[:, 2:3], decode=True)
    assert m.cached_key.value is kept and int(m.cache_index.value) == 2
    y = nnx.jit(lambda m, x: m(x, decode=True))(m, X[:, 2:3])
    assert jnp.isnan(y).all()


@pytest.mark.parametrize("transform", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_several_positions_in_one_decoding_step(transform):
    # (the reference takes one at a time)
    attend = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())
    step = transform(lambda m, x: m(x, decode=True))
    for m in (layer(), layer(attention_fn=attend)):
        whole = m(X, is_causal=True)
        m.init_cache(X.shape)
        parts = [step(m, X[:, a:b]) for a, b in ((0, 3), (3, 4), (4, 6))]
        y = jnp.concatenate(parts, axis=1)
        np.testing.assert_allclose(y, whole, rtol=1e-4, atol=1e-5)
        assert int(m.cache_index.value) == 6
    m.init_cache((3, 4, 8))
    step(m, X[:, :3])
    if transform is nnx.jit:
        assert jnp.isnan(step(m, X[:, 3:5])).all()
    else:
        with pytest.raises(ValueError, match="cannot decode position 4: 3 of 4 entries of its cac"):
            step(m, X[:, 3:5])


def test_positions_can_be_given_to_a_decoding_step():
    attend = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())
    m, free = layer(attention_fn=attend), layer(attention_fn=attend)
    m.init_cache(X.shape)
    free.init_cache(X.shape)
    for i in range(3):
        given = m(X[:, i : i + 1], decode=True, input_positions=jnp.array([i]))
        np.testing.assert_array_equal(given, free(X[:, i : i + 1], decode=True))
    other = m(X[:, 3:4], decode=True, input_positions=jnp.array([0]))
    assert (other != free(X[:, 3:4], decode=True)).any()


# Bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"dropout_rate": 0.5, "deterministic": True}])
def test_large_logits_of_half_precision_do_not_overflow(options):
    query = jnp.full((1, 2, 1, 4), 200, jnp.float16)  # logits of 80,000
    y = nnx.dot_product_attention(query, query, query, **options)
    assert y.dtype == jnp.float16 and (y == 200).all()


@pytest.mark.parametrize("options", [{}, {"dropout_rate": 0.5, "deterministic": True}])
def test_a_bias_of_minus_infinity_excludes_every_key_without_nan(options):
    x = jnp.asarray(normal(1, 2, 1, 4))

    def attend(x):
        bias = jnp.array([[0.0, -jnp.inf], [-jnp.inf, -jnp.inf]], x.dtype)
        return nnx.dot_product_attention(x, x, x, bias=bias, **options)

    np.testing.assert_allclose(attend(x)[0, :, 0], [x[0, 0, 0], x.mean((0, 1, 2))], rtol=1e-5)
    assert np.isfinite(jax.grad(lambda x: attend(x).sum())(x)).all()
    half = x.astype(jnp.float16)
    np.testing.assert_allclose(attend(half)[0, 1, 0], half.mean((0, 1, 2)), atol=2e-3)
