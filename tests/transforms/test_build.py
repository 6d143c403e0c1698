"""A model built in one compiled program is the model that is built object by object."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from tests.transforms.models import compilations

WIDTH = 8


class Model(nnx.Module):
    """Layers of several kinds and types, one of them in two places, and annotated parameters."""

    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.up = nnx.Linear(
            WIDTH, 16, kernel_metadata={"out_sharding": (None, "model")}, rngs=rngs
        )
        self.down = nnx.List([nnx.Linear(16, WIDTH, param_dtype=jnp.bfloat16, rngs=rngs)])
        self.head = self.down[0]  # tied
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)


def build():
    model = Model()
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


@pytest.fixture(scope="module")
def eager():
    return build()


def bare(value):
    """The bits of a value: a random key as the numbers in it, a small float as an integer."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(value))
    return np.asarray(value.view(jnp.uint16) if value.dtype == jnp.bfloat16 else value)


def assert_same(found, expected, ulps=0):
    """The same structure, and every value bit for bit, or `ulps` last digits apart."""
    assert nnx.graphdef(found) == nnx.graphdef(expected)
    for mine, theirs in zip(*(jax.tree.leaves(nnx.state(x)) for x in (found, expected))):
        mine, theirs = bare(mine), bare(theirs)
        assert mine.dtype == theirs.dtype
        if ulps and theirs.dtype == np.float32:
            np.testing.assert_array_max_ulp(mine, theirs, ulps)
        else:
            np.testing.assert_array_equal(mine, theirs)


def test_one_program_builds_model_and_optimizer_as_eager_code_does(eager):
    jitted = nnx.jit(build)
    with compilations(1):
        found = jitted()
    assert_same(found, eager)
    model = found[0]
    assert model.head is model.down[0]
    with compilations(0):
        again = jitted()
    assert again[0] is not model and again[0].head is not model.head
    assert_same(again, eager)


def test_annotated_parameters_are_born_sharded(eager):
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), compilations(1):
        model, optimizer = nnx.jit(build)()
    columns = NamedSharding(mesh, P(None, "model"))
    for variable in (model.up.kernel, optimizer.opt_state[0].mu.up.kernel):
        assert variable.get_value().sharding.is_equivalent_to(columns, 2)
    assert_same((model, optimizer), eager, 4)  # XLA may take other instructions for a part
