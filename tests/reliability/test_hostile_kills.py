"""Saves that are killed, or that the disk refuses, leave the old values or the new ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flatbuffers")


@pytest.mark.parametrize(
    ("name", "count"), [("safetensors", 4), ("shards", 4), ("exported", 3), ("checkpoint", 3)]
)
def test_a_killed_save_leaves_all_values_of_one_step(name, count):
    command = ["tests.reliability.hostile_kills", "--count", str(count), "--only", name]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *_, last = done.stdout.splitlines()
    assert re.fullmatch(r"\d+ saves, 0 defects", last)
    killed = re.findall(r"(\d+) \w+ by (?:event|size): killed", done.stdout)
    assert sum(map(int, killed)) >= count
