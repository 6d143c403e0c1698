"""Runs an example as a user would run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def quick_run(name: str, folder: Path) -> str:
    """The output of an example with `--quick`, run in a folder, which has to succeed."""
    # A user's process has one CPU device, not the eight of these tests.
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    run = subprocess.run(
        [sys.executable, EXAMPLES / name, "--quick"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout
