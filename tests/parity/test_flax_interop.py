"""The rest of Flax and other libraries treat our objects as Flax's: the same programs under both."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from tests.flax.launching import printed
from tests.parity.fuzz.observe import difference

pytest.importorskip("flax")


def run(*modes, hook):
    """Run parts of a program under Flax, or under `nnxlite.flax`."""
    launcher = ("-m", "nnxlite.flax") if hook else ()
    file = Path(__file__).with_name("flax_files.py")
    printed("-W", "ignore", *launcher, str(file), *map(str, modes))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Files that were written under Flax and read here, and files that were written here."""
    theirs, ours = folders = [tmp_path_factory.mktemp(name) for name in ("theirs", "ours")]
    run("write", theirs, "programs", theirs, hook=False)
    reading = ("read_pickles", theirs, "read_checkpoints", theirs)
    run(*reading, "write", ours, "programs", ours, hook=True)
    return folders


def test_programs_around_flax_give_the_same(folders):
    theirs, ours = (pickle.loads((folder / "results").read_bytes()) for folder in folders)
    exactly = lambda a, b: a.dtype == b.dtype and np.array_equal(a, b)
    found = {name: difference(ours[name], theirs[name], close=exactly) for name in theirs}
    assert len(found) > 100 and not {name: d for name, d in found.items() if d}


def test_files_of_flax_are_read_here_and_ours_there(folders):
    run("read_checkpoints", folders[1], hook=False)
