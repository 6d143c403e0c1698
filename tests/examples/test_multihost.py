"""The example of several processes, run alone, as a user would run it first."""

from __future__ import annotations

import re

import pytest

from tests.examples.process import quick_run

pytest.importorskip("sklearn")
pytest.importorskip("orbax.checkpoint")


def test_quick_run_trains_and_restores(tmp_path):
    output = quick_run("multihost.py", tmp_path)
    trained = re.findall(r"^(data|fsdp): .*, (\d+\.\d)% of 320 test scans right", output, re.M)
    assert [plan for plan, _ in trained] == ["data", "fsdp"]
    restored = re.search(r"restored on one copy each: \d+ arrays, (\d+\.\d)% right$", output)
    assert restored, output
    assert restored[1] == trained[1][1] and float(restored[1]) >= 90
