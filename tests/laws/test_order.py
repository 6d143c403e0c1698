"""Law L2: leaf order and paths are the same in every process, whatever the hash seed."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import textwrap
from pathlib import Path

PROGRAM = textwrap.dedent(
    """
    import jax, jax.numpy as jnp
    import nnxlite as nnx

    class Model(nnx.Module):
        def __init__(self, names):
            for name in names:
                setattr(self, name, nnx.Param(jnp.ones(2), **{n: 1 for n in names}))
            self.mixed = {"b": jnp.ones(1), 3: jnp.ones(2), "a": [jnp.ones(3)], 10: jnp.ones(4)}
            self.names = set(names)
            self.items = nnx.List([nnx.Dict({n: nnx.Param(jnp.ones(6)) for n in names}), jnp.ones(5)])
            self.state = nnx.State({n: jnp.ones(len(n)) for n in names})

    names = {"kernel", "bias", "scale", "a", "B", "_x", "é", "layer10", "layer9"}
    model = Model(names)
    graphdef, state = nnx.split(model)
    print(graphdef.paths)
    print(nnx.to_flat_state(state).paths)
    print([path for path, _ in nnx.iter_graph(model) if path[:1] != ("names",)])
    print([leaf.shape for leaf in jax.tree.leaves(state)])
    del model.mixed  # JAX does not sort keys of several types
    print([jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(model)])
    print(graphdef == nnx.graphdef(Model(sorted(names))))
    """
)


def in_another_process() -> str:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_L2_paths_and_leaf_order_are_the_same_in_every_process():
    here = io.StringIO()
    with contextlib.redirect_stdout(here):
        exec(PROGRAM, {"__name__": "program"})
    first = in_another_process()
    assert first == here.getvalue() and first.endswith("True\n")
    paths = first.splitlines()[0]
    assert paths.index("'B'") < paths.index("'_x'") < paths.index("'a'") < paths.index("'bias'")
    assert paths.index("('mixed', 3)") < paths.index("('mixed', 10)") < paths.index("('mixed', 'a'")
