"""The rest of Flax and other libraries treat our objects as Flax's: the same programs under both."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flax")

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PROGRAM = HERE / "flax_interop.py"
FILES = HERE / "flax_files.py"


def run(file: Path, *arguments: object, hook: bool) -> None:
    """Run a program under Flax, or under `nnxlite.flax`."""
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("NNXLITE_FLAX", "FLAX_"))
    }
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    launcher = ["-m", "nnxlite.flax"] if hook else []
    command = [sys.executable, "-W", "ignore", *launcher, str(file), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert not done.returncode, done.stderr[-3000:]


def names() -> list[str]:
    """The programs, read without running the file: it imports Flax."""
    functions = [n for n in ast.parse(PROGRAM.read_text()).body if isinstance(n, ast.FunctionDef)]
    return [f.name for f in functions if f.decorator_list]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interop")
    for hook in (False, True):
        run(PROGRAM, folder / str(hook), hook=hook)
    return [json.loads((folder / str(hook)).read_text()) for hook in (False, True)]


@pytest.mark.parametrize("name", names())
def test_a_program_around_flax_gives_the_same(results, name):
    theirs, ours = results
    assert ours[name] == theirs[name]


def test_files_of_flax_are_read_here_and_ours_there(tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for folder in (theirs, ours):
        folder.mkdir()
    run(FILES, theirs, "write", hook=False)
    run(FILES, theirs, "read", hook=True)
    run(FILES, ours, "write", "read", hook=True)
    run(FILES, ours, "read_checkpoints", hook=False)
