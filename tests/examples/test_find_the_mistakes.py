"""The example of silent mistakes, run as a user would run it."""

from __future__ import annotations

import re

import pytest

from tests.examples.process import quick_run

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


def test_quick_run_finds_all_mistakes_and_trains(tmp_path):
    output = quick_run("find_the_mistakes.py", tmp_path)
    figures = re.fullmatch(
        r"(\d) of 9 mistakes found; test accuracy (\d+\.\d)% before, (\d+\.\d)% after",
        output.splitlines()[-1],
    )
    assert figures, output
    found, before, after = map(float, figures.groups())
    assert found == 9, output
    assert before < 20 < 85 <= after
    assert (tmp_path / "out" / "find_the_mistakes.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    drawing = (tmp_path / "out" / "find_the_mistakes.svg").read_text()
    assert drawing.startswith("<svg") and "2 x RNN" in drawing
