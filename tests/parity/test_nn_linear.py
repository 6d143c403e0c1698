"""Parity of the linear, convolutional, embedding, low-rank and dropout layers with the reference.

Each case builds a layer of one name in both libraries from one seed and compares initial parameters
(bit for bit), paths, kinds and static attributes, then the programs of forward pass and gradients.
Where both libraries trace to the very same program it need not be run; else results are compared.
"""

from __future__ import annotations

import inspect
import re
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn.quick import QUICK, quick
from tests.parity.layers import (
    OLDER,
    assert_equal_state,
    assert_same_programs,
    leaves,
    ref,
)

F32, BF16, F16, I32 = jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32
NORMAL = jax.nn.initializers.normal(1.0)


class Case(tp.NamedTuple):
    layer: str
    args: tuple[tp.Any, ...]
    kwargs: dict[str, tp.Any]
    shape: tuple[int, ...]
    x: tp.Any


def case(layer, *args, shape, x=F32, **kwargs):
    label = [layer, *map(str, args), *(f"{k}={_short(v)}" for k, v in kwargs.items())]
    text = " ".join([*label, str(shape), jnp.dtype(x).name])
    return pytest.param(Case(layer, args, kwargs, shape, x), id=text)


def _short(value):
    shape = getattr(value, "shape", None)
    return f"array{shape}" if shape is not None else getattr(value, "__name__", value)


def mask(*shape):
    return jnp.asarray(np.random.default_rng(1).integers(0, 2, shape), F32)


BATCHES = [(), (2,), (2, 5), (2, 1, 3)]
DTYPES = [
    {"x": BF16},
    {"x": F16},
    {"x": I32},
    {"x": BF16, "param_dtype": BF16},
    {"x": F16, "param_dtype": BF16},
    {"dtype": BF16},
    {"dtype": F16, "param_dtype": F16, "x": F16},
    {"dtype": BF16, "preferred_element_type": F32},
    {"precision": "highest"},
    {"kernel_init": NORMAL, "bias_init": NORMAL},
]
NO_BIAS = {"use_bias": False}

LINEAR = [
    *[case("Linear", 3, 4, shape=(*b, 3)) for b in BATCHES],
    *[case("Linear", 5, 7, shape=(3, 5), **d) for d in [*DTYPES, NO_BIAS]],
    case("Linear", 1, 1, shape=(1,)),
]

PAIR = {"axis": (1, -1), "shape": (2, 3, 7, 5)}
BATCHED = {"axis": (2, 4), "batch_axis": {0: 2, 1: 3}, "shape": (2, 3, 3, 6, 5)}
GENERAL = [
    *[case("LinearGeneral", 3, (4, 2), shape=(*b, 3)) for b in BATCHES],
    *[case("LinearGeneral", (3, 2), 5, axis=(-2, -1), shape=(*b, 3, 2)) for b in BATCHES],
    *[case("LinearGeneral", (3, 5), (4, 2), **PAIR, **d) for d in [*DTYPES, NO_BIAS]],
    case("LinearGeneral", 3, 4, axis=0, shape=(3, 7)),
    case("LinearGeneral", (2, 3), 4, axis=(-1, 0), shape=(2, 5, 3)),
    case("LinearGeneral", 3, 4, batch_axis={0: 2}, shape=(2, 5, 3), kernel_init=NORMAL),
    case("LinearGeneral", (3, 5), (4, 2), **BATCHED, bias_init=NORMAL),
    case("LinearGeneral", 3, 4, axis=1, batch_axis={0: 2}, use_bias=False, shape=(2, 3, 7)),
]

HEADS = ("Einsum", "nta,hab->nthb", (3, 4, 5), (3, 5))
ANY = ("Einsum", "...a,hab->...hb", (3, 4, 5), (3, 5))
EINSUM = [
    *[case(*HEADS, shape=(2, 6, 4), **d) for d in DTYPES],
    *[case(*ANY, shape=(*b, 4), bias_init=NORMAL) for b in BATCHES],
    case(*HEADS[:3], shape=(2, 6, 4)),
    case(*HEADS[:3], (3, 1, 5), bias_init=NORMAL, shape=(2, 6, 4)),
    case("Einsum", "nta, hab -> nbth", (3, 4, 5), (5, 3), bias_init=NORMAL, shape=(2, 6, 4)),
    case("Einsum", "ab,ab->b", (3, 4), (4,), bias_init=NORMAL, shape=(3, 4)),
    case("Einsum", "a...,ab->b...", (3, 4), (4,), bias_init=NORMAL, shape=(3, 2, 5)),
]

