"""JAX's own messages name the user's function, its file, and the paths of its arguments."""

import os
import traceback

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.transforms.models import EACH, refuses


class MLP(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)])

    def __call__(self, x):
        return self.layers[1](nnx.relu(self.layers[0](x)))


def positive_weights(model, batch):
    return 1 if model.layers[0].kernel.sum() > 0 else 2


def positive_batch(model, batch):
    return 1 if batch["x"].sum() > 0 else 2


BATCH = {"x": jnp.ones((1, 2))}
BOOLEAN = jax.errors.TracerBoolConversionError


@pytest.mark.parametrize(
    "transform", [nnx.jit, nnx.filter_jit, nnx.jit(donate="written"), nnx.jit(graph_updates=False)]
)
@pytest.mark.parametrize(
    ("step", "name"),
    [(positive_weights, "model.layers[0].kernel"), (positive_batch, "batch['x']")],
)
def test_a_bool_of_a_tracer_is_told_by_function_and_argument(transform, step, name):
    with refuses(BOOLEAN, f"the argument {name}.", f"function {step.__name__} at {__file__}:"):
        transform(step)(MLP(), BATCH)


def test_arguments_by_keyword_static_ones_and_bound_methods():
    class Model(MLP):
        def loss(self, n, x, *rest, flag):
            return n if flag["on"] > 0 and rest[0] > 0 else x

    model = Model()
    step = nnx.jit(Model.loss, static_argnums=1)
    with refuses(BOOLEAN, "function loss at", "the argument flag['on']"):
        step(model, 3, 1.0, 2.0, flag={"on": jnp.ones(())})
    with refuses(BOOLEAN, "the argument args[2]"):
        nnx.jit(lambda a, *args: 1 if args[1] > 0 else 2)(1, 2, 3)
    with refuses(BOOLEAN, "the argument x"):
        nnx.jit(lambda n, x: 1 if x > 0 else 2, static_argnums=0)(1, 2)
    bound = nnx.jit(model.loss, static_argnums=0)
    with refuses(BOOLEAN, "function loss at", "the argument flag['on']"):
        bound(3, 1.0, 2.0, flag={"on": jnp.ones(())})


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (lambda f: nnx.cond(True, f, f, MLP(), BATCH), "model.layers[0].kernel"),
        (lambda f: nnx.scan(f, in_axes=(None, 0), out_axes=0)(MLP(), {"x": jnp.ones((3, 1, 2))}),
         "model.layers[0].kernel"),
        (lambda f: nnx.fori_loop(0, jnp.array(2), lambda i, m: f(m, BATCH), MLP()),
         "m.layers[0].kernel"),
    ],
)  # fmt: skip
def test_branches_and_loops_name_arguments(run, name):
    with refuses(BOOLEAN, f"the argument {name}.", f" at {__file__}:"):
        run(positive_weights)


def test_a_leaked_tracer_names_the_function_and_the_line_that_made_it():
    leaked = []

    def leaky(model, x):
        leaked.append(model(x))
        return x

    nnx.jit(leaky)(MLP(), jnp.ones((1, 2)))
    with refuses(jax.errors.UnexpectedTracerError, "leaky at " + __file__, ".leaky)") as caught:
        leaked[0] + 1
    assert "transforms" not in str(caught.value).replace(__file__, "")


def fails(*args, **kwargs):
    raise LookupError("the user's own")


class Failing(nnx.Module):
    def __call__(self, x):
        return fails()

    jitted = nnx.jit(__call__)
    remade = nnx.remat(__call__)


class Around(nnx.Module):
    def __init__(self, inner):
        self.inner = inner

    def __call__(self, x):
        return self.inner(x)


def ruled(forward, backward):
    fun = nnx.custom_vjp(lambda m, x: m(x).sum())
    fun.defvjp(forward, backward)
    return nnx.grad(fun)


MODEL = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
SHARDED = jax.sharding.SingleDeviceSharding(jax.devices()[0])
CALLED = {
    **{name: lambda m, x, name=name: EACH[name](fails)(m) for name in EACH},
    "jit, static": lambda m, x: nnx.jit(fails, static_argnums=1)(m, 3),
    "jit, out_shardings": lambda m, x: nnx.jit(fails, out_shardings=SHARDED)(m, x),
    "jit, lowered": lambda m, x: nnx.jit(fails).lower(m, x),
    "jit, a method": lambda m, x: Failing().jitted(x),
    "jit, a module": lambda m, x: nnx.jit(Around(Around(Failing())))(x),
    "grad": lambda m, x: nnx.grad(fails)(m, x),
    "cond_fun": lambda m, x: nnx.while_loop(fails, lambda c: c, (m, x)),
    "cond under grad": lambda m, x: nnx.grad(EACH["cond"](fails))(m),
    "remat, a method": lambda m, x: Failing().remade(x),
    "custom_vjp, forward": lambda m, x: ruled(fails, fails)(m, x),
    "custom_vjp, backward": lambda m, x: ruled(lambda m, x: (m(x).sum(), ()), fails)(m, x),
    "split_rngs": lambda m, x: nnx.split_rngs(splits=2)(fails)(nnx.Rngs(0)),
    "several": lambda m, x: nnx.jit(nnx.vmap(nnx.grad(fails), in_axes=(None, 0)))(m, x),
    "filter_grad": lambda m, x: nnx.filter_grad(fails)(m, x),
    "eager": lambda m, x: Around(Around(Around(Failing())))(x),
}


