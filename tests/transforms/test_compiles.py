"""Why a function was compiled again: every cause is named, and asking costs a call nothing."""

import functools
import gc
import itertools
import threading
import types
import weakref
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import nnxlite as nnx


def network():
    rngs = nnx.Rngs(0)
    model = nnx.Dict(layers=nnx.List([nnx.Linear(2, 2, rngs=rngs), nnx.Linear(2, 2, rngs=rngs)]))
    model.scale, model.act = 1.0, functools.partial(jnp.multiply, 1.0)
    return model


def forward(model, batch):
    return model.layers[0](batch["x"]) * model.scale


BATCH, ONES = {"x": jnp.ones((3, 2))}, jnp.ones(2)
MESH = jax.make_mesh((1,), "d", axis_types=(jax.sharding.AxisType.Auto,))
lines = itertools.count(10_000)


@pytest.fixture(params=[nnx.jit, nnx.filter_jit], ids=["jit", "filter_jit"])
def step(request):
    """A function like no other, on a line of its own."""
    code = forward.__code__.replace(co_firstlineno=next(lines))
    return request.param(types.FunctionType(code, globals()))


def test_before_the_first_call_and_after_it(step):
    assert str(step.explain()).endswith("(forward) has not been compiled.")
    step(network(), BATCH)
    explained = step.explain()
    assert explained.traces == 1 and explained.causes == () and explained.seconds > 0
    assert "its first call" in str(explained)
    assert step.cache_info()[:2] == (1, 1)


CAUSES = [
    (lambda m, b: b.update(x=jnp.ones((5, 2))), "batch['x']: float32[3,2] -> float32[5,2]"),
    (lambda m, b: b.update(x=jnp.ones((3, 2), jnp.int32)),
     "batch['x']: float32[3,2] -> int32[3,2]"),
    (lambda m, b: b.update(x=jax.device_put(b["x"], jax.NamedSharding(MESH, P()))),
     "batch['x']: float32[3,2] -> float32[3,2] on the mesh d=1 (Auto)"),
    (lambda m, b: b.update(y=jnp.ones(1)), "batch['y']: new"),
    (lambda m, b: setattr(m, "scale", 2.0), "model.scale: 1.0 -> 2.0"),
    (lambda m, b: setattr(m, "extra", nnx.Param(jnp.ones(1))), "model.extra: nothing became Param"),
    (lambda m, b: delattr(m.layers[1], "bias"), "model.layers.1.bias: Param became nothing"),
    (lambda m, b: setattr(m.layers[1], "use_bias", "other"), "model.layers.1.use_bias: "),
    (lambda m, b: m.layers.__setitem__(1, m.layers[0]), "model.layers.1"),
    (lambda m, b: setattr(m.layers[0], "bias", nnx.Cache(m.layers[0].bias.value)),
     "model.layers.0.bias: Param became Cache"),
    (lambda m, b: setattr(m, "act", functools.partial(jnp.multiply, 2.0)), "model.act"),
    (lambda m, b: setattr(m, "act", lambda x: x * 2), "model.act"),
    (lambda m, b: m.layers[0].bias.set_metadata(tag="b"), "model.layers.0.bias: "),
    (lambda m, b: m.layers[0].bias.set_value(jnp.ones(2, jnp.bfloat16)),
     "model.layers[0].bias: float32[2] -> bfloat16[2]"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "cause"), CAUSES)
def test_each_cause_is_named(step, change, cause):
    model, batch = network(), dict(BATCH)
    step(network(), dict(BATCH))
    change(model, batch)
    for _ in range(2):
        step(model, batch)
        step(network(), dict(BATCH))
    explained = step.explain()
    assert explained.traces == 2
    assert len(explained.causes) == 1 and explained.causes[0].startswith(cause)
    assert explained.causes[0] in str(explained) and "; traces so far: 2)" in str(explained)


def causes(jitted, *calls):
    """Why the last of some calls compiled."""
    for args in calls:
        jitted(*args)
    return jitted.explain().causes


def test_a_static_argument_or_leaf_a_weak_type_and_the_most_similar_earlier_call():
    power = lambda x, n: x**n
    for jitted in (nnx.jit(power, static_argnums=1), nnx.filter_jit(power)):
        assert causes(jitted, (ONES, 2), (ONES, 3)) == ("n: 2 -> 3",)
        other = causes(jitted, (jnp.ones(5), 2), (jnp.ones(5), 4))
        assert other == ("n: 2 -> 4",)
    weak = causes(nnx.jit(lambda x: 2 * x), (jnp.float32(1),), (1.0,))
    assert weak == ("x: float32[] -> weakly typed float32[]",)


def test_a_function_that_is_defined_again():
    make = lambda n: nnx.jit(lambda x: x * n)
    first = make(2)
    first(ONES)
    second = make(3)
    (cause,) = causes(second, (ONES,))
    assert "another function" in cause
    del first
    gc.collect()
    third = make(4)
    assert causes(third, (jnp.ones(3),))[1:] == ("x: float32[2] -> float32[3]",)
    # other options are not another function
    assert causes(nnx.jit(third.fun, donate_argnums=0), (jnp.ones(2),)) == ()


def test_settings_of_jax_and_of_the_library():
    f, x = nnx.jit(lambda x: x @ x), jnp.ones((2, 2))
    for one in (x, jnp.ones((3, 3))):
        f(one)
    with jax.default_matmul_precision("highest"):
        f(x)
    assert "a setting of JAX" in f.explain().causes[0]
    with nnx.set_graph_updates(False):
        f(x)
    assert "setting graph_updates: default -> False" in f.explain().causes


