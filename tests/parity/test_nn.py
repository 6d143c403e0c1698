"""Layers beside the reference: attributes, results, state and mistakes; random ones in `layer_fuzz`."""

from __future__ import annotations

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.nn import activations
from tests.nn.catalogue import LAYERS
from tests.nn.quick import QUICK, normal, quick
from tests.parity.layers import (
    OLDER,
    assert_equal_results,
    assert_equal_state,
    leaves,
    ref,
    static_attributes,
)
from tests.parity.programs import Lines, agree

F32, BF16, F16, I32 = jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32
KEY = jax.random.key(0)
X = jnp.asarray(normal(3, 6, 8))
CELLS = ["SimpleCell", "LSTMCell", "OptimizedLSTMCell", "GRUCell"]

pytestmark = [  # warnings of the reference
    pytest.mark.filterwarnings("ignore:keep_rngs argument is deprecated"),
    pytest.mark.filterwarnings("ignore:carry_init is provided in __init__"),
    pytest.mark.filterwarnings("ignore:Using 'Module.sow"),
    pytest.mark.filterwarnings("ignore:'.value' access"),
]
needs_newer = pytest.mark.skipif(OLDER, reason="the installed reference has no such thing yet")


def arrays(batch=(2,), kv_heads=4, dtype=F32):
    return (
        jnp.asarray(normal(*batch, 5, 4, 8, seed=1), dtype),
        jnp.asarray(normal(*batch, 7, kv_heads, 8, seed=2), dtype),
        jnp.asarray(normal(*batch, 7, kv_heads, 8, seed=3), dtype),
    )


def build(lib, *args, quick=True, **kwargs):
    options = {"decode": False, **(QUICK if quick else {}), **kwargs}
    return lib.MultiHeadAttention(*args, **options, rngs=lib.Rngs(0, params=1, dropout=2))


# Lines ------------------------------------------------------------------------------------------


def layers(lib):
    """Layers, inputs for them, and programs with parameters."""

    def ran(layer, x):
        """Results of two calls and the Variables; sizes as NumPy arrays are leaves there, not here."""
        found, state = [layer(x), layer(x)], lib.state(layer, lib.Variable)
        left = sorted(lib.to_flat_state(state), key=lambda item: str(item[0]))
        if lib is nnx:
            assert len(jax.tree.leaves(nnx.state(layer))) == len(left)
            nnx.graphdef(layer)
        return found, left

    def loaded(name, size, other):
        """A layer with the parameters of another size."""
        layer, wider = (getattr(lib, name)(*n, rngs=lib.Rngs(0)) for n in (size, other))
        lib.update(layer, lib.state(wider))
        if not name.endswith("Cell"):
            return layer(small)
        x = jnp.linspace(-1.0, 1.0, 2 * other[0]).reshape(2, -1)
        return layer(wider.initialize_carry(x.shape, lib.Rngs(0)), x)[1]

    def multi(*args, **options):
        return build(lib, *args, **options)

    def decodes_another_batch():
        layer = multi(2, 8)
        layer.init_cache(X.shape)
        return layer(X[:1, :1], decode=True)

    def viewed():
        layer = lib.MultiHeadAttention(2, 4, decode=True, deterministic=True, rngs=lib.Rngs(0))
        layer.init_cache((2, 3, 4))
        layer(jnp.ones((2, 1, 4)))
        view = lib.view(layer, decode=True, batch_size=2, max_length=3)
        view(jnp.ones((2, 1, 4)))
        return view.cached_key is layer.cached_key, int(layer.cache_index[...])

    def recorded():
        module = lib.Module()
        dropped = {"dropout_rate": 0.3, "dropout_rng": KEY}
        return lib.dot_product_attention(*arrays(), **dropped, module=module), lib.state(module)

    def cell(name="GRUCell", **options):
        some = {"kernel_init": quick, "recurrent_kernel_init": quick, "bias_init": quick}
        return getattr(lib, name)(3, 4, **some, **options, rngs=lib.Rngs(0, params=1))

    def drawn(both):
        """Keys that are given to a call, and how many are used."""
        cells = [cell("LSTMCell", carry_init=jax.random.normal) for _ in range(2)]
        layer = lib.Bidirectional(*map(lib.RNN, cells)) if both else lib.RNN(cells[0])
        given = tuple(jnp.asarray(normal(2, 4, seed=i)) for i in (5, 6))
        rngs, x = lib.Rngs(3, carry=4), jnp.asarray(normal(2, 5, 3))
        results = [layer(x, rngs=source) for source in (rngs, rngs.carry, lib.Rngs(5))]
        layer(x, rngs=rngs, initial_carry=(given, given) if both else given)
        return results, rngs, layer.rngs

    class Noisy(lib.RNNCellBase):
        num_feature_axes = 1

        def __init__(self):
            rngs = lib.Rngs(params=0, dropout=1)
            self.linear = lib.Linear(3, 3, kernel_init=quick, rngs=rngs)
            self.dropout = lib.Dropout(0.5, rngs=rngs)
            self.steps = lib.BatchStat(jnp.array(0))

        def initialize_carry(self, input_shape, rngs=None, carry_init=None):
            return jnp.zeros(input_shape)

        def __call__(self, carry, inputs):
            self.steps.set_value(self.steps.get_value() + 1)
            carry = self.dropout(jnp.tanh(self.linear(inputs)) + carry)
            return carry, carry

    small, data = jnp.asarray(normal(2, 3, 4)), jnp.asarray(normal(2, 4, 6))
    names = {k: v for k, v in locals().items() if callable(v) and k != "lib"}
    return names | {
        "r": lib.Rngs(0),
        "params": lib.Rngs(params=0),
        "x": data,
        "X": X,
        "ones": jnp.ones,
        "normal": jax.random.normal,
        "steps": jnp.asarray(normal(2, 5, 3)),
        "axes": lib.StateAxes({lib.Param: None, ...: lib.Carry}),
        "pair": lambda x: (x, x + 1),
        "named": lambda x: {"a": x, "b": 2},
        "take": lambda *args, **kwargs: (args, kwargs),
        "add": lambda x, b: x + b,
        "as_y": lambda x, b: {"y": x + b},
        "max": max,
        "chain": lib.Sequential,
        "array": np.array,
        "quick": {"kernel_init": quick},
    }


