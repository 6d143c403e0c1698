"""Imports of Flax NNX in all their forms become imports of nnxlite, and nothing else changes."""

from __future__ import annotations

import pytest

pytest.importorskip("libcst")

from nnxlite.migrate import UnreadableError, migrate_text

FORMS = {
    "from flax import nnx": "import nnxlite as nnx",
    "from flax import nnx as X": "import nnxlite as X",
    "import flax.nnx as X": "import nnxlite as X",
    "import flax.nnx.nn.linear as X": "import nnxlite.nn.linear as X",
    "from flax.nnx import A, Param as P": "from nnxlite import A, Param as P",
    "from flax.nnx.nnx.nn.linear import Conv": "from nnxlite.nn.linear import Conv",
    "from flax.nnx.nn.linear import Conv": "from nnxlite.nn.linear import Conv",
    "from flax.nnx import (\n    Param,  # kept\n)": "from nnxlite import (\n    Param,  # kept\n)",
    "import flax\nflax.nnx.Param": "import nnxlite\nnnxlite.Param",
    "import flax as f\nf.nnx.Param": "import nnxlite\nnnxlite.Param",
    "import flax.nnx\nflax.nnx.Param": "import nnxlite\nnnxlite.Param",
    "import jax, flax\nflax.nnx.Param": "import jax\nimport nnxlite\nnnxlite.Param",
    "import flax\nflax.nnx.Param, flax.config": (
        "import flax\nimport nnxlite\nnnxlite.Param, flax.config"
    ),
    "import flax.nnx\nflax.nnx.Param, flax.config": (
        "import flax\nimport nnxlite\nnnxlite.Param, flax.config"
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
    "from flax.nnx import Scan, Param": "from nnxlite import Scan, Param",
    "def f():\n\tfrom flax import struct, nnx\n\treturn nnx": (
        "def f():\n\tfrom flax import struct\n\timport nnxlite as nnx\n\treturn nnx"
    ),
    "try:\n    from flax import nnx\nexcept ImportError:\n    nnx = None": (
        "try:\n    import nnxlite as nnx\nexcept ImportError:\n    nnx = None"
    ),
    "if TYPE_CHECKING:\n    from flax import nnx  # types": (
        "if TYPE_CHECKING:\n    import nnxlite as nnx  # types"
    ),
}


@pytest.mark.parametrize("before", FORMS)
def test_an_import_moves(before):
    once = migrate_text(before).text
    assert once == FORMS[before]
    compile(once, "program", "exec")
    assert migrate_text(once).text == once


UNTOUCHED = [
    "import flax\nflax.linen.Dense",
    "from .flax import nnx",
    "from flax_extra import nnx",
    "flax = 1\nflax.nnx",
    "def f(flax): return flax.nnx.Param",
    "import jax  # from flax import nnx",
    "text = 'from flax import nnx'",
    "import nnxlite as nnx\nnnx.Linear(2, 3, rngs=nnx.Rngs(0))",
]


@pytest.mark.parametrize("text", UNTOUCHED)
def test_what_is_not_flax_nnx_stays(text):
    assert migrate_text(text).text == text


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_line_endings_stay(newline):
    lines = ["from flax import nnx, struct", "x = 1   ", "", "  ", "\f", "y = 2"]
    wanted = ["from flax import struct", "import nnxlite as nnx", *lines[1:]]
    assert migrate_text(newline.join(lines)).text == newline.join(wanted)


def test_a_syntax_error_has_a_position():
    with pytest.raises(UnreadableError, match="syntax error") as caught:
        migrate_text("from flax import nnx\nx = = 1\n")
    assert caught.value.line == 2


def test_a_source_nobody_knows():
    with pytest.raises(ValueError, match="unknown source 'jaxnet'; expected one of nnx, equinox"):
        migrate_text("", "jaxnet")
