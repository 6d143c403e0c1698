"""`freeze` and `unfreeze`: one statement that gradients and optimizers respect."""

import jax
import jax.numpy as jnp
import optax
import pytest

import nnxlite as nnx
from tests.messages import refused, rows

X, Y = jnp.ones((2, 4)), jnp.ones((2, 1))
FIRST = nnx.PathContains(0)


LAST = ["layers.1.bias", "layers.1.kernel"]
FROZEN = ["layers.0.bias", "layers.0.kernel"]


def make(*freeze) -> nnx.MLP:
    model = nnx.MLP(4, 1, 8, 1, rngs=nnx.Rngs(0))
    for filter in freeze:
        nnx.freeze(model, filter)
    return model


def loss(model):
    return ((model(X) - Y) ** 2).mean()


def names(state) -> list[str]:
    return [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]


def frozen(model) -> list[str]:
    return names(nnx.state(model, nnx.Frozen()))


def changed(model, before) -> list[str]:
    """The names of the Variables whose values differ from those in a state."""
    pairs = zip(nnx.to_flat_state(nnx.state(model)), nnx.to_flat_state(before), strict=True)
    return [".".join(map(str, path)) for (path, x), (_, y) in pairs if not (x[...] == y[...]).all()]


def copied(model):
    return jax.tree.map(jnp.copy, nnx.state(model))


KERNELS = lambda path, _: path[-1] == "kernel"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("filter", "left"),
    [(FIRST, LAST), ([KERNELS, FIRST], ["layers.1.bias"]), (nnx.Param, [])],
    ids=["a path", "a function or a path", "a kind"],
)
def test_gradients_contain_only_what_is_trainable(filter, left):
    model = make(filter)
    assert names(nnx.grad(loss)(model)) == left
    nnx.unfreeze(model)
    assert names(nnx.grad(loss)(model)) == FROZEN + LAST and frozen(model) == []


def test_gradients_of_states_trees_and_variables():
    model = make(FIRST)
    graphdef, params = nnx.split(model)
    assert names(nnx.grad(lambda p: loss(nnx.merge(graphdef, p)))(params)) == LAST
    assert names(nnx.grad(loss, argnums=nnx.DiffState(0, ...))(model)) == LAST
    like = nnx.grad(loss, graph_updates=False)(model)
    assert like.layers[0].kernel.value is None and like.layers[1].kernel.shape == (8, 1)
    # A Variable that is an argument itself is differentiated: that is said there.
    kernel = model.layers[0].kernel
    assert jnp.array_equal(nnx.grad(lambda v: (v**2).sum())(kernel)[...], 2 * kernel[...])


def test_a_tag_and_a_part_select_a_shared_variable_at_all_its_places():
    shared, other = nnx.Param(jnp.ones(2), tag="body"), nnx.Param(jnp.ones(2))
    model = nnx.Dict(a=shared, z=nnx.List([shared]), other=other)
    for chosen in ((model.z,), (model, "body")):
        nnx.freeze(*chosen)
        assert frozen(model) == ["a"]
        assert names(nnx.grad(lambda m: (m.a * m.z[0] * m.other).sum())(model)) == ["other"]
        nnx.unfreeze(model)


def test_frozen_goes_along_with_copies_and_not_with_values():
    model, other = make(FIRST), make()
    graphdef, state = nnx.split(model)
    for copy in (nnx.clone(model), nnx.merge(graphdef, state, copy=True)):
        assert frozen(copy) == frozen(model) == FROZEN
    nnx.update(model, jax.tree.map(jnp.zeros_like, nnx.state(other)))
    assert frozen(model) == FROZEN and not model.layers[0].kernel[...].any()
    nnx.update(other, nnx.state(model))
    assert frozen(other) == []


@pytest.mark.quick
def test_frozen_inside_jit_and_a_former_program_is_found_again():
    model, traces = make(), []

    @nnx.jit
    def gradients(model):
        traces.append(names(nnx.grad(loss)(model)))

    for _ in range(2):
        gradients(model)
        nnx.jit(lambda model: nnx.freeze(model, FIRST))(model)
        gradients(model)
        assert frozen(model) == FROZEN
        nnx.jit(nnx.unfreeze)(model)
    assert traces == [FROZEN + LAST, LAST] and frozen(model) == []


@pytest.mark.parametrize("before", [False, True])
def test_law_7_an_optimizer_that_was_made_for_other_parameters(before):
    model = make()
    first, second = (nnx.freeze, nnx.unfreeze) if before else (nnx.unfreeze, nnx.freeze)
    first(model, FIRST)
    tx = optax.adamw(0.1, weight_decay=0.1)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    assert names(optimizer.opt_state[0].mu) == (LAST if before else FROZEN + LAST)
    optimizer.update(model, nnx.grad(loss)(model))
    second(model, FIRST)
    values = copied(model)
    with pytest.raises(ValueError, match="made for: .*layers.0.bias.*new Optimizer after .*fr"):
        optimizer.update(model, nnx.grad(loss)(model))
    assert changed(model, values) == [] and optimizer.step[...] == 1
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    expected = FROZEN + LAST if before else LAST
    updates = nnx.jit(lambda m, o: o.update(m, nnx.grad(loss)(m)))(model, optimizer)
    assert names(updates) == expected == changed(model, values)


def test_gradients_and_averages_of_what_is_frozen_are_ignored():
    model = make()
    grads, before = nnx.grad(loss)(model), copied(model)
    nnx.freeze(model, FIRST)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    assert names(optimizer.update(model, grads)) == LAST == changed(model, before)
    trained = nnx.ModelAndOptimizer(model, optax.sgd(0.1))
    assert names(trained.update(nnx.grad(loss, graph_updates=False)(model))) == LAST
    ema = nnx.EMA(model, decay=0.5, only=nnx.Param)
    for part in (FIRST, ...):
        nnx.freeze(model, part)
        ema.update(model)
    assert len(jax.tree.leaves(ema.apply_to(model))) == 4


def test_clipping_does_not_see_what_is_frozen():
    model, other = make(FIRST), make()
    tx = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0))
    by_wrt = nnx.Optimizer(other, tx, wrt=nnx.Not(FIRST))
    grads = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.Not(FIRST)))(other)
    expected = by_wrt.update(other, grads)
    got = nnx.Optimizer(model, tx, wrt=nnx.Param).update(model, nnx.grad(loss)(model))
    assert names(got) == names(expected) == LAST
    assert jnp.allclose(got.layers[1].kernel, expected.layers[1].kernel)


def test_reports_say_what_is_frozen_and_check_takes_it_for_meant():
    model = make(FIRST)
    assert "kernel: Param(nnx_frozen=True) float32[4,8]" in str(model)
    assert "kernel: float32[4,8] (nnx_frozen=True)" in nnx.tabulate(model, X)
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    assert str(nnx.check(model, optimizer, X)) == str(nnx.check(make(), None, X))


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
