"""Random programs in the filtered style, run by this library and by Equinox as a black box.

`NNXLITE_FUZZ=3000` sets the number of programs, `NNXLITE_FUZZ_FIRST` the first seed. A failure shows
the seed, the program up to the line that differs, and both outcomes.
"""

from __future__ import annotations

import pytest

pytest.importorskip("equinox")

from tests.parity.batches import batches, differences
from tests.parity.filtered_fuzz import is_known, peers, program_of


def differ(seed: int) -> str | None:
    found = peers().compare(program_of(seed))
    return peers().report(found) if found and not is_known(found) else None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", batches(100))
def test_both_do_the_same(start):
    text = differences(start, differ)
    assert not text, text


def test_the_same_seed_gives_the_same_program():
    assert program_of(7) == program_of(7) != program_of(8)
