"""Layers beside the reference: attributes, results, state and mistakes; random ones in `layer_fuzz`."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.nn import activations
from tests.nn.catalogue import LAYERS
from tests.nn.quick import normal, quick
from tests.parity.fuzz.observe import difference
from tests.parity.layers import ref
from tests.parity.programs import Lines, Plain

BF16 = jnp.bfloat16
KEY = jax.random.key(0)
X = jnp.asarray(normal(3, 6, 8))
CELLS = ["SimpleCell", "LSTMCell", "OptimizedLSTMCell", "GRUCell"]

pytestmark = [  # warnings of the reference
    pytest.mark.filterwarnings("ignore:keep_rngs argument is deprecated"),
    pytest.mark.filterwarnings("ignore:carry_init is provided in __init__"),
    pytest.mark.filterwarnings("ignore:Using 'Module.sow"),
    pytest.mark.filterwarnings("ignore:'.value' access"),
    pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types"),
]


def arrays(kv_heads=4):
    shapes = (2, 5, 4, 8), (2, 7, kv_heads, 8), (2, 7, kv_heads, 8)
    return [jnp.asarray(normal(*shape, seed=i)) for i, shape in enumerate(shapes, 1)]


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

    def recorded(attend, *inputs, **options):
        module, dropped = lib.Module(), {"dropout_rate": 0.3, "dropout_rng": KEY}
        return attend(*inputs, **dropped, module=module, **options), lib.state(module)

    def given():
        """What an attention function is called with."""
        seen = []

        def attend(query, key, value, **options):
            seen.append({k: v for k, v in options.items() if k not in ("module", "implementation")})
            return value

        options = {"decode": False, "attention_fn": attend, "rngs": lib.Rngs(0)}
        lib.MultiHeadAttention(2, 8, **options)(X, mask=None, is_causal=True)
        return seen

    def wide(call):
        with jax.enable_x64(True):
            return call()

    def promoted(*args, **options):
        found = lib.nn.dtypes.promote_dtype(args, **options)
        kinds = [x is not None and (type(x).__name__, str(x.dtype), x.weak_type) for x in found]
        dtype = lib.nn.dtypes.canonicalize_dtype(*args, **options)
        return type(found), kinds, str(jnp.dtype(dtype))

    def cell(name="GRUCell", **options):
        some = {"kernel_init": quick, "recurrent_kernel_init": quick, "bias_init": quick}
        return getattr(lib, name)(3, 4, **some, **options, rngs=lib.Rngs(0, params=1))

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

    names = {k: v for k, v in locals().items() if callable(v) and k != "lib"}
    return names | {
        "r": lib.Rngs(0),
        "params": lib.Rngs(params=0),
        "x": jnp.asarray(normal(2, 4, 6)),
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
        "arrays": arrays,
        "BF16": BF16,
        "CELLS": CELLS,
    }


lines = Lines()
lines(
    "promotion",
    layers,
    """
    promoted(ones(2), ones(2, BF16))
    promoted(ones(2, int), None)
    promoted(ones(2, int), ones(2, int), inexact=False)
    promoted(ones(2, BF16), 2.0)
    promoted(1, 2)
    promoted(np.ones(2), ones(2, BF16))
    promoted(ones(2), ones(2), dtype=jnp.float16)
    promoted(jnp.asarray(1.0), ones(2), dtype='bfloat16')
    promoted(ones(2, bool))
    promoted(ones(2, jnp.complex64), ones(2))
    """,
)
lines(
    "values",
    layers,
    """
    lib.Embed(3, 4, rngs=r)(array([0, -1, -7, 7, -8, 100]))
    ran(lib.Conv(6, 3, array([3]), strides=(np.int64(2),), **quick, rngs=r), x)
    lib.Conv(6, 3, 3, input_dilation=2, use_bias=False, conv_general_dilated=lambda x, *_, **__: x, rngs=r)(x)
    ran(lib.LinearGeneral(array([4, 6]), array([3]), axis=(1, 2), **quick, rngs=r), x)
    ran(lib.Einsum('abc,cd->abd', array([6, 3]), array([3]), **quick, rngs=r), x)
    ran(lib.LayerNorm(24, reduction_axes=array([1, 2]), feature_axes=array([1, 2]), rngs=r), x)
    lib.avg_pool(x, (2,), padding=array([[1, 1]]))
    recorded(lib.dot_product_attention, *arrays())
    recorded(lib.nn.attention.dot_product_attention_weights, *arrays()[:2])  # newer
    [lib.nn.attention.dot_product_attention_weights(*arrays(kv_heads=n)[:2], is_causal=True) for n in (1, 2)]  # newer
    given()  # newer
    [lib.RoPE(*a)(X[..., None, :], *p) for a in ((), (100.0,), (10000.0, 8, 9)) for p in ((), (jnp.asarray([5, 1, 0, 2, 9, 9]),))]  # newer
    lib.RoPE()(X[..., None, :].astype(BF16)), {k: v for k, v in vars(lib.RoPE(100.0)).items() if k[0] != '_'}  # newer
    wide(lambda: [lib.RoPE(*a)(np.asarray(X[..., None, :], np.float64)) for a in ((), (10000.0, 8, 9))])  # newer
    lib.dot_product_attention_with_rope(*arrays(), rope=lib.RoPE(), is_causal=True)  # newer
    wide(lambda: ran(lib.BatchNorm(6, rngs=lib.Rngs(0)), np.asarray(x, np.float64)))
    wide(lambda: [cell(name, **o) for name in CELLS for o in ({}, {'param_dtype': jnp.complex64})])
    ran(lib.RNN(Noisy()), steps)
    ran(lib.RNN(Noisy(), broadcast_rngs='dropout'), steps)
    ran(lib.RNN(Noisy(), broadcast_rngs=True), steps)
    ran(lib.RNN(Noisy(), state_axes=axes), steps)
    """,
)
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
    lib.Dropout(0.5, rngs=params)
    lib.MultiHeadAttention(2, 4, dropout_rate=0.5, rngs=params)
    lib.nn.attention.dot_product_attention_weights(arrays()[0], arrays()[1][..., :3])
    lib.nn.attention.dot_product_attention_weights(arrays()[0], arrays()[1][0])
    lib.GroupNorm(6, 2, rngs=r)(ones((3, 7)))
    lib.LayerNorm(6, rngs=r)(ones((3, 7)))
    lib.Conv(6, 3, 3, padding=(1, 2), rngs=r)(x)
    lib.Einsum('ab,bc,cd->ad', (6, 3), rngs=r)
    lib.RNN(lib.GRUCell(6, 2, carry_init=normal, rngs=r), rngs=False)(x)
    lib.RNN(cell(), rngs=params)
    lib.RNN(cell())(steps, rngs=params)
    lib.GRUCell(3, 4, keep_rngs=True, **quick, rngs=params)
    cell().initialize_carry((2, 3), params)
    lib.combine_masks(ones((2, 2)), ones(2))
    """,
)


test_line = lines.test()


def is_static(value):
    """Whether both libraries have a value: it is neither data nor of the reference."""
    module = getattr(value, "__module__", None) or type(value).__module__
    data = isinstance(value, (ref.Variable, ref.Pytree, dict))
    return not data and not module.startswith("flax")


IN_BOTH = [name for name in LAYERS if hasattr(ref, name.partition(",")[0])]


@pytest.mark.parametrize("name", IN_BOTH)
def test_a_layer_is_that_of_the_reference(name):
    """State bit for bit, attributes and results of the layers of the catalogue."""
    row, libs = LAYERS[name], (nnx, ref)
    ours, theirs = made = [row.make(lib.Rngs(0), lib) for lib in libs]
    exactly = lambda a, b: a.dtype == b.dtype and np.array_equal(a, b)
    states = [Plain(lib)(lib.state(layer)) for lib, layer in zip(libs, made)]
    assert difference(*states, close=exactly) is None
    for attribute, value in vars(theirs).items():
        if not attribute.startswith("_") and is_static(value):
            assert getattr(ours, attribute) == value, attribute
    results = [Plain(lib)(row.run(layer, row.x)) for lib, layer in zip(libs, made)]
    assert difference(*results) is None


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
