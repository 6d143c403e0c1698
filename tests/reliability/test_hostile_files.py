"""Files that are damaged, or that deceive: refused by a documented error, or read as what they say."""

from __future__ import annotations

import pytest

from tests.reliability import hostile

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

COUNTS = {"checkpoint": 60, "safetensors": 150, "shards": 100, "exported": 100}


@pytest.mark.parametrize("name", hostile.FORMATS)
def test_damaged_files_are_refused_or_right(name):
    counts = hostile.campaign(COUNTS[name], 0, [name])
    assert sum(counts.values()) == COUNTS[name]
    refused = sum(number for text, number in counts.items() if "refused" in text)
    assert refused >= COUNTS[name] / 4
