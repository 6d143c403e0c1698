"""Random programs with layers, metrics and optimizers, run by this library and by the reference.

`NNXLITE_FUZZ=3000` sets the number of programs, `NNXLITE_FUZZ_FIRST` the first seed. A failure shows
the seed, the program with the line that differs, and what differs in both outcomes.
"""

from __future__ import annotations

import pytest

import nnxlite as nnx
from tests.parity.batches import batches, differences
from tests.parity.layer_fuzz import difference, program_of
from tests.parity.layers import OLDER, ref

pytestmark = pytest.mark.skipif(OLDER, reason="the reference is older than the one we follow")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", batches(160))
def test_both_do_the_same(start):
    text = differences(start, lambda seed: difference(program_of(seed), nnx, ref))
    assert not text, text


def test_the_same_seed_gives_the_same_program():
    assert program_of(7) == program_of(7) != program_of(8)
