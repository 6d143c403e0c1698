"""The example of long sequences, run as a user would run it."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("matplotlib")

from tests.examples.process import quick_run


def test_the_ways_agree_and_a_ring_needs_less_memory(tmp_path):
    text = quick_run("long_sequences.py", tmp_path)
    held = {m[1].strip(): int(m[2]) for m in re.finditer(r"│ ([a-z ]+?) +│.*?(\d+) kB a", text)}
    assert held["ring"] == held["one device"] > 3 * held["stages"]
    apart = [float(m[1]) for m in re.finditer(r"│ \d\.\d{4} │ (\d+e[+-]\d+) ", text)]
    assert len(apart) == 3 and max(apart) < 1e-3
    last = re.search(r"needs (\d+) % of the memory along the ring; [\d.]+ % of the", text)
    assert last and int(last[1]) < 10
    assert (tmp_path / "out" / "long_sequences.png").stat().st_size > 10_000