@pytest.mark.parametrize("way", CALLED)
def test_the_error_of_a_user_has_at_most_two_of_our_frames(way):
    """Whether or not the function was called before; its own frame is the last."""
    for _ in range(2):
        with pytest.raises(LookupError) as caught:
            CALLED[way](MODEL, jnp.ones((2, 2)))
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert frames[-1].name == "fails"
        ours = [frame for frame in frames if f"{os.sep}nnxlite{os.sep}" in frame.filename]
        assert len([frame for frame in ours if frame.filename != __file__]) <= 2, ours


@pytest.mark.parametrize("way", ["eager", "jit, static"])
def test_all_frames_are_there_where_jax_is_asked_for_them(way):
    mode = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(LookupError) as caught:
            CALLED[way](MODEL, jnp.ones((2, 2)))
    finally:
        jax.config.update("jax_traceback_filtering", mode)
    names = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert sum(f"{os.sep}nnxlite{os.sep}" in name for name in names) > 2


@pytest.mark.parametrize("transform", [nnx.jit, nnx.filter_jit])
def test_programs_know_the_names_of_the_arguments(transform):
    step = transform(lambda model, batch: model(batch["x"]))
    text = step.lower(MLP(), BATCH).compile().as_text()
    assert 'op_name="model.layers[0].kernel"' in text and "batch[\\'x\\']" in text
    if transform is nnx.jit:
        names = step.trace(MLP(), BATCH).jaxpr.debug_info.arg_names
        assert names[0] == "batch['x']" and "model.layers[1].bias" in names


def test_a_variable_that_holds_a_tree_has_a_name_for_each_leaf():
    model = nnx.Dict(table=nnx.Variable({"a": jnp.ones(()), "b": jnp.ones(())}))
    for transform in (nnx.jit, nnx.filter_jit):
        with refuses(BOOLEAN, "the argument m.table['b']"):
            transform(lambda m: 1 if m.table["b"] > 0 else 2)(model)


@pytest.mark.parametrize("transform", [nnx.jit, nnx.filter_jit])
def test_an_error_is_noted_with_the_module_and_the_arguments(transform):
    class Wide(nnx.Module):
        def __call__(self, x):
            return x @ jnp.ones((5, 5))

    def step(model, batch):
        return model(batch["x"])

    model = MLP()
    model.layers.append(Wide())
    model.layers[1] = model.layers[2]
    inner = transform(step)
    with pytest.raises(TypeError) as caught:
        nnx.jit(lambda model, batch: inner(model, batch))(model, {"x": jnp.ones((1, 2))})
    (note,) = [n for n in caught.value.__notes__ if "was traced with" in n]
    assert note.startswith("Raised in Wide at `layers.1` of MLP, while ")
    assert note.endswith(".step) was traced with batch['x']: float32[1,2].")


@pytest.mark.parametrize("args", [(MLP(),), tuple(range(9))], ids=["a model", "many"])
def test_an_error_outside_of_modules_is_noted_with_the_function(args):
    def step(*arrays):
        raise KeyError("no")

    with pytest.raises(KeyError) as caught:
        nnx.jit(step)(*args)
    (note,) = [n for n in caught.value.__notes__ if "was traced with" in n]
    assert note.startswith("Raised while jit(")
    if len(args) > 1:
        assert "args[0]: weakly typed int32[], " in note and note.endswith(" and 4 more.")


# What donation and captured states lead to, and the remedies --------------------------------------


def linear():
    return nnx.Linear(2, 2, rngs=nnx.Rngs(0))


@nnx.jit(donate_argnums=0)
def donating(model, x):
    model.kernel[...] += 1
    return model(x).sum()


READERS = {
    "eager": (lambda model, x: model(x), "The arrays at bias, kernel of Linear are gone"),
    "nnx.jit": (nnx.jit(lambda model, x: model(x)), "The arrays at model.bias, model.kernel"),
    "filter_jit": (nnx.filter_jit(lambda model, x: model(x)), "The arrays at model.bias, model.kernel"),
    "nnx.vmap": (nnx.vmap(lambda model, x: model(x), in_axes=(None, 0)), "The arrays at bias, kernel"),
    "another that donates": (donating, "The arrays of 'model.bias' and 1 more are gone"),
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_arrays_that_a_donating_call_has_reused(reader):
    read, text = READERS[reader]
    x, model = jnp.ones((1, 2)), linear()
    shared, own = nnx.clone(model), nnx.clone(model, arrays=True)
    donating(model, x)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        read(shared, x)
    notes = "\n".join(caught.value.__notes__)
    assert text in notes and "nnx.clone(model, arrays=True)" in notes
    assert notes.count("nnx.clone(model, arrays=True)") == 1
    read(own, x)


def written(model):
    model.kernel[...] += 1
    return model.kernel * 1


@pytest.mark.parametrize("jit", [jax.jit, nnx.jit, nnx.filter_jit])
@pytest.mark.parametrize("use", [written, lambda model: model], ids=["written", "returned"])
def test_a_state_that_a_function_captures(jit, use):
    graphdef, state = nnx.split(linear())
    if jit is jax.jit and use is not written:
        return
    with pytest.raises((nnx.TraceContextError, ValueError)) as caught:
        jit(lambda: use(nnx.merge(graphdef, state)))()
    assert "nnx.merge(graphdef, state, copy=True)" in str(caught.value)
    jit(lambda: use(nnx.merge(graphdef, state, copy=True)))()
    assert (nnx.merge(graphdef, state).kernel == linear().kernel).all()
