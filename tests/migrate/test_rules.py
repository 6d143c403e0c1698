"""What becomes of programs: spellings of earlier versions move or have a note, all else stays."""

import re
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("libcst")

import hypothesis.strategies as st
from hypothesis import given, settings

import nnxlite as nnx
from nnxlite import filtered
from nnxlite.migrate import UnreadableError, _hints, migrate_text

HEAD = "import nnxlite as nnx\n"

FORMS = {
    "from flax import nnx": "import nnxlite as nnx",
    "from flax import nnx as X": "import nnxlite as X",
    "import flax.nnx as X": "import nnxlite as X",
    "import flax.nnx.nn.linear as X": "import nnxlite.nn.linear as X",
    "from flax.nnx import A, Param as P": "from nnxlite import A, Param as P",
    "from flax.nnx.nnx.nn.linear import Conv": "from nnxlite.nn.linear import Conv",
    "from flax.nnx import (\n    Param,  # kept\n)": "from nnxlite import (\n    Param,  # kept\n)",
    "import flax\nflax.nnx.Param": "import nnxlite\nnnxlite.Param",
    "import flax as f\nf.nnx.Param": "import nnxlite\nnnxlite.Param",
    "import flax.nnx\nflax.nnx.Param": "import nnxlite\nnnxlite.Param",
    "import jax, flax\nflax.nnx.Param": "import jax\nimport nnxlite\nnnxlite.Param",
    **dict.fromkeys(
        (
            "import flax\nflax.nnx.Param, flax.config",
            "import flax.nnx\nflax.nnx.Param, flax.config",
        ),
        "import flax\nimport nnxlite\nnnxlite.Param, flax.config",
    ),
    "import flax.linen\nflax.nnx.Param, flax.linen.Dense": (
        "import flax.linen\nimport nnxlite\nnnxlite.Param, flax.linen.Dense"
    ),
    "from flax import nnx, linen as nn": "from flax import linen as nn\nimport nnxlite as nnx",
    "from flax import (\n    nnx,  # why\n    struct,  # data\n)": (
        "from flax import (\n    struct,  # data\n)\nimport nnxlite as nnx"
    ),
    "if 1: from flax import nnx, struct": "if 1: from flax import struct; import nnxlite as nnx",
    "x = 1; from flax import nnx; y = 2": "x = 1; import nnxlite as nnx; y = 2",
    "def f():\n\tfrom flax import struct, nnx\n\treturn nnx": (
        "def f():\n\tfrom flax import struct\n\timport nnxlite as nnx\n\treturn nnx"
    ),
    "try:\n    from flax import nnx\nexcept ImportError:\n    nnx = None": (
        "try:\n    import nnxlite as nnx\nexcept ImportError:\n    nnx = None"
    ),
    "import nnxlite as nnx\nnnx.Optimizer(model, tx)": (
        "import nnxlite as nnx\nnnx.ModelAndOptimizer(model, tx)"
    ),
    "import nnxlite as nnx\nnnx.optimizer.Optimizer(model, tx=tx)": (
        "import nnxlite as nnx\nnnx.optimizer.ModelAndOptimizer(model, tx=tx)"
    ),
}
"""Programs, and what becomes of them."""


@pytest.mark.parametrize("before", FORMS)
def test_a_program_is_rewritten(before):
    once = migrate_text(before).text
    assert once == FORMS[before]
    compile(once, "program", "exec")
    assert migrate_text(once).text == once


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
nnx.nn.linear.Linear, nnx.variablelib.Variable, nnx.optimizer.OptState, nnx.relu.anything
"""

UNTOUCHED = [
    "import flax\nflax.linen.Dense",
    "from .flax import nnx",
    "from flax_extra import nnx",
    "flax = 1\nflax.nnx",
    "def f(flax): return flax.nnx.Param",
    "import jax  # from flax import nnx",
    "text = 'from flax import nnx'",
    "import nnxlite as nnx\nnnx.Linear(2, 3, rngs=nnx.Rngs(0))",
    FINE,
]


@pytest.mark.parametrize("text", UNTOUCHED)
def test_what_is_not_flax_nnx_stays(text):
    done = migrate_text(text)
    assert done.text == text and (text is not FINE or done.notes == ())


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
@given(LINES, st.sampled_from(["\n", "\r\n", "\r"]), st.booleans())
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


def test_a_syntax_error_has_a_position():
    with pytest.raises(UnreadableError, match="syntax error") as caught:
        migrate_text("from flax import nnx\nx = = 1\n")
    assert caught.value.line == 2


def test_a_source_nobody_knows():
    with pytest.raises(ValueError, match="unknown source 'jaxnet'; expected one of nnx, equinox"):
        migrate_text("", "jaxnet")


STAYING = {
    "nnx.TreeNode": ("nnxlite has no `TreeNode`", "use nnx.Pytree"),
    "nnx.Scan": ("nnxlite has no `Scan`", "nnx.scan"),
    "nnx.graph.static_cache": ("nnxlite has no `graph.static_cache`", "private, or no longer"),
    "nnx.vmap(f, state_axes={})": ("takes no argument `state_axes`", "nnx.StateAxes"),
    "nnx.Linear(2, 3, wide=True)": ("`nnx.Linear` takes no argument `wide`", "in_features"),
    "nnx.Linear.partial_init(2, 3)": ("nnxlite has no `Linear.partial_init`", "under nnx.jit"),
    "nnx.grad(f, 1, wrt=nnx.Param)": (
        "`nnx.grad` takes no argument `wrt`",
        "nnx.DiffState(0, filter",
    ),
    "from nnxlite import Optimizer\nOptimizer(m, tx)": ("`Optimizer` needs `wrt`", "wrt=nnx.Param"),
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
"""Programs that stay as they are, and what the note and its hint say."""


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


def test_every_hint_points_at_a_page():
    docs = Path(__file__).parents[2] / "docs"
    pages = {page for _, page in [*_hints.FLAX.values(), *_hints.ABSENT.values()]}
    pages |= {_hints.FLAX_NNX, _hints.LINEN, _hints.EQUINOX}
    assert [page for page in pages if not (docs / page).is_file()] == []
    named = re.findall(r"nnx\.([a-zA-Z_]+)", " ".join(_hints.EQUINOX_LEFT.values()))
    assert [name for name in named if not hasattr(nnx, name)] == []


# Equinox ---------------------------------------------------------------------------------------------

SAME = {name for name in vars(filtered) if name[0] != "_"} - {*_hints.EQUINOX_LEFT}
HINTS = {name: f"nnx.{name} is the same function, for modules of both" for name in SAME}
HINTS |= {**_hints.EQUINOX_LEFT, "unheard": _hints.OTHER_EQUINOX}


@pytest.mark.parametrize("name", sorted(HINTS))
def test_a_name_of_equinox_has_a_note(name):
    assert name not in SAME or callable(getattr(nnx, name))
    for program in (f"import equinox as eqx\neqx.{name}", f"from equinox import {name}"):
        done = migrate_text(program, "equinox")
        (note,) = done.notes
        assert done.text == program and (note.what, note.hint) == (f"`equinox.{name}`", HINTS[name])


def test_names_below_a_module_of_equinox_have_its_hint():
    program = "import equinox as eqx\nfrom equinox.nn import Linear\neqx.nn.Linear(2, 3), Linear"
    notes = migrate_text(program, "equinox").notes
    assert [(note.line, note.what) for note in notes] == [
        (n, "`equinox.nn.Linear`") for n in (2, 3)
    ]
    assert {note.hint for note in notes} == {_hints.EQUINOX_LEFT["nn"]}
