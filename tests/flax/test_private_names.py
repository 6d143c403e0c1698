"""What libraries use of Flax beyond its public names; `private_names.py` is a program that does."""

from __future__ import annotations

from pathlib import Path

from tests.flax.test_hook import needs_flax, printed

PROGRAM = Path(__file__).with_name("private_names.py")


@needs_flax
def test_the_same_program_prints_the_same_under_flax():
    lines = printed("-W", "ignore", "-m", "nnxlite.flax", str(PROGRAM))
    assert len(lines) > 50 and lines == printed("-W", "ignore", str(PROGRAM))


OTHERS = """
import copy, pickle, sys, warnings
import jax, jax.numpy as jnp
from flax import nnx
from flax.nnx import deprecations, ids
import flax.nnx.nn.linear

assert ids.uuid() != ids.uuid() and ids.UUID(1) == ids.UUIDManager()() and hash(ids.UUID(1))

@deprecations.deprecated
def current(x):
    return x + 1

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert current(1) == 2 and current.__name__ == "current"
assert [str(w.message) for w in caught] == ["This function is deprecated. Use current instead."]

# A Variable with a way to pickle of its own, which fills the private slots.
class Weight(nnx.Variable):
    def __getstate__(self):
        state = nnx.Variable.__getstate__(self)
        return {"value": state["_raw_value"], "metadata": state["_var_metadata"]}
    def __setstate__(self, state):
        assert not hasattr(self, "_var_metadata")
        object.__setattr__(self, "_raw_value", state["value"])
        object.__setattr__(self, "_trace_state", nnx.tracers.TraceState())
        object.__setattr__(self, "_var_metadata", state["metadata"])

sys.modules["__main__"].Weight = Weight
weight = Weight(jnp.ones(2), tag="x")
for other in (pickle.loads(pickle.dumps(weight)), copy.deepcopy(weight)):
    assert other.tag == "x" and other[...].tolist() == [1, 1]
    assert other._trace_state == weight._trace_state
live = weight._var_metadata
live.update(more=1)
assert weight.more == 1 and live == weight._var_metadata and {**live} == live.copy() == live | {}
assert live["tag"] == "x" and len(live) == len([*live]) and "tag" in repr(live)
assert pickle.loads(pickle.dumps(live)) == live.copy()
weight._var_metadata = {"tag": "y"}
assert weight.get_metadata(exclude_required=True) == {"tag": "y"} and not weight.ref

# The statuses of attributes; another status than before.
class Net(nnx.Module):
    def __init__(self):
        self.rate = 0.5

net = Net()
assert jax.tree.leaves(net) == []
net._pytree__nodes = net._pytree__nodes.update({"rate": True, "absent": True})
assert jax.tree.leaves(net) == [0.5] and hash(net._pytree__nodes) and "rate" in repr(net._pytree__nodes)

# The trace of an object, read and given.
states = []
def make(x):
    inner = Net()
    assert inner._pytree__state.trace_state.is_valid() and not net._pytree__state.trace_state.is_valid()
    inner._pytree__state = net._pytree__state
    states.append(inner)
    return x
jax.eval_shape(make, 1.0)
states[0].rate = 1.0
assert "eager" in repr(states[0]._pytree__state) and states[0].rate == 1.0
assert pickle.loads(pickle.dumps(net._pytree__state._trace_state)).is_valid()
print("right")
"""


def test_what_else_is_private_is_there(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(OTHERS)
    assert printed("-W", "ignore", "-m", "nnxlite.flax", str(script)) == ["right"]
