"""`nnxlite.flax` beside the rest of Flax: rules for logical names, and what pickles contain."""

from __future__ import annotations

import pytest

from tests.flax.launching import printed, python

pytest.importorskip("flax")

RULES = """
import nnxlite.flax
from flax import linen, nnx
import jax.numpy as jnp
weights = nnx.Param(jnp.ones((8, 8)), out_sharding=("embed", "mlp"), eager_sharding=False)
specs = []
step = nnx.jit(lambda p: specs.append(str(nnx.get_partition_spec(p).get_value())) or p + 1)
step(weights)
with linen.logical_axis_rules((("embed", "x"), ("mlp", "y"))):
    step(weights), step(weights)
step(weights)
print(*specs)
try:
    with linen.logical_axis_rules(("embed", "x")):
        pass
except ValueError as error:
    print(error)
"""


def test_rules_of_linen_are_part_of_the_key_of_a_program():
    specs, message = printed("-c", RULES)
    assert specs == "P('embed', 'mlp') P('x', 'y')"
    assert "A logical axis rule is a pair" in message


WRITE = """
import nnxlite.flax, optax, pickle, sys
from flax import nnx
model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
graphdef, state = nnx.split(model)
with open(sys.argv[1], "wb") as file:
    pickle.dump([model, graphdef, state, nnx.to_flat_state(state), nnx.Rngs(0)], file)
print(float(model.layers[0].kernel.sum()))
"""
READ = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    model, graphdef, state, flat, rngs = pickle.load(file)
again = graphdef.merge(state)
print(float(again.layers[0].kernel.sum()), type(again).__module__.split(".")[0], "flax" in sys.modules)
"""


def test_pickles_written_under_the_hook_need_no_hook(tmp_path):
    (total,) = printed("-c", WRITE, str(tmp_path / "file"))
    assert printed("-c", READ, str(tmp_path / "file")) == [f"{total} nnxlite False"]
    with_hook = printed("-c", "import nnxlite.flax" + READ, str(tmp_path / "file"))
    assert with_hook[0].startswith(f"{total} nnxlite")


UNREADABLE = """
import nnxlite.flax
from flax.nnx import graphlib
graphlib.GraphDef.__new__(graphlib.GraphDef)  # which a pickle of Flax begins with
"""


def test_a_graphdef_of_flax_says_what_to_pickle():
    done = python("-c", UNREADABLE)
    assert (
        "TypeError: A pickled GraphDef of Flax cannot be read here: pickle the state" in done.stderr
    )


STATUSES = """
import nnxlite.flax, jax
from flax import nnx
node = nnx.Dict()
vars(node).update({"_pytree__nodes": {"size": True, "_pytree__nodes": False}, "size": 3, "name": "x"})
print(list(nnx.state(node)), jax.tree.leaves(node), nnx.clone(node).name)
"""


def test_statuses_written_to_the_dict_of_an_object_count():
    assert printed("-c", STATUSES) == ["['size'] [3] x"]