PADDINGS_1 = ["SAME", "VALID", "CIRCULAR", "REFLECT", "CAUSAL", 2, [(1, 3)]]
PADDINGS_2 = ["SAME", "VALID", "CIRCULAR", "REFLECT", 1, (2, 1), [(0, 2), 1]]
IMAGE = (2, 9, 8, 3)
CONV = [
    *[case("Conv", 3, 4, 3, shape=(*b, 8, 3)) for b in BATCHES],
    *[case("Conv", 3, 4, (3, 2), shape=IMAGE, **d) for d in [*DTYPES, NO_BIAS]],
    *[case("Conv", 3, 4, k, padding=p, shape=(2, 9, 3)) for p in PADDINGS_1 for k in (1, 2, 5)],
    *[case("Conv", 3, 4, 4, 2, padding=p, kernel_dilation=2, shape=(2, 11, 3)) for p in PADDINGS_1],
    *[
        case("Conv", 3, 4, (3, 2), (2, 1), padding=p, kernel_dilation=(1, 2), shape=IMAGE)
        for p in PADDINGS_2
    ],
    case("Conv", 3, 4, (1, 2, 3), 2, shape=(2, 3, 4, 5, 3)),
    case("Conv", 1, 2, (1, 2, 3, 2), shape=(2, 3, 4, 3, 2, 1)),
    case("Conv", 3, 4, (), shape=(2, 3)),
    case("Conv", 4, 6, 3, feature_group_count=2, shape=(2, 8, 4)),
    case("Conv", 4, 8, (3, 3), feature_group_count=4, padding="CIRCULAR", shape=(6, 6, 4)),
    case("Conv", 3, 4, 3, input_dilation=2, padding=1, shape=(2, 8, 3)),
    case("Conv", 3, 4, 3, None, input_dilation=None, kernel_dilation=None, shape=(2, 8, 3)),
    case("Conv", 3, 4, 3, mask=mask(3, 3, 4), shape=(2, 8, 3)),
    case("Conv", 3, 4, 3, mask=mask(3, 3, 4), dtype=BF16, shape=(2, 8, 3)),
    case("Conv", 3, 4, 3, padding="CAUSAL", dtype=BF16, shape=(2, 8, 3)),
]
TRANSPOSED = [
    *[case("ConvTranspose", 3, 4, 3, shape=(*b, 8, 3)) for b in BATCHES],
    *[case("ConvTranspose", 3, 4, (3, 2), 2, shape=IMAGE, **d) for d in [*DTYPES, NO_BIAS]],
    *[
        case("ConvTranspose", 3, 4, k, s, padding=p, transpose_kernel=t, shape=(2, 5, 3))
        for p in ("SAME", "VALID", 1, [(0, 2)])
        for k, s, t in [(1, 1, False), (3, 2, True), (2, 3, False)]
    ],
    *[
        case(
            "ConvTranspose",
            3,
            4,
            k,
            s,
            padding="CIRCULAR",
            kernel_dilation=d,
            transpose_kernel=t,
            shape=(2, 3, 3),
        )
        for k, d in [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2)]
        for s in (1, 2, 3)
        for t in (False, True)
    ],
    case("ConvTranspose", 3, 4, (3, 4), (2, 1), padding="CIRCULAR", shape=(2, 1, 4, 5, 3)),
    case("ConvTranspose", 3, 4, (3, 4), (2, 1), padding="CIRCULAR", dtype=BF16, shape=(4, 5, 3)),
    case("ConvTranspose", 3, 4, (3, 3), kernel_dilation=2, shape=IMAGE),
    case("ConvTranspose", 3, 4, 4, padding="SAME_LOWER", transpose_kernel=True, shape=(2, 5, 3)),
    case("ConvTranspose", 3, 4, (2, 3), padding="same_lower", kernel_dilation=2, shape=IMAGE),
    case("ConvTranspose", 3, 4, 3, mask=mask(3, 3, 4), shape=(2, 8, 3)),
    case("ConvTranspose", 3, 4, 3, transpose_kernel=True, mask=mask(3, 4, 3), shape=(2, 8, 3)),
]

