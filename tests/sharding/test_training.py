"""Training on eight devices gives what one device gives, wherever parameters and data lie."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from tests.nn.quick import normal
from tests.sharding.meshes import linear, mesh_of, names_of, steps

X, Y = normal(16, 8), normal(16, 4, seed=1)
PLAIN, DATA, MODEL = (None, None), ("data", None), (None, "model")


class Net(nnx.Module):
    """Two layers with BatchNorm between, annotated by the names of the two kernels' axes."""

    def __init__(self, first=PLAIN, second=PLAIN, hidden=None, out=None):
        rngs = nnx.Rngs(0)
        self.first = linear(*first, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.second = nnx.Linear(
            16, 4, kernel_init=steps, kernel_metadata={"out_sharding": second}, rngs=rngs
        )
        self.hidden, self.out = hidden, out

    def __call__(self, x):
        x = self.norm(jnp.tanh(self.first(x, out_sharding=self.hidden)))
        return self.second(x, out_sharding=self.out)


def build(**names):
    model = Net(**names)
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def train_step(model, optimizer, x, y):
    def loss_of(model):
        return jnp.mean((model(x) - y) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def train(model, optimizer, x=X, y=Y, **options):
    step = nnx.jit(train_step, **options)
    return [float(step(model, optimizer, x, y)) for _ in range(3)]


def arrays(*nodes):
    return {path: np.asarray(v.value) for path, v in nnx.to_flat_state(nnx.state(list(nodes)))}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=2e-4, atol=2e-5, err_msg=str(path))


@pytest.fixture(scope="module")
def one_device():
    """Losses and final values of three steps."""
    model, optimizer = build()
    losses = train(model, optimizer)
    assert losses[2] < losses[0]
    return losses, arrays(model, optimizer)


LAYOUTS = {
    "data parallel": ({}, P(("data", "model"))),
    "fully sharded": ({"first": DATA, "second": (("data", "model"), None)}, P("data")),
    "tensor parallel": ({"first": MODEL, "second": ("model", None)}, P("data")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_one_device(layout, one_device):
    names, batch = LAYOUTS[layout]
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        model, optimizer = nnx.jit(lambda: build(**names))() if names else build()
        where = NamedSharding(mesh, batch)
        losses = train(model, optimizer, jax.device_put(X, where), jax.device_put(Y, where))
    np.testing.assert_allclose(losses, one_device[0], rtol=1e-4)
    assert_same(arrays(model, optimizer), one_device[1])
    mu = optimizer.opt_state[0].mu
    for layer, key in ((model.first, "first"), (model.second, "second")):
        wanted = names.get(key, PLAIN)
        moment = mu[key]["kernel"]
        assert moment.sharding_names == layer.kernel.sharding_names == wanted
        if names:
            # Nothing is gathered: a parameter and its moments are on each device in parts.
            for variable in (layer.kernel, moment):
                placed = variable.value.sharding
                assert placed.is_equivalent_to(NamedSharding(mesh, P(*wanted)), 2), placed
            assert layer.kernel.value.addressable_shards[0].data.size < layer.kernel.value.size


def test_an_explicit_mesh_carries_shardings_in_types(one_device):
    mesh = mesh_of(AxisType.Explicit)
    seen = []
    with jax.set_mesh(mesh):
        names = {"first": MODEL, "second": ("model", None)}
        model, optimizer = build(**names, hidden=P("data", "model"), out=P("data", None))
        x, y = jax.device_put(X, P("data", None)), jax.device_put(Y, P("data", None))
        nnx.jit(lambda m, x: seen.append(jax.typeof(m.first(x)).sharding.spec))(model, x)
        losses = train(model, optimizer, x, y)
    assert seen == [P("data", "model")]
    np.testing.assert_allclose(losses, one_device[0], rtol=1e-4)
    assert_same(arrays(model, optimizer), one_device[1])
    assert names_of(model.first.kernel) == names_of(optimizer.opt_state[0].nu["first"]["kernel"])
    assert names_of(model.first.kernel) == MODEL


# Optimizer state ---------------------------------------------------------------------------------


def test_to_opt_state_places_what_it_annotates():
    with jax.set_mesh(mesh_of()):
        tree = {"a": nnx.Param(jnp.zeros((8, 4)), optimizer_sharding=("data", None)), "n": 1}
        found = nnx.optimizer.to_opt_state(tree)
    assert found["a"].sharding_names == names_of(found["a"]) == ("data", None)
    assert tree["a"].sharding_names is None and type(found["n"]) is nnx.optimizer.OptArray


def test_shardings_of_moments_with_axes_of_their_own():
    mesh = mesh_of()
    whole = NamedSharding(mesh, P("data", "model"))
    for annotation in (whole, Format(Layout((1, 0)), whole)):
        model = nnx.Dict(w=nnx.Param(jnp.zeros((8, 4)), sharding=annotation))
        state = nnx.Optimizer(model, optax.lbfgs(memory_size=2), wrt=nnx.Param).opt_state[0]
        memory = state.diff_params_memory["w"]
        assert memory.value.shape == (2, 8, 4)
        assert names_of(memory) == (None, "data", "model")
        assert memory.sharding_names == whole.update(spec=P(None, "data", "model"))


@pytest.mark.parametrize("partition", ["data", None])
def test_moments_of_stacked_layers_have_the_stacked_axis(partition):
    named = {} if partition is None else {"transform_metadata": {nnx.PARTITION_NAME: partition}}
    make = nnx.vmap(lambda i: linear(None, "model"), **named)
    with jax.set_mesh(mesh_of()):
        model = nnx.jit(make)(jnp.arange(2))
        moments = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param).opt_state[0].mu
    for name, rest in (("kernel", (None, "model")), ("bias", ("model",))):
        moment, variable = moments[name], getattr(model, name)
        assert moment.sharding_names == variable.sharding_names == (partition, *rest)
        if partition is None:
            assert moment.value.sharding == variable.value.sharding


# Shardings of `jit` ------------------------------------------------------------------------------


def shardings(kernel):
    mesh = kernel.mesh
    return {nnx.PathContains("kernel"): kernel, ...: NamedSharding(mesh, P())}


def test_a_result_of_the_arguments_has_their_sharding():
    whole = NamedSharding(mesh_of(), P())
    rows = whole.update(spec=P("data"))
    model = linear()
    with pytest.raises(ValueError, match="different out_shardings for a shared Param.*'m.kernel'"):
        nnx.jit(lambda m: m, in_shardings=whole, out_shardings=rows)(model)
    with pytest.raises(ValueError, match="different out_shardings for a shared Param.*'m.kernel'"):
        nnx.jit(lambda m: [m.kernel], out_shardings=rows)(model)
    assert model.kernel.value.sharding.num_devices == 1
    assert nnx.jit(lambda m: m, in_shardings=rows)(model) is model
    assert names_of(model.kernel) == ("data",)
    assert nnx.jit(lambda m: m, in_shardings=rows, out_shardings=rows)(model) is model


def test_jit_takes_specs_on_the_mesh_in_force():
    with jax.set_mesh(mesh_of()):
        step = nnx.jit(lambda m, x: m(x), in_shardings=(P(), P("data")), out_shardings=P("data"))
        model = linear()
        assert names_of(step(model, X)) == ("data",)
        assert names_of(model.kernel) == ()


def test_jit_with_shardings_and_donation():
    mesh = mesh_of()
    places = nnx.StateSharding(shardings(NamedSharding(mesh, P(None, "model"))))
    model = linear()
    model.kernel.value = jax.device_put(model.kernel.value, NamedSharding(mesh, P(None, "model")))
    before = model.kernel.value

    def double(model):
        model.kernel.value = model.kernel.value * 2

    nnx.jit(double, in_shardings=(places,), donate="written")(model)
    assert before.is_deleted() and names_of(model.kernel) == (None, "model")
    assert not model.bias.value.is_deleted()


def test_jit_compiled_ahead_of_time_with_shardings():
    mesh = mesh_of()
    columns, rows = (NamedSharding(mesh, P(*names)) for names in ((None, "model"), ("data",)))
    places = nnx.StateSharding(shardings(columns))
    step = nnx.jit(lambda m, x: m(x), in_shardings=(places, rows), out_shardings=rows)
    model = linear()
    compiled = step.lower(model, X).compile()
    np.testing.assert_allclose(compiled(model, X), model(X), rtol=1e-5)


def test_state_sharding_as_a_value():
    one, same = (nnx.StateSharding({nnx.Param: P("a"), ...: None}) for _ in range(2))
    assert one == same and hash(one) == hash(same)
    assert one != nnx.StateSharding({nnx.Param: P("b"), ...: None}) and one != nnx.StateAxes({})
    assert one.filters == (nnx.Param, ...) and one.shardings == (P("a"), None)
    assert repr(one).startswith("StateSharding({") and "Ellipsis: None" in repr(one)
