"""The training loop: what is saved when, what Ctrl-C does, and that nothing waits for the device."""

import contextlib
import copy
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx
from nnxlite.training import _loop


class Memory:
    def __init__(self):
        self.saved, self.events = {}, []

    @property
    def latest(self):
        return max(self.saved, default=None)

    def save(self, step, *, metrics=None, force=False, **items):
        self.events.append((step, metrics, force))
        self.saved[step] = copy.deepcopy(nnx.state(items))

    def restore(self, step=None, /, **items):
        nnx.update(items, self.saved[self.latest if step is None else step])

    def wait(self):
        self.events.append("wait")


def one_param():
    return {"model": nnx.Dict(a=nnx.Param(jnp.array(1.0)))}


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
    resumed, run = trained(9, memory, save_every=3)
    assert run.start == 5 and [entry["step"] for entry in run.history] == [5, 6, 7, 8]
    assert memory.events[2:] == [(6, None, False), (9, None, False), "wait"]  # the last one once
    np.testing.assert_array_equal(resumed.kernel[...], whole.kernel[...])
    _, done = trained(9, memory)
    assert done.start == 9 and done.history == [] and memory.events[-1] == "wait"
    assert len(memory.events) == 6  # nothing to save


class Counting:
    """An iterator over numbers, with a state of the kind that is asked for."""

    def __init__(self, form):
        self.number, self.form, self.set = 0, form, None

    def __next__(self):
        self.number += 1
        return self.number - 1

    def get_state(self):
        return self.form(self.number)

    def set_state(self, state):
        self.set = state
        self.number = state["next"] if isinstance(state, dict) else len(state) // 2


@pytest.mark.parametrize(
    "form", [lambda n: {"next": n, "more": [(None,), 20_000 * n * "é"]}, lambda n: n * b"\n\xff"]
)
@pytest.mark.parametrize("kept", [False, True])
def test_data_goes_on_where_the_checkpoint_was_saved(form, kept, tmp_path):
    memory, seen = nnx.checkpoint.Manager(tmp_path / "run") if kept else Memory(), []
    for stop_at in (3, None):
        data = Counting(form)
        for step in quiet(7, checkpoints=memory, items=one_param(), data=data, save_every=2):
            seen.append(next(data))
            if step.number == stop_at:
                step.stop()
    assert seen == list(range(7)) and data.set == form(4)


