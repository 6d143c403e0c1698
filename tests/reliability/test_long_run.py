"""A short long run: nothing grows with steps, events, structures or threads (law L9)."""

from __future__ import annotations

import dataclasses
import typing as tp
from pathlib import Path

import jax
import pytest

import nnxlite as nnx
from tests.reliability import long_run
from tests.reliability.long_run import EVENTS, Run, fitted, growth, measure, train

COUNTS = {"arrays", "bytes of arrays", "entries of tables", "objects", "programs", "threads"}
SCALE = 0.1  # between events there are a tenth of the steps of the long run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tp.Iterator[Run]:
    made = Run(tmp_path_factory.mktemp("run"))
    made.happen("evaluate")
    measure()  # what the first one makes stays
    yield made
    made.manager.close()


def test_L9_nothing_grows_in_a_thousand_steps_with_events(run: Run) -> None:
    rare = ["manager_again", "new_functions", "printed"]  # they take long, and are repeated below
    measured = train(run, 1000, measurements=8, scale=SCALE, but=rare)
    second_half = measured[len(measured) // 2 :]
    first, last = second_half[0].step, second_half[-1].step
    programs = long_run.programs_of_events(first, last, SCALE)
    grown = growth(second_half, programs)
    assert {number.name for number in grown} >= COUNTS
    assert [str(g) for g in grown if g.is_leak and g.name != "memory, MiB"] == []


@pytest.mark.parametrize("name", EVENTS)
def test_L9_one_more_occurrence_of_an_event_leaves_nothing(run: Run, name: str) -> None:
    times = 2
    for _ in range(2):
        run.happen(name)
    run.manager.wait()
    before = measure()
    for _ in range(times):
        run.happen(name)
    run.manager.wait()
    after = measure()
    assert after.programs - before.programs <= times * EVENTS[name].compiles
    assert after.arrays <= before.arrays + 8
    left = after.objects - before.objects
    # `test_memory.py` says what JAX 0.11 changed for donating functions.
    most = 1_800 if name == "new_functions" and jax.__version_info__ >= (0, 11) else 250
    assert left <= most, (after.by_type - before.by_type).most_common(8)


def test_L9_structures_that_are_gone_leave_no_definitions() -> None:
    numbers = range(300)
    long_run.many_structures(long_run.of_one_class, numbers)
    before = measure()
    alive = long_run.many_structures(long_run.of_one_class, range(300, 600))
    after = measure()
    assert alive <= 1
    assert after.objects <= before.objects + 300
    assert sum(after.tables.values()) <= sum(before.tables.values()) + 100


def test_L9_threads_that_have_ended_leave_nothing(run: Run) -> None:
    run.happen("other_thread")
    before = measure()
    for _ in range(20):
        run.happen("other_thread")
    after = measure()
    assert after.threads == before.threads
    assert after.objects <= before.objects + 100


def test_a_leak_is_found() -> None:
    kept: list[tp.Any] = []
    x: list[float] = []
    y: list[float] = []
    for step in range(5):
        kept += [nnx.Param(0.0) for _ in range(200)]
        x.append(step)
        y.append(measure().objects)
    assert fitted("objects", x, y, long_run.TOLERANCES["objects"]).is_leak


def test_a_table_that_a_module_gains_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nnx, "_table", {1: 2, 3: 4}, raising=False)
    assert long_run.tables()["nnxlite._table"] == 2


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measured = measure()
    points = [dataclasses.replace(measured, step=n, programs=1, step_time=0.1) for n in (1, 2)]
    long_run.draw(points, tmp_path / "run.svg")
    assert (tmp_path / "run.svg").read_text().count('<g id="axes_') == 6
