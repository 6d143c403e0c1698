"""The example of an exported network, run as a user would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("flatbuffers")

EXAMPLE = Path(__file__).parents[2] / "examples" / "export.py"


def test_quick_run_exports_and_serves(tmp_path):
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
        r"100 requests of 1 to 63 scans ran 3 programs; (\d+) of 297 scans read right, (\d+) before "
        r"export",
        run.stdout.splitlines()[-1],
    )
    assert figures, run.stdout
    assert abs(int(figures[1]) - int(figures[2])) <= 1 and int(figures[1]) > 240
    assert (
        "Exported(classify: inputs=float32[batch, 8, 8], platforms=cpu, weights=10)" in run.stdout
    )
    assert re.search(r"│ 32 +│ \d+ +│ 9 to 32 +│ \d+\.\d\d ms", run.stdout)
    assert (tmp_path / "out" / "export.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
