"""The command line: files found and left out, diffs, exit status, encodings."""

import os
import stat
import sys

import pytest

pytest.importorskip("libcst")

from nnxlite.migrate import _NO_LIBCST, _command
from nnxlite.migrate._command import main

OLD, NEW = "from flax import nnx\n", "import nnxlite as nnx\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_only_write_changes_a_file_and_once(here, capsys):
    (here / "a.py").write_text(OLD)
    (here / "a.py").chmod(0o755)
    assert main(["a.py"]) == 0
    assert (here / "a.py").read_text() == OLD
    out = capsys.readouterr().out
    assert "--- a/a.py\n+++ b/a.py\n" in out and f"-{OLD}+{NEW}" in out
    assert out.endswith("files read: 1, would change: 1 (1 lines), to decide: 0, unreadable: 0\n")
    assert main(["a.py", "--write"]) == 0
    assert (here / "a.py").read_text() == NEW
    assert stat.S_IMODE((here / "a.py").stat().st_mode) == 0o755
    assert os.listdir(here) == ["a.py"]
    assert main(["a.py", "--check"]) == 0
    assert "changed: 1 (1 lines)" in capsys.readouterr().out


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
    for name in ("a.py", "b.pyi", ".hidden/c.py", "venv/site-packages/d.py", "text.txt"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(OLD)
    assert [*_command.programs(here)] == [here / "a.py", here / "b.pyi"]
    assert main([".", "a.py", "--write", "--quiet"]) == 0
    assert (here / "a.py").read_text() == NEW and (here / "text.txt").read_text() == OLD


def test_bad_input_does_not_stop_the_others(here, capsys):
    (here / "a.py").write_text(OLD + "x = = 1\n")
    (here / "b.py").write_text(OLD)
    (here / "c.py").write_bytes(b"# coding: nothing\n")
    (here / "d.ipynb").write_text("{}")
    assert main([".", "d.ipynb", "--write"]) == 2
    assert (here / "b.py").read_text() == NEW
    errors = capsys.readouterr().err
    assert "a.py:2:" in errors and "syntax error" in errors
    assert "c.py:1:1: cannot be decoded" in errors and "d.ipynb:1:1: a notebook: make" in errors
    assert main(["nowhere.py"]) == 2
    assert "nowhere.py does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "utf-8-sig"])
def test_encodings_stay(here, encoding):
    head = "# coding: latin-1\n" if encoding == "latin-1" else ""
    (here / "a.py").write_bytes((head + "x = 'é'\r\n" + OLD).encode(encoding))
    assert main(["a.py", "--write"]) == 0
    assert (here / "a.py").read_bytes() == (head + "x = 'é'\r\n" + NEW).encode(encoding)


def test_without_libcst_the_message_names_the_extra(here, monkeypatch, capsys):
    (here / "a.py").write_text(OLD)
    monkeypatch.setitem(sys.modules, "libcst", None)
    assert _command.main(["a.py"]) == 2
    assert "pip install 'nnxlite[migrate]'" in capsys.readouterr().err
    assert "libcst" in _NO_LIBCST


def test_programs_are_not_run(here, monkeypatch):
    (here / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(here)
    text = OLD + "import evil\nfrom evil import *\nnnx.evil.x()\nprint(__import__('evil'))\n"
    assert NEW in _command.migrate_text(text).text
    assert "evil" not in sys.modules