EMBED = [
    *[case("Embed", 7, 3, shape=b, x=I32) for b in BATCHES],
    case("Embed", 7, 3, shape=(4,), x=jnp.uint8),
    case("Embed", 7, 3, shape=(4,), x=I32, dtype=BF16),
    case("Embed", 7, 3, shape=(4,), x=I32, param_dtype=F16),
    case("Embed", 1, 3, shape=(4, 2), x=I32),
    case("Embed", 7, 3, shape=(4,), x=I32, embedding_init=NORMAL),
]
LORA_DTYPES = [{"x": BF16}, {"dtype": BF16}, {"x": F16, "param_dtype": F16}]
LORA = [
    *[case("LoRA", 3, 2, 4, shape=(*b, 3), b_initializer=NORMAL) for b in BATCHES],
    *[case("LoRA", 3, 2, 4, shape=(2, 3), **d) for d in LORA_DTYPES],
    *[
        case("LoRALinear", 3, 4, lora_rank=2, shape=(2, 3), b_initializer=NORMAL, **d)
        for d in [{}, {"x": BF16}, {"lora_dtype": BF16, "dtype": F16}, {"use_bias": False}]
    ],
    case("LoRALinear", 3, 4, lora_rank=2, lora_param_dtype=BF16, shape=(3,)),
]
PRELU = [
    *[case("PReLU", shape=b) for b in BATCHES],
    case("PReLU", 0.3, shape=(5,), x=BF16),
    case("PReLU", 0.3, param_dtype=BF16, shape=(5,)),
    case("PReLU", 0.3, dtype=F16, shape=(5,)),
]
CASES = [*LINEAR, *GENERAL, *EINSUM, *CONV, *TRANSPOSED, *EMBED, *LORA, *PRELU]


QUICK_BY_LAYER = {
    "Embed": {"embedding_init": quick},
    "LoRA": {"a_initializer": quick, "b_initializer": quick},
    "LoRALinear": {"kernel_init": quick, "a_initializer": quick, "b_initializer": quick},
    "PReLU": {},
}


def build(lib, c, *, default_init=False):
    rngs = {} if c.layer == "PReLU" else {"rngs": lib.Rngs(7)}
    inits = QUICK_BY_LAYER.get(c.layer, QUICK)
    inits = {} if default_init else inits
    return getattr(lib, c.layer)(*c.args, **{**inits, **c.kwargs, **rngs})


def example(c):
    generator = np.random.default_rng(0)
    if jnp.issubdtype(c.x, jnp.integer):
        return jnp.asarray(generator.integers(0, 7, c.shape), c.x)
    return jnp.asarray(generator.normal(size=c.shape), c.x)


@pytest.mark.parametrize("c", CASES)
def test_layer_computes_as_the_reference(c):
    ours, theirs = build(nnx, c), build(ref, c)
    assert_equal_state(ours, theirs)
    assert_same_programs(ours, theirs, example(c))


START = [
    *[LINEAR[i] for i in (0, 4, 7, 13)],
    *[GENERAL[i] for i in (0, 4, 10, -1, -2, -3)],
    *[EINSUM[i] for i in (0, 3)],
    *[CONV[i] for i in (0, 4, 9)],
    *[TRANSPOSED[i] for i in (0, 4, 16)],
    *[EMBED[i] for i in (0, 6)],
    *[LORA[i] for i in (4, 6, 7, 11)],
    *PRELU[4:],
]


@pytest.mark.parametrize("c", START)
def test_initial_parameters_are_the_bits_of_the_reference(c):
    assert_equal_state(build(nnx, c, default_init=True), build(ref, c, default_init=True))


EAGER = [LINEAR[2], LINEAR[4], LINEAR[9], GENERAL[2], EINSUM[0], CONV[2], TRANSPOSED[1], EMBED[1]]


