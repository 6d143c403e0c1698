"""`nnxlite.flax`: a program that imports `flax.nnx` gets nnxlite, by every way of starting it."""

from __future__ import annotations

from tests.flax.launching import printed

MODULES = """
import flax.nnx as nnx, flax.nnx.nn.linear, importlib, pickle, sys
from flax import nnx as again
from flax.nnx import Module, graph, statelib
from flax.nnx.nn.linear import Conv
import nnxlite
assert nnx is again and nnx.__name__ == "flax.nnx" and sys.modules["flax"].nnx is nnx
assert (nnx.Linear, Module, Conv) == (nnxlite.Linear, nnxlite.Module, nnxlite.Conv)
assert graph.__name__ == "flax.nnx.graph" and graph.split is nnx.split and nnx.graph is graph
assert nnx.nn.recurrent.initializers is nnx.nn.initializers is nnx.initializers
for name in dir(nnx):
    assert getattr(nnx, name) is not None or name.startswith("__"), name
assert importlib.reload(nnx) is nnx and nnx.Linear is nnxlite.Linear
model = pickle.loads(pickle.dumps(nnx.Linear(2, 3, rngs=nnx.Rngs(0))))
assert type(model) is nnx.Linear
print("right")
"""


def test_modules_are_those_of_nnxlite_by_the_names_of_flax(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(MODULES)
    assert printed("-m", "nnxlite.flax", str(script)) == ["right"]
    assert printed("-c", "import nnxlite.flax" + MODULES) == ["right"]
