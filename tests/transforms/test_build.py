"""A model built in one compiled program is the model that is built object by object."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from tests.transforms.models import COMPILATION, jax_events

WIDTH = 8
SHARDED = 4  # XLA may take other instructions for a part of an array than for the whole


class Block(nnx.Module):
    def __init__(self, rngs):
        self.before = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            2, WIDTH, param_dtype=jnp.bfloat16, decode=False, dropout_rate=0.1, rngs=rngs
        )
        self.up = nnx.Linear(
            WIDTH, 2 * WIDTH, kernel_metadata={"out_sharding": (None, "model")}, rngs=rngs
        )
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)


class Transformer(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.embed = nnx.Embed(16, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs)])
        self.head = self.embed  # tied
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)


def build():
    model = Transformer()
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


@pytest.fixture(scope="module")
def eager():
    return build()


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))


def arrays(*nodes):
    values = {path: v.get_value() for path, v in nnx.to_flat_state(nnx.state(nodes))}
    return {path: np.asarray(bare(value)) for path, value in values.items()}


def bare(value):
    """The bits of a value: a random key as the numbers in it, a small float as an integer."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(value)
    return value.view(jnp.uint16) if value.dtype == jnp.bfloat16 else value


@functools.cache
def compiles_normal_alike():
    """Whether JAX compiles `normal` into a larger program without merging its last two factors."""
    init = nnx.initializers.normal(0.3)
    draw = lambda key: init(key, (64,), jnp.float32)
    key = jax.random.key(0)
    return bool((jax.jit(draw)(key) == draw(key)).all())


def assert_same(found, expected, ulps=0):
    """The same structure, and every value bit for bit, or `ulps` last digits apart.

    JAX before 0.12 drops a rounding where it compiles `normal`, the initializer of an embedding.
    """
    assert nnx.graphdef(found) == nnx.graphdef(expected)
    mine, theirs = arrays(*found), arrays(*expected)
    assert mine.keys() == theirs.keys()
    for path, value in theirs.items():
        assert mine[path].dtype == value.dtype, path
        apart = max(ulps, not compiles_normal_alike()) if path[-1] == "embedding" else ulps
        if apart and value.dtype == np.float32:
            np.testing.assert_array_max_ulp(mine[path], value, apart)
        else:
            np.testing.assert_array_equal(mine[path], value, err_msg=str(path))


def compiled_by(function):
    """The result of a call, and how many programs XLA compiled for it."""
    with jax_events() as seen:
        return function(), seen[COMPILATION]


def test_one_program_builds_model_and_optimizer_as_eager_code_does(eager):
    jitted = nnx.jit(build)
    found, programs = compiled_by(jitted)
    assert programs == 1
    assert_same(found, eager)
    model, optimizer = found
    assert model.head is model.embed
    again, programs = compiled_by(jitted)
    assert programs == 0
    assert again[0] is not model and again[0].embed is not model.embed
    assert_same(again, eager)


def test_a_seed_may_be_an_argument_of_the_program():
    make = lambda key: nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(key))
    jitted = nnx.jit(make)
    keys = [jax.random.key(seed) for seed in (0, 1)]
    first = jitted(keys[0])
    second, programs = compiled_by(lambda: jitted(keys[1]))
    assert programs == 0
    for model, key in zip((first, second), keys):
        np.testing.assert_array_equal(model.kernel[...], make(key).kernel[...])


def test_annotated_parameters_are_born_sharded(eager, mesh):
    with jax.set_mesh(mesh):
        (model, optimizer), programs = compiled_by(nnx.jit(build))
    assert programs == 1
    columns = NamedSharding(mesh, P(None, "model"))
    for variable in (model.blocks[0].up.kernel, optimizer.opt_state[0].mu.blocks[0].up.kernel):
        assert variable.get_value().sharding.is_equivalent_to(columns, 2)
    assert_same((model, optimizer), eager, SHARDED)


def test_out_shardings_place_what_is_built(eager, mesh):
    columns, everywhere = NamedSharding(mesh, P(None, "model")), NamedSharding(mesh, P())
    down_kernel = nnx.All(nnx.PathContains("down"), nnx.PathContains("kernel"))
    place = nnx.StateSharding({down_kernel: columns, ...: everywhere})
    model, optimizer = nnx.jit(build, out_shardings=place)()
    assert_same((model, optimizer), eager, SHARDED)
    for path, variable in nnx.to_flat_state(nnx.state((model, optimizer))):
        chosen = columns if {"down", "kernel"} <= set(path) else everywhere
        assert variable.get_value().sharding.is_equivalent_to(chosen, variable.ndim), path