@pytest.mark.parametrize("c", [p.values[0] for p in EAGER], ids=[p.id for p in EAGER])
def test_eager_results_are_the_bits_of_the_reference(c):
    x = example(c)
    ours, theirs = build(nnx, c)(x), build(ref, c)(x)
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


STATIC = {
    "Linear": "in_features out_features use_bias dtype param_dtype precision dot_general "
    "preferred_element_type",
    "LinearGeneral": "in_features out_features axis use_bias dtype param_dtype precision "
    "dot_general dot_general_cls preferred_element_type",
    "Einsum": "einsum_str kernel_shape bias_shape dtype param_dtype precision einsum_op "
    "preferred_element_type",
    "Conv": "in_features out_features kernel_size kernel_shape strides padding input_dilation "
    "kernel_dilation feature_group_count use_bias mask dtype param_dtype precision "
    "conv_general_dilated preferred_element_type",
    "ConvTranspose": "in_features out_features kernel_size kernel_shape strides padding "
    "kernel_dilation use_bias mask dtype param_dtype precision transpose_kernel "
    "preferred_element_type",
    "Embed": "num_embeddings features dtype param_dtype",
    "LoRA": "in_features out_features dtype param_dtype base_module",
    "PReLU": "dtype param_dtype",
    "Dropout": "rate broadcast_dims deterministic rng_collection",
}
MADE = {
    "Linear": (3, 4),
    "LinearGeneral": ((3, 2), 4, {"axis": (-2, -1)}),
    "Einsum": ("ab,bc->ac", (3, 4), (4,)),
    "Conv": (3, 4, (3, 3), (2, 1)),
    "ConvTranspose": (3, 4, 3),
    "Embed": (3, 4),
    "LoRA": (3, 2, 4),
    "PReLU": (),
    "Dropout": (0.5,),
}


def made(lib, name):
    args = [a for a in MADE[name] if not isinstance(a, dict)]
    kwargs = {k: v for a in MADE[name] if isinstance(a, dict) for k, v in a.items()}
    if name != "PReLU":
        kwargs["rngs"] = lib.Rngs(0)
    return getattr(lib, name)(*args, **kwargs)


@pytest.mark.parametrize("name", STATIC)
def test_attributes_are_those_of_the_reference(name):
    ours, theirs = made(nnx, name), made(ref, name)
    for attribute in STATIC[name].split():
        assert getattr(ours, attribute) == getattr(theirs, attribute), attribute


METADATA = [
    ("Linear", (3, 4), {"kernel_metadata": {"tag": 1}, "bias_metadata": {"note": "b"}}),
    ("Conv", (3, 4, 3), {"kernel_metadata": {"tag": 1}, "bias_metadata": {"note": "b"}}),
    ("ConvTranspose", (3, 4, 3), {"kernel_metadata": {"tag": 1}, "bias_metadata": {"note": 2}}),
    ("LinearGeneral", (3, 4), {"kernel_metadata": {"tag": 1}, "bias_metadata": {"note": "b"}}),
    ("Einsum", ("ab,bc->ac", (3, 4), (4,)), {"kernel_metadata": {"tag": 1}}),
    ("Embed", (3, 4), {"embedding_metadata": {"tag": 1}}),
    ("LoRA", (3, 2, 4), {"a_metadata": {"tag": 1}, "b_metadata": {"tag": 2}}),
    (
        "Linear",
        (3, 4),
        {"kernel_metadata": {"out_sharding": ("x", None), "eager_sharding": False}},
    ),
]


@pytest.mark.parametrize(("name", "args", "kwargs"), METADATA)
def test_parameter_metadata_is_that_of_the_reference(name, args, kwargs):
    ours = getattr(nnx, name)(*args, rngs=nnx.Rngs(0), **kwargs)
    theirs = getattr(ref, name)(*args, rngs=ref.Rngs(0), **kwargs)
    for (_, mine), (_, other) in zip(
        nnx.to_flat_state(nnx.state(ours)), ref.to_flat_state(ref.state(theirs)), strict=True
    ):
        assert mine.get_metadata() == other.get_metadata()


