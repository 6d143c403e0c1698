"""Kills processes while they save; each next one checks what it finds, and goes on saving.

    python tests/checkpoint/crash.py FOLDER KILLS SEED

Prints the number of kills that fell into a save.  A process is forked from this one, which has imported
all that a save needs and started nothing, so that fifty of them take less than a minute.
"""

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
import orbax.checkpoint  # noqa: F401

import nnxlite as nnx

warnings.simplefilter("ignore")
SIZES = (3, 1000, 20_000)


def run(folder, least, managed, report):
    """Check that arrays are of one step, not before the last one reported; then save on and on."""
    model = nnx.Dict({f"w{size}": nnx.Param(np.zeros(size, "f")) for size in SIZES})
    path, step = folder / ("run" if managed else "last"), 0
    manager = nnx.checkpoint.Manager(path, keep=1)
    if least:
        items = {"model": model, "step": 0}
        found = manager.restore(**items) if managed else nnx.checkpoint.restore(path, **items)
        step = found.values["step"]
        values = {float(v) for param in model.values() for v in param.get_value()}
        assert values == {float(step)} and step >= least, (step, least, values)
    os.write(report, b"ready\n")
    while True:
        step += 1
        for size in SIZES:
            model[f"w{size}"].set_value(np.full(size, step, "f"))
        os.write(report, b"begin\n")
        if managed:
            manager.save(step, model=model, step=step)
            manager.wait()
        else:
            nnx.checkpoint.save(path, model=model, step=step, overwrite=True)
        os.write(report, f"done {step}\n".encode())


def lines_until(pipe, seconds):
    """What comes out of a pipe until it closes or the time is over."""
    end, out = time.monotonic() + seconds, b""
    while (left := end - time.monotonic()) > 0 and select.select([pipe], [], [], left)[0]:
        read = os.read(pipe, 4096)
        out += read
        if not read:
            break
    return out.splitlines()


def main():
    folder, kills, seed = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    random.seed(seed)
    inside, last = 0, {False: 0, True: 0}
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
        select.select([pipe], [], [], 60)  # until it is ready
        found = lines_until(pipe, random.uniform(0, 0.3))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            sys.exit(f"process {number} ended by itself")
        found += lines_until(pipe, 1)
        os.close(pipe)
        done = [int(line.split()[1]) for line in found if line.startswith(b"done")]
        last[managed] = max([last[managed], *done])
        inside += bool(found) and found[-1] == b"begin"
    print(inside, last)


main()
