"""The training loop: what is saved when, what Ctrl-C does, and that nothing waits for the device."""

from __future__ import annotations

import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx
from nnxlite.training import _loop


class Memory:
    """Checkpoints in a dict."""

    def __init__(self):
        self.saved, self.events = {}, []

    @property
    def latest(self):
        return max(self.saved, default=None)

    def save(self, step, /, *, metrics=None, force=False, **items):
        self.events.append((step, metrics, force))
        self.saved[step] = jax.tree.map(jnp.copy, nnx.state(items))

    def restore(self, step=None, /, **items):
        nnx.update(items, self.saved[self.latest if step is None else step])

    def wait(self):
        self.events.append("wait")


class Bare:
    latest = None

    def save(self, step, **items):
        self.got = step, items

    def restore(self, step=None, **items):
        raise AssertionError


def quiet(*args, **kwargs):
    return nnx.training.loop(*args, progress=False, **kwargs)


@nnx.jit
def train_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def trained(steps, checkpoints, stop_at=None, **options):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-1), wrt=nnx.Param)
    items = {"model": model, "optimizer": optimizer}
    run = quiet(steps, checkpoints=checkpoints, items=items, **options)
    for step in run:
        x = np.random.default_rng(step.number).normal(size=(4, 2)).astype(np.float32)
        step.log(loss=train_step(model, optimizer, x))
        if step.number == stop_at:
            step.stop()
    return model, run


@pytest.mark.quick
def test_a_resumed_run_is_the_same_run():
    whole, _ = trained(9, Memory())
    memory = Memory()
    _, first = trained(9, memory, stop_at=4)
    assert first.start == 0 and not first.interrupted
    assert memory.events == [(5, None, True), "wait"]
    resumed, run = trained(9, memory, save_every=2)
    assert run.start == 5 and [entry["step"] for entry in run.history] == [5, 6, 7, 8]
    assert memory.events[2:] == [(6, None, False), (8, None, False), (9, None, True), "wait"]
    np.testing.assert_array_equal(resumed.kernel[...], whole.kernel[...])
    _, done = trained(9, memory)
    assert done.start == 9 and done.history == [] and memory.events[-1] == "wait"
    assert len(memory.events) == 7  # nothing to save


