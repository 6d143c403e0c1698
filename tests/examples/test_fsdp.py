"""The example of plans, run as a user would run it."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("matplotlib")

from tests.examples.process import quick_run


def test_the_plans_agree_and_hold_less_on_each_device(tmp_path):
    text = quick_run("fsdp.py", tmp_path)
    rows = {
        found[1]: (int(found[2]), int(found[3]))
        for found in re.finditer(r"│ ([a-z+ ]+?) +│ (\d+) kB of (\d+) ", text)
    }
    whole = rows["one device"][0]
    assert rows["data"] == (whole, whole)
    assert rows["fsdp"][0] < whole / 3 and rows["fsdp+tensor"][0] < whole / 6
    assert re.search(r"│ data .*all-reduce", text)
    assert (tmp_path / "out" / "layout.png").stat().st_size > 10_000
