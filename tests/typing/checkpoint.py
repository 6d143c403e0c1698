"""What type checkers infer of checkpoints."""

from __future__ import annotations

import typing as tp
from typing import assert_type

import nnxlite as nnx

model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
if tp.TYPE_CHECKING:  # what needs a folder, and further packages
    assert_type(nnx.checkpoint.save("folder", model=model, step=3, overwrite=True), None)
    report = nnx.checkpoint.restore("folder", model=model, rename={"old.**": "model.**"}, cast=None)
    assert_type(report, nnx.checkpoint.Report)
    assert_type(report.missing, tuple[str, ...])
    assert_type(report.misshapen, tuple[nnx.checkpoint.Mismatch, ...])
    assert_type(report.misshapen[0].stored, str)
    assert_type(report.complete, bool)
    assert_type(report.values, tp.Mapping[str, tp.Any])
    assert_type(nnx.checkpoint.info("folder").leaves, dict[str, str])

    with nnx.checkpoint.Manager("folder", keep=3, best="loss", mode="min") as manager:
        assert_type(manager, nnx.checkpoint.Manager)
        assert_type(manager.save(3, model=model, metrics={"loss": 0.1}), bool)
        assert_type(manager.restore(manager.best, model=model), nnx.checkpoint.Report)
        assert_type(manager.steps, list[int])
        assert_type(manager.latest, int | None)
        assert_type(manager.metrics(3), dict[str, float])
        assert_type(manager.should_stop(patience=100), bool)
