"""`freeze` and `unfreeze`: one statement that gradients and optimizers respect."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import nnxlite as nnx
from tests.messages import refused, rows

X, Y = jnp.ones((2, 4)), jnp.ones((2, 1))
FIRST = nnx.PathContains(0)


def make() -> nnx.MLP:
    return nnx.MLP(4, 1, 8, 1, rngs=nnx.Rngs(0))


def loss(model):
    return ((model(X) - Y) ** 2).mean()


def names(state) -> list[str]:
    return [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]


def frozen(model) -> list[str]:
    return names(nnx.state(model, nnx.Frozen()))


def same(a, b) -> list[bool]:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return [bool((x == y).all()) for x, y in pairs]


def copied(model, *filters):
    return jax.tree.map(jnp.copy, nnx.state(model, *filters))


LAST = ["layers.1.bias", "layers.1.kernel"]
ALL = ["layers.0.bias", "layers.0.kernel", *LAST]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("filter", "left"),
    [
        (FIRST, LAST),
        (nnx.Param, []),
        (lambda path, _: path[-1] == "kernel", ["layers.0.bias", "layers.1.bias"]),
        ([nnx.PathContains("bias"), FIRST], ["layers.1.kernel"]),
        (nnx.Not(FIRST), ["layers.0.bias", "layers.0.kernel"]),
        (..., []),
    ],
)
def test_gradients_contain_only_what_is_trainable(filter, left):
    model = make()
    nnx.freeze(model, filter)
    assert names(nnx.grad(loss)(model)) == left
    assert names(nnx.grad(loss, argnums=nnx.DiffState(0, ...))(model)) == left
    value, grads = nnx.jit(nnx.value_and_grad(loss))(model)
    assert names(grads) == left and float(value) == pytest.approx(float(loss(model)))
    nnx.unfreeze(model)
    assert names(nnx.grad(loss)(model)) == ALL and frozen(model) == []


def test_a_tag_selects_too():
    model = nnx.Dict(a=nnx.Param(jnp.ones(2), tag="body"), b=nnx.Param(jnp.ones(2)))
    nnx.freeze(model, "body")
    assert names(nnx.grad(lambda m: m.a.sum() + m.b.sum())(model)) == ["b"]


def test_gradients_of_states_trees_and_variables():
    model = make()
    nnx.freeze(model, FIRST)
    graphdef, params = nnx.split(model)
    assert names(nnx.grad(lambda p: loss(nnx.merge(graphdef, p)))(params)) == LAST
    like = nnx.grad(loss, graph_updates=False)(model)
    assert like.layers[0].kernel.value is None and like.layers[1].kernel.shape == (8, 1)
    # A Variable that is an argument itself is differentiated: that is said there.
    kernel = model.layers[0].kernel
    grads = nnx.grad(lambda v: (v**2).sum())(kernel)
    assert same(grads, 2 * kernel[...]) == [True]


def test_a_shared_variable_is_frozen_at_all_its_places():
    class Tied(nnx.Module):
        def __init__(self):
            self.a = nnx.Param(jnp.ones(2))
            self.z = nnx.List([self.a])
            self.other = nnx.Param(jnp.ones(2))

        def __call__(self):
            return (self.a * self.z[0] * self.other).sum()

    model = Tied()
    nnx.freeze(model.z)
    assert frozen(model) == ["a"] and names(nnx.grad(lambda m: m())(model)) == ["other"]


def test_frozen_goes_along_with_copies_and_not_with_values():
    model = make()
    nnx.freeze(model, FIRST)
    graphdef, state = nnx.split(model)
    for copy in (nnx.clone(model), nnx.merge(graphdef, state, copy=True)):
        assert frozen(copy) == frozen(model) == ["layers.0.bias", "layers.0.kernel"]
    free = nnx.state(make())
    nnx.update(model, jax.tree.map(jnp.zeros_like, free))
    assert frozen(model) == ["layers.0.bias", "layers.0.kernel"]
    assert float(abs(model.layers[0].kernel[...]).sum()) == 0
    other = make()
    nnx.update(other, nnx.state(model))
    assert frozen(other) == []


def test_frozen_inside_jit():
    model = make()

    @nnx.jit
    def turn(model):
        nnx.freeze(model, FIRST)
        return nnx.grad(loss)(model)

    assert names(turn(model)) == LAST and frozen(model) == ["layers.0.bias", "layers.0.kernel"]
    nnx.jit(nnx.unfreeze)(model)
    assert frozen(model) == []


@pytest.mark.quick
def test_a_former_program_is_found_again():
    model, traces = make(), []

    @nnx.jit
    def step(model):
        traces.append(len(nnx.to_flat_state(nnx.grad(loss)(model))))

    for _ in range(2):
        step(model)
        nnx.freeze(model, FIRST)
        step(model)
        nnx.unfreeze(model)
    assert traces == [4, 2]


@pytest.mark.parametrize("before", [False, True])
def test_law_7_an_optimizer_that_was_made_for_other_parameters(before):
    model = make()
    first, second = (nnx.freeze, nnx.unfreeze) if before else (nnx.unfreeze, nnx.freeze)
    first(model, FIRST)
    optimizer = nnx.Optimizer(model, optax.adamw(0.1, weight_decay=0.1), wrt=nnx.Param)
    assert names(optimizer.opt_state[0].mu) == (LAST if before else ALL)
    optimizer.update(model, nnx.grad(loss)(model))
    second(model, FIRST)
    values = copied(model)
    with pytest.raises(
        ValueError, match="made for: .*layers.0.bias.*Make a new Optimizer after .*fr"
    ):
        optimizer.update(model, nnx.grad(loss)(model))
    assert all(same(nnx.state(model), values)) and optimizer.step[...] == 1
    optimizer = nnx.Optimizer(model, optax.adamw(0.1, weight_decay=0.1), wrt=nnx.Param)
    updates = nnx.jit(lambda m, o: o.update(m, nnx.grad(loss)(m)))(model, optimizer)
    assert names(updates) == (ALL if before else LAST)
    assert same(nnx.state(model), values) == [not before] * 2 + [False] * 2


def test_gradients_of_what_is_frozen_are_ignored():
    model = make()
    grads = nnx.grad(loss)(model)
    nnx.freeze(model, FIRST)
    before = copied(model)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    assert names(optimizer.update(model, grads)) == LAST
    assert same(nnx.state(model), before) == [True, True, False, False]
    trained = nnx.ModelAndOptimizer(model, optax.sgd(0.1))
    assert names(trained.update(nnx.grad(loss, graph_updates=False)(model))) == LAST


def test_clipping_does_not_see_what_is_frozen():
    model, other = make(), make()
    nnx.freeze(model, FIRST)
    tx = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0))
    by_wrt = nnx.Optimizer(other, tx, wrt=nnx.Not(FIRST))
    grads = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.Not(FIRST)))(other)
    expected = by_wrt.update(other, grads)
    got = nnx.Optimizer(model, tx, wrt=nnx.Param).update(model, nnx.grad(loss)(model))
    assert names(got) == names(expected) == LAST
    assert jnp.allclose(got.layers[1].kernel, expected.layers[1].kernel)


def test_averages():
    model = make()
    nnx.freeze(model, FIRST)
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    ema = nnx.EMA(model, decay=0.5, only=nnx.Param)

    before = copied(model)
    optimizer.update(model, nnx.grad(loss)(model))
    assert same(nnx.state(model), before) == [True, True, False, False]
    ema.update(model)
    nnx.freeze(model)
    ema.update(model)
    assert len(jax.tree.leaves(ema.apply_to(model))) == 4


def test_check_takes_frozen_for_meant():
    model = make()
    nnx.freeze(model, FIRST)
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    assert str(nnx.check(model, optimizer, X)) == str(nnx.check(make(), None, X))


def test_outlines_and_tables_say_what_is_frozen():
    model = make()
    nnx.freeze(model, FIRST)
    assert "kernel: Param(nnx_frozen=True) float32[4,8]" in str(model)
    assert "kernel: float32[4,8] (nnx_frozen=True)" in nnx.tabulate(model, X)


@rows("""
    nnx.freeze(model, nnx.PathContains("kernl"))
        ValueError: freeze: the filter PathContains('kernl', exact=True) matches no Variable of MLP
        ... Similar in the paths: 'kernel'. It has layers.0.bias,
    nnx.unfreeze(model, nnx.PathContains("kernl"))
        ValueError: unfreeze: the filter PathContains('kernl', exact=True) matches no Variable of MLP
    nnx.freeze(model, "kernel")
        ValueError: freeze: the filter 'kernel' matches ... tag ... use PathContains('kernel')
    nnx.freeze(model, "kernal")
        ValueError: Similar among tags and paths: 'kernel'
    nnx.freeze(model, nnx.BatchStat)
        ValueError: BatchStat matches no ... Its Variables are of the kinds Param
    nnx.freeze(model, nnx.Linear)
        ValueError: Linear matches ... not the objects that contain ... , such as model.layers.0
    nnx.unfreeze(model, lambda path, leaf: False)
        ValueError: <lambda> at ... matches no Variable of MLP. It has layers
    nnx.freeze(nnx.Dict(a=1), nnx.PathContains("b"))
        ValueError: matches no Variable of Dict. It has no Variables.
    nnx.freeze(nnx.Dict(a=1), nnx.Param)
        ValueError: matches no Variable of Dict. It has no Variables.
    optimizer.update(all_frozen, grads)
        ValueError: wrt=Param selects are frozen ... nnx.unfreeze(model
""")
def test_a_refusal_says_why_and_changes_nothing(line, message):
    model, all_frozen = make(), make()
    optimizer = nnx.Optimizer(all_frozen, optax.sgd(0.1), wrt=nnx.Param)
    nnx.freeze(all_frozen)
    grads = nnx.grad(loss)(all_frozen)
    scope = {"model": model, "all_frozen": all_frozen, "optimizer": optimizer, "grads": grads}
    refused(line, message, globals() | scope)
