"""Law L2: leaf order and paths are the same in every process, whatever the hash seed."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import nnxlite as nnx


class Model(nnx.Module):
    def __init__(self, names):
        for name in names:
            setattr(self, name, nnx.Param(jnp.ones(2), **dict.fromkeys(names, 1)))
        self.mixed = {"b": jnp.ones(1), 3: jnp.ones(2), "a": [jnp.ones(3)], 10: jnp.ones(4)}
        self.names = set(names)
        self.items = nnx.List([nnx.Dict({n: nnx.Param(jnp.ones(6)) for n in names}), jnp.ones(5)])
        self.state = nnx.State({n: jnp.ones(len(n)) for n in names})


def report():
    """What must be the same in another process."""
    names = {"kernel", "bias", "scale", "a", "B", "_x", "é", "layer10", "layer9"}
    model = Model(names)
    graphdef, state = nnx.split(model)
    assert graphdef == nnx.graphdef(Model(sorted(names)))
    visited = [path for path, _ in nnx.iter_graph(model) if path[:1] != ("names",)]
    shapes = [leaf.shape for leaf in jax.tree.leaves(state)]
    del model.mixed  # JAX does not sort keys of several types
    keys = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(model)]
    return repr([graphdef.paths, nnx.to_flat_state(state).paths, visited, shapes, keys])


def test_L2_paths_and_leaf_order_are_the_same_in_every_process():
    code = "from tests.laws.test_order import report; print(report())"
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": root, "PYTHONUTF8": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    paths = report()
    assert done.stdout == f"{paths}\n"
    assert paths.index("'B'") < paths.index("'_x'") < paths.index("'a'") < paths.index("'bias'")
    assert paths.index("('mixed', 3)") < paths.index("('mixed', 10)") < paths.index("('mixed', 'a'")