def test_with_the_manager_of_checkpoints(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    whole, _ = trained(7, Memory())
    with nnx.checkpoint.Manager(tmp_path / "run", best="valid") as manager:
        options = {"evaluate": lambda: {"valid": 1.0}, "save_every": 2}
        trained(7, manager, stop_at=4, **options)
        assert manager.steps == [2, 4, 5]
        resumed, run = trained(7, manager, **options)
        assert run.start == 5 and manager.latest == 7 and manager.metrics(7) == {"valid": 1.0}
    np.testing.assert_array_equal(resumed.kernel[...], whole.kernel[...])


class Counting:
    """An iterator over numbers, with a state of the kind that is asked for."""

    def __init__(self, form=lambda n: {"next": n, "more": ["a", None, 0.5]}):
        self.number, self.form, self.set = 0, form, None

    def __next__(self):
        self.number += 1
        return self.number - 1

    def get_state(self):
        return self.form(self.number)

    def set_state(self, state):
        self.set = state
        self.number = state["next"] if isinstance(state, dict) else len(state)


@pytest.mark.parametrize("form", [Counting().form, lambda n: n * b"\0", lambda n: n * b"\n"])
def test_data_goes_on_where_the_checkpoint_was_saved(form):
    memory, seen = Memory(), []
    items = {"model": nnx.Dict(a=nnx.Param(jnp.array(1.0)))}
    for stop_at in (3, None):
        data = Counting(form)
        for step in quiet(7, checkpoints=memory, items=items, data=data, save_every=2):
            seen.append(next(data))
            if step.number == stop_at:
                step.stop()
    assert seen == list(range(7)) and data.set == form(4)


def test_an_iterator_of_grain_goes_on(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    grain = pytest.importorskip("grain")

    def batches():
        data = grain.MapDataset.range(40).shuffle(seed=1).repeat().batch(4)
        return iter(data.to_iter_dataset())

    def loader():
        sampler = grain.samplers.IndexSampler(40, seed=0, shuffle=True)
        return iter(grain.DataLoader(data_source=range(40), sampler=sampler))

    for make in (batches, loader):
        whole, seen = make(), []
        with nnx.checkpoint.Manager(tmp_path / make.__name__) as manager:
            for steps in (5, 12):
                data = make()
                items = {"model": nnx.Dict(a=nnx.Param(jnp.array(1.0)))}
                for _ in quiet(steps, checkpoints=manager, items=items, data=data, save_every=3):
                    seen.append(np.asarray(next(data)).tolist())
        assert seen == [np.asarray(next(whole)).tolist() for _ in range(12)]


def test_evaluation_and_what_is_saved_with_it():
    memory, seen = Memory(), []

    def evaluate():
        seen.append(len(seen))
        return {"valid": jnp.array(float(len(seen)))}

    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    options = {"checkpoints": memory, "items": {"model": model}, "save_every": 3}
    run = quiet(7, evaluate=evaluate, evaluate_every=2, **options)
    for step in run:
        if step.every(2):
            step.log(loss=step.number)
    assert run.history == [
        {"step": 1, "loss": 1, "valid": 1.0},
        {"step": 2, "valid": 2.0},  # what is saved has an evaluation of its own
        {"step": 3, "loss": 3, "valid": 3.0},
        {"step": 5, "loss": 5, "valid": 4.0},
        {"step": 6, "valid": 5.0},
    ]
    saved = [(3, {"valid": 2.0}, False), (6, {"valid": 4.0}, False), (7, {"valid": 5.0}, True)]
    assert memory.events == [*saved, "wait"]
    assert run.steps_per_second > 0


def test_an_object_that_only_saves_items():
    bare, model = Bare(), nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    for _ in quiet(2, checkpoints=bare, items={"model": model}, evaluate=lambda: {"a": 1}):
        pass
    assert bare.got == (2, {"model": model})


def test_the_history_is_bounded_and_a_log_gets_all(monkeypatch):
    monkeypatch.setattr(_loop, "HISTORY", 3)
    first, second = [], []
    logs = [lambda *row: first.append(row), lambda *row: second.append(row)]
    run = quiet(5, log=logs, evaluate=lambda: {"valid": jnp.array(0.5)}, evaluate_every=3)
    for step in run:
        if step.number != 1:
            step.log(loss=jnp.array(2.0 * step.number))
        assert len(first) <= step.number
    rows = [(0, {"loss": 0.0}), (2, {"loss": 4.0, "valid": 0.5}), (3, {"loss": 6.0})]
    assert first == second == [*rows, (4, {"loss": 8.0, "valid": 0.5})]
    assert [entry["step"] for entry in run.history] == [2, 3, 4]
    for step in quiet(1, log=lambda *row: first.append(row)):
        step.log(loss=1.0)
    assert first[-1] == (0, {"loss": 1.0})


def test_a_log_in_a_file_goes_on(tmp_path):
    for start in (0, 2):
        for step in quiet(start + 2, start=start, log=nnx.training.CSV(tmp_path / "run.csv")):
            step.log(loss=step.number / 2, rate=0.1)
    lines = (tmp_path / "run.csv").read_text().splitlines()
    assert lines[:3] == ["step,name,value", "0,loss,0.0", "0,rate,0.1"] and len(lines) == 9
    assert lines[-2] == "3,loss,1.5"


def test_a_killed_run_has_logged_the_steps_of_its_checkpoints(tmp_path):
    rows = []

    class Kept(Bare):
        def save(self, step, **items):
            super().save(step, **items)
            assert rows == [(number, {"loss": 1.0}) for number in range(step)]

    options = {"checkpoints": Kept(), "items": {"n": 0}, "save_every": 3}
    for step in quiet(7, **options, log=lambda *row: rows.append(row)):
        step.log(loss=jnp.array(1.0))
    assert len(rows) == 7 and options["checkpoints"].got[0] == 7


def test_the_events_of_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto import event_pb2

    log, found = nnx.training.TensorBoard(tmp_path), []
    for steps in (1, 2):
        for step in quiet(steps, start=steps - 1, log=log):
            step.log(loss=jnp.array(1.5), rate=step.number)
    content = b"".join(file.read_bytes() for file in sorted(tmp_path.iterdir()))
    while content:  # records: the length, its checksum, an event, its checksum
        length = int.from_bytes(content[:8], "little")
        event = event_pb2.Event.FromString(content[12 : 12 + length])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        content = content[16 + length :]
    assert sorted(found) == [(0, "loss", 1.5), (0, "rate", 0.0), (1, "loss", 1.5), (1, "rate", 1.0)]


def test_a_run_of_weights_and_biases(tmp_path):
    pytest.importorskip("wandb")
    log = nnx.training.WandB(mode="offline", dir=tmp_path, project="test")
    for step in quiet(2, log=log):
        step.log(loss=jnp.array(1.5 + step.number))
    assert log.run.summary["loss"] == 2.5 and log.run.step == 2
    log.run.finish()
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


def test_losses_are_read_when_the_device_is_further():
    """An array that is not there yet is not asked for before `LAG` more steps."""
    read = []

    class Late:
        size = 1

        def __init__(self, number):
            self.number = number

        def __array__(self, dtype=None, copy=None):
            read.append(self.number)
            return np.asarray(float(self.number))

    run, ahead = quiet(5), []
    for step in run:
        ahead.append(step.number - len(run.history))
        step.log(loss=Late(step.number))
    assert max(ahead) == _loop.LAG
    assert [entry["step"] for entry in run.history] == list(range(5))


def press():
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_finishes_the_step_and_saves(capsys):
    before, memory, done = signal.getsignal(signal.SIGINT), Memory(), []
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    run = quiet(5, checkpoints=memory, items={"model": model})
    for step in run:
        if step.number == 2:
            press()
        done.append(step.number)
    assert run.interrupted and done == [0, 1, 2]
    assert memory.events == [(3, None, True), "wait"]
    assert "Stopping after this step; Ctrl-C again stops at once." in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before
    assert quiet(5, checkpoints=memory, items={"model": model}).start is None  # before iteration


def test_ctrl_c_while_something_is_evaluated_saves_too():
    memory, model = Memory(), nnx.Linear(1, 1, rngs=nnx.Rngs(0))

    def evaluate():
        press()
        return {"a": 1.0}

    items = {"model": model}
    run = quiet(5, checkpoints=memory, items=items, evaluate=evaluate, evaluate_every=2)
    assert [step.number for step in run] == [0, 1]
    assert memory.events == [(2, {"a": 1.0}, True), "wait"]


def test_sigterm_finishes_the_step_and_saves(capsys):
    """What Slurm, Kubernetes and preemption send; a second one changes nothing."""
    before, memory, done = signal.getsignal(signal.SIGTERM), Memory(), []
    run = quiet(5, checkpoints=memory, items={"model": nnx.Dict(a=nnx.Param(1.0))})
    for step in run:
        if step.number == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            press()  # the first Ctrl-C
        done.append(step.number)
    assert run.interrupted and done == [0, 1, 2] and memory.events == [(3, None, True), "wait"]
    assert "Stopping after this step, because of SIGTERM." in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_ctrl_c_interrupts_at_once():
    before, memory, model = signal.getsignal(signal.SIGINT), Memory(), nnx.Dict(a=nnx.Param(1.0))
    with pytest.raises(KeyboardInterrupt):
        for _ in quiet(5, checkpoints=memory, items={"model": model}):
            press()
            press()
    assert memory.events == [] and signal.getsignal(signal.SIGINT) is before


def test_an_exception_or_break_does_not_save():
    before, memory, model = signal.getsignal(signal.SIGINT), Memory(), nnx.Dict(a=nnx.Param(1.0))
    run = quiet(5, checkpoints=memory, items={"model": model})
    with pytest.raises(ZeroDivisionError):
        for step in run:
            step.log(loss=jnp.array(2.0))
            1 / (step.number - 1)
    assert memory.events == [] and signal.getsignal(signal.SIGINT) is before
    run = quiet(5, checkpoints=memory, items={"model": model})
    for step in run:
        step.log(loss=step.number)
        if step.number == 3:
            break
    assert memory.events == [] and signal.getsignal(signal.SIGINT) is before
    assert [entry["loss"] for entry in run.history] == [0, 1, 2, 3]


def test_another_thread_leaves_signals_alone():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work():
        for step in quiet(3):
            seen.append((step.number, signal.getsignal(signal.SIGINT) is before))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(0, True), (1, True), (2, True)]


def test_parts_alone():
    with nnx.training.interruptible() as stop:
        assert not stop
        press()
        assert stop
    memory, model = Memory(), nnx.Dict(a=nnx.Param(jnp.array(1.0)))
    assert nnx.training.resume(memory, model=model) == 0
    memory.save(4, model=model)
    model.a[...] = jnp.array(3.0)
    assert nnx.training.resume(memory, model=model) == 4 and model.a[...] == 1.0


def test_the_bar(capsys):
    for step in nnx.training.loop(3, start=1, evaluate=lambda: {"valid": 0.25}):
        step.log(loss=jnp.array(0.5))
    shown = capsys.readouterr().err
    assert "3/3" in shown and "steps/s" in shown and "loss 0.5" in shown and "valid 0.25" in shown
    assert repr(step) == "Step(2)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": -1}, "loop: steps must be at least 0, not -1"),
        ({"start": -2}, "loop: start must be at least 0, not -2"),
        ({"save_every": 0}, "loop: save_every must be at least 1, not 0"),
        ({"save_every": 2}, "loop: save_every=2 needs checkpoints and items"),
        ({"evaluate_every": 2}, "loop: evaluate_every=2 needs evaluate, a function"),
        ({"checkpoints": Bare()}, "loop got checkpoints without items: pass both"),
        ({"data": Counting()}, "loop: data needs checkpoints, and is saved as the item 'data'"),
        ({"items": {"a": 1}}, "loop got items without checkpoints: pass both"),
    ],
)
def test_options_that_mean_nothing(options, message):
    with pytest.raises(ValueError, match=message):
        nnx.training.loop(**{"steps": 3, **options})


