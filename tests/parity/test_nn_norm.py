"""Parity of the normalisations with the reference: parameters, results, gradients, statistics."""

from __future__ import annotations

import itertools
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn.quick import QUICK, normal, quick
from tests.parity.layers import (
    OLDER,
    assert_equal_results,
    assert_equal_state,
    assert_same_programs,
    leaves,
    ref,
    static_attributes,
)

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
SHAPE = (4, 5, 6)
MASK = jnp.asarray(np.random.default_rng(1).random(SHAPE) < 0.7)


class Case(tp.NamedTuple):
    name: str
    args: tuple[tp.Any, ...]
    kwargs: dict[str, tp.Any]
    x: tp.Any
    shape: tuple[int, ...]

    def build(self, lib):
        inits = {"scale_init": quick, "bias_init": quick}
        if self.name == "RMSNorm":
            inits.pop("bias_init")
        return getattr(lib, self.name)(*self.args, **{**inits, **self.kwargs}, rngs=lib.Rngs(3))

    def example(self):
        return jnp.asarray(normal(*self.shape) * 2 + 1, self.x)


def case(name, *args, x=F32, shape=SHAPE, **kwargs):
    label = [
        name,
        *map(str, args),
        *(f"{k}={getattr(v, '__name__', v)}" for k, v in kwargs.items()),
    ]
    return pytest.param(
        Case(name, args, kwargs, x, shape), id=" ".join([*label, jnp.dtype(x).name, str(shape)])
    )


KINDS = [
    ("BatchNorm", (6,)),
    ("LayerNorm", (6,)),
    ("RMSNorm", (6,)),
    ("GroupNorm", (6, 3)),
    ("InstanceNorm", (6,)),
]
DTYPES = [
    {},
    {"x": BF16},
    {"x": F16, "param_dtype": F16},
    {"dtype": BF16},
    {"dtype": F16, "x": BF16},
    {"param_dtype": BF16},
    {"x": jnp.int32},
]
CASES = [
    *[case("BatchNorm", 6, **options) for options in DTYPES],
    *[case(name, *args, **options) for name, args in KINDS[1:] for options in DTYPES[:6:4]],
    *[case(name, *args, use_fast_variance=False, use_scale=False) for name, args in KINDS[:4]],
    case("InstanceNorm", 6, epsilon=0.3, use_bias=False),
    *[case("LayerNorm", 6, shape=(*b, 6)) for b in [(), (2, 3, 4)]],
    case("BatchNorm", 5, axis=1, momentum=0.5),
    case("LayerNorm", 30, reduction_axes=(1, 2), feature_axes=(1, 2)),
    case("LayerNorm", 5, reduction_axes=(0, -1), feature_axes=1),
    case("RMSNorm", 5, reduction_axes=(1, 2), feature_axes=1),
    case("GroupNorm", 6, None, 2, shape=(2, 3, 4, 6)),
    case("GroupNorm", 6, 2, reduction_axes=(1, 2)),
    case("GroupNorm", 6, 6, shape=(3, 6)),
    case("InstanceNorm", 5, feature_axes=1),
]


@pytest.mark.parametrize("c", CASES)
def test_a_normalisation_computes_as_the_reference(c):
    ours, theirs = c.build(nnx), c.build(ref)
    assert_equal_state(ours, theirs)
    assert static_attributes(nnx, ours) == static_attributes(ref, theirs)
    # gradients through a variance of few elements magnify the last bits
    assert_same_programs(ours, theirs, c.example(), factor=20)


@pytest.mark.parametrize("options", [{}, {"x": F16}, {"dtype": BF16}])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("name", "args"), KINDS)
def test_masks_and_statistics_are_those_of_the_reference(name, args, fast, options):
    c = Case(name, args, {"use_fast_variance": fast, **options}, options.get("x", F32), SHAPE)
    c.kwargs.pop("x", None)
    ours, theirs, x = c.build(nnx), c.build(ref), c.example()
    for mask in (MASK, None):
        assert_equal_results(ours(x, mask=mask), theirs(x, mask=mask))
    if name == "BatchNorm":
        for _, _, value in leaves(nnx, nnx.state(ours, nnx.BatchStat)):
            assert value.dtype == F32
        assert_equal_results(
            [v for _, _, v in leaves(nnx, nnx.state(ours, nnx.BatchStat))],
            [v for _, _, v in leaves(ref, ref.state(theirs, ref.BatchStat))],
        )
        for layer in (ours, theirs):
            layer.eval()
            assert layer.use_running_average
        assert_equal_results(ours(x), theirs(x))


@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types")  # of the reference
def test_statistics_keep_their_dtype_as_in_the_reference():
    x = normal(4, 6).astype(np.float64)
    with jax.enable_x64(True):
        ours, theirs = (lib.BatchNorm(6, rngs=lib.Rngs(0)) for lib in (nnx, ref))
        for layer in (ours, theirs):
            assert layer(x).dtype == np.float64
            assert layer.mean.dtype == layer.var.dtype == F32
        np.testing.assert_allclose(ours.var.get_value(), theirs.var.get_value(), rtol=1e-6)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "InstanceNorm"])
def test_without_parameters_any_number_of_features_does(name):
    options = {"use_scale": False} | ({} if name == "RMSNorm" else {"use_bias": False})
    x = jnp.asarray(normal(2, 4, 6))
    ours, theirs = (getattr(lib, name)(3, rngs=lib.Rngs(0), **options) for lib in (nnx, ref))
    assert_equal_results(ours(x), theirs(x))


