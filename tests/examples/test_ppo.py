"""The example of reinforcement learning, run as a user would run it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.examples.process import EXAMPLES, quick_run

pytest.importorskip("matplotlib")


def test_quick_run_learns_to_balance(tmp_path):
    last = quick_run("ppo.py", tmp_path).splitlines()[-1]
    figures = re.fullmatch(
        r"mean return of 64 episodes (\d+\.\d), lowest (\d+); (\d+\.\d) before training", last
    )
    assert figures, last
    mean, lowest, before = map(float, figures.groups())
    assert before < 120
    assert 200 <= mean <= 500 and lowest <= mean
    assert (tmp_path / "out" / "ppo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_bad_option_is_one_clear_line(tmp_path):
    command = [sys.executable, EXAMPLES / "ppo.py", "--updates", "0"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr == "ppo.py: error: argument --updates: a whole number from 1 up, not '0'\n"