def test_an_iterator_of_grain_goes_on(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    grain = pytest.importorskip("grain")
    batches = grain.MapDataset.range(40).shuffle(seed=1).repeat().batch(4).to_iter_dataset()
    sampler = grain.samplers.IndexSampler(40, seed=0, shuffle=True)
    loader = grain.DataLoader(data_source=range(40), sampler=sampler)
    for number, source in enumerate((batches, loader)):
        whole, seen = iter(source), []
        with nnx.checkpoint.Manager(tmp_path / str(number)) as manager:
            for steps in (3, 6):
                data = iter(source)
                for _ in quiet(steps, checkpoints=manager, items=one_param(), data=data):
                    seen.append(np.asarray(next(data)).tolist())
        assert seen == [np.asarray(next(whole)).tolist() for _ in range(6)]


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


def test_the_history_is_bounded_and_a_log_gets_all_before_a_save(monkeypatch):
    monkeypatch.setattr(_loop, "HISTORY", 3)
    first, second = [], []

    class Logged(Memory):  # a run that is killed has logged the steps of its checkpoints
        def save(self, step, **items):
            super().save(step, **items)
            assert [number for number, _ in first] == [n for n in range(step) if n != 1]

    options = {"checkpoints": Logged(), "items": one_param(), "save_every": 3}
    logs = [lambda *row: first.append(row), lambda *row: second.append(row)]
    run = quiet(5, log=logs, evaluate=lambda: {"valid": jnp.array(0.5)}, **options)
    for step in run:
        if step.number != 1:
            step.log(loss=jnp.array(2.0 * step.number))
        assert len(first) <= step.number
    rows = [(0, {"loss": 0.0}), (2, {"loss": 4.0, "valid": 0.5}), (3, {"loss": 6.0})]
    assert first == second == [*rows, (4, {"loss": 8.0, "valid": 0.5})]
    assert [entry["step"] for entry in run.history] == [2, 3, 4]
    evaluation = {"valid": 0.5}
    assert options["checkpoints"].events == [(3, evaluation, False), (5, evaluation, True), "wait"]


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


@pytest.fixture
def handlers():
    """Fails a test that leaves another handler of a signal than there was."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def terminate():
    """Slurm, Kubernetes and preemption send SIGTERM; a second one changes nothing."""
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    press()  # the first Ctrl-C


@pytest.mark.parametrize(
    ("send", "text"),
    [
        (press, "Stopping after this step; Ctrl-C again stops at once."),
        (terminate, "Stopping after this step, because of SIGTERM."),
    ],
)
def test_a_signal_finishes_the_step_and_saves(send, text, capsys, handlers):
    memory, done = Memory(), []
    run = quiet(5, checkpoints=memory, items=one_param())
    assert run.start is None  # before iteration
    for step in run:
        if step.number == 2:
            send()
        done.append(step.number)
    assert run.interrupted and done == [0, 1, 2] and memory.events == [(3, None, True), "wait"]
    assert text in capsys.readouterr().err


def press_twice():
    press()
    press()


@pytest.mark.parametrize(
    ("end", "error"),
    [(press_twice, KeyboardInterrupt), (lambda: 1 / 0, ZeroDivisionError), (None, None)],
)
def test_a_second_ctrl_c_an_exception_or_break_does_not_save(end, error, handlers):
    memory = Memory()
    run = quiet(5, checkpoints=memory, items=one_param())
    with pytest.raises(error) if error else contextlib.nullcontext():
        for step in run:
            step.log(loss=jnp.array(2.0 * step.number))
            if step.number == 3:
                if end is None:
                    break
                end()
    assert memory.events == [] and [entry["loss"] for entry in run.history] == [0, 2, 4, 6]


def test_another_thread_leaves_signals_alone():
    before = signal.getsignal(signal.SIGINT)
    work = lambda: [signal.getsignal(signal.SIGINT) is before for step in quiet(3)]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == [True, True, True]


def test_the_bar(capsys):
    for step in nnx.training.loop(3, start=1, evaluate=lambda: {"valid": 0.25}):
        step.log(loss=jnp.array(0.5))
    shown = capsys.readouterr().err
    assert "3/3" in shown and "steps/s" in shown and "loss 0.5" in shown and "valid 0.25" in shown
    assert repr(step) == "Step(number=2)"


SAVED = {"checkpoints": Memory(), "items": one_param()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": -1}, "loop: steps must be at least 0, not -1"),
        ({"start": -2}, "loop: start must be at least 0, not -2"),
        ({"save_every": 0}, "loop: save_every must be at least 1, not 0"),
        ({"save_every": 2}, "loop: save_every=2 needs checkpoints and items"),
        ({"evaluate_every": 2}, "loop: evaluate_every=2 needs evaluate, a function"),
        ({"evaluate": lambda m: {}}, "loop: evaluate is called without arguments: missing a"),
        ({"checkpoints": Memory()}, "loop got checkpoints without items: pass both"),
        ({"items": {"a": 1}}, "loop got items without checkpoints: pass both"),
        (SAVED | {"items": {"step": 1}}, "item 'step' has the name of a parameter of Memory.save"),
        ({"data": Counting(None)}, "loop: data needs checkpoints, and is saved as the item"),
        (SAVED | {"data": [1, 2]}, "get_state and set_state, and list does not. Pass the iter"),
    ],
)
def test_options_that_mean_nothing(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        nnx.training.loop(**{"steps": 3, **options})


NO_BYTES = "has to return bytes, text"
NO_NUMBERS = "has to return numbers by name"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SAVED | {"data": Counting(lambda n: {"a": id})}, f"Counting returns .*dict.*{NO_BYTES}"),
        (SAVED | {"data": Counting(range)}, f"get_state of Counting returns range.* {NO_BYTES}"),
        ({"evaluate": lambda: 1.0}, f"loop: evaluate returns float, and {NO_NUMBERS}"),
        ({"evaluate": lambda: {"b": jnp.ones(2)}}, f"evaluate returns dict, and {NO_NUMBERS}"),
    ],
)
def test_data_and_evaluations_that_return_something_else(options, message):
    with pytest.raises(TypeError, match=message):
        list(quiet(1, evaluate_every=1 if "evaluate" in options else None, **options))


def test_what_can_be_logged_and_evaluated():
    metrics, given = nnx.MultiMetric(a=nnx.metrics.Average()), np.zeros(1)
    run = quiet(2, evaluate=lambda: {**metrics.compute(), "step": np.ones(1)}, evaluate_every=1)
    for step in run:
        metrics.update(values=step.number)
        given += 1
        step.log(a=metrics.a.count, b=given)
    step.log(self=nnx.Param(jnp.array(4)))
    first = {"step": 0, "a": 1, "b": 1.0, "evaluate/a": 0.0, "evaluate/step": 1.0}
    second = {"step": 1, "a": 2, "b": 2.0, "evaluate/a": 0.5, "evaluate/step": 1.0}
    assert run.history == [first, second, {"step": 1, "self": 4}]
    for bad in (jnp.ones(2), "text", None, {"a": 1.0}, jax.random.key(0), nnx.metrics.Welford()):
        with pytest.raises(ValueError, match="Step 1 logs loss .*; it takes single numbers"):
            step.log(loss=bad)
    with pytest.raises(ValueError, match=r"logs loss float32\[\]; it takes .*, outside of jit"):
        jax.jit(lambda x: step.log(loss=x))(1.0)
    for step in quiet(1):
        step.log(a=1.0)
        for name in ("a", "step"):
            with pytest.raises(ValueError, match=f"Step 0 logs {name} twice; the second one"):
                step.log(b=2.0, **{name: 2.0})
    assert step.run.history == [{"step": 0, "a": 1.0}]


def test_items_with_the_names_of_parameters_are_refused_before_the_first_step(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    with nnx.checkpoint.Manager(tmp_path / "run") as manager:
        for name in ("metrics", "force", "only", "strict"):
            method = "restore" if name == "strict" else "save"
            expected = f"'{name}' has the name of a parameter of Manager.{method}; .*'train_{name}'"
            with pytest.raises(ValueError, match=expected):
                quiet(3, checkpoints=manager, items={name: nnx.metrics.Average()})
        quiet(3, checkpoints=manager, items={"step": nnx.metrics.Average()})
