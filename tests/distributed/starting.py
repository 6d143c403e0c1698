"""Starting one program in several processes of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.conftest import xla_flags

ROOT = Path(__file__).parents[2]


def start(count: int, devices: int, *command: object) -> list[subprocess.Popen[str]]:
    """Processes of `python *command` that find each other by their environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": xla_flags(devices=devices)}
    env |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_PROCESSES": str(count)}
    env |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}"}
    return [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env={**env, "JAX_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(count)
    ]


def run(count: int, devices: int, *command: object) -> list[str]:
    """The output of each process; all have to succeed."""
    processes = start(count, devices, *command)
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [text for process, text in zip(processes, outputs) if process.returncode]
    assert not failed, "\n".join(text[-4000:] for text in failed)
    return outputs
