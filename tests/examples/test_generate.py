"""The example of generated text, run as a user would run it."""

from __future__ import annotations

import re

import pytest

from tests.examples.process import quick_run

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


def test_quick_run_learns_and_writes(tmp_path):
    output = quick_run("generate.py", tmp_path)
    figures = re.fullmatch(
        r"validation (\d\.\d\d) bits per letter; (\d\.\d\d) before training, (\d\.\d\d) by the .*",
        output.splitlines()[-1],
    )
    assert figures, output
    trained, before, frequency = map(float, figures.groups())
    assert trained < frequency < before
    assert re.search(r"│ 5 +│ +[\d,]+ +│ +[\d,]+ +│", output)
    written = (tmp_path / "out" / "generate.txt").read_text()
    assert written.count("The data set contains") == 6
    streamed = output.split("\n\n")[0]
    assert streamed in written  # the same key: the stream gives what the whole call gives
    assert (tmp_path / "out" / "generate.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
