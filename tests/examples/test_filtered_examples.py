"""The examples of the filtered style, run as a user would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.process import environment

pytest.importorskip("matplotlib")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "said", "least", "most"),
    [
        ("frozen_layer", r"the last layer alone: mean squared error (\S+)", 0, 0.3),
        ("build_model", r"loss \S+ -> (\S+)", 0, 0.1),
        ("spiral_rnn", r"test accuracy (\S+) %", 95, 100),
    ],
)
def test_quick_run_reaches_its_result(name, said, least, most, tmp_path):
    run = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", "--quick", "--out", str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    result = re.search(said, run.stdout)
    assert result and least <= float(result[1]) <= most, run.stdout
    assert name != "frozen_layer" or "the first layer is as it was: True" in run.stdout
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
