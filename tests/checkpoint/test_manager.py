"""The manager: which checkpoints are kept, the best one, and what becomes of a damaged one."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import types
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.checkpoint import CheckpointError, DamagedError, MismatchError, NotFoundError
from nnxlite.checkpoint._manager import _finish

Manager = nnx.checkpoint.Manager


def model(value=0.0):
    return nnx.Dict(w=nnx.Param(jnp.full(3, value)))


def run(directory, losses, **options):
    """A manager of `directory` after a checkpoint for each loss, from step 1 on."""
    manager = Manager(directory, **options)
    for step, loss in enumerate(losses, 1):
        metrics = {"loss": jnp.float32(loss)} if options.get("best") else None
        manager.save(step, model=model(float(step)), metrics=metrics)
    manager.wait()
    return manager


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"keep": 2}, [4, 5]),
        ({"keep": None}, [1, 2, 3, 4, 5]),
        ({"keep": 1, "best": "loss"}, [2, 5]),
        ({"keep": 1, "best": "loss", "mode": "max"}, [3, 5]),
        ({"keep": 1, "keep_every": 2}, [2, 4, 5]),
        ({"keep": 1, "every": 2}, [4]),
    ],
)
def test_which_checkpoints_are_kept(tmp_path, options, kept):
    with run(tmp_path, [0.5, 0.1, 0.9, 0.2, 0.3], **options) as manager:
        assert manager.steps == kept and manager.latest == kept[-1]
    assert sorted(int(p.name) for p in tmp_path.iterdir()) == kept


def test_the_best_one_is_found_by_another_process_and_restored(tmp_path):
    run(tmp_path, [0.5, float("nan"), 0.1, 0.1, 0.3], keep=None, best="loss").close()
    manager = Manager(tmp_path, best="loss")
    assert manager.best == 3 and manager.metrics(3) == {"loss": pytest.approx(0.1)}
    new = model()
    manager.restore(manager.best, model=new)
    assert new.w.tolist() == [3, 3, 3]
    manager.restore(model=new)
    assert new.w.tolist() == [5, 5, 5]
    assert repr(manager) == f"Manager('{tmp_path}', steps=[1, 2, 3, 4, 5])"
    assert Manager(tmp_path, best="accuracy").best == 1  # none has it


def test_early_stopping(tmp_path):
    with run(tmp_path, [0.5, 0.2, 0.2, 0.2], keep=1, best="loss") as manager:
        assert manager.steps == [2, 4] and manager.best == 2
        assert manager.should_stop(2) and not manager.should_stop(3)
    assert not Manager(tmp_path / "none", best="loss").should_stop(1)


def test_steps_between_are_passed_over_unless_forced(tmp_path):
    with Manager(tmp_path, every=10) as manager:
        saved = [manager.save(step, model=model(), force=step == 17) for step in (10, 15, 17)]
    assert saved == [True, False, True] and manager.steps == [10, 17]


@pytest.mark.parametrize("again", ["same manager", "another manager"])
@pytest.mark.parametrize(
    ("options", "steps", "kept"),
    [
        ({"keep": 2}, [6, 7], [5, 6, 7]),  # 5 is the best one
        ({"keep": 1}, [15], [5, 15]),
        ({"keep": 1, "keep_every": 5}, [6, 10, 11], [5, 10, 11]),
        ({"keep": 3, "every": 5}, [8, 10], [5, 10]),  # 8 is not a multiple
    ],
)
def test_a_run_that_goes_back_is_saved_from_there(tmp_path, again, options, steps, kept):
    """The first save replaces those of its step and later ones, in this process or the next."""
    manager = Manager(tmp_path, best="loss", **options)
    for step in (5, 10, 15):
        manager.save(step, model=model(step + 0.0), metrics={"loss": step})
    if again == "another manager":
        manager.close()
        manager = Manager(tmp_path, best="loss", **options)
    manager.restore(manager.best, model=model())
    replaces = pytest.warns(UserWarning, match=r"went back to step 5, .* checkpoints \[(10, )?15\]")
    with replaces as warned:
        for step in steps:
            saved = manager.save(step, model=model(step + 100.0), metrics={"loss": 50 + step})
            assert saved is (step != 8)
    assert len(warned) == 1
    manager.close()
    last, new = steps[-1], model()
    for found in (manager, Manager(tmp_path, best="loss")):
        assert found.steps == kept and found.latest == last and found.best == 5
        assert found.restore(model=new).step == last and new.w[0] == last + 100
        assert found.restore(5, model=new).step == 5 and new.w[0] == 5
    with Manager(tmp_path, best="loss") as goes_on:
        assert nnx.training.resume(goes_on, model=new) == last
        goes_on.save(last + 1, model=new, metrics={"loss": 99})
    assert Manager(tmp_path).latest == last + 1


def test_a_former_run_is_not_replaced_by_one_that_does_not_go_on_from_it(tmp_path):
    run(tmp_path, [1, 2, 3]).close()
    with Manager(tmp_path) as manager:
        refused = pytest.raises(ValueError, match="step 2 is not after those in .* up to 3.*folder")
        with refused:
            manager.save(2, model=model())
        manager.restore(2, model=model())
        with refused:
            manager.save(2, model=model())
        manager.restore(1, model=model())
        with pytest.warns(UserWarning, match=r"replaces the later checkpoints \[2, 3\]"):
            assert manager.save(2, model=model(7.0))
    new = model()
    assert Manager(tmp_path).restore(model=new).step == 2 and new.w[0] == 7
    assert Manager(tmp_path).steps == [1, 2]


PROGRAM = """
import os, sys, jax.numpy as jnp, nnxlite as nnx

