"""`by_path`: transformations for groups of parameters."""

from __future__ import annotations

import jax.numpy as jnp
import optax
import pytest

import nnxlite as nnx

X = jnp.ones((2, 4))


def make() -> nnx.MLP:
    return nnx.MLP(4, 1, 8, 1, rngs=nnx.Rngs(0))


def loss(model):
    return (model(X) ** 2).mean()


def tx(first="layers.0.**", rest="**"):
    return nnx.by_path({first: optax.sgd(0.5), rest: optax.adam(0.1)})


@pytest.mark.quick
def test_each_group_has_its_transformation_and_the_first_pattern_that_matches_counts():
    model = make()
    groups = {"layers.*.bias": optax.set_to_zero(), "layers.0.**": optax.sgd(0.5)}
    groups["**"] = optax.adam(0.1)
    optimizer = nnx.Optimizer(model, nnx.by_path(groups), wrt=nnx.Param)
    grads = nnx.grad(loss)(model)
    updates = optimizer.update(model, grads)
    first, second = updates.layers[0], updates.layers[1]
    assert not first.bias.any() and not second.bias.any()
    assert jnp.allclose(first.kernel, -0.5 * grads.layers[0].kernel[...])
    step = jnp.where(grads.layers[1].kernel[...] == 0, 0, 0.1)
    assert jnp.allclose(abs(second.kernel), step, atol=1e-4)


def test_built_again_it_is_no_new_program():
    traces = []

    @nnx.jit
    def step(model, optimizer):
        traces.append(1)
        optimizer.update(model, nnx.grad(loss)(model))

    for _ in range(2):
        model = make()
        step(model, nnx.Optimizer(model, tx(), wrt=nnx.Param))
    assert len(traces) == 1


def test_it_is_an_optax_transformation():
    params = {"a": {"w": jnp.ones(2)}, "b": jnp.ones(2)}
    groups = nnx.by_path({"a.w": optax.sgd(1.0), "**": optax.sgd(2.0)})
    updates, _ = groups.update(params, groups.init(params), params)
    assert updates["a"]["w"].tolist() == [-1, -1] and updates["b"].tolist() == [-2, -2]


@pytest.mark.parametrize(
    ("first", "rest", "message"),
    [
        ("layer.0.**", "**", r"pattern 'layer.0.\*\*', or .*without frozen ones: layers.0.bias"),
        ("layers.0.*", "layers.1.kernel", r"parameter layers.1.bias matches none .* 'layers.0.\*'"),
        ("layers.**", "layers.0.*", r"pattern 'layers.0.\*', or all belong to one before it"),
    ],
)
def test_patterns_and_parameters_that_do_not_match(first, rest, message):
    with pytest.raises(ValueError, match=message):
        nnx.Optimizer(make(), tx(first, rest), wrt=nnx.Param)
    nnx.Optimizer(make(), tx("layers.**"), wrt=nnx.Param)  # the rest may be nothing


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ({}, ValueError, "by_path needs a pattern at least"),
        ({1: optax.sgd(1.0)}, TypeError, r"by_path takes patterns such as 'encoder.\*\*', got 1"),
        ({"**": optax.sgd}, TypeError, r"by_path: '\*\*' needs an optax transformation, got func"),
        ({"a": optax.sgd(1.0)}, ValueError, "'a', or .* ones: none"),
    ],
)
def test_what_is_no_group(groups, error, message):
    with pytest.raises(error, match=message):
        nnx.by_path(groups).init({})
