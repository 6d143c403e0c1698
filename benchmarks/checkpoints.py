"""Checkpoints: writing and reading the weights of 100 Linears, and the size on disk.

The limit is Orbax with a flat dictionary of the same arrays. Flax stands for what its users write:
Orbax by hand with the State of the model. Equinox writes the arrays one after the other into one file.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax

import nnxlite
from benchmarks.harness import Once, Prepared, Sampler, case
from benchmarks.models import library, linears

LAYERS = 100

Save = Callable[[Path], object]
Restore = Callable[[Path], object]


def flat_orbax() -> tuple[Save, Restore]:
    """Orbax with a dictionary of arrays, and nothing of objects."""
    import orbax.checkpoint as ocp

    state = nnxlite.to_flat_state(nnxlite.state(linears(nnxlite, LAYERS)))
    arrays = {".".join(map(str, path)): leaf.get_value() for path, leaf in state}
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    options = ocp.checkpoint_utils.construct_restore_args(arrays)
    return (
        lambda path: checkpointer.save(path, args=ocp.args.PyTreeSave(arrays)),
        lambda path: checkpointer.restore(
            path, args=ocp.args.PyTreeRestore(item=arrays, restore_args=options)
        ),
    )


def ours() -> tuple[Save, Restore]:
    """Into a model, with names and settings."""
    model, other = (linears(nnxlite, LAYERS) for _ in range(2))
    return (
        lambda path: nnxlite.checkpoint.save(path, model=model),
        lambda path: nnxlite.checkpoint.restore(path, model=other),
    )


def orbax_by_hand() -> tuple[Save, Restore]:
    """What programs with Flax NNX write; restoring ends with an update of the model."""
    import orbax.checkpoint as ocp

    nnx = library("flax")
    model, other = (linears(nnx, LAYERS) for _ in range(2))
    checkpointer = ocp.StandardCheckpointer()

    def save(path: Path) -> None:
        checkpointer.save(path, nnx.state(model))
        checkpointer.wait_until_finished()

    def restore(path: Path) -> None:
        nnx.update(other, checkpointer.restore(path, nnx.state(other)))

    return save, restore


def equinox_leaves() -> tuple[Save, Restore]:
    """The leaves of a tree in one file, without names."""
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0), LAYERS)
    model = [eqx.nn.Linear(8, 8, key=key) for key in keys]
    return (
        lambda path: eqx.tree_serialise_leaves(path, model),
        lambda path: eqx.tree_deserialise_leaves(path, model),
    )


CONTENDERS: dict[str, Callable[[], tuple[Save, Restore]]] = {
    "limit": flat_orbax,
    "nnxlite": ours,
    "flax": orbax_by_hand,
    "equinox": equinox_leaves,
}


def new_path() -> Path:
    """A path in a folder of its own, where nothing is yet."""
    return Path(tempfile.mkdtemp()) / "checkpoint.eqx"


def remove(path: Path) -> None:
    """Remove it with its folder."""
    shutil.rmtree(path.parent)


@case("checkpoints", f"save {LAYERS} Linears")
def save():
    """Into a new folder or file."""

    def sampler(make: Callable[[], tuple[Save, Restore]]) -> Sampler:
        write, _ = make()
        return Prepared(new_path, write)

    return {name: lambda make=make: sampler(make) for name, make in CONTENDERS.items()}


@case("checkpoints", f"restore {LAYERS} Linears")
def restore():
    """Into a model that exists; the limit gives a dictionary."""

    def sampler(make: Callable[[], tuple[Save, Restore]]) -> Sampler:
        write, read = make()
        path = new_path()
        write(path)
        return Prepared(lambda: path, read)

    return {name: lambda make=make: sampler(make) for name, make in CONTENDERS.items()}


@case("checkpoints", f"bytes of {LAYERS} Linears on disk", unit="bytes")
def size():
    """All files together; the arrays have 7,200 numbers, all zero."""

    def sampler(make: Callable[[], tuple[Save, Restore]]) -> Sampler:
        def run() -> float:
            path = new_path()
            make()[0](path)
            files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
            total = sum(file.stat().st_size for file in files)
            remove(path)
            return float(total)

        return Once(run)

    return {name: lambda make=make: sampler(make) for name, make in CONTENDERS.items()}
