"""Law L6: a program runs again only where the functions in it are known to be equal.

Two tables: how a function depends on something, and where it is static. Each function is defined again,
by the same code, after what it reads has changed.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx

ONE = jnp.ones(())
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


def set_gain(gain):
    """Change everything that a function below may depend on."""
    global GAIN, helper
    GAIN = TABLE["gain"] = ROW[0] = ARRAY[0] = gain
    MODULE.gain = OBJECT.gain = Settings.gain = nnx.Linear.gain = gain
    helper = (lambda gain: lambda x: x * gain)(gain)


def reads_global(x):
    return x * GAIN


def scaled(table, x):
    return x * table["gain"]


def of_attribute(gain):
    def f(x):
        return x * f.gain

    f.gain = gain
    return f


WAYS = {
    "value": lambda gain: lambda x: x * gain,
    "global": lambda _: lambda x: x * GAIN,
    "helper": lambda _: lambda x: helper(x),
    "captured_helper": lambda _: (lambda inner: lambda x: inner(x))(reads_global),
    "captured_dict": lambda _: (lambda table: lambda x: x * table["gain"])(TABLE),
    "captured_list": lambda _: (lambda row: lambda x: x * row[0])(ROW),
    "captured_array": lambda _: (lambda array: lambda x: x * array[0])(ARRAY),
    "captured_object": lambda _: (lambda settings: lambda x: x * settings.gain)(OBJECT),
    "default": lambda _: lambda x, table=TABLE: x * table["gain"],
    "keyword_default": lambda _: lambda x, *, row=ROW: x * row[0],
    "class_attribute": lambda _: lambda x: x * Settings.gain,
    "module_attribute": lambda _: lambda x: x * MODULE.gain,
    "library_attribute": lambda _: lambda x: x * nnx.Linear.gain,
    "partial": lambda _: functools.partial(scaled, TABLE),
    "partial_of_a_global": lambda _: functools.partial(reads_global),
    "wrapped": lambda _: functools.wraps(reads_global)(lambda x: reads_global(x)),
    "jitted": lambda _: jax.jit(lambda x: x * GAIN),
    "vmapped": lambda _: jax.vmap(lambda x: x * GAIN, in_axes=None, axis_size=1, out_axes=None),
    "attribute": of_attribute,
}
"""How a function depends on the gain: each defines the function again."""


class Net(nnx.Module):
    def __init__(self, act):
        self.weight = nnx.Param(ONE)
        self.act = act

    def __call__(self, x):
        return self.act(self.weight * x)


@nnx.jit
def call(model, x):
    return model(x)


def call_bare(model):
    return model(ONE)


@nnx.jit
def step(model, optimizer):
    before = model.weight[...]
    optimizer.update(model, nnx.grad(lambda model: model.weight[...])(model))
    return before - model.weight[...]


def value_of(act):
    with jax.ensure_compile_time_eval():
        return float(act(ONE))


def in_schedule(act):
    model, tx = Net(nnx.relu), optax.sgd(lambda count: act(ONE))
    return step(model, nnx.Optimizer(model, tx, wrt=nnx.Param))


def in_mask(act):
    model = Net(nnx.relu)
    mask = lambda params: jax.tree.map(lambda _: value_of(act) > 2.5, params)
    tx = optax.chain(optax.sgd(1.0), optax.masked(optax.scale(0.0), mask))
    return 3.0 - step(model, nnx.Optimizer(model, tx, wrt=nnx.Param))


def in_custom_vjp(act):
    f = nnx.custom_vjp(lambda model: model(ONE))
    f.defvjp(lambda model: (f(model), None), lambda _, g: (None,))
    return nnx.jit(lambda model: f(model))(Net(act))


by_number = nnx.jit(lambda act, x: act(x), static_argnums=0)
by_name = nnx.jit(lambda x, act: act(x), static_argnames="act")
filtered = nnx.filter_jit(lambda act, x: act(x))
call_held = nnx.jit(lambda model: model.table["act"][0](model.weight[...]))
read = nnx.jit(lambda model: model.weight[...] + 0)
of_graphdef = jax.jit(lambda graphdef, state: nnx.merge(graphdef, state)(ONE), static_argnums=0)
of_module = jax.jit(call_bare)

PLACES = {
    "module": lambda act: call(Net(act), ONE),
    "sequential": lambda act: call(nnx.Sequential(act), ONE),
    "container": lambda act: call_held(nnx.Dict(weight=nnx.Param(ONE), table={"act": (act,)})),
    "metadata": lambda act: read(
        nnx.Dict(weight=nnx.Param(ONE, on_get_value=lambda _, value: act(value)))
    ),
    "static_argument": lambda act: by_number(act, ONE),
    "static_keyword": lambda act: by_name(ONE, act=act),
    "filter_jit": lambda act: filtered(act, ONE),
    "graphdef": lambda act: of_graphdef(*nnx.split(Net(act))),
    "pytree": lambda act: of_module(Net(act)),
    "schedule": in_schedule,
    "mask": in_mask,
    "custom_vjp": in_custom_vjp,
    "vmap": lambda act: nnx.vmap(call_bare, in_axes=None, axis_size=2)(Net(act))[0],
    "scan": lambda act: nnx.scan(lambda c, m: (m(c), None), in_axes=(nnx.Carry, None), length=1)(
        ONE, Net(act)
    )[0],
    "cond": lambda act: nnx.cond(True, call_bare, call_bare, Net(act)),
    "remat": lambda act: nnx.remat(call_bare)(Net(act)),
}
"""Where a function is static: each gives the result for it."""

PAIRS = [(w, p) for i, w in enumerate(WAYS) for j, p in enumerate(PLACES) if (i + j) % 5 == 0]
"""A fifth: each way in a fifth of the places, each place for a fifth of the ways."""


@pytest.mark.parametrize("way, place", PAIRS)
def test_L6_a_function_that_is_defined_again_is_traced_again(way, place):
    results = []
    for gain in (2.0, 3.0, 3.0):
        set_gain(gain)
        results.append(float(PLACES[place](WAYS[way](gain))))
    assert results == [2.0, 3.0, 3.0]


@pytest.mark.parametrize("way", [*WAYS][::5])
def test_L6_a_compiled_program_refuses_another_function(way):
    """The two are equal to themselves only."""
    set_gain(2.0)
    compiled = nnx.jit(call_bare).lower(Net(WAYS[way](2.0))).compile()
    with pytest.raises(TypeError, match="act|structure"):
        compiled(Net(WAYS[way](3.0)))


# What is known to be equal compiles once ----------------------------------------------------------


OPTIMIZERS = {
    "mask": lambda: optax.adamw(
        optax.cosine_decay_schedule(1e-3, 100),
        mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    ),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
    "boundaries": lambda: optax.sgd(optax.piecewise_constant_schedule(1.0, {10: 0.1})),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.sgd)(1e-3),
    "steps": lambda: optax.MultiSteps(optax.sgd(1e-3), 4),
    "lamb": lambda: optax.chain(
        optax.adaptive_grad_clip(0.1), optax.lamb(optax.linear_schedule(0.0, 1e-3, 10))
    ),
}
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
def test_L6_equal_models_compile_once(name):
    traces = []

    @nnx.jit
    def run(model, x):
        traces.append(1)
        return model(x)

    for seed in range(3):
        run(Mlp(ACTIVATIONS[name](), nnx.Rngs(seed)), jnp.ones((1, 2)))
    assert len(traces) == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_L6_equal_optimizers_compile_once(name):
    traces = []

    @nnx.jit
    def train(model, optimizer, x):
        traces.append(1)
        grads = nnx.grad(lambda model: model(x).sum())(model)
        optimizer.update(model, grads)

    for seed in range(3):
        model = Mlp(lambda x: nnx.relu(x) * 2, nnx.Rngs(seed))
        optimizer = nnx.Optimizer(model, OPTIMIZERS[name](), wrt=nnx.Param)
        for _ in range(2):
            train(model, optimizer, jnp.ones((1, 2)))
    assert len(traces) == 1


@pytest.mark.parametrize("code", ["lambda x: jnp.abs(x) * std", "lambda x: op(x, 3.0)"])
def test_a_name_that_is_defined_or_bound_again_later_counts(code):
    namespace = {"jax": jax, "jnp": jnp, "op": jnp.add}
    models = [Net(eval(code, namespace)) for _ in range(2)]
    nnx.split(models)  # seen before the names have a meaning, or another one
    namespace["std"] = 4.0
    assert call(models[0], ONE) == 4.0
    namespace["std"], namespace["op"] = 3.0, jnp.multiply
    assert call(models[1], ONE) == 3.0


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