lines = Lines()
lines(
    "values",
    layers,
    """
    lib.Embed(3, 4, rngs=r)(array([0, -1, -7, 7, -8, 100]))
    ran(lib.Conv(6, 3, array([3]), strides=(np.int64(2),), **quick, rngs=r), x)
    ran(lib.Conv(6, 3, 3, array([2]), kernel_dilation=array([1]), **quick, rngs=r), x)
    ran(lib.ConvTranspose(6, 3, array([3]), array([2]), **quick, rngs=r), x)
    ran(lib.LinearGeneral(array([4, 6]), array([3]), axis=(1, 2), **quick, rngs=r), x)
    ran(lib.LinearGeneral((4, 6), 3, axis=array([1, 2]), **quick, rngs=r), x)
    ran(lib.Einsum('abc,cd->abd', array([6, 3]), array([3]), **quick, rngs=r), x)
    ran(lib.LayerNorm(24, reduction_axes=array([1, 2]), feature_axes=array([1, 2]), rngs=r), x)
    lib.avg_pool(x, (2,), padding=array([[1, 1]]))
    lib.LayerNorm(3, use_scale=False, use_bias=False, rngs=r)(x)
    lib.InstanceNorm(3, use_scale=False, use_bias=False, rngs=r)(x)
    lib.RMSNorm(3, use_scale=False, rngs=r)(x)
    loaded('BatchNorm', (2,), (4,))
    loaded('LayerNorm', (2,), (4,))
    loaded('RMSNorm', (2,), (4,))
    loaded('InstanceNorm', (2,), (4,))
    lib.initializers.zeros_init()(jax.random.key(0), (2, 3), jnp.float32)
    lib.initializers.ones_init()(jax.random.key(0), (2, 3), jnp.float32)
    recorded()
    viewed()
    ran(lib.RNN(Noisy()), steps)
    ran(lib.RNN(Noisy(), broadcast_rngs='dropout'), steps)
    ran(lib.RNN(Noisy(), broadcast_rngs=True), steps)
    ran(lib.RNN(Noisy(), state_axes=axes), steps)
    drawn(False)
    drawn(True)
    ran(lib.RNN(cell('SimpleCell', residual=True, activation_fn=lib.relu)), steps)
    ran(lib.RNN(cell('LSTMCell', gate_fn=jax.nn.hard_sigmoid, activation_fn=jnp.sin)), steps)
    ran(lib.RNN(cell('LSTMCell', kernel_metadata={'a': 1}, recurrent_kernel_metadata={'b': 2}, bias_metadata={'c': 3})), steps)
    ran(lib.RNN(cell(keep_rngs=True, carry_init=normal), rngs=False), steps)
    lib.RNN(cell(), reverse=True, keep_order=True, return_carry=True)(steps, seq_lengths=array([5, 2]))
    lib.Bidirectional(lib.RNN(cell()), lib.RNN(cell()), merge_fn=jnp.add, time_major=True, return_carry=True)(steps)
    cell().initialize_carry((2, 3), lib.Rngs(carry=3), normal)
    ran(lib.WeightNorm(lib.Linear(6, 3, **quick, rngs=r), use_scale=False, rngs=r), x)
    ran(lib.SpectralNorm(lib.Linear(6, 3, **quick, rngs=r), n_steps=0, rngs=r), x)
    ran(lib.LayerNorm(6, scale_init=normal, bias_init=normal, scale_metadata={'a': 1}, bias_metadata={'b': 2}, rngs=r), x)
    ran(lib.Linear(6, 3, bias_init=normal, promote_dtype=lambda a, *, dtype=None: tuple(a), rngs=r), x)
    ran(lib.Dropout(0.5, broadcast_dims=(0, -1), rngs=r), x)
    lib.Embed(1, 3, rngs=r)(array([0, 5]))
    multi(2, 8, out_kernel_init=lib.initializers.ones, out_bias_init=normal)(X)
    multi(2, 8, dropout_rate=0.5, keep_rngs=False)(X, deterministic=False, rngs=lib.Rngs(dropout=7))
    """,
)
for _name in CELLS:
    for _size in ((4, 3), (2, 5), (4, 5)):
        lines("values", layers, f"loaded({_name!r}, (2, 3), {_size})")
