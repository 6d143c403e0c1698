"""`capture`: what modules record during one call, and nothing of it afterwards."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.objects._capture import capture

Mid, P = nnx.Intermediate, nnx.Perturbation


class Stage(nnx.Module):
    def __init__(self, factor=2.0):
        self.w = nnx.Param(jnp.array(factor))

    def __call__(self, x):
        x = self.perturb("inner", self.w * x)
        self.sow(Mid, "out", x)
        return x


class Net(nnx.Module):
    def __init__(self):
        self.first = Stage(2.0)
        self.second = self.first
        self.rest = nnx.List([Stage(3.0)])

    def __call__(self, x):
        return self.rest[0](self.second(self.first(x)))


def plain(state):
    """A state as nested dicts of floats."""
    value = lambda v: jax.tree.map(lambda x: np.asarray(x).tolist(), v.value)
    return nnx.to_pure_dict(state, extract_fn=value)


def attributes(model):
    return sorted(str(k) for _, m in model.iter_modules() for k in vars(m))


X = jnp.array(1.0)


def test_modules_beside_the_first_argument_keep_what_they_record():
    a, b = Stage(), Stage()
    _, seen = capture(lambda a, b: (a(X), b(X)), Mid)(a, b)
    assert plain(seen) == {"out": (2.0,)} and b.out.value == (2.0,)
    other = functools.partial(lambda x, m: m(x), X)  # the call's own first argument comes first
    for _, seen in (capture(other, Mid)(a), capture(nnx.jit(a), Mid)(X)):
        assert plain(seen) == {"out": (2.0,)}


def test_an_exception_leaves_the_modules_as_they_were():
    net = Net()
    before, call = attributes(net), Stage.__call__

    def fail(net):
        net(X)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        capture(fail, Mid, method_outputs=Mid)(net)
    assert attributes(net) == before
    assert Stage.__call__ is call


def test_copies_made_inside_are_cleaned_too():
    stage = nnx.Dict(a=Stage())

    def grow(model):
        model.b = nnx.clone(model.a)
        model.c = Stage()
        model.a(X), model.c(X)

    capture(grow, Mid)(stage)
    assert [sorted(vars(stage[k])) for k in "abc"] == [["w"], ["w"], ["inner", "out", "w"]]


def test_a_dict_does_not_show_the_record_among_its_items():
    model = nnx.Dict(a=Stage(), b=Stage())

    def run(model):
        assert list(model) == ["a", "b"] and len(model) == 2
        assert [name for name, _ in nnx.iter_children(model)] == ["a", "b"]
        return [layer(X) for layer in model.values()]

    for options in ({}, {"method_outputs": Mid}):  # nor are its own methods recorded
        assert sorted(capture(run, Mid, **options)(model)[1]) == ["a", "b"]


def test_the_same_function_compiles_apart_with_and_without_a_capture():
    stage = Stage()
    traces = []

    @nnx.jit
    def run(m, x):
        traces.append(x)
        return m(x)

    jitted = capture(run, Mid)
    for _ in range(2):
        _, seen = jitted(stage, X)
        assert plain(seen) == {"out": (2.0,)}
    assert len(traces) == 1
    _, seen = capture(run, Mid, method_outputs=Mid)(stage, X)
    assert sorted(seen) == ["__call__", "out"] and len(traces) == 2


def test_init_keeps_metadata_and_gives_sow_its_start():
    start = nnx.State({"out": Mid((7.0,), tag="t"), "unused": P(1.0)})
    _, seen = capture(Stage(), Mid, init=start)(X)
    assert plain(seen) == {"out": (7.0, 2.0)} and seen["out"].tag == "t"


class Methods(nnx.Module):
    def __call__(self, x):
        self.text(), self._private(x)
        return self.static(self.jitted(x))

    @nnx.jit
    def jitted(self, x):
        return x + 1

    @staticmethod
    def static(x):
        return x

    def text(self):
        return "not an array"

    def _private(self, x):
        return x


class Below(Methods):
    def __call__(self, x):
        return super().__call__(x) + 10


def test_public_methods_that_give_arrays_are_recorded_an_inherited_one_once():
    _, seen = capture(Below(), Mid, method_outputs=Mid)(X)
    assert plain(seen) == {"__call__": (12.0,), "jitted": (2.0,)}


def test_classes_are_put_back_and_other_objects_record_nothing():
    original, outside, stage = Stage.__call__, Stage(), Stage()
    jitted = nnx.jit(stage)  # it calls the method that the class has then

    def run(m, x):
        assert Stage.__call__ is not original
        capture(m, Mid, method_outputs=Mid)(x)
        assert Stage.__call__ is not original
        outside(x)
        return jitted(x)

    _, seen = capture(run, Mid, method_outputs=Mid)(stage, X)
    assert Stage.__call__ is original and sorted(seen) == ["__call__", "out"]
    assert sorted(vars(outside)) == ["inner", "out", "w"]


def test_a_call_inside_two_captures_is_recorded_once():
    other = Stage()

    def run(m, x):
        _, inner = capture(other, Mid, method_outputs=Mid)(x)
        assert inner["__call__"].value == (2.0,)
        return m(x)

    _, seen = capture(run, Mid, method_outputs=Mid)(Stage(), X)
    assert seen["__call__"].value == (2.0,)


def test_threads_capture_independently():
    call = Stage.__call__

    def outputs(number):
        seen = [capture(Stage(number), Mid, method_outputs=Mid)(X)[1] for _ in range(20)]
        return {float(state["__call__"].value[0]) for state in seen}

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(outputs, [1.0, 2.0, 3.0, 4.0])] == [{1.0}, {2.0}, {3.0}, {4.0}]
    assert Stage.__call__ is call


def test_a_model_is_captured_by_one_thread_at_a_time():
    """A second one would lose its values, and leave a record behind; its own view is captured."""
    net = Net()
    before, names = nnx.graphdef(net), attributes(net)
    entered, done = threading.Event(), threading.Event()

    def slowly(model, x):
        entered.set()
        assert done.wait(60)
        return model(x)

    results = []
    slow = capture(slowly, Mid)
    thread = threading.Thread(target=lambda: results.append(slow(net, X)))
    thread.start()
    assert entered.wait(60)
    try:
        refused = "capture: another thread is capturing the .* Give each thread a view of its own"
        for call in (
            lambda: capture(net, Mid)(X),
            lambda: capture(net.rest[0], Mid)(X),
            lambda: capture(lambda models: models[0](X), Mid)([net.first]),
        ):
            with pytest.raises(RuntimeError, match=refused):
                call()
        seen = capture(nnx.view(net), Mid)(X)[1]
    finally:
        done.set()
        thread.join()
    assert plain(seen) == plain(results[0][1]) == plain(capture(net, Mid)(X)[1])
    copied = capture(lambda model, x: nnx.clone(model), Mid)(net, X)[0]  # has a record of its own
    again = capture(copied, Mid)
    with ThreadPoolExecutor(1) as pool:
        assert plain(again(X)[1]) == plain(pool.submit(again, X).result()[1])
    assert nnx.graphdef(net) is before and attributes(net) == names
