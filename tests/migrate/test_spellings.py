"""Spellings of earlier versions: what is certain is rewritten, the rest has a note with a hint."""

from __future__ import annotations

import pytest

pytest.importorskip("libcst")

from nnxlite.migrate import migrate_text

HEAD = "import nnxlite as nnx\n"

REWRITTEN = {
    "nnx.Optimizer(model, tx)": "nnx.ModelAndOptimizer(model, tx)",
    "nnx.optimizer.Optimizer(model, tx=tx)": "nnx.optimizer.ModelAndOptimizer(model, tx=tx)",
}


@pytest.mark.parametrize("before", REWRITTEN)
def test_a_spelling_is_rewritten(before):
    done = migrate_text(HEAD + before)
    assert done.text == HEAD + REWRITTEN[before]
    assert done.notes == ()
    assert migrate_text(done.text) == done


STAYING = {
    "nnx.TreeNode": ("nnxlite has no `TreeNode`", "use nnx.Pytree"),
    "nnx.Scan": ("nnxlite has no `Scan`", "nnx.scan"),
    "nnx.graph.static_cache": ("nnxlite has no `graph.static_cache`", "private, or no longer"),
    "nnx.vmap(f, state_axes={})": ("takes no argument `state_axes`", "nnx.StateAxes"),
    "nnx.Linear(2, 3, wide=True)": ("`nnx.Linear` takes no argument `wide`", "in_features"),
    "nnx.Linear.partial_init(2, 3)": ("nnxlite has no `Linear.partial_init`", "under nnx.jit"),
    "nnx.grad(f, 1, wrt=nnx.Param)": (
        "`nnx.grad` takes no argument `wrt`",
        "nnx.DiffState(0, filter)",
    ),
    "from nnxlite import Optimizer\nOptimizer(m, tx)": (
        "`Optimizer` needs `wrt`",
        "add wrt=nnx.Param",
    ),
    "nnx.VariableState(nnx.Param, x)": ("another name of `Variable`", "kind(value)"),
    "import_module('flax.nnx.nn')": ("a string says `flax.nnx.nn`", 'write "nnxlite.nn"'),
    "from flax.nnx import *": ("a star import", "import nnxlite as nnx"),
    "from nnxlite import Vmap": ("nnxlite has no `Vmap`", "nnx.vmap"),
    "import flax.struct": ("`flax.struct` stays", "jax.tree_util.register_dataclass"),
    "from flax import linen": ("`flax.linen` stays", "nnx.Module"),
    "from flax.core import FrozenDict": ("`flax.core` stays", "plain dicts"),
    "from flax.training.train_state import TrainState": ("train_state` stays", "nnx.Optimizer"),
    "from flax.training import lr_schedule": ("`flax.training` stays", "copy the function"),
    "from flax import serialization": ("`flax.serialization` stays", "nnx.checkpoint"),
    "from flax.jax_utils import replicate": ("`flax.jax_utils` stays", "nnx.shard"),
    "from flax import traverse_util": ("`flax.traverse_util` stays", "nnx.to_flat_state"),
    "import flax\nflax.config.update('a', 1)": ("`flax.config` stays", "keep Flax installed"),
    "from flax import errors": ("`flax.errors` stays", "nnx.errors"),
}


@pytest.mark.parametrize("program", STAYING)
def test_a_note_says_what_to_do(program):
    text = HEAD + program
    done = migrate_text(text)
    assert done.text == text
    what, hint = STAYING[program]
    assert any(what in note.what and hint in note.hint for note in done.notes), done.notes
    for note in done.notes:
        line = text.splitlines()[note.line - 1]
        assert 1 <= note.column <= len(line) and note.page.endswith(".md")


FINE = """
import nnxlite as nnx
class M(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.a = nnx.Linear(2, 3, rngs=rngs)
        self.b = nnx.Param(1, anything=2)
        self.b.value = self.b.raw_value
opt = nnx.Optimizer(m, tx, wrt=nnx.Param)
opt.update(model, grads)
metrics.update(loss)
nnx.state(m).flat_state()
nnx.remat(f)(segment_ids=1)
nnx.split_rngs(rngs, splits=3, only="dropout")
nnx.vmap(f, in_axes=nnx.StateAxes({nnx.Param: 0, ...: None}))
nnx.nn.linear.Linear, nnx.variablelib.Variable, nnx.optimizer.OptState
"""


def test_a_program_in_order_has_no_notes():
    assert migrate_text(FINE) == type(migrate_text(FINE))(FINE)