lines(
    "sequential",
    layers,
    """
    chain()()
    chain()(1)  # newer
    chain()(1, 2)  # newer
    chain()(b=2)  # newer
    chain(pair, lambda x, y: x * y)(3)
    chain(named, take)(1)
    chain(lambda x: [x, 2], take)(1)  # newer
    chain(lambda x: (), take)(1)  # newer
    chain(lambda x: {}, take)(1)  # newer
    chain(lambda x: None, take)(1)
    chain(take, take)(1, 2, z=3)  # newer
    chain(add, lambda x: x * 2)(1, b=2)
    chain(as_y, take)(1, b=2)  # newer
    chain(lambda x: x)(1, unused=2)  # newer
    chain(max, take)(1, 2, extra=3)  # newer
    chain(lambda x: x, lambda x, *, rngs: (x, rngs), take)(1, rngs=5)  # newer
    """,
)
lines(
    "mistakes",
    layers,
    """
    lib.Dropout(0.5, deterministic=None, rngs=r)(x)
    lib.Dropout(0.5)(x)
    lib.Dropout(0.5, rngs=params)
    lib.BatchNorm(6, use_running_average=None, rngs=r)(x)
    lib.MultiHeadAttention(2, 6, rngs=r)(x)
    lib.MultiHeadAttention(2, 6, decode=True, rngs=r)(x[:, :1])
    lib.MultiHeadAttention(2, 6, decode=False, rngs=r)(x[..., :4])
    lib.MultiHeadAttention(2, 6, decode=False, rngs=r)(x, None, x)
    lib.MultiHeadAttention(4, 6, rngs=r)
    lib.MultiHeadAttention(2, 4, dropout_rate=0.5, rngs=params)
    multi(3, 8)
    multi(2, 8, dropout_rate=0.5)(X)
    multi(2, 8)(X[:, :1], decode=True)
    decodes_another_batch()
    lib.Embed(3, 2, rngs=r)(x)
    lib.GroupNorm(6, 2, 3, rngs=r)
    lib.GroupNorm(6, 4, rngs=r)
    lib.GroupNorm(6, None, rngs=r)
    lib.GroupNorm(6, None, 4, rngs=r)
    lib.GroupNorm(6, 2, rngs=r)(ones((3, 7)))
    lib.LayerNorm(6, rngs=r)(ones((3, 7)))
    lib.InstanceNorm(6, feature_axes=0, rngs=r)(ones((6, 3)))
    lib.Conv(6, 3, 3, mask=ones((3, 6)), rngs=r)(x)
    lib.Conv(6, 3, 3, padding=(1, 2), rngs=r)(x)
    lib.Conv(6, 3, (3, 3), padding='CAUSAL', rngs=r)(x)
    lib.LinearGeneral((4, 6), 3, rngs=r)
    lib.LinearGeneral(6, 3, batch_axis={1: 4}, rngs=r)
    lib.Einsum('ab,bc', (6, 3), rngs=r)
    lib.Einsum('ab,bc,cd->ad', (6, 3), rngs=r)
    lib.RNN(lib.GRUCell(6, 2, carry_init=normal, rngs=r), rngs=False)(x)
    lib.RNN(cell(), rngs=params)
    lib.RNN(cell())(steps, rngs=params)
    lib.GRUCell(3, 4, keep_rngs=True, **quick, rngs=params)
    cell().initialize_carry((2, 3), params)
    lib.combine_masks(ones((2, 2)), ones(2))
    lib.combine_masks(ones(2), ones((1, 2)))
    """,
)


