"""Random programs with layers, metrics and optimizers, run by this library and by the reference.

`NNXLITE_FUZZ=3000` sets the number of programs, `NNXLITE_FUZZ_FIRST` the first seed. A failure shows
the seed, the program with the line that differs, and what differs in both outcomes.
"""

from __future__ import annotations

import os

import jax
import pytest

import nnxlite as nnx
from tests.parity.layer_fuzz import difference, program_of
from tests.parity.layers import OLDER, ref

PROGRAMS = int(os.environ.get("NNXLITE_FUZZ", "30"))
FIRST = int(os.environ.get("NNXLITE_FUZZ_FIRST", "0"))
BATCH = 10

pytestmark = pytest.mark.skipif(OLDER, reason="the reference is older than the one we follow")


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Most of the time goes to XLA."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", range(FIRST, FIRST + PROGRAMS, BATCH))
def test_both_do_the_same(start):
    found = {s: difference(program_of(s), nnx, ref) for s in range(start, start + BATCH)}
    jax.clear_caches()
    text = "\n\n".join(f"seed {seed}:\n{text}" for seed, text in found.items() if text)
    assert not text, text


def test_the_same_seed_gives_the_same_program():
    assert program_of(7) == program_of(7) != program_of(8)
