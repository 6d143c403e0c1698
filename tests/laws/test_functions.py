"""Law L6: a program runs again only where the functions in it are known to be equal.

A table: how a function depends on something, and where it is static. Each function is defined again, by
the same code, after what it reads has changed.
"""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx

GAIN = 0.0
TABLE = {"gain": 0.0}
ROW = [0.0]
ARRAY = np.zeros(1)
MODULE = types.ModuleType("settings")


class Settings:
    gain = 0.0


OBJECT = Settings()


def helper(x):
    return x


# How a function depends on something: each takes the new setting and defines the function again. ----


def of_global(gain):
    global GAIN
    GAIN = gain
    return lambda x: x * GAIN


def of_helper(gain):
    global helper
    helper = (lambda gain: lambda x: x * gain)(gain)
    return lambda x: helper(x)


def of_captured_helper(gain):
    global GAIN
    GAIN = gain
    inner = reads_global
    return lambda x: inner(x)


def reads_global(x):
    return x * GAIN


def of_captured_dict(gain):
    TABLE["gain"] = gain
    table = TABLE
    return lambda x: x * table["gain"]


def of_captured_list(gain):
    ROW[0] = gain
    row = ROW
    return lambda x: x * row[0]


def of_captured_array(gain):
    ARRAY[0] = gain
    array = ARRAY
    return lambda x: x * array[0]


def of_captured_object(gain):
    OBJECT.gain = gain
    settings = OBJECT
    return lambda x: x * settings.gain


def of_default(gain):
    TABLE["gain"] = gain
    return lambda x, table=TABLE: x * table["gain"]


def of_keyword_default(gain):
    ROW[0] = gain
    return lambda x, *, row=ROW: x * row[0]


def of_class_attribute(gain):
    Settings.gain = gain
    return lambda x: x * Settings.gain


def of_module_attribute(gain):
    MODULE.gain = gain
    return lambda x: x * MODULE.gain


def of_library_attribute(gain):
    nnx.Linear.gain = gain
    return lambda x: x * nnx.Linear.gain


def of_partial(gain):
    TABLE["gain"] = gain
    return functools.partial(scaled, TABLE)


def scaled(table, x):
    return x * table["gain"]


def of_partial_of_a_global(gain):
    global GAIN
    GAIN = gain
    return functools.partial(reads_global)


def of_wrapped(gain):
    global GAIN
    GAIN = gain
    return functools.wraps(reads_global)(lambda x: reads_global(x))


def of_jitted(gain):
    global GAIN
    GAIN = gain
    return jax.jit(lambda x: x * GAIN)


def of_vmapped(gain):
    global GAIN
    GAIN = gain
    return jax.vmap(lambda x: x * GAIN, in_axes=None, axis_size=1, out_axes=None)


def of_attribute(gain):
    def f(x):
        return x * f.gain

    f.gain = gain
    return f


def of_value(gain):
    return lambda x: x * gain


WAYS = [way for name, way in sorted(globals().items()) if name.startswith("of_")]


# Where a function is static: each gives the result for a function. ------------------------------------


class Net(nnx.Module):
    def __init__(self, act):
        self.weight = nnx.Param(jnp.ones(()))
        self.act = act

    def __call__(self, x):
        return self.act(self.weight * x)


class Holder(nnx.Module):
    def __init__(self, act):
        self.weight = nnx.Param(jnp.ones(()))
        self.table = {"act": (act,)}


class Hooked(nnx.Module):
    def __init__(self, act):
        self.weight = nnx.Param(jnp.ones(()), on_get_value=lambda _, value: act(value))


@nnx.jit
def call(model, x):
    return model(x)


def in_module(act):
    return call(Net(act), jnp.ones(()))


def in_sequential(act):
    return call(nnx.Sequential(act), jnp.ones(()))


@nnx.jit
def call_held(model):
    return model.table["act"][0](model.weight[...])


def in_container(act):
    return call_held(Holder(act))


@nnx.jit
def read(model):
    return model.weight[...] + 0


def in_metadata(act):
    return read(Hooked(act))


@functools.partial(nnx.jit, static_argnums=0)
def by_number(act, x):
    return act(x)


def as_static_argument(act):
    return by_number(act, jnp.ones(()))


@functools.partial(nnx.jit, static_argnames="act")
def by_name(x, act):
    return act(x)


def as_static_keyword(act):
    return by_name(jnp.ones(()), act=act)


@nnx.filter_jit
def filtered(act, x):
    return act(x)


def in_filter_jit(act):
    return filtered(act, jnp.ones(()))


@functools.partial(jax.jit, static_argnums=0)
def of_graphdef(graphdef, state):
    return nnx.merge(graphdef, state)(jnp.ones(()))


def in_graphdef(act):
    return of_graphdef(*nnx.split(Net(act)))


