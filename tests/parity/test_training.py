"""Optimizers, metrics, averages and train states give what the reference gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx

flax_nnx = pytest.importorskip("flax.nnx")

LIBRARIES = (nnx, flax_nnx)
X = jax.random.normal(jax.random.key(5), (8, 2))
Y = X.sum(1, keepdims=True)
IGNORED = {"hijax", "ref", "eager_sharding", "mesh"}


def model(lib):
    class Dense(lib.Module):
        def __init__(self, n, m, rngs):
            self.kernel = lib.Param(rngs.normal((n, m)), mine=1)
            self.bias = lib.Param(jnp.zeros(m))

        def __call__(self, x):
            return x @ self.kernel[...] + self.bias[...]

    class Model(lib.Module):
        def __init__(self):
            rngs = lib.Rngs(0)
            self.layers = lib.List([Dense(2, 3, rngs), Dense(3, 1, rngs)])
            self.scale = lib.Param(jnp.ones(1))
            self.mean = lib.BatchStat(jnp.zeros(1))

        def __call__(self, x):
            return self.layers[1](jnp.tanh(self.layers[0](x))) * self.scale[...]

    return Model()


def gradients(lib, node, wrt, shift=1.0):
    """Any State like the parameters will do."""
    return jax.tree.map(lambda x: 0.1 * np.asarray(x) + np.float32(shift), lib.state(node, wrt))


def described(lib, node):
    """Path to (kind, shape, dtype, metadata) and path to value."""
    kinds, values = {}, {}
    for path, v in lib.to_flat_state(lib.state(node)):
        value = v.get_value()
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        metadata = {k: x for k, x in v.get_metadata().items() if k not in IGNORED}
        kinds[path] = (type(v).__name__, shape, dtype, metadata)
        if shape is not None:
            values[path] = np.asarray(value)
    return kinds, values


def agree(a, b, rtol=1e-5):
    assert a[0] == b[0]
    assert list(a[0]) == list(b[0])
    for path, value in a[1].items():
        np.testing.assert_allclose(value, b[1][path], rtol=rtol, atol=1e-6, err_msg=str(path))


TRANSFORMATIONS = {
    "adam": lambda: optax.adam(0.1),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "schedule": lambda: optax.sgd(optax.cosine_decay_schedule(1.0, 5)),
    "adamw with a mask": lambda: optax.adamw(
        0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
    "multi steps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "masked": lambda: optax.masked(
        optax.adam(0.1), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
    "multi transform": lambda: optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.sgd(0.5)},
        lambda p: jax.tree_util.tree_map_with_path(
            lambda path, x: "a" if "bias" in str(path) else "b", p
        ),
    ),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(0.1, 0.0, 5)
    ),
    "schedule free": lambda: optax.contrib.schedule_free_adamw(0.1),
    "adafactor": lambda: optax.adafactor(0.1),
    "plateau": lambda: optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5)
    ),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_optimizer_state_and_updates(name):
    results = []
    for lib in LIBRARIES:
        node = model(lib)
        optimizer = lib.Optimizer(node, TRANSFORMATIONS[name](), wrt=lib.Param)
        start = described(lib, optimizer)
        arguments = {"value": jnp.array(1.0)} if name == "plateau" else {}
        wrt = lib.Param
        step = lib.jit(lambda m, o, g, kw: o.update(m, g, **kw))
        updates = None
        for i in range(3):
            grads = gradients(lib, node, wrt, shift=i - 0.5)
            updates = step(node, optimizer, grads, arguments)
        assert type(updates).__name__ == "State"
        results.append((start, described(lib, (node, optimizer)), lib.to_pure_dict(updates)))
    (start, end, updates), (their_start, their_end, their_updates) = results
    agree(start, their_start, rtol=1e-7)
    agree(end, their_end)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), updates, their_updates
    )


def test_the_state_of_lbfgs():
    found = []
    for lib in LIBRARIES:
        optimizer = lib.Optimizer(model(lib), optax.lbfgs(memory_size=3), wrt=lib.Param)
        found.append(described(lib, optimizer))
    agree(*found)


def test_model_and_optimizer():
    results = []
    for lib in LIBRARIES:
        node = model(lib)
        trained = lib.ModelAndOptimizer(node, optax.adam(0.1))
        trained.update(gradients(lib, node, lib.Param))
        results.append(described(lib, trained))
    agree(*results)


def metric_runs(lib):
    average = lib.metrics.Average("loss")
    average.update(loss=jnp.array([1, 2, 3]))
    average.update(loss=np.ones((2, 3), np.float32), other=3)
    average.update(loss=2.5)
    average.update(loss=jnp.array([1.0, 2.0, 3.0]), mask=jnp.array([1, 0, 1]))
    accuracy = lib.metrics.Accuracy()
    logits = jax.random.normal(jax.random.key(0), (5, 3, 4))
    labels = jax.random.randint(jax.random.key(1), (5, 3), 0, 4)
    accuracy.update(logits=logits, labels=labels)
    accuracy.update(logits=logits, labels=labels, mask=labels > 1)
    binary = lib.metrics.Accuracy(threshold=0.5)
    binary.update(logits=logits[..., 0], labels=labels % 2)
    spread = lib.metrics.Welford()
    for i in range(4):
        spread.update(values=jax.random.normal(jax.random.key(i), (7,)) * 3 + 2)
    several = lib.MultiMetric(accuracy=lib.metrics.Accuracy(), loss=lib.metrics.Average("loss"))
    several.update(logits=logits, labels=labels, loss=3.0)
    several.update(logits=logits, labels=labels, loss=jnp.ones(5), mask={"accuracy": labels > 0})
    masks = {"accuracy": labels > 1, "loss": labels}
    several.update(logits=logits, labels=labels, loss=jnp.ones((5, 3)), mask=masks)
    return [average, accuracy, binary, spread, several]


def test_statistics_of_batches_are_those_of_the_reference_bit_for_bit():
    random = np.random.default_rng(0)
    batches = [jnp.asarray(random.normal(size=n), jnp.float32) for n in (1, 7, 3, 8, 2, 5, 4, 6)]
    ours, theirs = nnx.metrics.Welford(), flax_nnx.metrics.Welford()
    for batch in batches:
        for metric in (ours, theirs):
            metric.update(values=batch)
        for name in ("mean", "standard_deviation", "standard_error_of_mean"):
            assert getattr(ours.compute(), name) == getattr(theirs.compute(), name)


def test_metrics():
    ours, theirs = (metric_runs(lib) for lib in LIBRARIES)
    agree(described(nnx, ours), described(flax_nnx, theirs))
    for a, b in zip(ours, theirs, strict=True):
        a, b = jax.tree.leaves(a.compute()), jax.tree.leaves(b.compute())
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_averages_bit_for_bit():
    results = []
    for lib in LIBRARIES:
        node = model(lib)
        ema = lib.EMA(node, 0.97, only=lib.Param)
        for i in range(3):
            node.layers[0].kernel[...] = jax.random.normal(jax.random.key(i), (2, 3))
            ema.update(node)
        averaged = ema.apply_to(node)
        assert averaged is not node and averaged.mean is node.mean
        assert averaged.layers[0].kernel is ema.params["layers"][0]["kernel"]
        results.append(described(lib, ema))
    agree(*results, rtol=0)


def test_averages_of_a_part_are_applied_to_a_whole_model():
    results = []
    for lib in LIBRARIES:
        node = model(lib)
        ema = lib.EMA(lib.state(node, lib.Param), 0.5)
        node.scale[...] += 2
        node.later = lib.Param(jnp.ones(3))
        averaged = ema.apply_to(node)
        assert averaged.mean is node.mean and averaged.later is node.later
        results.append(described(lib, averaged))
        del node.mean, node.scale
        with pytest.raises(ValueError):
            ema.apply_to(node)
    agree(*results, rtol=0)


def test_train_states():
    results = []
    for lib in LIBRARIES:
        graphdef, params, rest = lib.split(model(lib), lib.Param, ...)

        class State(lib.TrainState):
            rest: lib.State

        state = State.create(graphdef, params=params, tx=optax.adam(0.1), rest=rest)

        def loss(params, state=state):
            out, _ = state.apply(params, "rest")(X)
            return jnp.mean((out - Y) ** 2)

        for _ in range(3):
            state = state.apply_gradients(jax.grad(loss)(state.params))
        leaves = jax.tree_util.tree_leaves_with_path(state)
        results.append({jax.tree_util.keystr(k): np.asarray(v) for k, v in leaves})
    ours, theirs = results
    assert list(ours) == list(theirs)
    for path, value in ours.items():
        assert value.dtype == theirs[path].dtype
        np.testing.assert_allclose(value, theirs[path], rtol=1e-5, atol=1e-7, err_msg=path)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda lib, m: lib.Optimizer(m, optax.sgd(1.0)),
        lambda lib, m: lib.Optimizer(m, optax.sgd(1.0), wrt=lib.Param).update(m),
        lambda lib, m: lib.Optimizer(m, optax.adam(1.0), wrt=lib.Param).update(
            m, lib.state(m, lib.PathContains("layers"))
        ),
        lambda lib, m: lib.metrics.Average("a").update(b=3),
        lambda lib, m: lib.metrics.Welford("a").update(b=3),
        lambda lib, m: lib.metrics.Accuracy(threshold="a"),
        lambda lib, m: lib.metrics.Accuracy().update(logits=jnp.ones((3, 2)), labels=jnp.ones(3)),
        lambda lib, m: lib.metrics.Accuracy().update(
            logits=jnp.ones((3, 2)), labels=jnp.ones((3, 2), int)
        ),
        lambda lib, m: lib.metrics.Accuracy().update(
            logits=jnp.ones((3, 2)), labels=jnp.ones(2, int)
        ),
        lambda lib, m: lib.metrics.Average().update(values=jnp.ones(3), mask=jnp.ones(2)),
        lambda lib, m: lib.Metric(),
        lambda lib, m: lib.EMA(m, 0.5, only=lib.Param).update(lib.List([lib.Param(jnp.ones(1))])),
        lambda lib, m: lib.EMA(lib.List([jnp.ones(2)]), 0.5),
    ],
)
def test_errors_are_of_the_same_class(wrong):
    raised = []
    for lib in LIBRARIES:
        with pytest.raises(Exception) as caught:
            wrong(lib, model(lib))
        raised.append(caught.type)
    assert raised[0] is raised[1]


def test_what_is_missing_is_named():
    for lib in LIBRARIES:
        net = model(lib)
        with pytest.raises(TypeError, match="Missing required argument `wrt`.*ModelAndOptimizer"):
            lib.Optimizer(net, optax.sgd(1.0))
        with pytest.raises(TypeError, match="Missing required argument `grads`"):
            lib.Optimizer(net, optax.sgd(1.0), wrt=lib.Param).update(net)
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'tx'"):
            lib.Optimizer(net, wrt=lib.Param)


def test_averages_keep_weak_types_and_make_arrays_of_numbers():
    results = []
    for lib in LIBRARIES:
        node = lib.Dict(weak=lib.Param(jnp.full(2, 0.5)), number=lib.Param(1.0))
        ema = lib.EMA(node, 0.5)
        node["number"].set_value(3.0)
        ema.update(node)
        values = [v.get_value() for _, v in lib.to_flat_state(lib.state(ema.params))]
        results.append([(type(v), v.dtype, v.weak_type, v.tolist()) for v in values])
    assert results[0] == results[1]
    assert [found[2:] for found in results[0]] == [(True, 2.0), (True, [0.5, 0.5])]
