"""The example of a calibrated ensemble, run as a user would run it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.examples.process import EXAMPLES, quick_run

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


def test_quick_run_trains_and_calibrates(tmp_path):
    output = quick_run("ensemble.py", tmp_path)
    last = output.splitlines()[-1]
    figures = re.fullmatch(
        r"accuracy (\d+\.\d) %, expected calibration error (\d+\.\d) %; (\d+\.\d) % before .*", last
    )
    assert figures, last
    accuracy, after, before = map(float, figures.groups())
    assert accuracy >= 78
    assert after <= 5 and after < before
    detection = re.search(r"│ calibrated ensemble │ .* │ (0\.\d{3}) ", output)
    assert detection and float(detection[1]) > 0.7
    assert (tmp_path / "out" / "ensemble.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_bad_option_is_one_clear_line(tmp_path):
    command = [sys.executable, EXAMPLES / "ensemble.py", "--members", "1"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr == (
        "ensemble.py: error: argument --members: a whole number from 2 up, not '1'\n"
    )
