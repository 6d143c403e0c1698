"""The rest of Flax and other libraries treat our objects as Flax's: the same programs under both."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.parity.fuzz.observe import difference

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


def test_programs_around_flax_give_the_same(tmp_path):
    for hook in (False, True):
        run(PROGRAM, tmp_path / str(hook), hook=hook)
    theirs, ours = (pickle.loads((tmp_path / str(hook)).read_bytes()) for hook in (False, True))
    exactly = lambda a, b: a.dtype == b.dtype and np.array_equal(a, b)
    found = {name: difference(ours[name], theirs[name], close=exactly) for name in theirs}
    assert len(found) > 100 and not {name: d for name, d in found.items() if d}


def test_files_of_flax_are_read_here_and_ours_there(tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for folder in (theirs, ours):
        folder.mkdir()
    reads = ("read_pickles", "read_checkpoints")
    run(FILES, theirs, "write", hook=False)
    run(FILES, theirs, *reads, hook=True)
    run(FILES, ours, "write", *reads, hook=True)
    run(FILES, ours, "read_checkpoints", hook=False)
