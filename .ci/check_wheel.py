"""Run by `.ci/run` outside the clone: the installed wheel is complete, and works on its own."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import nnxlite as nnx

names = zipfile.ZipFile(sys.argv[1]).namelist()
roots = {name.split("/")[0] for name in names if ".dist-info/" not in name}
assert roots == {"nnxlite", "nnxlite_flax.pth"}, f"the wheel installs {sorted(roots)}"
assert "nnxlite/py.typed" in names, "the wheel does not carry py.typed"
assert any(name.endswith("licenses/LICENSE") for name in names), "the wheel carries no licence"
versions = {Path(sys.argv[1]).name.split("-")[1], importlib.metadata.version("nnxlite")}
assert versions == {nnx.__version__}, f"the wheel is {versions}, the package {nnx.__version__}"
metadata = importlib.metadata.metadata("nnxlite")
assert metadata["License-Expression"] == "Apache-2.0" and metadata["Description"], "bare metadata"

home = Path(sysconfig.get_paths()["purelib"])
assert Path(nnx.__file__).is_relative_to(home), f"{nnx.__file__} is not the installed wheel"

model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
x, y = jnp.eye(2), jnp.array([[1.0], [-1.0]])


@nnx.jit
def step(model, optimizer):
    """One step towards `y`."""
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    return loss


losses = [float(step(model, optimizer)) for _ in range(50)]
assert losses[-1] < losses[0] / 10, losses
# Flax is not installed here, and its programs run.
Path("written_for_flax.py").write_text(
    "from flax import nnx\nprint(nnx.__name__, nnx.Linear(2, 1, rngs=nnx.Rngs(0)).out_features)\n"
)
launched = [sys.executable, "-m", "nnxlite.flax", "written_for_flax.py"]
by_hand = [sys.executable, "written_for_flax.py"]
for command, environment in ((launched, {}), (by_hand, {"NNXLITE_FLAX": "1"})):
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.stdout == "flax.nnx 1\n", (command, done.stdout, done.stderr)

print(f"nnxlite {nnx.__version__}, {len(names)} files; a model trains on jax {jax.__version__}")
