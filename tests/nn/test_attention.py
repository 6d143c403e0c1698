"""Attention: caches, modes and large numbers; values are in the catalogue."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn.quick import QUICK, normal

X = jnp.asarray(normal(3, 6, 8))
ROTATING = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())


def layer(*args, decode=False, **kwargs):
    options = {**QUICK, "rngs": nnx.Rngs(0), **kwargs}
    return nnx.MultiHeadAttention(*(args or (2, 8)), decode=decode, **options)


def test_an_implementation_is_passed_on_to_the_attention_function():
    fused, seen = layer(implementation="xla"), {}
    np.testing.assert_allclose(fused(X, is_causal=True), layer()(X, is_causal=True), atol=1e-5)
    with pytest.raises(ValueError, match="is fused, which excludes recording the weights"):
        fused(X, sow_weights=True)

    def own(query, key, value, **options):
        seen.update(options)
        return value

    layer(attention_fn=own)(X)
    assert not {"input_positions", "implementation"} & seen.keys()
    layer(attention_fn=own, implementation="cudnn")(X, input_positions=jnp.arange(6))
    assert seen["input_positions"].shape == (6,) and seen["implementation"] == "cudnn"


def test_metadata_goes_to_the_parameters():
    shared = layer(kernel_metadata={"of": "kernel"}, bias_metadata={"of": "bias"})
    assert shared.out.kernel.of == "kernel" and shared.out.bias.of == "bias"
    names = ("kernel", "out_kernel", "bias", "out_bias", "query_ln_scale", "key_ln_scale")
    m = layer(normalize_qk=True, **{f"{n}_metadata": {"of": n} for n in names})
    for part in ("query", "key", "value"):
        projection = getattr(m, part)
        assert (projection.kernel.of, projection.bias.of) == ("kernel", "bias")
    assert (m.out.kernel.of, m.out.bias.of) == ("out_kernel", "out_bias")
    assert (m.query_ln.scale.of, m.key_ln.scale.of) == ("query_ln_scale", "key_ln_scale")


def test_the_remedy_for_a_missing_mode_works():
    model = nnx.Dict(a=layer(decode=None))
    with pytest.raises(ValueError, match=r"with `model.set_attributes\(decode=False\)` or `nnx.v"):
        model.a(X)
    model.set_attributes(decode=False)
    assert model.a(X).shape == X.shape


def test_set_view_makes_a_cache_and_init_cache_empties_it():
    # (the reference accepts both sizes, and makes none)
    m = layer(dtype=jnp.bfloat16)
    m.set_view(decode=True, batch_size=np.int64(3), max_length=np.int64(6))
    assert m.decode and m.cached_key.shape == (3, 6, 2, 4) and m.cached_key.dtype == jnp.bfloat16
    first = m(X[:, :1])
    cache = m.cached_key
    m.set_view(batch_size=3, max_length=6)
    assert m.cached_key is cache
    m.set_view(batch_size=(2, 3), max_length=4)
    assert m.decode and m.cached_value.shape == (2, 3, 4, 2, 4)
    m.init_cache(X.shape)
    assert int(m.cache_index.value) == 0 and not m.cached_key.value.any()
    np.testing.assert_array_equal(m(X[:, :1]), first)


BF16, F32 = jnp.bfloat16, jnp.float32


@pytest.mark.parametrize(
    ("dtype", "parameters", "inputs", "cached"),
    [
        (None, F32, BF16, None),
        (None, BF16, F32, BF16),
        (BF16, F32, F32, F32),
        (BF16, BF16, BF16, None),
        (F32, BF16, BF16, None),
        (F32, F32, BF16, BF16),
    ],
)
def test_a_step_computes_in_the_dtype_of_a_call_without_a_cache(dtype, parameters, inputs, cached):
    m = layer(dtype=dtype, param_dtype=parameters, normalize_qk=True)
    x, step = X.astype(inputs), nnx.jit(lambda m, x: m(x))
    whole = nnx.jit(lambda m, x: m(x, is_causal=True))(m, x)
    m.set_view(decode=True, batch_size=3, max_length=6)
    assert m.cached_key.dtype == m.cached_value.dtype == (dtype or parameters)
    if cached is not None:
        m.init_cache(x.shape, cached)
    steps = jnp.concatenate([step(m, x[:, :4]), step(m, x[:, 4:])], axis=1)
    assert steps.dtype == whole.dtype
    assert m.cached_key.dtype == (cached or dtype or parameters)
    tolerance = 1e-5 if whole.dtype == m.cached_key.dtype == F32 else 0.05
    np.testing.assert_allclose(steps.astype(F32), whole.astype(F32), rtol=tolerance, atol=tolerance)


def test_a_mask_takes_places_of_the_cache_away():
    m, mask = layer(), jnp.array([True, False, True, True, True, True])
    whole = m(X, is_causal=True, mask=jnp.broadcast_to(mask, (3, 2, 6, 6)))
    for shape in ((3, 1, 1, 6), (2, 1, 6), (6,)):
        m.init_cache(X.shape)
        steps = [m(X[:, [i]], decode=True, mask=jnp.broadcast_to(mask, shape)) for i in range(6)]
        np.testing.assert_allclose(jnp.concatenate(steps, 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transform", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_several_positions_in_one_step_and_one_past_the_cache(transform):
    # (the reference takes one at a time, and goes on past the cache, overwriting the last place)
    step = transform(lambda m, x: m(x, decode=True))
    for m in (layer(), layer(attention_fn=ROTATING)):
        whole = m(X, is_causal=True)
        m.init_cache(X.shape)
        y = jnp.concatenate([step(m, X[:, a:b]) for a, b in ((0, 3), (3, 4), (4, 6))], axis=1)
        np.testing.assert_allclose(y, whole, rtol=1e-4, atol=1e-5)
        assert int(m.cache_index.value) == 6
        if transform is nnx.jit:
            assert jnp.isnan(step(m, X[:, :1])).all()
            continue
        kept = m.cached_key.value
        with pytest.raises(ValueError, match="cannot decode position 6: all 6 entries"):
            step(m, X[:, :1])
        assert m.cached_key.value is kept and int(m.cache_index.value) == 6
        m.init_cache((3, 4, 8))
        step(m, X[:, :3])
        with pytest.raises(ValueError, match="cannot decode position 4: 3 of 4 entries of its cac"):
            step(m, X[:, 3:5])


def test_positions_can_be_given():
    m, free = layer(attention_fn=ROTATING), layer(attention_fn=ROTATING)
    m.init_cache(X.shape)
    free.init_cache(X.shape)
    for i in range(3):
        given = m(X[:, i : i + 1], decode=True, input_positions=jnp.array([i]))
        np.testing.assert_array_equal(given, free(X[:, i : i + 1], decode=True))
    other = m(X[:, 3:4], decode=True, input_positions=jnp.array([0]))
    assert (other != free(X[:, 3:4], decode=True)).any()
    # (of several sequences the reference takes one row)
    rope, rows = nnx.RoPE(50.0), np.array([[3, 0, 9], [1, 1, 1], [8, 2, 0]])
    turned = rope(jnp.repeat(X[:, :3, None], 10, axis=2))
    expected = jnp.take_along_axis(turned, rows[..., None, None], axis=2)[:, :, 0]
    np.testing.assert_allclose(rope(X[:, :3], rows), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"dropout_rate": 0.5, "deterministic": True}])
def test_large_logits_and_biases_of_minus_infinity_are_no_problem(options):
    attend = functools.partial(nnx.dot_product_attention, **options)
    query = jnp.full((1, 2, 1, 4), 200, jnp.float16)  # logits of 80,000
    y = attend(query, query, query)
    assert y.dtype == jnp.float16 and (y == 200).all()
    x = jnp.asarray(normal(1, 2, 1, 4))

    @jax.jit
    def biased(x):
        bias = jnp.array([[0.0, -jnp.inf], [-jnp.inf, -jnp.inf]], x.dtype)
        return attend(x, x, x, bias=bias)

    np.testing.assert_allclose(biased(x)[0, :, 0], [x[0, 0, 0], x.mean((0, 1, 2))], rtol=1e-5)
    assert np.isfinite(jax.jit(jax.grad(lambda x: biased(x).sum()))(x)).all()
    half = x.astype(jnp.float16)
    np.testing.assert_allclose(biased(half)[0, 1, 0], half.mean((0, 1, 2)), atol=2e-3)