@pytest.mark.parametrize("name", ["Conv", "ConvTranspose"])
def test_a_bias_that_is_switched_off_is_not_added(name):
    results = []
    for lib in (nnx, ref):
        layer = getattr(lib, name)(3, 4, 3, bias_init=NORMAL, kernel_init=quick, rngs=lib.Rngs(0))
        layer.use_bias = False
        results.append(layer(jnp.ones((2, 5, 3))))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("name", ["Linear", "LinearGeneral"])
def test_annotated_initializers_carry_their_metadata(name):
    def kernel(lib):
        init = lib.with_metadata(jax.nn.initializers.lecun_normal(), tag="k")
        layer = getattr(lib, name)(3, 4, kernel_init=init, rngs=lib.Rngs(0))
        return layer.kernel

    assert kernel(nnx).get_metadata("tag") == kernel(ref).get_metadata("tag") == "k"
    np.testing.assert_array_equal(kernel(nnx).get_value(), kernel(ref).get_value())


def test_embed_treats_numbers_outside_the_table_as_the_reference():
    numbers = jnp.array([0, -1, -7, 7, -8, 100])
    ours, theirs = made(nnx, "Embed"), made(ref, "Embed")
    np.testing.assert_array_equal(ours(numbers), theirs(numbers))


def test_embed_attend_matches_the_reference():
    query = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 4)), BF16)
    np.testing.assert_array_equal(
        made(nnx, "Embed").attend(query), made(ref, "Embed").attend(query)
    )


STREAMS = [
    {"default": 0},
    {"dropout": 3},
    {"default": 1, "dropout": 2},
    {"params": 1, "default": 5},
]


@pytest.mark.parametrize("seeds", STREAMS, ids=str)
@pytest.mark.parametrize("options", [{}, {"broadcast_dims": (0,)}, {"broadcast_dims": (-1, 1)}])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=lambda d: d.__name__)
def test_dropout_draws_the_masks_of_the_reference(seeds, options, dtype):
    def draws(lib):
        rngs = lib.Rngs(**seeds)
        layer = lib.Dropout(0.3, rngs=rngs, **options)
        x = jnp.ones((3, 2, 4), dtype)
        own = lib.Rngs(9)
        found = [layer(x), layer(x), layer(x, rngs=own), layer(x, rngs=own.noise)]
        found.append(layer(x, rngs=jax.random.key(4)))
        counts = {name: int(stream.count.get_value()) for name, stream in rngs.items()}
        kinds = [(p, k) for p, k, _ in leaves(lib, lib.state(layer))]
        return found, (counts, kinds, layer.rngs.tag)

    (ours, facts), (theirs, facts_) = draws(nnx), draws(ref)
    assert facts == facts_
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


NUMPY = {
    "kernel size": lambda lib, o: lib.Conv(6, 3, np.array([3]), strides=(np.int64(2),), **o),
    "strides": lambda lib, o: lib.Conv(6, 3, 3, np.array([2]), kernel_dilation=np.array([1]), **o),
    "transposed": lambda lib, o: lib.ConvTranspose(6, 3, np.array([3]), np.array([2]), **o),
    "features": lambda lib, o: lib.LinearGeneral(np.array([4, 6]), np.array([3]), axis=(1, 2), **o),
    "axes": lambda lib, o: lib.LinearGeneral((4, 6), 3, axis=np.array([1, 2]), **o),
    "equation": lambda lib, o: lib.Einsum("abc,cd->abd", np.array([6, 3]), np.array([3]), **o),
    "norm": lambda lib, o: lib.LayerNorm(
        24, reduction_axes=np.array([1, 2]), feature_axes=np.array([1, 2]), rngs=o["rngs"]
    ),
}


@pytest.mark.parametrize("name", NUMPY)
def test_sizes_and_axes_may_be_numpy_arrays_as_in_the_reference(name):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 6)), F32)
    ours, theirs = (
        NUMPY[name](lib, {"kernel_init": quick, "rngs": lib.Rngs(0)}) for lib in (nnx, ref)
    )
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-5, atol=1e-6)
    assert len(jax.tree.leaves(nnx.state(ours))) == 2  # the settings are none of them
    nnx.graphdef(ours)


