"""The example of generated text, run as a user would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

EXAMPLE = Path(__file__).parents[2] / "examples" / "generate.py"


def test_quick_run_learns_and_writes(tmp_path):
    # A user's process has one CPU device, not the eight of these tests.
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    run = subprocess.run(
        [sys.executable, EXAMPLE, "--quick"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    figures = re.fullmatch(
        r"validation (\d\.\d\d) bits per letter; (\d\.\d\d) before training, (\d\.\d\d) by the .*",
        run.stdout.splitlines()[-1],
    )
    assert figures, run.stdout
    trained, before, frequency = map(float, figures.groups())
    assert trained < frequency < before
    assert re.search(r"│ 5 +│ +[\d,]+ +│ +[\d,]+ +│", run.stdout)
    written = (tmp_path / "out" / "generate.txt").read_text()
    assert written.count("The data set contains") == 5
    streamed = run.stdout.split("\n\n")[0]
    assert streamed in written  # the same key: the stream gives what the whole call gives
    assert (tmp_path / "out" / "generate.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