def test_a_trace_that_fails_is_not_counted():
    f = nnx.jit(lambda x: {}["no"], max_traces=1)
    for _ in range(3):
        with pytest.raises(KeyError):
            f(1.0)
    assert f.explain().traces == 0


@pytest.mark.parametrize("jit", [nnx.jit, nnx.filter_jit])
def test_max_traces_raises_with_the_reason(jit):
    model = network()
    step = jit(forward, max_traces=2)
    assert step.cache_info().traces == 0
    for n in (1, 2, 1, 2):
        step(model, {"x": jnp.ones((n, 2))})
    with pytest.raises(RuntimeError) as caught:
        step(model, {"x": jnp.ones((7, 2))})
    text = str(caught.value)
    assert "forward) would be traced 3 times; max_traces=2" in text
    assert "batch['x']: float32[2,2] -> float32[7,2]" in text and "pad the arrays" in text
    assert step.explain().traces == 2
    step(model, {"x": jnp.ones((2, 2))})  # what is compiled still runs


def test_compiles_are_explained_as_they_happen(capsys):
    double = nnx.jit(lambda x: 2 * x)
    texts = []
    with nnx.explain_compiles(show=texts.append):
        for n in (1, 1, 2):
            double(jnp.ones(n))
    double(jnp.ones(3))
    assert len(texts) == 2
    assert "its first call" in texts[0] and "x: float32[1] -> float32[2]" in texts[1]
    nnx.explain_compiles(True)
    double(np.ones(4, np.float32))
    nnx.explain_compiles(False)
    double(jnp.ones(5))
    printed = capsys.readouterr().err
    assert "x: float32[3] -> float32[4]" in printed and "float32[5]" not in printed


def test_explaining_does_not_compile_again_or_reach_other_threads():
    double, texts = nnx.jit(lambda x: 2 * x), []
    double(jnp.ones(2))
    with nnx.explain_compiles(show=texts.append):
        double(jnp.ones(2))
        thread = threading.Thread(target=lambda: double(jnp.ones(9)))
        thread.start()
        thread.join()
    assert texts == [] and double.explain().traces == 2


def test_records_are_bounded_and_keep_no_object_alive():
    step, model = nnx.jit(lambda model, x: x), network()
    gone = weakref.ref(model)
    for n in range(20):
        step(model, jnp.ones(n))
    del model
    gc.collect()
    assert gone() is None and step.explain().traces == step.cache_info().traces == 20


def test_static_values_that_cannot_be_shown_and_errors_that_take_no_note():
    class Hostile:
        def __repr__(self):
            raise KeyError("no repr")

    class Closed(Exception):
        def __setattr__(self, name, value):
            if not name.startswith("__"):
                raise AttributeError(name)
            super().__setattr__(name, value)

    def step(x, how):
        if x.shape == (9,):
            raise Closed(9)
        return x

    for jitted in (nnx.filter_jit(step), nnx.jit(step, static_argnums=1)):
        jitted(jnp.ones(2), Hostile())
        jitted(jnp.ones(2), Hostile())
        assert len(jitted.explain().causes) == 1 and "static" in str(jitted.explain())
        with pytest.raises(Closed):
            jitted(jnp.ones(9), Hostile())
    with pytest.raises(Closed):
        nnx.vmap(step, in_axes=(0, None))(jnp.ones((2, 9)), None)


class Settings:
    def __init__(self, scale):
        self.scale = scale


def warm(peak):
    return optax.sgd(optax.linear_schedule(0.0, peak, 10))


LOOK_THE_SAME = {
    "a number in optax": (optax.sgd, 0.5, 0.25, "step_size: -0.5 -> -0.25"),
    "a number in a schedule": (warm, 1.0, 2.0, "end_value: 1.0 -> 2.0"),
    "a partial": (lambda n: functools.partial(pow, Settings(n)), 1, 2, "[0].scale: 1 -> 2"),
    "an attribute": (Settings, 1, 2, ".scale: 1 -> 2"),
    "a captured value": (lambda n: lambda x: x * n, 2, 3, ".n: 2 -> 3"),
    "a default": (lambda n: lambda x, n=n: x, 2, 3, "[0]: 2 -> 3"),
    "a method": (lambda n: Counter({"a": n}).get, 2, 3, "looks the same"),
    "nothing": (Settings, 1, 1, "another object, which looks the same: <"),
}


@pytest.mark.parametrize("case", LOOK_THE_SAME)
def test_static_values_that_look_the_same_are_told_apart(case):
    """As a static argument, by number and by name, and as a static leaf of `filter_jit`."""
    make, before, after, difference = LOOK_THE_SAME[case]
    kept, f = (make(before), make(after)), lambda x, how: x + 1
    for jitted in (
        nnx.jit(f, static_argnums=1),
        nnx.jit(f, static_argnames="how"),
        nnx.filter_jit(f),
    ):
        (cause,) = causes(jitted, *[(ONES, how) for how in kept])
        assert cause.startswith("how") and difference in cause


def test_a_function_that_is_made_in_each_step_is_called_that():
    code, texts = (lambda x: 2 * x).__code__.replace(co_firstlineno=next(lines)), []
    with nnx.explain_compiles(show=texts.append):
        for _ in range(3):
            nnx.jit(types.FunctionType(code, globals()))(jnp.ones(2))
    assert "its first call" in texts[0] and len(texts) == 3
    for text in texts[1:]:
        assert "was compiled again" in text and "another function" in text
        assert "call nnx.jit once, before the loop" in text
