"""The command line: files found and left out, diffs, exit status, encodings, atomic writes."""

from __future__ import annotations

import json
import os
import stat
import sys

import pytest

pytest.importorskip("libcst")

from nnxlite.migrate import _command, _errors, _files, _program, _sources
from nnxlite.migrate._command import main

OLD, NEW = "from flax import nnx\n", "import nnxlite as nnx\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_nothing_changes_without_write(here, capsys):
    (here / "a.py").write_text(OLD)
    assert main(["a.py"]) == 0
    assert (here / "a.py").read_text() == OLD
    out = capsys.readouterr().out
    assert "--- a/a.py\n+++ b/a.py\n" in out and f"-{OLD}+{NEW}" in out
    assert out.endswith("1 file read, 1 would change (1 line), 0 to decide\n")


def test_write_changes_once(here, capsys):
    (here / "a.py").write_text(OLD)
    (here / "a.py").chmod(0o755)
    assert main(["a.py", "--write"]) == 0
    assert (here / "a.py").read_text() == NEW
    assert stat.S_IMODE((here / "a.py").stat().st_mode) == 0o755
    assert os.listdir(here) == ["a.py"]
    assert main(["a.py", "--check"]) == 0
    assert "1 changed (1 line)" in capsys.readouterr().out


def test_check_fails_where_anything_is_left(here):
    (here / "a.py").write_text(OLD)
    assert main(["a.py", "--check", "--quiet"]) == 1
    assert main(["a.py", "--check", "--write"]) == 0
    (here / "a.py").write_text(NEW + "nnx.Scan\n")
    assert main(["a.py"]) == 0
    assert main(["a.py", "--check"]) == 1


def test_a_note_is_one_line(here, capsys):
    (here / "a.py").write_text("from flax import nnx\nnnx.TreeNode\n")
    main(["a.py", "--quiet"])
    assert capsys.readouterr().out == (
        "a.py:2:1: nnxlite has no `TreeNode`: use nnx.Pytree [docs/migrating/flax-nnx.md]\n"
    )


