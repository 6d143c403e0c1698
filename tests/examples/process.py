"""Runs an example as a user would run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import xla_flags

EXAMPLES = Path(__file__).parents[2] / "examples"


def environment() -> dict[str, str]:
    """That of a user's process, which has one CPU device, not the eight of these tests."""
    return {**os.environ, "XLA_FLAGS": xla_flags()}


def quick_run(name: str, folder: Path) -> str:
    """The output of an example with `--quick`, run in a folder, which has to succeed."""
    run = subprocess.run(
        [sys.executable, EXAMPLES / name, "--quick"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout
