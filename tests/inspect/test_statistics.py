"""statistics: what modules return and the gradients of parameters, against NumPy; under transforms."""

from __future__ import annotations

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx


class Add(nnx.Module):
    """Adds its parameter."""

    def __init__(self, by):
        self.by = nnx.Param(jnp.asarray(by))

    def __call__(self, x):
        return x + self.by[...]

    def twice(self, x):
        return {"once": x + self.by[...], "twice": x + 2 * self.by[...]}, 3


class Net(nnx.Module):
    def __init__(self, *layers):
        self.layers = nnx.List(layers)
        self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


X = jnp.asarray([[1.0, -1.0], [3.0, 5.0], [0.0, 4.0]])


def mean_square(model, x):
    return (model(x) ** 2).mean()


def mean_cube(model, x):
    """A loss that a normalised output can change, so that gradients are not all rounding."""
    return (model(x) ** 3).mean()


def test_outputs_of_a_module():
    model = Net(Add(1.0), Add(2.0))
    before = jax.tree.map(jnp.copy, nnx.state(model))
    graphdef = nnx.graphdef(model)
    report = nnx.statistics(model, X)
    assert list(report.outputs) == ["", "layers.0", "layers.1", "norm"] and not report.gradients
    first = report["layers.0"]
    expected = np.asarray(X) + 1
    assert (first.path, first.module, first.calls, first.elements) == ("layers.0", "Add", 1, 6)
    np.testing.assert_allclose(
        [first.mean, first.std, first.min, first.max],
        [expected.mean(), expected.std(), expected.min(), expected.max()],
        rtol=1e-6,
    )
    assert (first.zeros, first.nonfinite) == (1 / 6, 0.0)
    assert not nnx.diff(before, nnx.state(model)) and nnx.graphdef(model) == graphdef


def test_values_that_are_not_finite_are_counted_apart():
    values = jnp.asarray([1.0, 3.0, jnp.nan, jnp.inf])
    found = nnx.statistics(Add(0.0), values)[""]
    assert (found.mean, found.std, found.min, found.max) == (2.0, 1.0, 1.0, 3.0)
    assert found.nonfinite == 0.5
    found = nnx.statistics(Add(jnp.nan), X)[""]
    assert found.nonfinite == 1.0 and all(map(math.isnan, (found.mean, found.std, found.min)))


def test_methods_and_several_outputs():
    report = nnx.statistics(Add(1.0).twice, jnp.zeros(2))
    found = report["twice"]
    assert (found.mean, found.std, found.elements, found.calls) == (1.5, 0.5, 4, 1)
    integers = nnx.statistics(lambda model, x: model(x), Net(), jnp.arange(4.0).reshape(2, 2))
    assert list(integers.outputs) == ["model", "model.norm"]


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit, nnx.remat])
def test_gradients_of_a_loss(wrap):
    model = Net(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), Add(0.0))
    grads = nnx.grad(mean_cube)(model, X)
    report = nnx.statistics(wrap(mean_cube), model, X)
    assert list(report.gradients) == [
        "model.layers.0.bias",
        "model.layers.0.kernel",
        "model.layers.1.by",
        "model.norm.bias",
        "model.norm.scale",
    ]
    found = report["model.layers.0.kernel"]
    gradient = np.linalg.norm(grads["layers"][0]["kernel"][...])
    assert gradient > 0.01
    norm = np.linalg.norm(model.layers[0].kernel[...])
    assert found.type == "float32[2,2]"
    np.testing.assert_allclose([found.gradient_norm, found.norm], [gradient, norm], rtol=1e-4)
    np.testing.assert_allclose(found.ratio, gradient / norm, rtol=1e-4)
    assert report["model.norm.scale"].ratio > 0
    few = nnx.statistics(mean_square, model, X, wrt=nnx.PathContains("norm"))
    assert list(few.gradients) == [  # BatchStats as well: the filter decides
        "model.norm.bias",
        "model.norm.mean",
        "model.norm.scale",
        "model.norm.var",
    ]


def test_ratios_where_a_parameter_is_zero():
    report = nnx.statistics(lambda model, x: model(x).sum(), Add(0.0), X)
    assert (report["model.by"].gradient_norm, report["model.by"].ratio) == (6.0, math.inf)
    report = nnx.statistics(lambda model, x: (0 * model(x)).sum(), Add(0.0), X)
    assert report["model.by"].ratio == 0.0


def test_a_loss_with_auxiliary_results():
    report = nnx.statistics(lambda model, *, x: (model(x).sum(), model(x)), Add(2.0), x=X)
    assert report["model.by"].gradient_norm == 6.0 and report["model"].calls == 2


def test_a_training_step():
    model = Net(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    before = jax.tree.map(jnp.copy, nnx.state((model, optimizer)))

    @nnx.jit
    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(mean_square)(model, x)
        optimizer.update(model, grads)
        return value

    for _ in range(2):
        report = nnx.statistics(step, model, optimizer, X)
        assert report["model.layers.0"].calls == 1
        assert report["model.norm.scale"].gradient_norm > 0
    assert not nnx.diff(before, nnx.state((model, optimizer)))


def test_calls_in_loops_and_lanes_are_summed_up():
    model = Add(1.0)

    def run(model, xs):
        axes = {"in_axes": (nnx.Carry, None), "out_axes": nnx.Carry}
        scanned = nnx.scan(lambda x, model: model(x), length=3, **axes)
        return scanned(jnp.zeros(()), model), nnx.vmap(model)(xs)

    found = nnx.statistics(lambda model, xs: run(model, xs)[1], model, jnp.arange(4.0))["model"]
    assert (found.calls, found.mean, found.min, found.max) == (7, (1 + 2 + 3 + 10) / 7, 1.0, 4.0)


def test_the_report_as_text_and_as_json():
    model = Net(Add(1.0))
    report = nnx.statistics(mean_square, model, X)
    assert (
        json.loads(json.dumps(report.to_dict()))["outputs"]["model.norm"]["module"] == "BatchNorm"
    )
    lines = str(report).splitlines()
    assert str(report) == repr(report)
    assert lines[1].split() == ["┃", *"module ┃ type ┃ calls ┃ mean ┃ std ┃".split()] + (
        "min ┃ max ┃ zeros ┃ not finite ┃".split()
    )
    shown = next(line for line in lines if "model.layers.0 " in line)
    assert shown.replace("│", "").split() == [
        *("model.layers.0", "Add", "1", "3", "2.16", "0", "6", "16.7%", "0.0%")
    ]
    assert any("gradient norm" in line for line in lines)
    with pytest.raises(KeyError, match=r"No statistics for 'l1'; there are some for 'model', 'mo"):
        report["l1"]
    empty = nnx.statistics(lambda x: x, jnp.arange(3))
    assert str(empty) == "no floating values"
    with pytest.raises(KeyError, match="there are some for nothing"):
        empty["model"]


def test_what_the_function_raises_passes_through():
    with pytest.raises(KeyError, match="mine"):
        nnx.statistics(lambda model: {}["mine"], Add(1.0))
