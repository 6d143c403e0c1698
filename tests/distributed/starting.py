"""Starting one program in several processes of this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.conftest import xla_flags

ROOT = Path(__file__).parents[2]


def start(count: int, devices: int, *command: object) -> list[Started]:
    """Processes of `python *command` that find each other by their environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": xla_flags(devices=devices)}
    env |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_PROCESSES": str(count)}
    env |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}"}
    return [
        Started(list(map(str, command)), {**env, "JAX_PROCESS_ID": str(index)})
        for index in range(count)
    ]


class Started:
    """One process, whose output goes into a file: a full pipe would stop it, and so all of them."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.file = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", *command],
            env=env,
            stdout=self.file,
            stderr=subprocess.STDOUT,
        )

    def output(self) -> str:
        self.file.seek(0)
        return self.file.read()


def ended(processes: list[Started], seconds: float = 240) -> list[str]:
    """The output of each process, when all have ended; one that has not says where it is."""
    end = time.monotonic() + seconds
    late = []
    for one in processes:
        try:
            one.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(one)
    for one in late:
        one.process.send_signal(signal.SIGABRT)  # faulthandler prints the stack of each thread
        one.process.wait()
    outputs = [one.output() for one in processes]
    for one in processes:
        one.file.close()
    assert not late, "not ended:\n" + "\n".join(text[-4000:] for text in outputs)
    return outputs


def run(count: int, devices: int, *command: object) -> list[str]:
    """The output of each process; all have to succeed."""
    processes = start(count, devices, *command)
    outputs = ended(processes)
    failed = [text for one, text in zip(processes, outputs) if one.process.returncode]
    assert not failed, "\n".join(text[-4000:] for text in failed)
    return outputs