@jax.jit
def of_module(model):
    return model(jnp.ones(()))


def in_pytree(act):
    return of_module(Net(act))


@nnx.jit
def step(model, optimizer):
    before = model.weight[...]
    optimizer.update(model, nnx.grad(lambda model: model.weight[...])(model))
    return before - model.weight[...]


def in_schedule(act):
    model = Net(nnx.relu)
    tx = optax.sgd(lambda count: act(jnp.ones(())))
    return step(model, nnx.Optimizer(model, tx, wrt=nnx.Param))


def value_of(act):
    with jax.ensure_compile_time_eval():
        return float(act(jnp.ones(())))


def in_mask(act):
    model = Net(nnx.relu)
    mask = lambda params: jax.tree.map(lambda _: value_of(act) > 2.5, params)
    tx = optax.chain(optax.sgd(1.0), optax.masked(optax.scale(0.0), mask))
    return 2.0 + step(model, nnx.Optimizer(model, tx, wrt=nnx.Param)) * -1.0 + 1.0


def in_wrt(act):
    model = Net(nnx.relu)
    model.other = nnx.Param(jnp.ones(()))
    name = lambda: "weight" if value_of(act) < 2.5 else "other"
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=lambda path, leaf: path[-1] == name())
    trained = step_of_all(model, optimizer)
    return trained["weight"] * 2.0 + trained["other"] * 3.0


@nnx.jit
def step_of_all(model, optimizer):
    before = {n: getattr(model, n)[...] for n in ("weight", "other")}
    grads = nnx.grad(
        lambda m: m.weight[...] + m.other[...], argnums=nnx.DiffState(0, optimizer.wrt)
    )
    optimizer.update(model, grads(model))
    return {n: before[n] - getattr(model, n)[...] for n in before}


def in_custom_vjp(act):
    @nnx.custom_vjp
    def f(model):
        return model(jnp.ones(()))

    f.defvjp(lambda model: (f(model), None), lambda _, g: (None,))
    return nnx.jit(lambda model: f(model))(Net(act))


def in_vmap(act):
    return nnx.vmap(call_bare, in_axes=None, axis_size=2)(Net(act))[0]


def in_scan(act):
    return nnx.scan(lambda c, m: (m(c), None), in_axes=(nnx.Carry, None), length=1)(
        jnp.ones(()), Net(act)
    )[0]


def in_cond(act):
    return nnx.cond(True, call_bare, call_bare, Net(act))


def in_remat(act):
    return nnx.remat(call_bare)(Net(act))


def in_shapes(act):
    return nnx.jit(call_bare).lower(Net(act)).compile()(Net(act))


def call_bare(model):
    return model(jnp.ones(()))


PLACES = [place for name, place in sorted(globals().items()) if name.startswith(("in_", "as_"))]


PAIRS = [(w, p) for i, w in enumerate(WAYS) for j, p in enumerate(PLACES) if (i + j) % 5 == 0]
"""A fifth: each way in a fifth of the places, each place for a fifth of the ways."""


@pytest.mark.parametrize("way, place", PAIRS, ids=lambda function: function.__name__)
def test_a_function_that_is_defined_again_is_traced_again(way, place):
    if place is in_shapes:  # the two functions are equal to themselves only: refused, not stale
        with pytest.raises(TypeError, match="act|structure"):
            place_twice(way)
        return
    assert [float(place(way(gain))) for gain in (2.0, 3.0, 3.0)] == [2.0, 3.0, 3.0]


def place_twice(way):
    compiled = nnx.jit(call_bare).lower(Net(way(2.0))).compile()
    compiled(Net(way(3.0)))


# What is known to be equal compiles once. -------------------------------------------------------------


def optimizers():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
    yield lambda: optax.adam(1e-3)
    yield lambda: optax.adamw(optax.cosine_decay_schedule(1e-3, 100), weight_decay=1e-4)
    yield lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
    yield lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100))
    yield lambda: optax.sgd(optax.piecewise_constant_schedule(1.0, {10: 0.1}))
    yield lambda: optax.inject_hyperparams(optax.adam)(1e-3)
    yield lambda: optax.MultiSteps(optax.adam(1e-3), 4)
    yield lambda: optax.adamw(1e-3, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params))
    yield lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.lamb(schedule))
    yield (
        lambda: optax.lookahead_free(1e-3) if hasattr(optax, "lookahead_free") else optax.lion(1e-3)
    )


ACTIVATIONS = {
    "lambda": lambda: lambda x: nnx.relu(x) * 2,
    "shape": lambda: lambda x: jnp.reshape(x, x.shape) @ jnp.eye(x.shape[-1]),
    "inner": lambda: lambda x: jax.tree.map(lambda part: nnx.gelu(part), x),
    "default": lambda: lambda x, gain=2.0: jax.nn.silu(x) * gain,
    "gelu": lambda: jax.nn.gelu,
    "partial": lambda: functools.partial(jax.nn.gelu, approximate=False),
    "of a lambda": lambda: functools.partial(lambda slope, x: jax.nn.leaky_relu(x, slope), 0.1),
}