@pytest.mark.parametrize("scope, line, mode", lines.params)
def test_line(scope, line, mode):
    agree(scope, line, mode)


# Attributes, names and dtypes -------------------------------------------------------------------


def is_static(value):
    """Whether both libraries have a value: it is neither data nor of the reference."""
    module = getattr(value, "__module__", None) or type(value).__module__
    data = isinstance(value, (ref.Variable, ref.Pytree, dict))
    return not data and not module.startswith("flax")


IN_BOTH = [name for name in LAYERS if hasattr(ref, name.partition(",")[0])]


@pytest.mark.parametrize("name", IN_BOTH)
def test_a_layer_is_that_of_the_reference(name):
    """State bit for bit, attributes and results of the layers of the catalogue."""
    row = LAYERS[name]
    ours, theirs = row.make(nnx.Rngs(0)), row.make(ref.Rngs(0), ref)
    assert_equal_state(ours, theirs)
    for attribute, value in vars(theirs).items():
        if not attribute.startswith("_") and is_static(value):
            assert getattr(ours, attribute) == value, attribute
    assert_equal_results(row.run(ours, row.x), row.run(theirs, row.x), 8)


def test_initializers_are_those_of_the_reference():
    for name in dir(ref.initializers):
        made = getattr(ref.initializers, name)
        if inspect.isfunction(made) and not name.startswith("_"):
            ours = getattr(nnx.initializers, name)
            assert inspect.signature(ours).parameters.keys() == (
                inspect.signature(made).parameters.keys()
            )


def test_activations_are_those_of_the_reference():
    for name in (n for n in vars(activations) if n[0].islower()):
        assert getattr(nnx, name) is getattr(ref, name)


PROMOTIONS = [
    ((jnp.ones(2), jnp.ones(2, BF16)), {}),
    ((jnp.ones(2, I32), None), {}),
    ((jnp.ones(2, I32), jnp.ones(2, I32)), {"inexact": False}),
    ((jnp.ones(2, BF16), 2.0), {}),
    ((1, 2), {}),
    ((np.ones(2), jnp.ones(2, BF16)), {}),
    ((jnp.ones(2), jnp.ones(2)), {"dtype": F16}),
    ((jnp.asarray(1.0), jnp.ones(2)), {"dtype": "bfloat16"}),
    ((jnp.ones(2, bool),), {}),
    ((jnp.ones(2, jnp.complex64), jnp.ones(2)), {}),
    ([jnp.ones(2), jnp.ones(2)], {}),
]