def test_directories_are_searched(here, capsys):
    for name in ("src/a.py", "src/b.pyi", "src/.hidden/c.py", "src/venv/lib/d.py", "src/text.txt"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(OLD)
    (here / "src/venv/pyvenv.cfg").touch()
    assert [str(path) for path in _files.programs([here / "src"], [])] == [
        str(here / "src/a.py"),
        str(here / "src/b.pyi"),
    ]
    assert [*_files.programs([here / "src", here / "src/a.py"], ["b.*"])] == [here / "src/a.py"]
    assert [*_files.programs([here / "src"], ["src/*"])] == []


def test_bad_input_does_not_stop_the_others(here, capsys):
    (here / "a.py").write_text(OLD + "x = = 1\n")
    (here / "b.py").write_text(OLD)
    (here / "c.py").write_bytes(b"# coding: nothing\n")
    (here / "d.ipynb").write_text("[")
    assert main([".", "--write"]) == 2
    assert (here / "b.py").read_text() == NEW
    errors = capsys.readouterr().err
    assert "a.py:2:" in errors and "syntax error" in errors
    assert "c.py:1:1: cannot be decoded" in errors and "d.ipynb:1:2: not JSON" in errors
    assert main(["nowhere.py"]) == 2
    assert "nowhere.py does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "utf-8-sig"])
def test_encodings_stay(here, encoding):
    head = "# coding: latin-1\n" if encoding == "latin-1" else ""
    (here / "a.py").write_bytes((head + "x = 'é'\r\n" + OLD).encode(encoding))
    assert main(["a.py", "--write"]) == 0
    assert (here / "a.py").read_bytes() == (head + "x = 'é'\r\n" + NEW).encode(encoding)


def test_a_write_that_fails_leaves_the_file(here, monkeypatch, capsys):
    (here / "a.py").write_text(OLD)

    def replace(*args):
        raise OSError("the disk is gone")

    monkeypatch.setattr(_files.os, "replace", replace)
    assert main(["a.py", "--write"]) == 2
    assert "the disk is gone" in capsys.readouterr().err
    assert (here / "a.py").read_text() == OLD and os.listdir(here) == ["a.py"]


def test_a_terminal_has_colours(here, monkeypatch, capsys):
    (here / "a.py").write_text(OLD)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert main(["a.py"]) == 0
    assert "\x1b[" in capsys.readouterr().out


def test_without_libcst_the_message_names_the_extra(here, monkeypatch, capsys):
    (here / "a.py").write_text(OLD)
    monkeypatch.setitem(sys.modules, "libcst", None)
    assert _command.main(["a.py"]) == 2
    assert "pip install 'nnxlite[migrate]'" in capsys.readouterr().err
    assert "libcst" in _program.NO_LIBCST


NOTEBOOK = """{
 "cells": [
  {"cell_type": "markdown", "source": ["from flax import nnx"]},
  {
   "cell_type": "code",
   "outputs": [{"data": {"text/plain":   ["1 \\u00e9"]}}],
   "source": [
    "%matplotlib inline\\n",
    "!pip install flax\\n",
    "files = !ls\\n",
    "from flax import (\\n",
    "    nnx,\\n",
    "    struct,\\n",
    ")\\n",
    "nnx.Param?"
   ]
  },
  {"cell_type": "code", "source": "%%bash\\nfrom flax import nnx"},
  {"cell_type": "code", "source": "s = 'é'\\nnnx.Optimizer(m, tx)\\nnnx.Scan"}
 ],
 "nbformat": 4
}"""


def test_cells_of_a_notebook_are_one_program(here, capsys):
    (here / "a.ipynb").write_text(NOTEBOOK, encoding="utf-8")
    assert main(["a.ipynb", "--write", "--quiet"]) == 0
    new = (here / "a.ipynb").read_text(encoding="utf-8")
    json.loads(new)
    changed = NOTEBOOK.replace("nnx.Optimizer(m", "nnx.ModelAndOptimizer(m")
    start, stop = changed.index('    "from flax import ('), changed.index('    "nnx.Param?"')
    assert new.startswith(changed[:start]) and new.endswith(changed[stop:])
    code = "".join(json.loads(new)["cells"][1]["source"])
    assert "from flax import (\n    struct,\n)\nimport nnxlite as nnx\nnnx.Param?" in code
    assert "a.ipynb:cell 3:3:1: nnxlite has no `Scan`" in capsys.readouterr().out
    assert main(["a.ipynb", "--write", "--quiet"]) == 0
    assert (here / "a.ipynb").read_text(encoding="utf-8") == new


def test_json_that_is_no_notebook(here, capsys):
    (here / "a.ipynb").write_text("{}")
    assert main(["a.ipynb"]) == 2
    assert "not a notebook: it has no list `cells`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "not JSON: it is nested too deeply"),
        ('{"cells": [1]}', "not a notebook: a cell is not a table"),
        ('{"cells": [{"cell_type": "code", "source": [1]}]}', "the source of a cell is not text"),
    ],
    ids=["deep", "cell", "source"],
)
def test_notebooks_that_are_none(here, capsys, text, message):
    (here / "a.ipynb").write_text(text)
    assert main(["a.ipynb", "--write"]) == 2
    assert message in capsys.readouterr().err
    assert (here / "a.ipynb").read_text() == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = " + "(" * 300 + ")" * 300, "it is nested too deeply"),
        ("x = " + "-" * 100_000 + "1", "it is nested too deeply"),
        ("x = '\ud800'", "cannot be encoded: "),
    ],
    ids=["parentheses", "operators", "surrogate"],
)
def test_programs_that_no_parser_takes(text, message):
    with pytest.raises(_errors.UnreadableError, match=f"^{message}"):
        _sources.migrate_text(f"from flax import nnx\n{text}\n")


def test_a_program_that_is_too_deep_for_the_edits(monkeypatch):
    def find(program, source):
        raise RecursionError

    monkeypatch.setattr(_sources, "_find", find)
    with pytest.raises(_errors.UnreadableError, match="^it is nested too deeply$"):
        _sources.migrate_text("from flax import nnx\n")
