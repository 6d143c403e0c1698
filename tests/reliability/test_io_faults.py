"""Exceptions while the library saves, restores, or runs a training loop; see `io_faults.py`."""

from __future__ import annotations

import contextlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.reliability import faults, io_faults

pytest.importorskip("orbax.checkpoint")


@pytest.mark.parametrize("name", io_faults.CASES)
def test_exceptions_at_random_lines_leave_the_old_or_the_new(name):
    counts = io_faults.campaign(4, [name], seed=3)
    assert counts.total() == counts[f"{name}: raised"] + counts[f"{name}: went on"] == 4


def test_a_restore_is_one_step(tmp_path):
    """At every line that puts values together and writes them: into Variables and objects."""

    def make(value):
        model = nnx.Dict(a=nnx.Param(jnp.full(2, value)), b=nnx.Param(jnp.full(2, value)))
        model.arrays = nnx.List([jnp.full(2, value), jnp.full(3, value)])
        return model

    def writes(code):
        inside = "graph/_edit", "_together", "objects/_containers", "checkpoint/_contents"
        return faults.in_library(code) and any(name in code.co_filename for name in inside)

    nnx.save_safetensors(tmp_path / "w", make(1.0))
    endings = []
    for _ in range(2):  # the second one has fewer lines
        every = faults.Lines(writes)
        every.run(lambda: nnx.load_safetensors(tmp_path / "w", make(0.0)))
    for at in range(1, every.count + 1):
        model = make(0.0)
        lines = faults.Lines(writes, at, faults.raising(faults.FaultInterrupt))
        with contextlib.suppress(KeyboardInterrupt):  # later runs may have fewer lines
            lines.run(lambda model=model: nnx.load_safetensors(tmp_path / "w", model))
        found = {
            float(x) for x in np.concatenate([*map(np.ravel, jax.tree.leaves(nnx.state(model)))])
        }
        assert len(found) == 1, lines.place
        endings += found
    assert {*endings} == {0.0, 1.0}


def test_an_interrupt_after_the_index_was_replaced_keeps_its_shards(tmp_path, monkeypatch):
    make = lambda value: nnx.Dict(
        a=nnx.Param(jnp.full(50, value)), b=nnx.Param(jnp.full(50, value))
    )
    nnx.save_safetensors(tmp_path / "w", make(1.0), max_shard_bytes=200)
    replace = os.replace

    def interrupted(source, target):
        replace(source, target)
        if str(target).endswith(".json"):
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        nnx.save_safetensors(tmp_path / "w", make(2.0), max_shard_bytes=200)
    monkeypatch.undo()
    model = make(0.0)
    nnx.load_safetensors(tmp_path / "w", model)
    assert {*model.a[...].tolist(), *model.b[...].tolist()} == {2.0}