@pytest.mark.parametrize("state", [{1: 2}, {"a": (1, 2)}, {"a": np.arange(2)}, object()])
def test_data_without_a_position_that_can_be_saved(state):
    options = {"checkpoints": Memory(), "items": {"model": nnx.Dict(a=nnx.Param(jnp.array(1.0)))}}
    with pytest.raises(
        TypeError, match="get_state and set_state, and list does not. Pass the iter"
    ):
        quiet(3, data=[1, 2], **options)
    run = quiet(3, data=Counting(lambda number: state), **options)
    expected = (
        f"get_state of Counting returns .*{type(state).__name__}.* has to return bytes, or wh"
    )
    with pytest.raises(TypeError, match=expected):
        next(iter(run))


def test_what_cannot_be_logged():
    with pytest.raises(
        ValueError, match=r"Step 0 logs loss of shape \(2,\); it takes single numbers"
    ):
        for step in quiet(3):
            step.log(loss=jnp.ones(2))


def test_an_evaluation_that_takes_arguments():
    with pytest.raises(
        TypeError, match="loop: evaluate is called without arguments: missing a requi"
    ):
        quiet(3, evaluate=lambda model: {"a": 1.0})


@pytest.mark.parametrize(
    ("result", "what"),
    [
        (None, "NoneType"),
        (1.0, "float"),
        ({"spread": nnx.metrics.Statistics(1.0, 1.0, 1.0)}, "dict"),
        ({"a": 1.0, "b": jnp.ones(2)}, "dict"),
    ],
)
def test_an_evaluation_that_returns_something_else(result, what):
    run = quiet(3, evaluate=lambda: result, evaluate_every=1)
    with pytest.raises(
        TypeError, match=f"loop: evaluate returns {what}, and has to return numbers by"
    ):
        for _ in run:
            pass
    for right in (lambda: {"a": np.float32(1)}, nnx.MultiMetric(a=nnx.metrics.Average()).compute):
        quiet(3, evaluate=right, evaluate_every=1)


@pytest.mark.parametrize("name", ["metrics", "force", "only", "strict"])
def test_items_with_the_names_of_parameters_are_refused_before_the_first_step(name, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    with nnx.checkpoint.Manager(tmp_path / "run") as manager:
        method = "restore" if name == "strict" else "save"
        expected = (
            f"item '{name}' has the name of a parameter of Manager.{method}; .*'train_{name}'"
        )
        with pytest.raises(ValueError, match=expected):
            quiet(3, checkpoints=manager, items={name: nnx.metrics.Average()})
        for _ in quiet(3, checkpoints=manager, items={"step": nnx.metrics.Average()}):
            pass
    with pytest.raises(ValueError, match="item 'step' has the name of a parameter of Bare.save"):
        quiet(3, checkpoints=Bare(), items={"step": nnx.metrics.Average()})
