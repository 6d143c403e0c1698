"""The example of a character-level transformer, run as a user would run it."""

from __future__ import annotations

import re

import pytest

from tests.examples.process import quick_run

pytest.importorskip("matplotlib")


def test_quick_run_learns_and_writes(tmp_path):
    output = quick_run("char_transformer.py", tmp_path)
    figures = re.fullmatch(
        r"held-out text: (\d\.\d\d) bits per character, (\d\.\d\d) by xz, "
        r"(\d\.\d\d) by the frequency of characters alone",
        output.splitlines()[-1],
    )
    assert figures, output
    learned, _, frequency = map(float, figures.groups())
    assert learned < frequency - 0.8
    assert output.count(" goes on:\n") == 4
    assert (tmp_path / "out" / "char_transformer.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
