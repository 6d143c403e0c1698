"""Run by several processes, of which some get a signal while they train: all stop after the same step.

For 2 processes of one device: see `starting`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import jax

import nnxlite as nnx
from nnxlite.training._loop import go_to, position
from tests.distributed.training import build, join, mesh_of, train

join()


class Numbers:
    """An iterator with a position of its own in each process."""

    def __init__(self, number):
        self.number = number

    def get_state(self):
        return {"number": self.number}

    def set_state(self, state):
        self.number = state["number"]


folder = Path(sys.argv[1])
struck = json.loads(sys.argv[2])  # a step and a signal by process
me = jax.process_index()
mesh = mesh_of(2)
report = {}
for run in ("first", "second"):
    items = build(mesh, 0)
    items["seen"] = items.pop("metrics")
    with nnx.checkpoint.Manager(folder / run) as manager:
        loop = nnx.training.loop(
            400 if run == "first" else 3, checkpoints=manager, items=items, progress=False
        )
        for step in loop:
            at, number = struck[str(me)]
            if run == "first" and at == step.number:
                os.kill(os.getpid(), signal.Signals[number])
            mine = {
                "model": items["model"],
                "optimizer": items["optimizer"],
                "metrics": items["seen"],
            }
            [loss] = train(mesh, mine, range(step.number, step.number + 1))
            step.log(loss=loss)
            time.sleep(0.02 * (1 + me))
        ended = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
        report[run] = {
            "interrupted": loop.interrupted,
            "done": len(loop.history),
            "steps": manager.steps,
            "handlers": ended == [signal.default_int_handler, signal.SIG_DFL],
        }
data = Numbers(0)
go_to(data, position(Numbers(me + 5)))
report["data"] = data.number == me + 5
(folder / f"{me}.json").write_text(json.dumps(report))
