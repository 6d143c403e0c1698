"""Run by two processes: exchanges, training, a checkpoint, failures that all notice, and signals.

For 2 processes of 2 devices: see `starting`.
"""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from nnxlite.training._loop import go_to, position
from tests.distributed.training import build, join, mesh_of, train

join()

folder, me = Path(sys.argv[1]), jax.process_index()
report = {}


def refusal(call):
    """What is said of something that must not succeed."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error")


def agreement():
    assert nnx.distributed.exchange("letters", "ab"[me]) == ["a", "b"]
    assert nnx.distributed.exchange("letters", "cd"[me]) == ["c", "d"]

    def read():
        with nnx.distributed.agreed("reading"):
            if me == 1:
                raise KeyError("column")

    report["agreed"] = refusal(read)
    if me == 0:
        late = lambda: nnx.distributed.exchange("end of epoch", "", timeout=0.2)
        report["late"] = refusal(late)


def training():
    mesh = mesh_of(4)
    items = build(mesh, 0)
    report["losses"] = train(mesh, items, range(3))
    model = items["model"]
    assert not model.first.kernel[...].is_fully_addressable
    report["texts"] = [
        repr(model),
        repr(nnx.state(model)),
        nnx.tabulate(model, np.zeros((4, 8), "float32")),
        repr(items["optimizer"]),
        repr(model.drop.rngs),
    ]
    report["metric"] = float(items["metrics"].compute())
    nnx.checkpoint.save(folder / "good", **items, step=3)
    report["info"] = nnx.checkpoint.info(folder / "good").values["step"]
    report["again"] = refusal(lambda: nnx.checkpoint.save(folder / "good", **items))
    save = lambda **items: nnx.checkpoint.save(folder / "none", **items)
    report["differs"] = refusal(lambda: save(model=model, seen=np.float32(me)))
    report["shape"] = refusal(lambda: save(model=model, seen=np.zeros(2 + me, "float32")))
    report["lacks"] = refusal(lambda: save(model=model, **({"more": 1} if me else {})))
    theirs = NamedSharding(Mesh(jax.devices()[2 * (1 - me) :][:2], ("data",)), P("data"))
    far = jax.make_array_from_callback((4,), theirs, lambda index: None, dtype="float32")
    report["far"] = refusal(lambda: save(far=nnx.Param(far)))
    report["weights"] = refusal(lambda: nnx.save_safetensors(folder / "w.safetensors", model))
    manager = nnx.checkpoint.Manager(folder / "run", keep=1, best="loss")
    manager.save(1, model=model, metrics={"loss": 1.0})
    manager.wait()
    if me == 1:  # its disk is full
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    report["full"] = refusal(lambda: nnx.checkpoint.save(folder / "good", **items, overwrite=True))
    manager.save(2, model=model, metrics={"loss": 2.0})
    report["full behind"] = refusal(manager.wait)
    if me == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    restored = build(mesh, 1)["model"]
    assert manager.restore(model=restored).step == 1
    report["next"] = manager.save(3, model=model, metrics={"loss": 0.5})
    manager.close()
    report["steps"] = manager.steps


class Numbers:
    """An iterator with a position of its own in each process."""

    def __init__(self, number):
        self.number = number

    def get_state(self):
        return {"number": self.number}

    def set_state(self, state):
        self.number = state["number"]


def stopping(run, steps, struck):
    """A loop in which each process gets a signal, in a step of its own."""
    items = build(mesh_of(4), 0)
    saved = {"model": items["model"], "optimizer": items["optimizer"], "seen": items["metrics"]}
    with nnx.checkpoint.Manager(folder / run) as manager:
        loop = nnx.training.loop(steps, checkpoints=manager, items=saved, progress=False)
        for step in loop:
            if struck and struck[0] == step.number:
                os.kill(os.getpid(), struck[1])
            [loss] = train(mesh_of(4), items, range(step.number, step.number + 1))
            step.log(loss=loss)
            time.sleep(0.02 * (1 + me))
        handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
        return {
            "interrupted": loop.interrupted,
            "done": len(loop.history),
            "steps": manager.steps,
            "handlers": handlers == [signal.default_int_handler, signal.SIG_DFL],
        }


agreement()
training()
report["struck"] = stopping("first", 400, ((6, signal.SIGTERM), (2, signal.SIGINT))[me])
report["free"] = stopping("second", 3, ())
data = Numbers(0)
go_to(data, position(Numbers(me + 5)))
report["data"] = data.number == me + 5
(folder / f"report{me}.json").write_text(json.dumps(report))
