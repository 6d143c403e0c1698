"""Laws of the rewriting: twice is once, and lines that do not mention Flax stay byte for byte."""

from __future__ import annotations

import textwrap

import jax
import numpy as np
import pytest

pytest.importorskip("libcst")

import hypothesis.strategies as st
from hypothesis import given, settings

from nnxlite.migrate import migrate_text

MOVING = st.sampled_from(
    """from flax import nnx
import flax.nnx as fx
import flax
import flax.nnx
from flax import struct, nnx as n
from flax.nnx import Param, Scan
x = flax.nnx.Param(1)
flax.linen.Dense(3)
fx.VariableState(3)
o = nnx.Optimizer(m, tx); o.update(g)
nnx.grad(f, wrt=nnx.Param)(m)
m: 'flax.nnx.Module' = fx.Scan""".split("\n")
)
SPACED = ["", "  ", "\t", "\f", "x=1 ;y = 2  ", "def  f( a ):pass", "(1,\n  2 )", "'''a\n  '''"]
COMMENTS = st.text(st.characters(blacklist_categories=("Cc", "Cs", "Zl", "Zp")), max_size=8)
OTHER = st.sampled_from(SPACED) | COMMENTS.map("# {}".format)
LINES = st.lists(st.tuples(st.booleans(), MOVING, OTHER), max_size=7)


@settings(max_examples=60)
@given(LINES, st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_twice_is_once_and_other_lines_stay(lines, newline, indented):
    text = "".join((moving if is_moving else other) + "\n" for is_moving, moving, other in lines)
    if indented:
        text = "def g():\n" + textwrap.indent(text, "   ") + "   pass\n"
    text = text.replace("\n", newline)
    new = migrate_text(text).text
    assert migrate_text(new).text == new
    compile(new, "program", "exec")
    kept, words = iter(new.split(newline)), ("flax", "nnx", "fx")
    others = [line for line in text.split(newline) if not any(word in line for word in words)]
    assert all(any(line == other for other in kept) for line in others)


# The first layer has no bias: in front of a BatchNorm its gradient is nothing but rounding, which Adam
# makes as large as any other.
PROGRAM = """
import jax, jax.numpy as jnp, optax
from flax import nnx

class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(4, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(nnx.relu(self.norm(self.hidden(x)))))

model = MLP(nnx.Rngs(0, dropout=1))
optimizer = nnx.Optimizer(model, optax.adam(1e-2))

@nnx.jit
def step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(model)
    optimizer.update(grads)
    return loss

x = jax.random.normal(jax.random.key(0), (16, 4))
losses = [float(step(optimizer.model, optimizer, x, x.sum(1, keepdims=True))) for _ in range(5)]
"""


def test_a_migrated_program_gives_the_same_numbers():
    """The spellings of early NNX, written out for Flax 0.12 by hand, beside the migrated program."""
    pytest.importorskip("flax")
    by_hand = PROGRAM.replace("nnx.Optimizer(", "nnx.ModelAndOptimizer(")
    here, there = {}, {}
    exec(migrate_text(PROGRAM).text, here)
    exec(by_hand, there)
    assert here["nnx"].__name__ == "nnxlite" and there["nnx"].__name__ == "flax.nnx"
    assert here["losses"] == pytest.approx(there["losses"], rel=1e-5)
    assert here["losses"][-1] < here["losses"][0]
    params = [
        names["nnx"].to_pure_dict(names["nnx"].state(names["model"], names["nnx"].Param))
        for names in (here, there)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *params)
