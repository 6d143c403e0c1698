"""Kills processes while they save; each next one checks what it finds, and goes on saving.

    python tests/checkpoint/crash.py FOLDER KILLS SEED

Prints the number of kills that fell into a save.  A process is forked before JAX starts anything, so
that fifty of them take less than a minute.
"""

from __future__ import annotations

import os
import pathlib
import random
import select
import signal
import sys
import time
import traceback
import warnings

import numpy as np

import nnxlite as nnx

warnings.simplefilter("ignore")
SIZES = (3, 1000, 20_000)


def build() -> nnx.Dict:
    return nnx.Dict({f"w{size}": nnx.Param(np.zeros(size, "f")) for size in SIZES})


def check(model: nnx.Dict, step: int, least: int) -> None:
    """Whether all arrays are of one step, which is not before the last one that was reported."""
    values = {float(v) for size in SIZES for v in model[f"w{size}"].get_value()}
    if values != {float(step)} or step < least:
        raise AssertionError(f"step {step}, at least {least} expected, with values {values}")


def run(folder: pathlib.Path, least: int, managed: bool, report: int) -> None:
    """Check what is there, then save on and on."""
    model, step = build(), 0
    path = folder / ("run" if managed else "last")
    manager = nnx.checkpoint.Manager(path, keep=1) if managed else None
    if least:
        source = (
            manager.restore if manager else lambda **items: nnx.checkpoint.restore(path, **items)
        )
        step = source(model=model, step=0).values["step"]
        check(model, step, least)
    os.write(report, b"ready 0\n")
    while True:
        step += 1
        for size in SIZES:
            model[f"w{size}"].set_value(np.full(size, step, "f"))
        os.write(report, f"begin {step}\n".encode())
        if manager is None:
            nnx.checkpoint.save(path, model=model, step=step, overwrite=True)
        else:
            manager.save(step, model=model, step=step)
            manager.wait()
        os.write(report, f"done {step}\n".encode())


def lines_until(pipe: int, seconds: float) -> list[bytes]:
    """What comes out of a pipe until it closes or the time is over."""
    end, out = time.monotonic() + seconds, b""
    while (left := end - time.monotonic()) > 0 and select.select([pipe], [], [], left)[0]:
        read = os.read(pipe, 4096)
        out += read
        if not read:
            break
    return out.splitlines()


def main() -> None:
    folder, kills, seed = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    random.seed(seed)
    inside = 0
    last = {False: 0, True: 0}
    for number in range(kills):
        managed = number % 2 == 1
        pipe, report = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                run(folder, last[managed], managed, report)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.close(report)
        ready: list[bytes] = []
        while not ready and select.select([pipe], [], [], 60)[0]:
            ready = os.read(pipe, 4096).splitlines()
            if not ready:
                break
        found = ready + lines_until(pipe, random.uniform(0, 0.3))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            sys.exit(f"process {number} ended by itself")
        found += lines_until(pipe, 1)
        os.close(pipe)
        done = [int(line.split()[1]) for line in found if line.startswith(b"done")]
        last[managed] = max([last[managed], *done])
        inside += bool(found) and found[-1].startswith(b"begin")
    print(inside, last)


main()