def fail(path, *args, rename=os.rename, **kwargs):
    if "full" in str(path):
        raise OSError("No space left on device")
    return rename(path, *args, **kwargs)

os.rename = fail
for folder in sys.argv[1:]:
    manager = nnx.checkpoint.Manager(folder)
    manager.save(1, model=nnx.Dict(w=nnx.Param(jnp.ones((4000, 1000)))))
del manager
1 / 0
"""


def test_a_program_that_ends_completes_its_checkpoints_or_says_what_could_not_be_written(tmp_path):
    command = [sys.executable, "-c", PROGRAM, tmp_path / "full", tmp_path / "run"]
    errors = subprocess.run(command, capture_output=True, text=True).stderr
    assert "ZeroDivisionError" in errors and "new futures" not in errors
    assert f"The checkpoint could not be written into {tmp_path}/full" in errors
    assert "No space left on device" in errors
    new = nnx.Dict(w=nnx.Param(jnp.zeros((4000, 1000))))
    assert Manager(tmp_path / "run").restore(model=new).step == 1 and new.w[0, 0] == 1
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["1"]


@pytest.mark.parametrize("loss", [0.1, 0.3])
def test_a_checkpoint_counts_while_it_is_being_written(tmp_path, slow_disk, loss):
    slow_disk.step = 3
    manager = run(tmp_path, [0.5, 0.2], best="loss")
    manager.save(3, model=model(3.0), metrics={"loss": loss})
    assert slow_disk.reached.wait(60) and Manager(tmp_path).steps == [1, 2]
    for _ in range(2):
        assert manager.steps == [1, 2, 3] and manager.latest == 3
        assert manager.metrics(3) == {"loss": loss}
        assert manager.best == (3 if loss < 0.2 else 2)
        assert manager.should_stop(1) is (loss > 0.2) and not manager.should_stop(2)
        slow_disk.go.set()
        manager.wait()
    manager.close()


@pytest.mark.parametrize("call", ["wait", "close", "save"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_checkpoint_that_cannot_be_written_is_taken_back(tmp_path, slow_disk, call):
    slow_disk.step, slow_disk.error = 3, OSError("No space left on device")
    manager = run(tmp_path, [0.2, 0.5], best="loss")
    save = lambda: manager.save(3, model=model(3.0), metrics={"loss": 0.1})
    assert save() and manager.best == 3
    slow_disk.go.set()
    with pytest.raises(CheckpointError, match="not be written .* No space left"):
        save() if call == "save" else getattr(manager, call)()
    assert manager.steps == [1, 2] and manager.latest == 2
    assert manager.best == 1 and manager.should_stop(1)
    slow_disk.error = None
    assert save()
    manager.close()
    assert manager.steps == [1, 2, 3] and manager.best == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_later_checkpoints_stay_until_the_one_that_replaces_them_is_complete(tmp_path, slow_disk):
    manager, slow_disk.step = Manager(tmp_path), 3
    for step in (1, 5, 9):
        manager.save(step, model=model())
    manager.restore(1, model=model())
    for slow_disk.error, steps in ((OSError("No space left"), [1, 5, 9]), (None, [1, 3])):
        with pytest.warns(UserWarning, match=r"back to step 1, .* later checkpoints \[5, 9\]"):
            manager.save(3, model=model())
        assert manager.steps == [1, 3] and manager.latest == 3
        slow_disk.go.set()
        with contextlib.suppress(CheckpointError):
            manager.close()
        assert manager.steps == Manager(tmp_path).steps == steps


def test_a_step_that_is_not_there(tmp_path):
    manager = Manager(tmp_path / "run")
    assert manager.steps == [] and manager.latest is None
    with pytest.raises(NotFoundError, match="Nothing to restore in .*run: there is no c"):
        manager.restore(model=model())
    assert not (tmp_path / "run").exists()  # nothing is made before the first save
    with run(tmp_path, [1, 1]) as manager:
        with pytest.raises(NotFoundError, match=r"No step 7 in .*: there is steps 1, 2"):
            manager.restore(7, model=model())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path):
    manager, new = Manager(tmp_path), model()
    for step in range(3):
        manager.save(step, model=model(step + 7.0))
    manager.close()
    for step, value in ((2, 8), (1, 7)):
        shutil.rmtree(tmp_path / f"{step}/arrays")
        message = f"Step {step} is passed over for the one before it. .*/{step} is damaged"
        for restore in (
            lambda: manager.restore(model=new).step,
            lambda: nnx.training.resume(Manager(tmp_path), model=new),
        ):
            with pytest.warns(UserWarning, match=message):
                assert restore() == step - 1
            assert new.w.tolist() == [value] * 3
        with pytest.raises(DamagedError):
            manager.restore(step, model=new)
        shutil.rmtree(tmp_path / str(step))
    shutil.rmtree(tmp_path / "0/arrays")
    with pytest.raises(DamagedError, match="/0 is damaged"):
        manager.restore(model=new)
    assert new.w.tolist() == [7] * 3


def test_another_model_is_not_passed_over(tmp_path):
    run(tmp_path, [1, 1]).close()
    with pytest.raises(MismatchError, match=r"missing, 1: model.v \(near: mod"):
        Manager(tmp_path).restore(model=nnx.Dict(v=nnx.Param(np.zeros(3))))


def test_what_an_ended_process_left_is_removed_by_the_next_save(tmp_path):
    (tmp_path / "9.orbax-checkpoint-tmp").mkdir()
    assert Manager(tmp_path).steps == [] and (tmp_path / "9.orbax-checkpoint-tmp").exists()
    with Manager(tmp_path) as manager:
        manager.save(9, model=model())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["9"]


def test_options_that_mean_nothing(tmp_path):
    for options, message in (
        ({"keep": 0}, "keep has to be at least 1, got 0"),
        ({"every": -1}, "every has to be at least 1, got -1"),
        ({"mode": "least"}, "mode is 'min' or 'max', got 'least'"),
    ):
        with pytest.raises(ValueError, match=message):
            Manager(tmp_path, **options)


def test_saves_that_are_refused(tmp_path):
    with Manager(tmp_path, best="loss") as manager:
        with pytest.raises(ValueError, match=r"compared by 'loss', .* metrics are \['acc'\]\."):
            manager.save(1, model=model(), metrics={"acc": 1})
        for step in (-1, 1.0, True, "1"):
            with pytest.raises(ValueError, match=f"a step is an integer from 0 on, got {step!r}"):
                manager.save(step, model=model(), metrics={"loss": 1})
        manager.save(1, model=model(), metrics={"loss": 1})
        for force in (False, True):
            with pytest.raises(ValueError, match=r"step 1 is not after those .* to 1\. Each save"):
                manager.save(1, model=model(), metrics={"loss": 1}, force=force)
    with pytest.raises(ValueError, match="name the metric first"):
        Manager(tmp_path).best


def test_managers_that_are_left_are_completed_in_their_process_alone(tmp_path, monkeypatch):
    ocp = pytest.importorskip("orbax.checkpoint")
    manager = run(tmp_path, [1, 1])
    failing = Mock(side_effect=OSError("No space left on device"))
    monkeypatch.setattr(ocp.CheckpointManager, "wait_until_finished", failing)
    message = f"could not be written into {tmp_path}, and those .* No space left on device"
    with pytest.raises(CheckpointError, match="No space left"):  # of the first of all managers
        _finish(os.getpid())
    _finish(os.getpid() + 1)  # a fork has nothing to write
    with pytest.raises(CheckpointError, match=message):
        manager.wait()


@pytest.fixture
def slow_disk(monkeypatch):
    """The last part of the save of `.step` waits for `.go`, and fails with `.error`; see `.reached`."""
    go, reached = threading.Event(), threading.Event()
    disk = types.SimpleNamespace(step=1, error=None, go=go, reached=reached)
    rename = os.rename

    def slow(path, *args, **kwargs):
        if os.path.basename(path).startswith(f"{disk.step}."):
            disk.reached.set()
            assert disk.go.wait(60)
            if disk.error:
                raise disk.error
        return rename(path, *args, **kwargs)

    monkeypatch.setattr(os, "rename", slow)
    yield disk
    disk.go.set()


def test_another_manager_of_the_folder_waits_for_what_is_being_written(tmp_path, slow_disk):
    first = Manager(tmp_path)
    first.save(1, model=model(1.0))
    assert slow_disk.reached.wait(60)
    threading.Timer(0.3, slow_disk.go.set).start()
    with Manager(tmp_path) as second:
        assert second.save(2, model=model(2.0))
    assert Manager(tmp_path).steps == [1, 2]
    first.close()
