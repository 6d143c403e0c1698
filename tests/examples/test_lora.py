"""The example of adapters, judged by its output and files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.examples.process import environment

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

LORA = Path(__file__).parents[2] / "examples" / "lora.py"


def test_quick_run_adapts_and_restores(tmp_path):
    run = subprocess.run(
        [sys.executable, LORA, "--quick", "--out", tmp_path],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    last = run.stdout.splitlines()[-1]
    figures = re.fullmatch(
        r"turned digits: (\S+) % before, (\S+) % with 5\.2 % of the weights", last
    )
    assert figures, last
    assert float(figures[1]) < 40 and float(figures[2]) > 80
    assert "taken out: the network is as it was" in run.stdout
    assert re.search(r"adapters alone +│ 4,392 ", run.stdout)
    assert (tmp_path / "lora.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    adapters = load_file(tmp_path / "lora.safetensors")
    assert sum(array.size for array in adapters.values()) == 4392
    assert adapters["layers.0.kernel.lora_a"].shape == (64, 4)
