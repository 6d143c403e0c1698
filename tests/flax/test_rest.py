"""What programs print under `nnxlite.flax`, all in one process; and what pickles contain."""

from __future__ import annotations

import json

import pytest

from tests.flax.launching import printed

pytest.importorskip("flax")

RULES = """
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
with linen.logical_axis_rules(("embed", "x")):
    pass
"""
UNREADABLE = """
from flax.nnx import graphlib
graphlib.GraphDef.__new__(graphlib.GraphDef)  # which a pickle of Flax begins with
"""
STATUSES = """
import jax
from flax import nnx
node = nnx.Dict()
vars(node).update({"_pytree__nodes": {"size": True, "_pytree__nodes": False}, "size": 3, "name": "x"})
print(list(nnx.state(node)), jax.tree.leaves(node), nnx.clone(node).name)
"""
WARNINGS = """
import jax.numpy as jnp
from flax import nnx
class Schedule:  # no Module, no pytree: static
    def __init__(self): self.betas = jnp.ones(2)
class Net(nnx.Module):
    def __init__(self): self.schedule, self.rngs = Schedule(), nnx.Rngs(0)
model = nnx.merge(*nnx.split(Net()))
draw = nnx.vmap(lambda net, x: x + net.rngs.noise.normal(()), in_axes=(None, 0))
print(draw(model, jnp.ones(2)).shape)
"""
STACKED = """
import jax
import jax.numpy as jnp
from flax import nnx
make = lambda key: nnx.Param(jnp.zeros((4, 2)), out_sharding=("rows", None))
named = nnx.vmap(make, transform_metadata={nnx.PARTITION_NAME: "layers"})
keys = jnp.arange(3)
for make in (nnx.vmap(make), nnx.scan(make, in_axes=0, out_axes=0), named):
    print(make(keys).get_metadata()["out_sharding"])
"""
PRINTED = {
    "the rules of Linen are part of the key of a program": (
        RULES,
        *("P('embed', 'mlp') P('x', 'y')\n", "ValueError: A logical axis rule is a pair"),
    ),
    "a GraphDef of Flax says what to pickle": (
        UNREADABLE,
        "TypeError: A pickled GraphDef of Flax cannot be read here: pickle the state",
    ),
    "statuses written to the dict of an object count": (STATUSES, "['size'] [3] x\n"),
    "warnings that Flax does not give are logged": (
        WARNINGS,
        *("(2,)", "'schedule.betas' is a float32[2] in a Schedule"),
        "The random stream 'default'",
    ),
    "an axis is named in annotations only where the program asks for it": (
        STACKED,
        "('rows', None)\n('rows', None)\n('layers', 'rows', None)\n",
    ),
}
"""Programs, and texts that they print or raise."""

RUN = """
import contextlib, io, json, sys, traceback, warnings
warnings.simplefilter("error", UserWarning)
import nnxlite.flax
found = {}
for name, program in json.load(sys.stdin).items():
    with contextlib.redirect_stdout(io.StringIO()) as found[name]:
        with contextlib.redirect_stderr(found[name]):
            try:
                exec(program, {"__name__": "__main__"})
            except Exception:
                traceback.print_exc()
print(json.dumps({name: text.getvalue() for name, text in found.items()}))
"""


@pytest.fixture(scope="module")
def texts():
    programs = json.dumps({name: source for name, (source, *_) in PRINTED.items()})
    return json.loads(printed("-c", RUN, stdin=programs)[-1])


@pytest.mark.parametrize("name", PRINTED)
def test_a_program_prints_what_it_should(name, texts):
    assert [text for text in PRINTED[name][1:] if text not in texts[name]] == [], texts[name]


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
