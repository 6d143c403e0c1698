"""Starting one program in several processes of this machine."""

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


def start(count, devices, *command):
    """Processes of `python *command` that find each other by their environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": xla_flags(devices=devices)}
    env |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_PROCESSES": str(count)}
    env |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}"}
    command = [sys.executable, "-X", "faulthandler", *map(str, command)]
    return [Started(command, {**env, "JAX_PROCESS_ID": str(index)}) for index in range(count)]


class Started(subprocess.Popen):
    """One process, whose output goes into a file: a full pipe would stop it, and so all of them."""

    def __init__(self, command, env):
        self.file = tempfile.TemporaryFile("w+")
        super().__init__(command, env=env, stdout=self.file, stderr=subprocess.STDOUT)


def ended(processes, seconds=240):
    """The output of each process, when all have ended; one that has not says where it is."""
    end, late = time.monotonic() + seconds, []
    for one in processes:
        try:
            one.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(one)
    for one in late:
        one.send_signal(signal.SIGABRT)  # faulthandler prints the stack of each thread
        one.wait()
    outputs = []
    for one in processes:
        with one.file as file:
            file.seek(0)
            outputs.append(file.read())
    assert not late, "not ended:\n" + "\n".join(text[-4000:] for text in outputs)
    return outputs


def run(count, devices, *command):
    """The output of each process; all have to succeed."""
    processes = start(count, devices, *command)
    outputs = ended(processes)
    failed = [text for one, text in zip(processes, outputs) if one.returncode]
    assert not failed, "\n".join(text[-4000:] for text in failed)
    return outputs
