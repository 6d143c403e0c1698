"""Two threads meet at lines of the library; many threads run freely.

The campaigns are `python -m tests.reliability.threads`; here is a part of each, of which nothing depends
on the clock.
"""

from __future__ import annotations

import threading
import typing as tp

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from nnxlite._interning import LOCK
from nnxlite.objects import observed
from tests.reliability import thread_cases
from tests.reliability.free_threads import at_once, different_models, one_model, one_stream
from tests.reliability.interleave import interleaved
from tests.reliability.thread_cases import CASES, Layer, Model, consistent
from tests.reliability.threads import Counts, run_case


def in_time(work: tp.Callable[[], object]) -> None:
    """Run something that must not wait for itself."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "a deadlock"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("name", CASES)
def test_two_operations(name):
    """At a few lines; `--lines 0` is at all."""
    for error in run_case(name, 3, 0, Counts()):
        raise error


@pytest.mark.parametrize("edit", ["_set_flag", "_add_attribute", "_remove_attribute", "_evaluate"])
def test_a_signal_handler_reads_an_object_while_it_is_edited(edit):
    """A handler or a finalizer runs in the thread that is in the middle of the edit."""

    def every_line() -> None:
        for at in range(1000):
            model = Model("handler")
            nnx.split(model)
            change = lambda m=model: getattr(thread_cases, edit)(m)
            run = interleaved(change, lambda m=model: m.eval(), at, same_thread=True)
            assert run.inner.error is run.outer.error is None
            consistent(model)
            if run.place is None:
                break

    in_time(every_line)


def test_a_signal_handler_observes_methods_that_are_just_being_observed():
    original = Layer.__call__

    def observe(seen: list[str]) -> list[str]:
        def note(
            call: tp.Any, outermost: bool, owner: tp.Any, name: str, args: tp.Any, kwargs: tp.Any
        ):
            seen.append(name)
            return call(owner, *args, **kwargs)

        with observed([(Layer, "__call__")], note):
            Layer("handler")(1.0)
        return seen

    def every_line() -> None:
        for at in range(1000):
            run = interleaved(lambda: observe([]), lambda: observe([]), at, same_thread=True)
            assert run.inner.error is run.outer.error is None
            assert run.inner.result == ["__call__"]
            assert set(run.outer.result) == {"__call__"}
            assert Layer.__call__ is original
            if run.place is None:
                break

    in_time(every_line)


def test_the_lock_of_the_process_is_free_again():
    assert LOCK.acquire(blocking=False)
    LOCK.release()


@pytest.mark.parametrize("seed", range(2))
def test_different_models_in_one_function(seed):
    different_models(seed, threads=3)


def test_one_model_read_while_it_is_trained():
    one_model(0, threads=4)


def test_sixteen_threads_draw_different_keys():
    one_stream(0, threads=16)


def test_an_error_in_a_worker_is_its_own():
    """The others finish; the model of the failing one is as before."""
    models = [nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(4)]

    @nnx.jit
    def step(model: nnx.Linear, fail: tp.Any) -> jax.Array:
        model.bias[...] += 1.0
        model.added = nnx.Variable(jnp.zeros(2))
        if fail is not None:
            raise ArithmeticError("on purpose")
        return model.bias[...].sum()

    def work(number: int) -> str:
        try:
            step(models[number], jnp.ones(()) if number % 2 else None)
        except ArithmeticError as error:
            return str(error)
        return "done"

    results = at_once([lambda n=n: work(n) for n in range(4)])
    assert results == ["done", "on purpose"] * 2
    for number, model in enumerate(models):
        assert model.bias[...].tolist() == ([0.0, 0.0] if number % 2 else [1.0, 1.0])
        assert hasattr(model, "added") is (number % 2 == 0)


def test_settings_of_jax_are_those_of_the_thread():
    """A mesh or a precision that one thread has set gives another one neither results nor programs."""
    traced: list[str] = []

    @nnx.jit
    def product(model: nnx.Linear, x: jax.Array) -> jax.Array:
        traced.append(str(jax.config.jax_default_matmul_precision))
        return model(x)

    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    inside, outside = threading.Event(), threading.Event()

    def with_setting() -> None:
        with jax.default_matmul_precision("float32"), nnx.set_graph_updates(False):
            product(model, jnp.ones((1, 2)))
            inside.set()
            assert outside.wait(60)

    def without() -> None:
        assert inside.wait(60)
        product(model, jnp.ones((1, 2)))
        assert nnx.set_graph_updates.current_value()
        outside.set()

    at_once([with_setting, without])
    assert traced == ["float32", "None"]
