"""The example of experts on several devices, run as a user would run it."""

from __future__ import annotations

import re

import pytest

from tests.examples.process import quick_run

pytest.importorskip("matplotlib")


def test_quick_run_learns_and_balances(tmp_path):
    output = quick_run("moe.py", tmp_path)
    figures = re.fullmatch(
        r"8 experts on 8 devices: accuracy (\d\.\d+); (\d\.\d+) before training",
        output.splitlines()[-1],
    )
    assert figures, output
    after, before = map(float, figures.groups())
    assert before < 0.15 and after > 0.8
    loads = [int(load) for load in re.findall(r"│ \d +│ +(\d+)% +│", output)]
    assert len(loads) == 8 and max(loads) < 50
    assert (tmp_path / "out" / "moe.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