def test_paddings_of_pools_may_be_numpy_arrays():
    x = jnp.ones((2, 4, 6))
    for lib in (nnx, ref):
        assert lib.avg_pool(x, (2,), padding=np.array([[1, 1]])).shape == (2, 5, 6)


POOLS = ["avg_pool", "max_pool", "min_pool"]
WINDOWS = [
    {"window_shape": (2, 2)},
    {"window_shape": (2, 3), "strides": (2, 1), "padding": "SAME"},
    {"window_shape": (3, 2), "strides": (1, 2), "padding": ((1, 0), (0, 1))},
]


BATCHES = {
    f"{batch} {options}": (batch, options)
    for batch in [(), (2,), (2, 3)]
    for options in WINDOWS
    # The reference fails on pairs of paddings with two batch axes.
    if len(batch) < 2 or not isinstance(options.get("padding"), tuple)
}


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize(("batch", "options"), BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("dtype", [F32, BF16, I32], ids=lambda d: d.__name__)
def test_pooling_matches_the_reference(name, batch, options, dtype):
    x = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (*batch, 4, 5, 3)), dtype)
    ours = jax.jit(lambda x: getattr(nnx, name)(x, **options))(x)
    theirs = jax.jit(lambda x: getattr(ref, name)(x, **options))(x)
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


def test_average_without_padding_matches_the_reference():
    x = jnp.arange(24.0).reshape(1, 4, 6, 1)
    options = {"strides": (2, 1), "padding": "SAME", "count_include_pad": False}
    np.testing.assert_array_equal(
        nnx.avg_pool(x, (2, 3), **options), ref.avg_pool(x, (2, 3), **options)
    )


def sequences(lib):
    """Results of Sequentials that pass tuples, dicts and options on."""
    pair = lambda x: (x, x + 1)
    named = lambda x: {"a": x, "b": 2}
    take = lambda *args, **kwargs: (args, kwargs)
    chain = lib.Sequential
    return [
        chain()(),
        chain()(1),
        chain()(1, 2),
        chain()(b=2),
        chain(pair, lambda x, y: x * y)(3),
        chain(named, take)(1),
        chain(lambda x: [x, 2], take)(1),
        chain(lambda x: (), take)(1),
        chain(lambda x: {}, take)(1),
        chain(lambda x: None, take)(1),
        chain(take, take)(1, 2, z=3),
        chain(lambda x, b: x + b, lambda x: x * 2)(1, b=2),
        chain(lambda x, b: {"y": x + b}, take)(1, b=2),
        chain(lambda x: x)(1, unused=2),
        chain(max, take)(1, 2, extra=3),
        chain(lambda x: x, lambda x, *, rngs: (x, rngs), take)(1, rngs=5),
    ]


@pytest.mark.skipif(OLDER, reason="the installed reference is older than the one we follow")
def test_sequential_passes_arguments_on_as_the_reference():
    assert sequences(nnx) == sequences(ref)


def test_initializers_are_those_of_the_reference():
    for name in dir(ref.initializers):
        made = getattr(ref.initializers, name)
        if inspect.isfunction(made) and not name.startswith("_"):
            ours = getattr(nnx.initializers, name)
            assert inspect.signature(ours).parameters.keys() == (
                inspect.signature(made).parameters.keys()
            )
    key = jax.random.key(0)
    for name in ("zeros_init", "ones_init"):
        np.testing.assert_array_equal(
            getattr(nnx.initializers, name)()(key, (2, 3), F32),
            getattr(ref.initializers, name)()(key, (2, 3), F32),
        )


ACTIVATIONS = (
    "celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu log_sigmoid "
    "log_softmax logsumexp one_hot relu relu6 selu sigmoid silu soft_sign softmax softplus "
    "standardize swish tanh"
).split()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_the_reference(name):
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


