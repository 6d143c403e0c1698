"""Run by several processes: the checkpoint of another number of them, trained further.

For 4 processes of one device: see `starting`.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from tests.distributed.training import build, join, mesh_of, train

join()

folder, me = Path(sys.argv[1]), jax.process_index()
mesh = mesh_of(jax.device_count())
items = build(mesh, 1)
kernel = lambda: process_allgather(items["model"].first.kernel[...], tiled=True)
before, report = kernel(), {}


def refusal(path, **given):
    try:
        nnx.checkpoint.restore(folder / path, **given)
    except nnx.checkpoint.CheckpointError as error:
        return f"{type(error).__name__}: {error}"


report["damaged"] = refusal("damaged", **items)
assert np.array_equal(kernel(), before)
extra = {} if me else {"extra": nnx.Param(np.zeros(2))}
report["mismatch"] = refusal("good", **items, **extra)
uneven = jax.make_mesh((3,), ("data",), devices=jax.devices()[:3])
abstract = jax.ShapeDtypeStruct((8, 16), "float32", sharding=NamedSharding(uneven, P("data")))
model = {"first": {"kernel": nnx.Param(abstract)}}
report["uneven"] = refusal("good", model=model, strict=False)
restored = nnx.checkpoint.restore(folder / "good", **items, step=0)
report["step"] = restored.values["step"]
report["losses"] = train(mesh, items, range(3, 5))
(folder / f"restored{me}.json").write_text(json.dumps(report))
