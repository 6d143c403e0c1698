"""Optimizers, metrics, averages and train states give what the reference gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx
from tests.parity.layers import ref
from tests.parity.programs import Programs, attempt, compare

X = jax.random.normal(jax.random.key(5), (8, 2))
program = Programs()


def model(lib):
    class Model(lib.Module):
        def __init__(self):
            self.layers = lib.List([lib.Linear(2, 3, rngs=lib.Rngs(0)), lib.Dict(a=lib.Param(X))])
            self.scale = lib.Param(jnp.ones(1), mine=1)
            self.mean = lib.BatchStat(jnp.zeros(1))

        def __call__(self, x):
            return jnp.tanh(self.layers[0](x)) * self.scale[...]

    return Model()


def gradients(lib, node, shift=1.0):
    """Any State like the parameters will do."""
    params = lib.state(node, lib.Param)
    return jax.tree.map(lambda x: 0.1 * np.asarray(x) + np.float32(shift), params)


# Those of the random programs are sgd, adam, a chain, masks and multi_transform.
TRANSFORMATIONS = {
    "schedule": lambda: optax.sgd(optax.cosine_decay_schedule(1.0, 5)),
    "multi steps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.0, 5)),
    "schedule free": lambda: optax.contrib.schedule_free_adamw(0.1),
    "adafactor": lambda: optax.adafactor(0.1),
    "plateau": lambda: optax.contrib.reduce_on_plateau(patience=1, factor=0.5),
    "monitor": lambda: optax.chain(optax.monitor({"norm": optax.tree.norm}), optax.adam(0.1)),
    "lbfgs": lambda: optax.lbfgs(memory_size=2, linesearch=None),
}


def optimized(lib, name):
    node = model(lib)
    optimizer = lib.Optimizer(node, TRANSFORMATIONS[name](), wrt=lib.Param)
    start = lib.clone(optimizer)
    more = {"value": jnp.array(1.0)} if name == "plateau" else {}
    step = lib.jit(lambda node, optimizer, grads: optimizer.update(node, grads, **more))
    updates = [step(node, optimizer, gradients(lib, node, i - 0.5)) for i in range(3)]
    return start, node, optimizer, updates


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_optimizer_state_and_updates(name):
    compare(functools.partial(optimized, name=name))


@program()
def metrics(lib):
    average = lib.metrics.Average("loss")
    average.update(loss=jnp.array([1, 2, 3]))
    average.update(loss=np.ones((2, 3), np.float32), other=3)
    average.update(loss=2.5)
    average.update(loss=jnp.array([1.0, 2.0, 3.0]), mask=jnp.array([1, 0, 1]))
    logits = jax.random.normal(jax.random.key(0), (5, 3, 4))
    labels = jax.random.randint(jax.random.key(1), (5, 3), 0, 4)
    binary = lib.metrics.Accuracy(threshold=0.5)
    binary.update(logits=logits[..., 0], labels=labels % 2)
    several = lib.MultiMetric(accuracy=lib.metrics.Accuracy(), loss=lib.metrics.Average("loss"))
    several.update(logits=logits, labels=labels, loss=3.0)
    several.update(logits=logits, labels=labels, loss=jnp.ones(5), mask={"accuracy": labels > 0})
    masks = {"accuracy": labels > 1, "loss": labels}
    several.update(logits=logits, labels=labels, loss=jnp.ones((5, 3)), mask=masks)
    found = [average, binary, several]
    return found, [jax.tree.leaves(metric.compute()) for metric in found]


@program()
def statistics_of_batches_bit_for_bit(lib):
    random, metric, found = np.random.default_rng(0), lib.metrics.Welford(), []
    for size in (1, 7, 3, 8, 2, 5, 4, 6):
        metric.update(values=jnp.asarray(random.normal(size=size), jnp.float32))
        now = metric.compute()
        found += [now.mean, now.standard_deviation, now.standard_error_of_mean]
    return [x.tobytes() for x in map(np.asarray, found)]


@program()
def averages_of_a_part_are_applied_bit_for_bit_to_a_whole_model(lib):
    node = model(lib)
    ema = lib.EMA(lib.state(node, lib.Param), 0.97)
    for i in range(3):
        node.layers[0].kernel[...] = jax.random.normal(jax.random.key(i), (2, 3))
        ema.update(lib.state(node, lib.Param))
    node.later = lib.Param(jnp.ones(3))
    averaged = ema.apply_to(node)
    kernel = averaged.layers[0].kernel
    same = averaged is node, averaged.mean is node.mean, averaged.later is node.later
    same += (kernel is ema.params["layers"][0]["kernel"],)
    found = lib.clone(averaged), np.asarray(kernel[...]).tobytes(), ema
    del node.mean, node.scale
    return found, same, attempt(lambda: ema.apply_to(node))


@program()
def averages_keep_weak_types_and_make_arrays_of_numbers(lib):
    node = lib.Dict(weak=lib.Param(jnp.full(2, 0.5)), number=lib.Param(1.0))
    ema = lib.EMA(node, 0.5)
    node["number"].set_value(3.0)
    ema.update(node)
    values = [v.get_value() for _, v in lib.to_flat_state(lib.state(ema.params))]
    assert [x.tolist() for x in values] == [2.0, [0.5, 0.5]]
    return [(type(v), v.dtype, v.weak_type, v) for v in values]


@program()
def train_states(lib):
    graphdef, params, rest = lib.split(model(lib), lib.Param, ...)

    class State(lib.TrainState):
        rest: lib.State

    state = State.create(graphdef, params=params, tx=optax.adam(0.1), rest=rest)
    for _ in range(3):
        loss = lambda params, state=state: jnp.mean(state.apply(params, "rest")(X)[0] ** 2)
        state = state.apply_gradients(jax.grad(loss)(state.params))
    return {jax.tree_util.keystr(k): v for k, v in jax.tree.leaves_with_path(state)}


test_program = program.test()


@pytest.mark.parametrize("lib", [nnx, ref])
def test_what_is_missing_is_named(lib):
    net = model(lib)
    with pytest.raises(TypeError, match="Missing required argument `wrt`.*ModelAndOptimizer"):
        lib.Optimizer(net, optax.sgd(1.0))
    with pytest.raises(TypeError, match="Missing required argument `grads`"):
        lib.Optimizer(net, optax.sgd(1.0), wrt=lib.Param).update(net)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'tx'"):
        lib.Optimizer(net, wrt=lib.Param)