X = jnp.ones((2, 4, 6))
MESSAGES = {
    "No `deterministic` argument was provided to Dropout": lambda lib, rngs: lib.Dropout(
        0.5, deterministic=None, rngs=rngs
    )(X),
    "`deterministic` is False, but no `rngs` argument was provided to Dropout": (
        lambda lib, rngs: lib.Dropout(0.5)(X)
    ),
    "No `use_running_average` argument was provided to BatchNorm": (
        lambda lib, rngs: lib.BatchNorm(6, use_running_average=None, rngs=rngs)(X)
    ),
    "No `decode` argument was provided to MultiHeadAttention": (
        lambda lib, rngs: lib.MultiHeadAttention(2, 6, rngs=rngs)(X)
    ),
    "Autoregressive cache not initialized, call ": (
        lambda lib, rngs: lib.MultiHeadAttention(2, 6, decode=True, rngs=rngs)(X[:, :1])
    ),
    "Incompatible input dimension, got 4 but module expects 6": (
        lambda lib, rngs: lib.MultiHeadAttention(2, 6, decode=False, rngs=rngs)(X[..., :4])
    ),
    "`inputs_k` cannot be None if `inputs_v` is not None": (
        lambda lib, rngs: lib.MultiHeadAttention(2, 6, decode=False, rngs=rngs)(X, None, X)
    ),
    "(6) must be divisible by 'num_heads' heads (4)": (
        lambda lib, rngs: lib.MultiHeadAttention(4, 6, rngs=rngs)
    ),
    "Input type must be an integer or unsigned integer": (
        lambda lib, rngs: lib.Embed(3, 2, rngs=rngs)(X)
    ),
    "Either `num_groups` or `group_size` should be specified": (
        lambda lib, rngs: lib.GroupNorm(6, 2, 3, rngs=rngs)
    ),
    "Number of groups (4) does not divide the number of channels (6)": (
        lambda lib, rngs: lib.GroupNorm(6, 4, rngs=rngs)
    ),
    "Number of features (6) is not multiple of the group size (4)": (
        lambda lib, rngs: lib.GroupNorm(6, None, 4, rngs=rngs)
    ),
    "The channel axes cannot include the leading dimension": (
        lambda lib, rngs: lib.InstanceNorm(2, feature_axes=0, rngs=rngs)(X)
    ),
    "Mask needs to have the same shape as weights. Shapes are: (3, 6), (3, 6, 3)": (
        lambda lib, rngs: lib.Conv(6, 3, 3, mask=jnp.ones((3, 6)), rngs=rngs)(X)
    ),
    "Invalid padding format: (1, 2), should be ": (
        lambda lib, rngs: lib.Conv(6, 3, 3, padding=(1, 2), rngs=rngs)(X)
    ),
    "Causal padding is only implemented for 1D convolutions": (
        lambda lib, rngs: lib.Conv(6, 3, (3, 3), padding="CAUSAL", rngs=rngs)(X)
    ),
    "in_features and axis must have the same length. Got (4, 6) and (-1,).": (
        lambda lib, rngs: lib.LinearGeneral((4, 6), 3, rngs=rngs)
    ),
    "batch_dims (1,) must be consecutive leading dimensions starting from 0.": (
        lambda lib, rngs: lib.LinearGeneral(6, 3, batch_axis={1: 4}, rngs=rngs)
    ),
    'equation must be explicit and include "->"': (
        lambda lib, rngs: lib.Einsum("ab,bc", (6, 3), rngs=rngs)
    ),
    "`einsum_str` equation must have exactly two operands": (
        lambda lib, rngs: lib.Einsum("ab,bc,cd->ad", (6, 3), rngs=rngs)
    ),
    "RNGs must be provided to initialize the cell carry": (
        lambda lib, rngs: lib.RNN(
            lib.GRUCell(6, 2, carry_init=jax.random.normal, rngs=rngs), rngs=False
        )(X)
    ),
    "masks must have same rank": (
        lambda lib, rngs: lib.combine_masks(jnp.ones((2, 2)), jnp.ones(2))
    ),
}


@pytest.mark.filterwarnings("ignore:carry_init is provided in __init__")  # of the reference
@pytest.mark.parametrize("words", MESSAGES)
def test_messages_have_the_words_that_programs_look_for(words):
    for lib in (nnx, ref):
        with pytest.raises(ValueError, match=re.escape(words)):
            MESSAGES[words](lib, lib.Rngs(0))
