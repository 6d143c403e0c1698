"""Run by several processes: what each can do, training, a checkpoint, and failures that all notice.

For 2 processes of 2 devices: see `starting`.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from tests.distributed.training import build, mesh_of, train

nnx.distributed.initialize()

folder, me = Path(sys.argv[1]), jax.process_index()
report: dict = {}


def refusal(call) -> str:
    """What is said of something that must not succeed."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error")


def arrays() -> None:
    """Meshes whose axes follow the order of processes, and those that do not."""
    whole = np.arange(48.0, dtype="float32").reshape(16, 3)
    devices = np.array(jax.devices()).reshape(2, 2)
    meshes = {
        "in order": (Mesh(devices.ravel(), ("data",)), P("data")),
        "reversed": (Mesh(devices.ravel()[::-1], ("data",)), P("data")),
        "interleaved": (Mesh(devices.T.ravel(), ("data",)), P("data")),
        "shared": (Mesh(devices.T, ("data", "model")), P("data")),
        "both": (Mesh(devices, ("data", "model")), P(("data", "model"), None)),
        "replicated": (Mesh(devices.ravel(), ("data",)), P()),
    }
    for name, (mesh, spec) in meshes.items():
        sharding = NamedSharding(mesh, spec)
        rows = nnx.distributed.local_rows(sharding, 16)
        array = nnx.distributed.to_global({"x": whole[rows]}, sharding)["x"]
        assert array.shape == (16, 3) and array.sharding == sharding
        assert np.array_equal(nnx.distributed.gather(array), whole), name
        assert np.array_equal(nnx.distributed.to_local(array), whole[rows]), name
        report[name] = rows.tolist()
    over = NamedSharding(meshes["in order"][0], P("data"))
    to_global = nnx.distributed.to_global
    report["unequal"] = refusal(lambda: to_global({"x": whole[: 4 + 8 * me]}, over))
    report["size"] = refusal(lambda: to_global({"x": whole[:8]}, over, size=12))
    assert to_global(whole[:2], over, size=4).shape == (4, 3)
    report["odd"] = refusal(lambda: to_global({"x": whole[: 4 - me]}, over))
    report["global"] = refusal(lambda: to_global(to_global(whole[:4], over), over))
    diagonal = NamedSharding(
        Mesh(np.array([devices[0], devices[1][::-1]]), ("a", "b")), P("a", "b")
    )
    report["rows of a block"] = nnx.distributed.local_rows(diagonal, 4).tolist()
    crossed = Mesh(np.array([devices[:, 0], devices[::-1, 1]]), ("a", "b"))
    blocks = NamedSharding(crossed, P("a", "b"))
    apart = to_global(whole[:4, :2], blocks)  # this process has two blocks that share no row
    report["no block"] = refusal(lambda: nnx.distributed.to_local(apart))
    theirs = NamedSharding(Mesh(devices[1 - me], ("data",)), P("data"))
    zeros = np.zeros(4, "float32")
    far = jax.make_array_from_callback((4,), theirs, zeros.__getitem__, dtype="float32")
    report["to_local"] = refusal(lambda: nnx.distributed.to_local({"far": far}))
    report["far"] = refusal(lambda: nnx.checkpoint.save(folder / "none", far=nnx.Param(far)))
    report["elsewhere"] = refusal(lambda: nnx.distributed.local_rows(theirs, 4))


def agreement() -> None:
    assert nnx.distributed.exchange("letters", "ab"[me]) == ["a", "b"]
    assert nnx.distributed.exchange("letters", "cd"[me]) == ["c", "d"]

    def read():
        with nnx.distributed.agreed("reading"):
            if me == 1:
                raise KeyError("column")

    report["agreed"] = refusal(read)
    if me == 0:
        report["barrier"] = refusal(lambda: nnx.distributed.barrier("end of epoch", timeout=0.2))


def training() -> None:
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


arrays()
agreement()
training()
(folder / f"report{me}.json").write_text(json.dumps(report))
print("done")
