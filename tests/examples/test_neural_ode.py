"""The example of a neural differential equation, run as a user would run it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.examples.process import EXAMPLES, quick_run

pytest.importorskip("matplotlib")
pytest.importorskip("diffrax")


def test_quick_run_learns_the_dynamics(tmp_path, monkeypatch):
    # Without optimisations the solver takes minutes.
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)
    last = quick_run("neural_ode.py", tmp_path).splitlines()[-1]
    figures = re.fullmatch(
        r"error of the populations: (\d+\.\d) % within the time of training, (\d+\.\d) % in 4 times"
        r" as long; noise 2 %",
        last,
    )
    assert figures, last
    within, beyond = map(float, figures.groups())
    assert within <= 15 and beyond <= 40
    assert (tmp_path / "out" / "neural_ode.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_bad_option_is_one_clear_line(tmp_path):
    command = [sys.executable, EXAMPLES / "neural_ode.py", "--steps", "many"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr == (
        "neural_ode.py: error: argument --steps: a whole number from 1 up, not 'many'\n"
    )
