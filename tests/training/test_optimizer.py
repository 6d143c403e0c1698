"""Optimizer: optax over the Variables of a model, in place, all or nothing; the immutable TrainState."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx


class Dense(nnx.Module):
    def __init__(self, n, m, seed=0, **metadata):
        self.kernel = nnx.Param(jax.random.normal(jax.random.key(seed), (n, m)), **metadata)
        self.bias = nnx.Param(jnp.zeros(m))


class Model(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([Dense(2, 3, 1), Dense(3, 1, 2)])
        self.scale = nnx.Param(jnp.ones(1))
        self.mean = nnx.BatchStat(jnp.zeros(1))
        self.rngs = nnx.Rngs(0)


def of_params(fun, model):
    return jax.tree.map(fun, nnx.state(model, nnx.Param))


def gradients(model):
    return of_params(lambda x: x * 0.1 + 1, model)


def ones_like(model):
    return of_params(jnp.ones_like, model)


def optimizer_of(model, tx=None, wrt=nnx.Param):
    return nnx.Optimizer(model, optax.adam(0.1) if tx is None else tx, wrt=wrt)


def snapshot(*nodes):
    states = [nnx.to_flat_state(nnx.state(node, nnx.Not(nnx.RngState))) for node in nodes]
    return [{path: np.asarray(v.value) for path, v in state} for state in states]


def close(a, b, rtol=1e-5, atol=1e-7):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def changing(updates):
    """A transformation that returns these updates of the gradients, and its state."""
    change = lambda grads, state, params=None: (updates(grads), state)
    return optax.GradientTransformation(lambda params: (), change)


update = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))


def test_moments_have_the_metadata_of_their_parameters_and_an_annotation_that_suits_their_shape():
    model = Dense(200, 300, sharding=("a", "b"), mine=1)
    moment = optimizer_of(model).opt_state[0].mu["kernel"]
    assert moment.sharding_names == ("a", "b") and moment.mine == 1
    memory = optimizer_of(model, optax.lbfgs(memory_size=5)).opt_state[0].diff_params_memory
    assert memory["kernel"].sharding_names == (None, "a", "b")
    rows = optimizer_of(model, optax.adafactor(1e-3)).opt_state[0].v_row["kernel"]
    assert rows.value.ndim == 1 and rows.sharding_names is None


def test_the_state_shares_no_buffer_with_the_parameters():
    model = Dense(2, 3)
    init = lambda params: {"first": params, "again": params}
    tx = optax.GradientTransformation(init, lambda u, s, p=None: (u, s))
    arrays = [v.value for _, v in nnx.to_flat_state(nnx.state((model, optimizer_of(model, tx))))]
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
    optimizer = optimizer_of(model, optax.GradientTransformationExtraArgs(init, update))
    assert isinstance(seen["init"], nnx.State) and isinstance(seen["init"]["scale"], nnx.Param)
    grads = gradients(model)
    updates = optimizer.update(model, grads, value=3, grad=grads)
    given, state, params = seen["update"]
    structures = {jax.tree.structure(x) for x in (given, params, state["m"], updates)}
    assert structures == {jax.tree.structure(nnx.as_pure(nnx.state(model, nnx.Param)))}
    assert seen["extra"]["value"] == 3
    assert jax.tree.structure(seen["extra"]["grad"]) == jax.tree.structure(params)


def test_an_update_is_one_program_that_writes_the_variables_there_are():
    """`tests/parity/test_training.py` compares what it writes."""
    model = Model()
    optimizer = optimizer_of(model, optax.MultiSteps(optax.adam(0.1), 2))
    variables = dict(nnx.to_flat_state(nnx.state((model, optimizer))))
    step = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))
    for _ in range(3):
        step(model, optimizer, gradients(model))
    assert optimizer.step.value == 3 and step.cache_info().traces == 1
    after = dict(nnx.to_flat_state(nnx.state((model, optimizer))))
    assert all(after[path] is variable for path, variable in variables.items())


def like_the_model(grads):
    model = Model()
    nnx.update(model, grads)
    return model


def with_axes(grads):
    return jax.tree.map(lambda x: jnp.stack([x - 1, x + 1]), grads)


MEAN = changing(lambda grads: jax.tree.map(lambda g: -g.mean(0), grads))


@pytest.mark.parametrize(
    ("form", "tx"),
    [(nnx.as_pure, None), (nnx.to_pure_dict, None), (like_the_model, None), (with_axes, MEAN)],
)
def test_gradients_may_have_another_form_and_more_than_the_filter_selects(form, tx):
    model, before = Model(), Model()
    optimizer = optimizer_of(model, optax.sgd(1.0) if tx is None else tx, nnx.PathContains("scale"))
    optimizer.update(model, form(gradients(model)))
    np.testing.assert_equal(snapshot(model.layers), snapshot(before.layers))
    np.testing.assert_allclose(model.scale.value, -0.1, rtol=1e-5)


def test_parameters_keep_their_dtype_and_their_callbacks_take_no_part():
    model = Dense(2, 3, on_get_value=lambda v, x: x * 10, on_set_value=lambda v, x: x + 100)
    model.bias.value = model.bias.value.astype(jnp.bfloat16)
    raw = np.asarray(model.kernel.get_raw_value())
    grads = nnx.State({"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)})
    optimizer_of(model, optax.sgd(1.0)).update(model, grads)
    np.testing.assert_array_equal(model.kernel.get_raw_value(), raw - 1)
    assert model.bias.value.dtype == jnp.bfloat16


def test_parameters_in_array_references():
    model = Dense(2, 3, ref=True)
    reference = model.kernel.get_raw_value()
    before = np.asarray(model.kernel.value)
    optimizer = optimizer_of(model)
    moment = optimizer.opt_state[0].mu["kernel"]
    held = moment.get_raw_value()
    assert moment.ref and nnx.is_array_ref(held) and held is not reference
    assert optimizer.opt_state[0].nu["kernel"].get_raw_value() is not held
    grads = nnx.State({"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)})
    optimizer.update(model, grads)
    update(model, optimizer, grads)
    assert model.kernel.get_raw_value() is reference and moment.get_raw_value() is held
    np.testing.assert_allclose(model.kernel.value, before - 0.2, atol=1e-5)
    np.testing.assert_allclose(moment.value, 0.19, rtol=1e-5)
    model = nnx.eval_shape(lambda: nnx.Dict(w=nnx.Param(jnp.ones(2), ref=True)))
    assert nnx.is_array_ref(optimizer_of(model).opt_state[0].mu["w"].get_raw_value())
    moment = nnx.eval_shape(optimizer_of, model).opt_state[0].mu["w"]
    assert moment.ref and isinstance(moment.get_raw_value(), jax.ShapeDtypeStruct)
    given = {"a": nnx.Param(jax.ShapeDtypeStruct((2,), jnp.float32)), "b": model.w}
    assert nnx.optimizer.to_opt_state(given)["b"].ref


def test_bare_arrays_can_be_parameters_and_state():
    model = nnx.Dict(a=jnp.ones(2), p=nnx.Param(jnp.ones(2)))
    optimizer = optimizer_of(model, optax.inject_hyperparams(optax.adam)(0.1), wrt=...)
    assert type(optimizer.opt_state.inner_state[0].mu["a"]) is nnx.OptArray
    optimizer.opt_state.hyperparams["learning_rate"] = jnp.array(0.5)
    optimizer.opt_state = optimizer.opt_state._replace(count=jnp.array(0))
    for _ in range(2):
        optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model)))
    close((model.a, model.p.value), (jnp.zeros(2),) * 2, atol=1e-4)
    assert optimizer.opt_state.count == 2


def test_parameters_may_hold_pytrees():
    model = nnx.Dict(knots=nnx.Param([jnp.ones(2), {"last": jnp.ones((1, 3))}]))
    optimizer = optimizer_of(model, optax.adam(0.5))
    assert type(optimizer.opt_state[0].mu["knots"]) is nnx.OptVariable
    update(model, optimizer, ones_like(model))
    first, rest = model.knots.value
    close((first, rest), (jnp.full(2, 0.5), {"last": jnp.full((1, 3), 0.5)}), rtol=1e-4)
    wrong = nnx.state(model)
    wrong["knots"] = wrong["knots"].replace([jnp.ones(2), {"last": jnp.ones(4)}])
    expected = r"gradient .*'last': 'float32\[4\]'.*, parameter .*'last': 'float32\[1, 3\]'"
    with pytest.raises(ValueError, match=expected):
        optimizer.update(model, wrong)
    assert model.knots.value[0] is first


def test_shared_parameters_are_updated_once():
    model = nnx.Dict(a=nnx.Param(jnp.ones(2)))
    model.b = model.a
    optimizer_of(model, optax.sgd(1.0)).update(model, nnx.State({"a": jnp.ones(2)}))
    assert (model.b.value == 0).all() and model.a is model.b
    with pytest.raises(ValueError, match="graph"):
        nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param, graph=False)


def refused(optimizer, model, grads, expected, error=ValueError):
    before = snapshot(model, optimizer)
    with pytest.raises(error, match=expected):
        optimizer.update(model, grads)
    np.testing.assert_equal(snapshot(model, optimizer), before)


OTHERS = r"gradients: layers.0.bias, layers.0.kernel.*; not among the parameters: weights"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda g: nnx.State({"layers": g["layers"]}), "Param selects: mis.*: scale.*DiffState"),
        (lambda g: nnx.State({**nnx.as_pure(g), "extra": jnp.ones(1)}), "e parameters: extra"),
        (lambda grads: nnx.State({"weights": jnp.ones(1)}), OTHERS),
        (lambda grads: None, "missing from the gradients: layers.0.bias"),
    ],
)
def test_law_7_gradients_of_another_structure_are_refused(change, expected):
    model = Model()
    refused(optimizer_of(model), model, change(gradients(model)), expected)


@pytest.mark.parametrize("shape", [(), (3,), (3, 2), (4, 2, 3)], ids=str)
def test_law_7_gradients_of_another_shape_are_refused_also_if_they_broadcast(shape):
    model = Dense(2, 3)
    given = ", ".join(map(str, shape))
    expected = rf"kernel: gradient float32\[{given}\], parameter float32\[2, 3\]"
    grads = nnx.State({"kernel": jnp.ones(shape), "bias": jnp.ones(3)})
    refused(optimizer_of(model, optax.sgd(1.0)), model, grads, expected)


@pytest.mark.parametrize(
    ("features", "tx"),
    [(1, optax.sgd(0.1, momentum=0.9)), (3, optax.chain(optax.trace(0.9))), (6, optax.adam(0.1))],
)
def test_law_7_state_of_parameters_that_were_replaced_is_refused(tx, features):
    """A head with another number of classes under the same path: old moments broadcast to it."""
    model = nnx.Dict(body=Dense(2, 3), head=Dense(3, features))
    optimizer = optimizer_of(model, tx)
    model.head = Dense(3, 2)
    state = rf"head.kernel: state float32\[3, {features}\], needed for the model float32\[3, 2\]"
    expected = rf"not like the one this Optimizer was made for: .*{state}.*Make a new Optimizer"
    refused(optimizer, model, ones_like(model), expected)
    with pytest.raises(ValueError, match=expected):
        update(model, optimizer, ones_like(model))
    monitored = optimizer_of(model, optax.chain(optax.monitor({"n": optax.tree.norm}), tx))
    update(model, monitored, ones_like(model))
    model.head = Dense(3, features)
    with pytest.raises(ValueError, match=r"head.kernel: state float32\[3, 2\], needed for the"):
        monitored.update(model, ones_like(model))
    model.extra = nnx.Param(jnp.ones(1))
    refused(optimizer, model, ones_like(model), "missing from the state of the Optimizer: .*extra")


def test_state_of_other_shapes_than_the_parameters_is_what_some_transformations_have():
    model = nnx.Dict(w=nnx.Param(jnp.ones((200, 300))))
    ones = ones_like(model)
    for tx in (optax.adafactor(1e-3), optax.lbfgs(1.0, linesearch=None)):
        optimizer = optimizer_of(model, tx)
        update = lambda m, o, g: o.update(m, g, value=1.0, grad=g, value_fn=lambda p: 1.0) and None
        nnx.jit(update)(model, optimizer, ones)
    model.w = nnx.Param(jnp.ones((200, 301)))
    expected = r"w: state float32\[.*200, 300\], needed for the model float32\[200, 301\]"
    refused(optimizer, model, ones_like(model), expected)


def test_a_model_and_gradients_that_are_swapped():
    model = Dense(2, 3)
    optimizer, grads = optimizer_of(model), ones_like(model)
    expected = r"takes the model and then the gradients; got {} and Dense. Swap them: optimizer.upd"
    refused(optimizer, grads, model, expected.format("State"), error=TypeError)
    with pytest.raises(TypeError, match=expected.format("dict")):
        optimizer.update(nnx.to_pure_dict(grads), model)
    state = nnx.state(model)  # may be a model
    optimizer_of(state).update(state, grads)


@pytest.mark.parametrize(
    ("make", "wrt", "shown"),
    [
        (nnx.Optimizer, nnx.PathContains("kernle"), "PathContains.*kernle"),
        (nnx.ModelAndOptimizer, nnx.LoRAParam, "LoRAParam"),
    ],
)
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


def test_masks_that_are_not_like_the_parameters():
    tx = optax.masked(optax.sgd(1.0), {"kernel": True, "bias": False})
    with pytest.raises(ValueError, match="structure") as caught:
        optimizer_of(Dense(2, 3), tx)
    [note] = caught.value.__notes__
    assert note.startswith("If this is about a mask or labels: Parameters come to optax as an nnx.")


def test_many_differences_are_counted_not_listed():
    model = nnx.List([nnx.Param(jnp.zeros(1)) for _ in range(12)])
    optimizer = optimizer_of(model)
    refused(optimizer, model, nnx.State({}), "missing from the gradients: 0, 1, 2.* and 4 more")
    refused(optimizer, model, {i: jnp.zeros(2) for i in range(12)}, "7: gradient .* and 4 more")


def fail(grads):
    raise ValueError("its own words")


TWICE = changing(lambda grads: jax.tree.map(lambda x: jnp.stack([x, x]), grads))


@pytest.mark.parametrize(
    ("tx", "expected"),
    [
        (TWICE, r"updates change the shape of parameters: bias: updated float32\[2, 3\]"),
        (changing(fail), "^its own words$"),
    ],
)
def test_a_transformation_that_fails_changes_nothing(tx, expected):
    model = Dense(2, 3)
    refused(optimizer_of(model, tx), model, ones_like(model), expected)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda m: nnx.Optimizer(m, optax.sgd(1.0)), "`wrt` of Optimizer.__init__. Say what is"),
        (lambda m: optimizer_of(m).update(m), "argument `grads` of Optimizer.update. Pass both"),
        (lambda m: optimizer_of(m, optax.adam), "tx must be an optax transformation.*optax.adam"),
        (lambda m: optimizer_of(m, wrt=5), "5 of type 'int' is not a filter"),
    ],
)
def test_arguments_that_are_missing_or_wrong(call, expected):
    with pytest.raises(TypeError, match=expected):
        call(Dense(2, 3))


# learning rates ---------------------------------------------------------------------------------


class Scaled(nnx.Module):
    def __init__(self, rate):
        self.schedule = lambda step: step * rate


def two():
    return nnx.Dict(w=nnx.Param(jnp.ones(2)))


def rated(rate):
    return optimizer_of(two(), optax.chain(optax.sgd(lambda step: rate / (step + 1))))


@pytest.mark.parametrize(
    "leave",
    [
        lambda: nnx.vmap(nnx.jit(rated))(jnp.ones(3)),
        lambda: nnx.scan(lambda c, rate: (c, rated(rate)))(0.0, jnp.ones(3)),
        lambda: nnx.jit(lambda owner, rate: setattr(owner, "x", rated(rate)))(two(), 1.0),
    ],
    ids=["vmap of jit", "scan", "attribute"],
)
def test_law_9_a_traced_learning_rate_does_not_leave(leave):
    expected = (
        r"The Optimizer that leaves the transform captures a tracer float32\[\] in its static "
        r"attribute '.*tx', which is dead outside. .*optax.inject_hyperparams\(optax.adam\)"
    )
    with pytest.raises(ValueError, match=expected):
        leave()


def test_law_9_any_function_that_captures_a_tracer():
    expected = "The Scaled .* static attribute 'schedule', .* Store the value in an nnx.Variable"
    with pytest.warns(UserWarning, match=expected):  # it may never be called
        assert callable(nnx.jit(Scaled)(1.0).schedule)
    assert nnx.jit(lambda rate: Scaled(rate).schedule(2.0))(3.0) == 6
    outer = nnx.jit(lambda rate: nnx.jit(lambda: Scaled(rate))().schedule(2.0))
    assert outer(3.0) == 6  # alive where it is used


def test_a_learning_rate_for_each_member():
    rates, grads = jnp.array([0.25, 0.5]), nnx.State({"w": jnp.ones(2)})

    @nnx.vmap
    def make(rate):
        model = two()
        return model, optimizer_of(model, optax.inject_hyperparams(optax.sgd)(learning_rate=rate))

    models, optimizers = make(rates)
    nnx.vmap(lambda m, o: o.update(m, grads) and None)(models, optimizers)
    np.testing.assert_array_equal(models.w[:, 0], 1 - rates)


# TrainState -------------------------------------------------------------------------------------


class WithRest(nnx.TrainState):
    rest: nnx.State


def train_state(**kwargs):
    graphdef, params, rest = nnx.split(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), nnx.Param, ...)
    return WithRest.create(graphdef, params=params, tx=optax.adam(0.1), rest=rest, **kwargs)


def test_apply_calls_the_model_by_states_or_field_names():
    state, x = train_state(), jnp.array([[1.0, 2.0], [3.0, 4.0]])
    y, (graphdef, new) = state.apply("params", "rest")(x)
    np.testing.assert_allclose(y, [[-1, -1], [1, 1]], atol=1e-4)
    assert graphdef == state.graphdef and new["mean"].value.all()
    np.testing.assert_array_equal(state.apply(state.params, state.rest)(x)[0], y)
    assert not state.rest["mean"].value.any()


SHIFT = nnx.State({"shift": jnp.ones(2)})
MISSING = "missing from the gradients: bias, scale; not among the parameters: shift"
DIFFER = "their containers or Variables differ"
NO_FIELD = "WithRest has no field 'nope'; its fields: graphdef"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda state: setattr(state, "step", 3), AttributeError, "step"),
        (lambda state: state.replace(nope=3), TypeError, "nope"),
        (lambda state: train_state(nope=3), TypeError, "nope"),
        (lambda state: state.apply("nope"), AttributeError, NO_FIELD),
        (lambda state: state.apply_gradients(SHIFT), ValueError, MISSING),
        (lambda state: state.apply_gradients(nnx.as_pure(state.params)), ValueError, DIFFER),
    ],
)
def test_what_a_train_state_refuses(call, error, message):
    state = train_state()
    with pytest.raises(error, match=message):
        call(state)
    assert state.replace(step=3).step == 3 and state.step == 0