def test_named_axes_are_those_of_the_reference():
    x = jnp.asarray(normal(2, 4, 6))

    def run(lib, fast):
        layer = lib.BatchNorm(6, axis_name="d", use_fast_variance=fast, rngs=lib.Rngs(0))
        graphdef, state = lib.split(layer)

        def one(x):
            layer = lib.merge(graphdef, state, copy=True)
            y = layer(x)
            return y, [v.get_value() for _, v in lib.to_flat_state(lib.state(layer, lib.BatchStat))]

        return jax.vmap(one, axis_name="d")(x)

    for fast in (True, False):
        assert_equal_results(run(nnx, fast), run(ref, fast), 5)


@pytest.mark.parametrize(("name", "args"), KINDS)
def test_metadata_is_that_of_the_reference(name, args):
    options = {"scale_metadata": {"tag": 1}}
    if name != "RMSNorm":
        options["bias_metadata"] = {"note": "b"}
    ours = getattr(nnx, name)(*args, rngs=nnx.Rngs(0), **options)
    theirs = getattr(ref, name)(*args, rngs=ref.Rngs(0), **options)
    for (_, mine), (_, other) in zip(
        nnx.to_flat_state(nnx.state(ours)), ref.to_flat_state(ref.state(theirs)), strict=True
    ):
        assert mine.get_metadata() == other.get_metadata()


@pytest.mark.parametrize("name", ["BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm"])
def test_bad_input_raises_what_the_reference_raises(name):
    bad = {
        "BatchNorm": [
            (lambda lib: lib.BatchNorm(6, use_running_average=None, rngs=lib.Rngs(0)), (3, 6))
        ],
        "LayerNorm": [(lambda lib: lib.LayerNorm(6, rngs=lib.Rngs(0)), (3, 7))],
        "GroupNorm": [
            (lambda lib: lib.GroupNorm(6, 4, rngs=lib.Rngs(0)), (3, 6)),
            (lambda lib: lib.GroupNorm(6, None, rngs=lib.Rngs(0)), (3, 6)),
            (lambda lib: lib.GroupNorm(6, 2, rngs=lib.Rngs(0)), (3, 7)),
        ],
        "InstanceNorm": [
            (lambda lib: lib.InstanceNorm(6, feature_axes=0, rngs=lib.Rngs(0)), (6, 3))
        ],
    }
    for build, shape in bad[name]:
        kinds = []
        for lib in (nnx, ref):
            with pytest.raises((ValueError, TypeError)) as caught:
                build(lib)(jnp.ones(shape))
            kinds.append(caught.type)
        assert kinds[0] is kinds[1]


# Normalisation of weights -----------------------------------------------------------------------


def block(lib):
    class Block(lib.Module):
        def __init__(self):
            rngs = lib.Rngs(0)
            self.a = lib.Linear(3, 4, **QUICK, rngs=rngs)
            self.b = lib.LinearGeneral(4, (1, 5), **QUICK, rngs=rngs)
            self.c = lib.Linear(5, 2, **QUICK, param_dtype=BF16, rngs=rngs)
            self.norm = lib.BatchNorm(5, use_running_average=True, rngs=rngs)

        def __call__(self, x):
            return self.c(self.norm(self.b(self.a(x))))

    return Block()


@pytest.mark.parametrize(
    "options", [{}, {"n_steps": 3}, {"dtype": BF16}, {"epsilon": 0.1}], ids=str
)
@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types")  # of the reference
def test_spectral_norm_is_that_of_the_reference(options):
    x = jnp.asarray(normal(2, 3))
    ours = nnx.SpectralNorm(block(nnx), **options, rngs=nnx.Rngs(1))
    theirs = ref.SpectralNorm(block(ref), **options, rngs=ref.Rngs(1))
    assert_equal_state(ours, theirs)
    for update_stats in (True, False, None):
        assert_equal_results(ours(x, update_stats), theirs(x, update_stats))
        assert_equal_results(
            [v for _, _, v in leaves(nnx, nnx.state(ours))],
            [v for _, _, v in leaves(ref, ref.state(theirs))],
            10,
        )


@pytest.mark.skipif(OLDER, reason="the installed reference keeps the scales as plain arrays")
@pytest.mark.parametrize(
    "options",
    [{}, {"use_scale": False}, {"feature_axes": None}, {"feature_axes": 0}, {"epsilon": 0.1}],
    ids=str,
)
def test_weight_norm_is_that_of_the_reference(options):
    x = jnp.asarray(normal(2, 3))
    layers = [
        lib.WeightNorm(lib.Linear(3, 4, **QUICK, rngs=lib.Rngs(0)), **options, rngs=lib.Rngs(1))
        for lib in (nnx, ref)
    ]
    assert_equal_state(*layers)
    for _ in range(2):
        assert_equal_results(layers[0](x), layers[1](x))
        assert_equal_results(
            [v for _, _, v in leaves(nnx, nnx.state(layers[0]))],
            [v for _, _, v in leaves(ref, ref.state(layers[1]))],
        )
    assert_same_programs(*layers, x, factor=10)


@pytest.mark.parametrize("name", ["BatchNorm", "LayerNorm", "RMSNorm", "InstanceNorm"])
def test_parameters_of_another_size_can_be_loaded(name):
    x = jnp.asarray(normal(2, 3, 4))
    results = []
    for lib in (nnx, ref):
        layer, wider = (getattr(lib, name)(n, rngs=lib.Rngs(0)) for n in (2, 4))
        lib.update(layer, lib.state(wider))
        results.append(layer(x))
    assert_equal_results(*results)


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
