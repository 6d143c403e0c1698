"""Optimizer: optax over the Variables of a model, in place, all or nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx
from nnxlite.training.optimizer import OptArray, OptVariable, to_opt_state


class Dense(nnx.Module):
    def __init__(self, n, m, seed=0, **metadata):
        self.kernel = nnx.Param(jax.random.normal(jax.random.key(seed), (n, m)), **metadata)
        self.bias = nnx.Param(jnp.zeros(m))

    def __call__(self, x):
        return x @ self.kernel.value + self.bias.value


class Model(nnx.Module):
    def __init__(self, **metadata):
        self.layers = nnx.List([Dense(2, 3, 1, **metadata), Dense(3, 1, 2)])
        self.scale = nnx.Param(jnp.ones(1))
        self.mean = nnx.BatchStat(jnp.zeros(1))
        self.rngs = nnx.Rngs(0)

    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.layers[0](x))) * self.scale.value


X = jax.random.normal(jax.random.key(5), (8, 2))
Y = X.sum(1, keepdims=True)


def loss_of(model):
    return jnp.mean((model(X) - Y) ** 2)


def gradients(model, wrt=nnx.Param):
    graphdef, params, rest = nnx.split(model, wrt, ...)
    return jax.grad(lambda p: loss_of(nnx.merge(graphdef, p, rest, copy=True)))(params)


def values(node, *filters):
    return {p: np.asarray(v.value) for p, v in nnx.to_flat_state(nnx.state(node, *filters))}


def snapshot(*nodes):
    return [values(n, nnx.Not(nnx.RngState)) for n in nodes]


def kinds(optimizer):
    flat = nnx.to_flat_state(nnx.state(optimizer))
    return {path: type(v) for path, v in flat}


# state ------------------------------------------------------------------------------------------


def test_moments_have_the_metadata_of_their_parameters():
    model = Dense(2, 3, sharding=("a", "b"), mine=1)
    moment = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param).opt_state[0].mu["kernel"]
    assert moment.sharding_names == ("a", "b") and moment.mine == 1


def test_the_annotation_follows_the_shape():
    model = Dense(200, 300, sharding=("a", "b"))
    lbfgs = nnx.Optimizer(model, optax.lbfgs(memory_size=5), wrt=nnx.Param)
    memory = lbfgs.opt_state[0].diff_params_memory["kernel"]
    assert memory.shape == (5, 200, 300) and memory.sharding_names == (None, "a", "b")
    factored = nnx.Optimizer(model, optax.adafactor(1e-3), wrt=nnx.Param)
    rows = factored.opt_state[0].v_row["kernel"]
    assert rows.value.ndim == 1 and rows.sharding_names is None
    spec = Dense(2, 3, sharding=jax.sharding.PartitionSpec("a", "b"))
    memory = nnx.Optimizer(spec, optax.lbfgs(memory_size=5), wrt=nnx.Param).opt_state[0]
    assert memory.diff_params_memory["kernel"].sharding_names == (None, "a", "b")


def test_moments_are_placed_like_their_parameters():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("a", "b"))
    model = Dense(4, 8)
    model.kernel.value = jax.device_put(model.kernel.value, sharding)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    assert optimizer.opt_state[0].mu["kernel"].value.sharding == sharding


def test_to_opt_state():
    tree = {"a": nnx.Param(jnp.ones(2), mine=1), "b": [jnp.zeros(1), 3], "none": None}
    found = to_opt_state(tree)
    assert type(found["a"]) is OptVariable and found["a"].mine == 1
    assert [type(x) for x in found["b"]] == [OptArray, OptArray] and found["b"][1].value == 3
    assert found["none"] is None


def test_the_state_shares_no_buffer_with_the_parameters():
    model = Dense(2, 3)
    tx = optax.GradientTransformation(
        lambda p: {"first": p, "again": p}, lambda u, s, p=None: (u, s)
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    arrays = [v.value for _, v in nnx.to_flat_state(nnx.state((model, optimizer)))]
    assert len({a.unsafe_buffer_pointer() for a in arrays}) == len(arrays)


def test_what_the_transformation_sees():
    seen = {}

    def init(params):
        seen["init"] = params
        return {"m": jax.tree.map(jnp.zeros_like, params), "n": jnp.zeros(())}

    def update(grads, state, params=None, **extra):
        seen.update(update=(grads, state, params), extra=extra)
        return jax.tree.map(jnp.negative, grads), state

    model = Model()
    tx = optax.GradientTransformationExtraArgs(init, update)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    assert isinstance(seen["init"], nnx.State) and isinstance(seen["init"]["scale"], nnx.Param)
    grads = gradients(model)
    updates = optimizer.update(model, grads, value=3, grad=grads)
    given, state, params = seen["update"]
    assert {type(x) for x in (given, params, state["m"], updates)} == {nnx.State}
    structures = {jax.tree.structure(x) for x in (given, params, state["m"], updates)}
    assert structures == {jax.tree.structure(nnx.as_pure(nnx.state(model, nnx.Param)))}
    assert seen["extra"]["value"] == 3
    assert jax.tree.structure(seen["extra"]["grad"]) == jax.tree.structure(params)


# updates ----------------------------------------------------------------------------------------

TRANSFORMATIONS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw with a mask": lambda: optax.adamw(
        0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
    "schedule": lambda: optax.sgd(optax.linear_schedule(1.0, 0.0, 5)),
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
    "chain": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.lion(0.1)),
    "schedule free": lambda: optax.contrib.schedule_free_adamw(0.1),
    "if finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "freeze": lambda: optax.set_to_zero(),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_updates_are_those_of_optax_on_a_plain_tree(name):
    tx, model = TRANSFORMATIONS[name](), Model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    state = tx.init(params)
    variables = dict(nnx.to_flat_state(nnx.state((model, optimizer))))

    @jax.jit
    def plain_step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, updates

    step = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))
    for i in range(4):
        grads = jax.tree.map(lambda x, i=i: x * 0.1 + i, nnx.state(model, nnx.Param))
        params, state, plain = plain_step(params, state, nnx.to_pure_dict(grads))
        updates = step(model, optimizer, grads)
        close(nnx.to_pure_dict(updates), plain)
    close(nnx.to_pure_dict(nnx.state(model, nnx.Param)), params)
    assert optimizer.step.value == 4
    after = dict(nnx.to_flat_state(nnx.state((model, optimizer))))
    assert all(after[path] is variable for path, variable in variables.items())


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), a, b)


def test_training_under_jit_equals_training_without():
    eager, jitted = Model(), Model()
    optimizers = [nnx.Optimizer(m, optax.adam(0.05), wrt=nnx.Param) for m in (eager, jitted)]
    traces = []

    @nnx.jit
    def step(model, optimizer):
        traces.append(None)
        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    losses = []
    for _ in range(20):
        optimizers[0].update(eager, gradients(eager))
        losses.append(float(step(jitted, optimizers[1])))
    assert len(traces) == 1 and losses[-1] < 0.5 * losses[0]
    for a, b in zip(snapshot(eager, optimizers[0]), snapshot(jitted, optimizers[1]), strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=1e-5), a, b)


def test_gradients_may_cover_more_than_the_filter_selects():
    model = Model()
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.PathContains("scale"))
    before = values(model.layers)
    optimizer.update(model, gradients(model))
    np.testing.assert_equal(values(model.layers), before)
    assert model.scale.value != 1


@pytest.mark.parametrize("form", [nnx.as_pure, nnx.to_pure_dict, lambda g: g])
def test_forms_of_gradients(form):
    a, b = Model(), Model()
    nnx.Optimizer(a, optax.sgd(0.1), wrt=nnx.Param).update(a, gradients(a))
    nnx.Optimizer(b, optax.sgd(0.1), wrt=nnx.Param).update(b, form(gradients(b)))
    np.testing.assert_equal(snapshot(a), snapshot(b))


def test_gradients_may_be_an_object_like_the_model():
    a, b = Model(), Model()
    nnx.Optimizer(a, optax.sgd(0.1), wrt=nnx.Param).update(a, gradients(a))
    grads = nnx.clone(b)
    nnx.update(grads, gradients(b))
    nnx.Optimizer(b, optax.sgd(0.1), wrt=nnx.Param).update(b, grads)
    np.testing.assert_equal(snapshot(a), snapshot(b))


def test_parameters_keep_their_dtype():
    model = Dense(2, 3)
    model.kernel.value = model.kernel.value.astype(jnp.bfloat16)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    grads = jax.tree.map(lambda x: jnp.ones(x.shape, jnp.float32), nnx.state(model))
    optimizer.update(model, grads)
    assert model.kernel.value.dtype == jnp.bfloat16


def test_callbacks_of_parameters_take_no_part():
    model = Dense(2, 3, on_get_value=lambda v, x: x * 10, on_set_value=lambda v, x: x + 100)
    raw = np.asarray(model.kernel.get_raw_value())
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model)))
    np.testing.assert_array_equal(model.kernel.get_raw_value(), raw - 1)


def test_parameters_in_array_references():
    model = Dense(2, 3, ref=True)
    reference = model.kernel.get_raw_value()
    before = np.asarray(model.kernel.value)
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    moment = optimizer.opt_state[0].mu["kernel"]
    held = moment.get_raw_value()
    assert moment.ref and nnx.is_array_ref(held) and held is not reference
    assert optimizer.opt_state[0].nu["kernel"].get_raw_value() is not held
    grads = nnx.State({"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)})
    optimizer.update(model, grads)
    nnx.jit(lambda m, o, g: o.update(m, g) and None)(model, optimizer, grads)
    assert model.kernel.get_raw_value() is reference and moment.get_raw_value() is held
    np.testing.assert_allclose(model.kernel.value, before - 0.2, atol=1e-5)
    np.testing.assert_allclose(moment.value, 0.19, rtol=1e-5)


def test_abstract_parameters_in_array_references():
    model = nnx.eval_shape(lambda: nnx.Dict(w=nnx.Param(jnp.ones(2), ref=True)))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    assert nnx.is_array_ref(optimizer.opt_state[0].mu["w"].get_raw_value())
    abstract = nnx.eval_shape(lambda m: nnx.Optimizer(m, optax.adam(0.1), wrt=nnx.Param), model)
    moment = abstract.opt_state[0].mu["w"]
    assert moment.ref and isinstance(moment.get_raw_value(), jax.ShapeDtypeStruct)
    given = {"a": nnx.Param(jax.ShapeDtypeStruct((2,), jnp.float32)), "b": model.w}
    assert nnx.optimizer.to_opt_state(given)["b"].ref


def test_bare_arrays_can_be_parameters():
    class Bare(nnx.Module):
        def __init__(self):
            self.a = jnp.ones(2)
            self.p = nnx.Param(jnp.ones(2))

    model = Bare()
    optimizer = nnx.Optimizer(model, optax.adam(0.5), wrt=...)
    assert kinds(optimizer)["opt_state", 0, "mu", "a"] is OptArray
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model)))
    np.testing.assert_allclose(model.a, 0.5, rtol=1e-4)
    np.testing.assert_allclose(model.p.value, 0.5, rtol=1e-4)


def test_parameters_may_hold_pytrees():
    class Spline(nnx.Module):
        def __init__(self):
            self.knots = nnx.Param([jnp.ones(2), {"last": jnp.ones((1, 3))}])

    model = Spline()
    optimizer = nnx.Optimizer(model, optax.adam(0.5), wrt=nnx.Param)
    assert kinds(optimizer)["opt_state", 0, "mu", "knots"] is OptVariable
    train = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))
    train(model, optimizer, jax.tree.map(jnp.ones_like, nnx.state(model)))
    first, rest = model.knots.value
    assert (first.shape, rest["last"].shape) == ((2,), (1, 3))
    np.testing.assert_allclose(first, 0.5, rtol=1e-4)
    np.testing.assert_allclose(rest["last"], 0.5, rtol=1e-4)
    wrong = nnx.state(model)
    wrong["knots"] = wrong["knots"].replace([jnp.ones(2), {"last": jnp.ones(4)}])
    expected = r"gradient .*'last': 'float32\[4\]'.*, parameter .*'last': 'float32\[1, 3\]'"
    with pytest.raises(ValueError, match=expected):
        optimizer.update(model, wrong)
    assert model.knots.value[0] is first


def test_shared_parameters_are_updated_once():
    class Tied(nnx.Module):
        def __init__(self):
            self.a = nnx.Param(jnp.ones(2))
            self.b = self.a

    model = Tied()
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    optimizer.update(model, nnx.State({"a": jnp.ones(2)}))
    assert (model.b.value == 0).all() and model.a is model.b
    with pytest.raises(ValueError, match="graph"):
        nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param, graph=False)


def test_optimizers_that_read_the_loss():
    model = Model()
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for _ in range(4):
        optimizer.update(model, gradients(model), value=jnp.array(1.0))
    assert optimizer.opt_state[1].scale.value < 1


def test_extra_gradient_axes_are_left_to_the_transformation():
    def update(grads, state, params=None):
        return jax.tree.map(lambda g: -g.mean(0), grads), state

    model = Dense(2, 3)
    tx = optax.GradientTransformation(lambda p: (), update)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    grads = nnx.State({"kernel": jnp.ones((4, 2, 3)), "bias": jnp.ones((4, 3))})
    optimizer.update(model, grads)
    np.testing.assert_array_equal(model.bias.value, -1)


# bad input --------------------------------------------------------------------------------------


def refused(optimizer, model, grads, expected, error=ValueError, **kwargs):
    before = snapshot(model, optimizer)
    with pytest.raises(error, match=expected) as caught:
        optimizer.update(model, grads, **kwargs)
    np.testing.assert_equal(snapshot(model, optimizer), before)
    return caught


def test_law_7_gradients_of_another_structure_are_refused():
    model = Model()
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    grads = gradients(model)
    del grads["scale"]
    refused(optimizer, model, grads, "wrt=Param selects: missing from the gradients: scale.*DiffSt")
    pure = nnx.as_pure(gradients(model))
    pure["extra"] = jnp.ones(1)
    refused(optimizer, model, pure, "not among the parameters: extra")
    renamed = nnx.State({"weights": jnp.ones(1)})
    expected = (
        "missing from the gradients: layers.0.bias, layers.0.kernel.*; "
        "not among the parameters: weights"
    )
    refused(optimizer, model, renamed, expected)
    refused(optimizer, model, None, "missing from the gradients: layers.0.bias")


def test_law_7_gradients_of_another_shape_are_refused():
    model = Dense(2, 3)
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    grads = nnx.State({"kernel": jnp.ones((3, 2)), "bias": jnp.ones(3)})
    expected = r"kernel: gradient float32\[3, 2\], parameter float32\[2, 3\]"
    refused(optimizer, model, grads, expected)
    grads = nnx.State({"kernel": jnp.ones((2, 3)), "bias": jnp.ones((2, 3))})
    expected = r"bias: gradient float32\[2, 3\], parameter float32\[3\]"
    refused(optimizer, model, grads, expected)


@pytest.mark.parametrize("tx", [optax.sgd(1.0), optax.adam(0.1), optax.lion(0.1)])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 3), (2, 1), (1, 1)])
def test_law_7_gradients_that_broadcast_are_refused(shape, tx):
    model = Dense(2, 3)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    grads = nnx.State({"kernel": jnp.ones(shape), "bias": jnp.ones(3)})
    expected = (
        rf"kernel: gradient float32\[{', '.join(map(str, shape))}\], parameter float32\[2, 3\]"
    )
    refused(optimizer, model, grads, expected)


@pytest.mark.parametrize("features", [1, 3, 6])
@pytest.mark.parametrize(
    "tx", [optax.sgd(0.1, momentum=0.9), optax.adam(0.1), optax.chain(optax.trace(0.9))]
)
def test_law_7_state_of_parameters_that_were_replaced_is_refused(tx, features):
    """A head with another number of classes under the same path: old moments broadcast to it."""
    model = nnx.Dict(body=Dense(2, 3), head=Dense(3, features))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    model.head = Dense(3, 2)
    ones = jax.tree.map(jnp.ones_like, nnx.state(model))
    expected = (
        rf"head.kernel: state float32\[3, {features}\], parameter float32\[3, 2\].*new Optimi"
    )
    refused(optimizer, model, ones, expected)
    with pytest.raises(ValueError, match=expected):
        nnx.jit(lambda m, o, g: o.update(m, g))(model, optimizer, ones)


def test_state_of_other_shapes_than_the_parameters_is_what_some_transformations_have():
    model = nnx.Dict(w=nnx.Param(jnp.ones((200, 300))))
    ones = jax.tree.map(jnp.ones_like, nnx.state(model))
    for tx in (optax.adafactor(1e-3), optax.lbfgs(1.0, linesearch=None)):
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        optimizer.update(model, ones, value=jnp.ones(()), grad=ones, value_fn=lambda p: 1.0)
    model.w = nnx.Param(jnp.ones((200, 301)))
    ones = jax.tree.map(jnp.ones_like, nnx.state(model))
    refused(
        optimizer, model, ones, r"w: state float32\[.*200, 300\], parameter float32\[200, 301\]"
    )


def test_a_model_and_gradients_that_are_swapped():
    model = Dense(2, 3)
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    grads = jax.tree.map(jnp.ones_like, nnx.state(model))
    expected = r"takes the model and then the gradients; got {} and Dense. Swap them: optimizer.upd"
    refused(optimizer, grads, model, expected.format("State"), error=TypeError)
    pure = nnx.to_pure_dict(grads)
    with pytest.raises(TypeError, match=expected.format("dict")):
        optimizer.update(pure, model)
    with pytest.raises(TypeError, match="Swap them"):
        nnx.StaticLossScale(1.0).step(optimizer, grads, model)
    state = nnx.state(model)  # may be a model
    nnx.Optimizer(state, optax.sgd(1.0), wrt=nnx.Param).update(state, grads)


@pytest.mark.parametrize(
    ("wrt", "shown"),
    [
        (nnx.LoRAParam, "LoRAParam"),
        (nnx.PathContains("kernle"), "PathContains.*kernle"),
        (nnx.All(nnx.Param, nnx.BatchStat), "All"),
    ],
)
@pytest.mark.parametrize("make", [nnx.Optimizer, nnx.ModelAndOptimizer])
def test_law_7_a_filter_that_selects_nothing_to_train(make, wrt, shown):
    model = nnx.Dict(a=nnx.BatchNorm(3, rngs=nnx.Rngs(0)), b=nnx.Param(jnp.ones(1)))
    expected = (
        rf"{make.__name__}: wrt=.*{shown}.* selects nothing in the model that is not frozen, so "
        r"nothing is trained. It contains 3 Param, 2 BatchStat \(at .*a.bias, a.mean, a.scale and 2"
    )
    with pytest.warns(UserWarning, match=expected) as caught:
        optimizer = make(model, optax.adam(1e-3), wrt=wrt)
    assert caught[0].filename == __file__ and isinstance(optimizer, nnx.Optimizer)
    make(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), optax.adam(1e-3), wrt=wrt)  # nothing could be trained
    nnx.freeze(model)
    with pytest.warns(UserWarning, match="that is not frozen"):
        make(model, optax.adam(1e-3), wrt=nnx.Param)


@pytest.mark.parametrize("stored", [False, True])
def test_masks_that_are_not_like_the_parameters(stored):
    model = Dense(2, 3)
    given = {"kernel": True, "bias": False}
    tx = optax.masked(optax.sgd(1.0), given if stored else lambda params: given)
    with pytest.raises(ValueError, match="structure") as caught:
        nnx.Optimizer(model, tx, wrt=nnx.Param)
    [note] = caught.value.__notes__
    assert note.startswith(
        "If this is about a mask or labels: Parameters come to optax as an nnx.St"
    )


def test_many_differences_are_counted_not_listed():
    model = nnx.List([nnx.Param(jnp.zeros(1)) for _ in range(12)])
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    refused(optimizer, model, nnx.State({}), "missing from the gradients: 0, 1, 2.* and 4 more")
    wrong = nnx.State({i: jnp.zeros(2) for i in range(12)})
    refused(optimizer, model, wrong, "7: gradient .*; and 4 more")


def test_a_model_changed_after_the_optimizer_was_made():
    model = Model()
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    model.extra = nnx.Param(jnp.ones(1))
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    expected = "not like the one this Optimizer was made for: .*: extra.*Make a new Optimizer"
    refused(optimizer, model, grads, expected)


def test_a_transformation_that_changes_shapes_is_refused():
    def double(updates, state, params=None):
        return jax.tree.map(lambda x: jnp.stack([x, x]), updates), state

    model = Dense(2, 3)
    tx = optax.GradientTransformation(lambda p: (), double)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    grads = jax.tree.map(jnp.ones_like, nnx.state(model))
    expected = r"updates change the shape of parameters: bias: updated float32\[2, 3\]"
    refused(optimizer, model, grads, expected)


def test_a_transformation_that_changes_its_structure_is_refused():
    model = Dense(2, 3)
    ones = jax.tree.map(jnp.ones_like, nnx.state(model))
    grow = optax.GradientTransformation(lambda p: {}, lambda u, s, p=None: (u, {"a": jnp.ones(1)}))
    optimizer = nnx.Optimizer(model, grow, wrt=nnx.Param)
    refused(optimizer, model, ones, "returned state of another structure than it was given")


def test_errors_of_the_transformation_pass_through():
    def fail(updates, state, params=None):
        raise ValueError("its own words")

    model = Dense(2, 3)
    optimizer = nnx.Optimizer(
        model, optax.GradientTransformation(lambda p: (), fail), wrt=nnx.Param
    )
    refused(optimizer, model, jax.tree.map(jnp.ones_like, nnx.state(model)), "^its own words$")


def test_arguments_that_are_missing_or_wrong():
    model = Dense(2, 3)
    with pytest.raises(TypeError, match="wrt"):
        nnx.Optimizer(model, optax.sgd(1.0))
    with pytest.raises(TypeError, match="tx must be an optax transformation.*optax.adam"):
        nnx.Optimizer(model, optax.adam, wrt=nnx.Param)
    with pytest.raises(TypeError, match="5 of type 'int' is not a filter"):
        nnx.Optimizer(model, optax.sgd(1.0), wrt=5)
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    with pytest.raises(TypeError, match="grads"):
        optimizer.update(model)


def test_a_captured_optimizer_is_protected():
    model = Dense(2, 3)
    optimizer = nnx.Optimizer(model, optax.adam(1.0), wrt=nnx.Param)
    before = snapshot(model, optimizer)

    @jax.jit
    def step(kernel):
        inner = nnx.clone(model)
        optimizer.update(inner, jax.tree.map(lambda x: x * kernel, nnx.state(inner)))

    with pytest.raises(nnx.TraceContextError):
        step(1.0)
    np.testing.assert_equal(snapshot(model, optimizer), before)


def test_a_schedule_may_read_the_step():
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    model = Dense(2, 3)
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.0)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        rate = schedule(optimizer.step.value)
        optimizer.opt_state.hyperparams["learning_rate"].value = rate
        optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model)))
        return rate

    assert [float(step(model, optimizer)) for _ in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    np.testing.assert_allclose(model.bias.value, -2.5)


# tracers ----------------------------------------------------------------------------------------


class Scaled(nnx.Module):
    def __init__(self, rate):
        self.schedule = lambda step: step * rate


LEAVING = {
    "vmap": lambda make: nnx.vmap(make)(jnp.ones(3)),
    "jit": lambda make: nnx.jit(make)(1.0),
    "eager vmap of jit": lambda make: nnx.vmap(nnx.jit(make))(jnp.ones(3)),
    "eval_shape": lambda make: nnx.eval_shape(make, 1.0),
    "grad": lambda make: nnx.grad(lambda rate: (rate, make(rate)), has_aux=True)(1.0),
    "scan": lambda make: nnx.scan(lambda c, rate: (c, make(rate)))(0.0, jnp.ones(3)),
    "attribute": lambda make: nnx.jit(lambda owner, rate: setattr(owner, "x", make(rate)))(
        nnx.Dict(a=nnx.Param(jnp.ones(1))), 1.0
    ),
}


@pytest.mark.parametrize("way", LEAVING)
@pytest.mark.parametrize(
    "tx",
    [
        optax.adam,
        lambda rate: optax.chain(optax.clip(1.0), optax.sgd(rate)),
        lambda rate: optax.sgd(lambda step: rate / (step + 1)),
        lambda rate: optax.MultiSteps(optax.sgd(rate), 2),
    ],
    ids=["adam", "chain", "schedule", "object"],
)
def test_law_9_a_traced_learning_rate_does_not_leave(way, tx):
    def make(rate):
        return nnx.Optimizer(nnx.Dict(w=nnx.Param(jnp.ones(2))), tx(rate), wrt=nnx.Param)

    expected = (
        r"The Optimizer that leaves the transform captures a tracer float32\[\] in its static "
        r"attribute '.*tx', which is dead outside. .*optax.inject_hyperparams\(optax.adam\)"
    )
    with pytest.raises(ValueError, match=expected):
        LEAVING[way](make)


def test_law_9_any_function_that_captures_a_tracer():
    expected = "The Scaled .* static attribute 'schedule', .* Store the value in an nnx.Variable"
    with pytest.raises(ValueError, match=expected):
        nnx.jit(Scaled)(1.0)
    assert nnx.jit(lambda rate: Scaled(rate).schedule(2.0))(3.0) == 6
    outer = nnx.jit(lambda rate: nnx.jit(lambda: Scaled(rate))().schedule(2.0))
    assert outer(3.0) == 6  # alive where it is used


def test_a_learning_rate_for_each_member():
    @nnx.vmap
    def train(rate):
        model = nnx.Dict(w=nnx.Param(jnp.ones(2)))
        optimizer = nnx.Optimizer(model, optax.sgd(rate), wrt=nnx.Param)
        optimizer.update(model, nnx.State({"w": jnp.ones(2)}))
        return model.w[...]

    rates = jnp.array([0.25, 0.5])
    np.testing.assert_array_equal(train(rates)[:, 0], 1 - rates)

    @nnx.vmap
    def make(rate):
        model = nnx.Dict(w=nnx.Param(jnp.ones(2)))
        tx = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    models, optimizers = make(rates)
    update = nnx.vmap(lambda m, o: o.update(m, nnx.State({"w": jnp.ones(2)})) and None)
    update(models, optimizers)
    np.testing.assert_array_equal(models.w[:, 0], 1 - rates)
