"""Parity of attention with the reference: functions, layer, dropout, cache."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn.quick import QUICK, normal
from tests.parity.layers import (
    OLDER,
    assert_equal_results,
    assert_equal_state,
    leaves,
    ref,
    static_attributes,
)

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
KEY = jax.random.key(0)
X = jnp.asarray(normal(3, 6, 8))
needs_newer = pytest.mark.skipif(OLDER, reason="the installed reference has no such thing yet")


def random_mask(*shape):
    return jnp.asarray(np.random.default_rng(4).random(shape) < 0.6)


def arrays(batch=(2,), kv_heads=4, dtype=F32):
    return (
        jnp.asarray(normal(*batch, 5, 4, 8, seed=1), dtype),
        jnp.asarray(normal(*batch, 7, kv_heads, 8, seed=2), dtype),
        jnp.asarray(normal(*batch, 7, kv_heads, 8, seed=3), dtype),
    )


DROP = {"dropout_rate": 0.3, "dropout_rng": KEY}
OPTIONS = {
    "nothing": {},
    "bias": {"bias": jnp.asarray(normal(2, 1, 5, 7))},
    "mask": {"mask": random_mask(2, 4, 5, 7)},
    "causal": {"is_causal": True},
    "all": {"bias": jnp.asarray(normal(1, 4, 5, 1)), "mask": random_mask(5, 7), "is_causal": True},
    "dropout": DROP,
    "dropout apart": {**DROP, "broadcast_dropout": False, "mask": random_mask(2, 1, 5, 7)},
    "deterministic": {**DROP, "deterministic": True},
    "dtype": {"dtype": BF16},
}


@needs_newer
@pytest.mark.filterwarnings("ignore:Using 'Module.sow")  # of the reference
def test_weights_alone_are_those_of_the_reference():
    results = []
    for lib in (nnx, ref):
        weights, found = lib.nn.attention.dot_product_attention_weights, []
        for shapes in ({}, {"batch": ()}, {"kv_heads": 2}, {"batch": (2, 3)}, {"dtype": BF16}):
            query, key, _ = arrays(**shapes)
            found.append(weights(query, key, is_causal=True))
        query, key, _ = arrays()
        found.extend(weights(query, key, **options) for options in OPTIONS.values())
        module = lib.Module()
        weights(query, key, **DROP, module=module)
        results.append((found, lib.state(module)["attention_weights"].get_value()))
        for bad, message in ((key[..., :3], "depth"), (key[0], "number of dimensions|same rank")):
            with pytest.raises(ValueError, match=message):
                weights(query, bad)
    assert_equal_results(*results)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")  # of the reference
def test_recorded_weights_are_those_of_the_reference():
    weights = []
    for lib in (nnx, ref):
        module = lib.Module()
        lib.dot_product_attention(*arrays(), **DROP, module=module)
        weights.append(lib.state(module)["attention_weights"].get_value())
    assert len(weights[0]) == len(weights[1]) == 1
    assert_equal_results(*weights)


@needs_newer
@pytest.mark.filterwarnings("ignore:'.value' access")  # inside the reference
def test_rotary_positions_are_those_of_the_reference():
    for args in ((), (100.0,), (10000.0, 8, 9)):
        ours, theirs = nnx.RoPE(*args), ref.RoPE(*args)
        assert static_attributes(nnx, ours) == static_attributes(ref, theirs)
        assert_equal_state(ours, theirs)
        for dtype in (F32, BF16):
            x = jnp.asarray(normal(2, 3, 6, 8), dtype)
            assert_equal_results(ours(x), theirs(x))
            positions = jnp.asarray([5, 1, 0, 2, 9, 9])
            assert_equal_results(ours(x, positions), theirs(x, positions), 5)
    results = [
        lib.dot_product_attention_with_rope(*arrays(), rope=lib.RoPE(), is_causal=True)
        for lib in (nnx, ref)
    ]
    assert_equal_results(*results)


@needs_newer
@pytest.mark.filterwarnings("ignore:'.value' access")  # inside the reference
@pytest.mark.parametrize("args", [(), (10000.0, 8, 9)], ids=str)
def test_rotary_positions_need_no_promotion(args):
    with jax.numpy_rank_promotion("raise"):
        ours, theirs = nnx.RoPE(*args), ref.RoPE(*args)
        for x in (X, X[0], X[None]):
            assert_equal_results(ours(x), theirs(x))
            assert_equal_results(ours(x, jnp.arange(6)), theirs(x, jnp.arange(6)))
    with jax.enable_x64(True):
        ours, theirs = nnx.RoPE(*args), ref.RoPE(*args)
        assert_equal_state(ours, theirs)
        x = np.asarray(X, np.float64)
        for positions in (None, np.arange(6)):
            np.testing.assert_allclose(ours(x, positions), theirs(x, positions), rtol=1e-12)
        assert ours(X).dtype == F32


# The layer --------------------------------------------------------------------------------------

LAYERS = {
    "plain": ((2, 8), {}),
    "other sizes": ((4, 8, 16, 10), {"use_bias": False}),
    "grouped": ((4, 8, 16), {"num_kv_heads": 2}),
    "multi-query": ((4, 8), {"num_kv_heads": 1, "normalize_qk": True}),
    "normalised": ((2, 8), {"normalize_qk": True}),
    "bfloat16": ((2, 8), {"dtype": BF16}),
    "half parameters": ((2, 8), {"param_dtype": F16}),
}


def build(lib, *args, quick=True, **kwargs):
    options = {"decode": False, **(QUICK if quick else {}), **kwargs}
    return lib.MultiHeadAttention(*args, **options, rngs=lib.Rngs(0, params=1, dropout=2))


@pytest.mark.parametrize(("args", "kwargs"), LAYERS.values(), ids=LAYERS)
def test_decoding_is_that_of_the_reference(args, kwargs):
    ours, theirs = (build(lib, *args, **kwargs) for lib in (nnx, ref))
    steps = []
    for lib, layer in ((nnx, ours), (ref, theirs)):
        layer.init_cache(X.shape, kwargs.get("dtype", F32))
        step = lib.jit(lambda layer, x: layer(x, decode=True))
        steps.append([step(layer, X[:, i : i + 1]) for i in range(X.shape[1])])
    assert_equal_results(*steps, 5)
    assert [leaf[:2] for leaf in leaves(nnx, nnx.state(ours))] == [
        leaf[:2] for leaf in leaves(ref, ref.state(theirs))
    ]
    assert_equal_results(
        [v for _, _, v in leaves(nnx, nnx.state(ours, nnx.Cache)) if v.ndim],
        [v for _, _, v in leaves(ref, ref.state(theirs, ref.Cache)) if v.ndim],
        5,
    )


def test_where_the_reference_decodes_wrongly_we_do_not():
    # A step has one query, so a causal mask over (query, key) leaves it the first key alone.  Earlier
    # releases of the reference apply that mask on top of the cache's own.
    ours, theirs = (build(lib, 2, 8) for lib in (nnx, ref))
    wanted = ours(X, is_causal=True)
    wrong = 0.0
    for layer in (ours, theirs):
        layer.init_cache(X.shape)
    for i in range(3):
        x = X[:, i : i + 1]
        y = ours(x, decode=True, is_causal=True)
        np.testing.assert_allclose(y, wanted[:, i : i + 1], rtol=1e-4, atol=1e-5)
        wrong = max(wrong, float(jnp.abs(theirs(x, decode=True, is_causal=True) - y).max()))
    assert (wrong > 1e-2) == OLDER


def test_bad_input_raises_what_the_reference_raises():
    def decode_nothing(lib):
        build(lib, 2, 8)(X[:, :1], decode=True)

    def of_another_batch(lib):
        layer = build(lib, 2, 8)
        layer.init_cache(X.shape)
        layer(X[:1, :1], decode=True)

    for bad in (
        lambda lib: build(lib, 3, 8),
        lambda lib: build(lib, 2, 8)(X[..., :7]),
        lambda lib: build(lib, 2, 8)(X, None, X),
        lambda lib: build(lib, 2, 8, decode=None)(X),
        lambda lib: build(lib, 2, 8, dropout_rate=0.5)(X),
        lambda lib: lib.combine_masks(jnp.ones(2), jnp.ones((1, 2))),
        decode_nothing,
        of_another_batch,
    ):
        kinds = []
        for lib in (nnx, ref):
            with pytest.raises((ValueError, TypeError)) as caught:
                bad(lib)
            kinds.append(caught.type)
        assert kinds[0] is kinds[1]


def test_an_attention_function_gets_the_arguments_of_the_reference():
    seen = {}

    def attend(query, key, value, *, lib, **options):
        seen[lib.__name__] = {k: v for k, v in options.items() if k != "module"}
        return value

    for lib in (nnx, ref):
        layer = build(lib, 2, 8, attention_fn=functools.partial(attend, lib=lib))
        layer(X, mask=None, is_causal=True)
    ours, theirs = seen.values()
    assert {name: ours[name] for name in theirs} == theirs


def test_a_view_for_decoding_shares_the_cache_that_fits():
    indices = []
    for lib in (nnx, ref):
        layer = lib.MultiHeadAttention(2, 4, decode=True, deterministic=True, rngs=lib.Rngs(0))
        layer.init_cache((2, 3, 4))
        layer(jnp.ones((2, 1, 4)))
        view = lib.view(layer, decode=True, batch_size=2, max_length=3)
        view(jnp.ones((2, 1, 4)))
        assert view.cached_key is layer.cached_key
        indices.append(int(layer.cache_index[...]))
    assert indices == [2, 2]
