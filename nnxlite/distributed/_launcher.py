"""The launcher: one program in several processes of this machine, which end together.

Each process has a session of its own, so that Ctrl-C reaches the launcher alone, and so that what a
process has started ends with it. On Linux the kernel kills them should the launcher be killed.
"""

from __future__ import annotations

import argparse
import collections
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import typing as tp
from pathlib import Path

from nnxlite.distributed._joining import ADDRESS, COUNT, INDEX, JOINED, TIMEOUT

LAST_LINES = 15
"""How many lines of a process that died are repeated."""
GRACE = 5.0
"""Seconds that processes have to end after SIGTERM."""
SAVING = 30.0
"""Seconds that they have to end after SIGINT, for Ctrl-C: a training loop saves before it ends."""

DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which outlives exec
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
"""Has the kernel kill a process when the launcher dies, then becomes the program itself."""


def main(arguments: tp.Sequence[str] | None = None) -> int:
    """Run the command line; the status to exit with.

    Args:
        arguments: those of the command line by default.
    """
    options = _options(arguments)
    command = [sys.executable, "-u"] + (["-m"] if options.module else [])
    command += [options.script, *options.arguments]
    if sys.platform == "linux":
        command = [sys.executable, "-c", DIE_WITH_PARENT, str(os.getpid()), *command]
    with tempfile.TemporaryDirectory() as folder:
        group = _Group(command, options, folder)
        signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        try:
            group.start()
            return group.watch()
        except KeyboardInterrupt:
            group.say("interrupted; ending all processes.")
            group.end(signal.SIGINT, SAVING)
            return 128 + signal.SIGINT
        finally:
            group.end(signal.SIGTERM, GRACE)


def _options(arguments: tp.Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m nnxlite.distributed",
        description="Run a script in several processes of this machine. The script calls "
        "nnx.distributed.initialize() before it uses JAX. When one process fails, all end.",
    )
    add = parser.add_argument
    add("--processes", "-n", type=_positive, required=True, help="how many processes to start")
    add("--devices-per-process", type=_positive, help="CPU devices that each pretends to have")
    add(
        "--timeout",
        type=float,
        default=120.0,
        help="seconds within which all have to join (default: 120)",
    )
    add("--port", type=int, help="of process 0; by default a free one")
    add("-m", dest="module", action="store_true", help="the script is the name of a module")
    add("script")
    add("arguments", nargs=argparse.REMAINDER, help="of the script")
    options = parser.parse_args(arguments)
    if not options.module and not Path(options.script).is_file():
        parser.error(f"there is no file {options.script}")
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("has to be at least 1")
    return number


class _Group:
    """The processes of one run."""

    def __init__(self, command: list[str], options: argparse.Namespace, folder: str) -> None:
        self.command = command
        self.count: int = options.processes
        self.timeout: float = options.timeout
        self.devices: int | None = options.devices_per_process
        self.folder = Path(folder)
        self.address = f"127.0.0.1:{options.port or _free_port()}"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.last = [collections.deque[str](maxlen=LAST_LINES) for _ in range(self.count)]
        self.readers: list[threading.Thread] = []
        self.ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.begin = time.monotonic()
        self.writing = threading.Lock()

    def start(self) -> None:
        """Start all, then the threads that read what they print and wait for their end."""
        for index in range(self.count):
            self.processes.append(
                subprocess.Popen(
                    self.command,
                    env=self.environment(index),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        for index in range(self.count):
            reader = threading.Thread(target=self.read, args=(index,), daemon=True)
            reader.start()
            self.readers.append(reader)
            threading.Thread(target=self.wait, args=(index,), daemon=True).start()

    def environment(self, index: int) -> dict[str, str]:
        """What process `index` finds in its environment."""
        env = {
            **os.environ,
            ADDRESS: self.address,
            COUNT: str(self.count),
            INDEX: str(index),
            TIMEOUT: str(self.timeout),
            JOINED: str(self.folder),
        }
        if self.devices is not None:
            flag = "--xla_force_host_platform_device_count"
            others = [f for f in env.get("XLA_FLAGS", "").split() if not f.startswith(flag)]
            env["XLA_FLAGS"] = " ".join([*others, f"{flag}={self.devices}"])
            env["JAX_PLATFORMS"] = "cpu"
        return env

    def read(self, index: int) -> None:
        """Repeat the lines of a process, each with its number."""
        stream = self.processes[index].stdout
        assert stream is not None
        with stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip("\r\n")
                self.last[index].append(text)
                with self.writing:
                    print(f"[{index}] {text}", flush=True)

    def wait(self, index: int) -> None:
        """Note when a process ends."""
        self.processes[index].wait()
        self.ended.put(index)

    def watch(self) -> int:
        """Wait until all have ended well, or one has not; the status to exit with."""
        running = set(range(self.count))
        while running:
            try:
                index = self.ended.get(timeout=0.2)
            except queue.Empty:
                if late := self.late():
                    names = ", ".join(map(str, late))
                    self.say(
                        f"after {self.timeout:g} s these processes have not joined the others: {names}. "
                        "Each has to call nnx.distributed.initialize(), before it uses JAX; --timeout "
                        "waits longer."
                    )
                    self.repeat(late[0])
                    return 1
                continue
            running.discard(index)
            status = self.processes[index].returncode
            if status == 0 and self.joined(index):
                continue
            others = f"; ending the other {len(running)}" if running else ""
            if status == 0:
                self.say(
                    f"process {index} of {self.count} ended without joining the others{others}. The "
                    "script has to call nnx.distributed.initialize(), before it uses JAX."
                )
                return 1
            self.say(f"process {index} of {self.count} {self.fate(status)}{others}.")
            self.repeat(index)
            return status if status > 0 else 128 - status
        return 0

    def joined(self, index: int) -> bool:
        """Whether a process has called `initialize`."""
        return (self.folder / str(index)).exists()

    def late(self) -> list[int]:
        """The processes that should have joined by now, and have not."""
        if time.monotonic() - self.begin < self.timeout + 2 * GRACE:  # they report it themselves
            return []
        return [index for index in range(self.count) if not self.joined(index)]

    def fate(self, status: int) -> str:
        """How a process ended, in words."""
        after = f"after {time.monotonic() - self.begin:.0f} s"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name} {after}"
        return f"ended with status {status} {after}"

    def repeat(self, index: int) -> None:
        """Print the last lines of a process again, at the end, where a person looks for them."""
        self.readers[index].join(timeout=1)
        if lines := list(self.last[index]):
            self.say(f"the last lines of process {index}:")
            for line in lines:
                print(f"    {line}", file=sys.stderr)

    def say(self, text: str) -> None:
        """Print a message of the launcher."""
        with self.writing:
            print(f"nnxlite.distributed: {text}", file=sys.stderr, flush=True)

    def end(self, first: signal.Signals, seconds: float) -> None:
        """End what still runs, and all that it has started."""
        self.send(first)
        deadline = time.monotonic() + seconds
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
            except KeyboardInterrupt:  # a second Ctrl-C: do not wait
                break
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        for reader in self.readers:
            reader.join(timeout=1)

    def send(self, number: signal.Signals) -> None:
        for process in self.processes:
            try:
                os.killpg(process.pid, number)
            except (ProcessLookupError, PermissionError):
                pass


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