@pytest.mark.parametrize(("args", "options"), PROMOTIONS)
def test_dtypes_promote_as_in_the_reference(args, options):
    from flax.nnx.nn import dtypes as their_dtypes

    from nnxlite.nn import dtypes

    ours = dtypes.promote_dtype(args, **options)
    theirs = their_dtypes.promote_dtype(args, **options)
    assert type(ours) is type(theirs) is tuple
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (type(a), a.dtype, a.weak_type) == (type(b), b.dtype, b.weak_type)
    assert jnp.dtype(dtypes.canonicalize_dtype(*args, **options)) == jnp.dtype(
        their_dtypes.canonicalize_dtype(*args, **options)
    )


# Normalisation and recurrence -------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types")  # of the reference
def test_statistics_keep_their_dtype_as_in_the_reference():
    x = normal(4, 6).astype(np.float64)
    with jax.enable_x64(True):
        ours, theirs = (lib.BatchNorm(6, rngs=lib.Rngs(0)) for lib in (nnx, ref))
        for layer in (ours, theirs):
            assert layer(x).dtype == np.float64
            assert layer.mean.dtype == layer.var.dtype == F32
        np.testing.assert_allclose(ours.var.get_value(), theirs.var.get_value(), rtol=1e-6)


MASKED = {
    "BatchNorm": ((4,), {}),
    "LayerNorm": ((4,), {}),
    "RMSNorm": ((4,), {}),
    "GroupNorm": ((4, 2), {}),
    "InstanceNorm": ((4,), {"use_fast_variance": False}),
}


@pytest.mark.parametrize("name", MASKED)
def test_masked_results_are_those_of_the_reference_bit_for_bit(name):
    """Masks of all shapes that the reference takes, also traced: the programs are the same."""
    args, options = MASKED[name]
    ours = getattr(nnx, name)(*args, **options, rngs=nnx.Rngs(0))
    theirs = getattr(ref, name)(*args, **options, rngs=ref.Rngs(0))
    x, full = jnp.asarray(normal(2, 3, 4)), normal(2, 3, 4, seed=1) < 0.5
    full[..., 0] = True
    for sizes in itertools.product((True, False), (True, False), (True, False)):
        mask = full[tuple(slice(None) if whole else slice(1) for whole in sizes)]
        if name == "GroupNorm" and mask.shape[-1] == 1:
            continue  # of which the reference cannot make groups
        for keep in (mask, mask[0], mask[0, 0]):
            y, z = ours(x, mask=jnp.asarray(keep)), theirs(x, mask=jnp.asarray(keep))
            assert np.isfinite(y).all()
            np.testing.assert_array_equal(y, np.where(np.isnan(z), y, z))  # NaN: of no elements
    for a, b in zip(jax.tree.leaves(nnx.state(ours)), jax.tree.leaves(ref.state(theirs))):
        np.testing.assert_array_equal(a, np.where(np.isnan(b), a, b))


@pytest.mark.parametrize("options", [{}, {"param_dtype": jnp.complex64}], ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_starts_as_the_reference_in_every_precision(name, wide, options):
    with jax.enable_x64(wide):
        options = {"kernel_init": quick, **options}
        ours, theirs = (getattr(lib, name)(3, 4, **options, rngs=lib.Rngs(0)) for lib in (nnx, ref))
        assert_equal_state(ours, theirs)


# Attention --------------------------------------------------------------------------------------


def random_mask(*shape):
    return jnp.asarray(np.random.default_rng(4).random(shape) < 0.6)


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


@needs_newer
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


DECODING = {
    "plain": ((2, 8), {}),
    "other sizes": ((4, 8, 16, 10), {"use_bias": False}),
    "grouped": ((4, 8, 16), {"num_kv_heads": 2}),
    "multi-query": ((4, 8), {"num_kv_heads": 1, "normalize_qk": True}),
    "normalised": ((2, 8), {"normalize_qk": True}),
    "bfloat16": ((2, 8), {"dtype": BF16}),
    "half parameters": ((2, 8), {"param_dtype": F16}),
}


@pytest.mark.parametrize(("args", "kwargs"), DECODING.values(), ids=DECODING)
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
