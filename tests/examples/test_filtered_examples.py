"""The examples of the filtered style, run as a user would run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("frozen_layer", "the first layer is as it was: True"),
        ("build_model", "loss "),
        ("spiral_rnn", "test accuracy "),
    ],
)
def test_quick_run(name, said, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    run = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", "--quick", "--out", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert said in run.stdout
    assert (tmp_path / f"{name}.npz").exists()
