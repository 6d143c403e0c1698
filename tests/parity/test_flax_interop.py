"""The rest of Flax and other libraries treat our objects as Flax's: the same programs under both."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from tests.flax.launching import printed
from tests.parity.fuzz.observe import difference

pytest.importorskip("flax")

HERE = Path(__file__).parent


def run(file: str, *arguments: object, hook: bool) -> None:
    """Run a program under Flax, or under `nnxlite.flax`."""
    launcher = ("-m", "nnxlite.flax") if hook else ()
    printed("-W", "ignore", *launcher, str(HERE / file), *map(str, arguments))


def test_programs_around_flax_give_the_same(tmp_path):
    for hook in (False, True):
        run("flax_interop.py", tmp_path / str(hook), hook=hook)
    theirs, ours = (pickle.loads((tmp_path / str(hook)).read_bytes()) for hook in (False, True))
    exactly = lambda a, b: a.dtype == b.dtype and np.array_equal(a, b)
    found = {name: difference(ours[name], theirs[name], close=exactly) for name in theirs}
    assert len(found) > 100 and not {name: d for name, d in found.items() if d}


def test_files_of_flax_are_read_here_and_ours_there(tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for folder in (theirs, ours):
        folder.mkdir()
    reads = ("read_pickles", "read_checkpoints")
    run("flax_files.py", theirs, "write", hook=False)
    run("flax_files.py", theirs, *reads, hook=True)
    run("flax_files.py", ours, "write", *reads, hook=True)
    run("flax_files.py", ours, "read_checkpoints", hook=False)