class Mlp(nnx.Module):
    def __init__(self, act, rngs):
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal")
        self.layers = nnx.List([nnx.Linear(2, 2, kernel_init=init, rngs=rngs) for _ in range(2)])
        self.act = act

    def __call__(self, x):
        for layer in self.layers:
            x = self.act(layer(x))
        return x


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_equal_models_compile_once(name):
    traces = []

    @nnx.jit
    def run(model, x):
        traces.append(1)
        return model(x)

    for seed in range(3):
        run(Mlp(ACTIVATIONS[name](), nnx.Rngs(seed)), jnp.ones((1, 2)))
    assert len(traces) == 1


@pytest.mark.parametrize("make", [*optimizers()])
def test_equal_optimizers_compile_once(make):
    traces = []

    @nnx.jit
    def train(model, optimizer, x):
        traces.append(1)
        grads = nnx.grad(lambda model: model(x).sum())(model)
        optimizer.update(model, grads)

    for seed in range(3):
        model = Mlp(lambda x: nnx.relu(x) * 2, nnx.Rngs(seed))
        optimizer = nnx.Optimizer(model, make(), wrt=nnx.Param)
        for _ in range(2):
            train(model, optimizer, jnp.ones((1, 2)))
    assert len(traces) == 1


def test_a_name_that_is_defined_or_bound_again_later_counts():
    namespace = {"jax": jax, "jnp": jnp}
    code = compile("act = lambda x: jnp.abs(x) * std", "cell", "exec")
    inner = next(c for c in code.co_consts if isinstance(c, types.CodeType))
    first, second = (types.FunctionType(inner, namespace) for _ in range(2))
    models = [Net(first), Net(second)]
    nnx.split(models[0]), nnx.split(models[1])  # seen before the name has a meaning
    for model, std in zip(models, (2.0, 3.0)):
        namespace["std"] = std
        assert call(model, jnp.ones(())) == std

    code = compile("act = lambda x: op(x, 3.0)", "cell", "exec")
    inner = next(c for c in code.co_consts if isinstance(c, types.CodeType))
    namespace["op"] = jnp.add
    models = [Net(types.FunctionType(inner, namespace)) for _ in range(2)]
    nnx.split(models[0]), nnx.split(models[1])
    assert call(models[0], jnp.ones(())) == 4.0
    namespace["op"] = jnp.multiply
    assert call(models[1], jnp.ones(())) == 3.0


def test_a_container_that_optax_captured_counts_as_it_is():
    mask = nnx.State({"weight": True})
    make = lambda mask: optax.chain(optax.sgd(1.0), optax.masked(optax.scale(0.0), mask))
    models = [Net(nnx.relu) for _ in range(2)]
    first = nnx.Optimizer(models[0], make(nnx.State({"weight": True})), wrt=nnx.Param)
    nnx.split(first)
    del first
    edited = make(mask)
    optimizer = nnx.Optimizer(models[0], edited, wrt=nnx.Param)
    nnx.split(optimizer)
    mask["weight"] = False
    assert step(models[0], optimizer) == 1.0
    other = nnx.Optimizer(models[1], make(nnx.State({"weight": True})), wrt=nnx.Param)
    assert step(models[1], other) == 0.0


@pytest.mark.parametrize("first, second", [(1, 1.0), (1.0, 1), (True, 1)])
def test_whole_numbers_keep_their_type(first, second):
    schedules = [optax.constant_schedule(value) for value in (first, second)]
    for schedule, value in zip(schedules, (first, second)):
        expected = jnp.asarray(schedule(0)).dtype
        assert jnp.asarray(by_number(schedule, 0)).dtype == expected == jnp.asarray(value).dtype


def test_a_container_that_optax_captured_equals_no_other_once_it_is_edited():
    boundaries = {10: 0.1}
    make = lambda boundaries: optax.piecewise_constant_schedule(1.0, boundaries)
    key = lambda schedule: nnx.graphdef(Net(schedule))
    first, second, other = make(boundaries), make({10: 0.1}), make({10: 0.2})
    assert key(first) == key(second) != key(other)
    masks = [{"a": True}, {"a": True}]
    one, two = (optax.masked(optax.sgd(1.0), mask) for mask in masks)
    assert key(one) == key(two)
    masks[0]["a"] = False
    assert key(two) != key(one) != key(optax.masked(optax.sgd(1.0), {"a": True}))
    assert key(two) == key(optax.masked(optax.sgd(1.0), {"a": True}))
