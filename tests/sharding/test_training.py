"""Annotated models on eight devices train as on one; moments, and the shardings of `jit`."""

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
PLAIN = (None, None)


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


@nnx.jit
def train_step(model, optimizer, x, y):
    def loss_of(model):
        return jnp.mean((model(x) - y) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def trained(model, optimizer, x=X, y=Y):
    """Losses of three steps, and what they leave."""
    losses = [float(train_step(model, optimizer, x, y)) for _ in range(3)]
    state = nnx.state([model, optimizer])
    return {"losses": losses} | {p: v.get_value() for p, v in nnx.to_flat_state(state)}


@pytest.fixture(scope="module")
def one_device():
    found = trained(*build())
    assert found["losses"][2] < found["losses"][0]
    return found


TENSOR = {"first": (None, "model"), "second": ("model", None)}
LAYOUTS = {
    "fully sharded": (
        AxisType.Auto,
        {"first": ("data", None), "second": (("data", "model"), None)},
    ),
    "tensor parallel": (AxisType.Auto, TENSOR),
    "explicit": (AxisType.Explicit, {**TENSOR, "hidden": P("data", "model"), "out": P("data")}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_state_are_those_of_one_device(layout, one_device):
    kind, names = LAYOUTS[layout]
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        model, optimizer = nnx.jit(lambda: build(**names))()
        found = trained(model, optimizer, *(jax.device_put(a, P("data", None)) for a in (X, Y)))
    assert found.keys() == one_device.keys()
    for path, value in one_device.items():
        np.testing.assert_allclose(found[path], value, rtol=2e-4, atol=2e-5, err_msg=str(path))
    for key in ("first", "second"):
        kernel, moment = getattr(model, key).kernel, optimizer.opt_state[0].mu[key]["kernel"]
        assert moment.sharding_names == kernel.sharding_names == names[key]
        # Nothing is gathered: a parameter and its moments are on each device in parts.
        for variable in (kernel, moment):
            wanted = NamedSharding(mesh, P(*names[key]))
            assert variable.value.sharding.is_equivalent_to(wanted, 2)
            assert variable.value.addressable_shards[0].data.size < kernel.value.size


# Optimizer state ---------------------------------------------------------------------------------


def test_to_opt_state_places_what_it_annotates():
    with jax.set_mesh(mesh_of()):
        tree = {"a": nnx.Param(jnp.zeros((8, 4)), optimizer_sharding=("data", None)), "n": 1}
        found = nnx.optimizer.to_opt_state(tree)
    assert found["a"].sharding_names == names_of(found["a"]) == ("data", None)
    assert tree["a"].sharding_names is None and type(found["n"]) is nnx.optimizer.OptArray


def test_shardings_of_moments_with_axes_of_their_own():
    whole = NamedSharding(mesh_of(), P("data", "model"))
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


def columns(mesh):
    """Kernels by columns, all else on every device."""
    whole = NamedSharding(mesh, P())
    return nnx.StateSharding(
        {nnx.PathContains("kernel"): whole.update(spec=P(None, "model")), ...: whole}
    )


def test_a_result_of_the_arguments_has_their_sharding():
    rows = NamedSharding(mesh_of(), P("data"))
    model = linear()
    assert nnx.jit(lambda m: m, in_shardings=rows)(model) is model
    assert names_of(model.kernel) == ("data",)
    assert nnx.jit(lambda m: m, in_shardings=rows, out_shardings=rows)(model) is model


def test_jit_takes_specs_on_the_mesh_in_force():
    with jax.set_mesh(mesh_of()):
        step = nnx.jit(lambda m, x: m(x), in_shardings=(P(), P("data")), out_shardings=P("data"))
        model = linear()
        assert names_of(step(model, X)) == ("data",)
        assert names_of(model.kernel) == ()


def test_jit_with_shardings_donates_and_compiles_ahead_of_time():
    mesh = mesh_of()
    rows = NamedSharding(mesh, P("data"))
    step = nnx.jit(lambda m, x: m(x), in_shardings=(columns(mesh), rows), out_shardings=rows)
    model = linear()
    np.testing.assert_allclose(step.lower(model, X).compile()(model, X), model(X), rtol=1e-5)
    model.kernel.value = jax.device_put(model.kernel.value, NamedSharding(mesh, P(None, "model")))
    before = model.kernel.value

    def double(model):
        model.kernel.value = model.kernel.value * 2

    nnx.jit(double, in_shardings=(columns(mesh),), donate="written")(model)
    assert before.is_deleted() and names_of(model.kernel) == (None, "model")
    assert not model.bias.value.is_deleted()


def test_state_sharding_as_a_value():
    one, same = (nnx.StateSharding({nnx.Param: P("a"), ...: None}) for _ in range(2))
    assert one == same and hash(one) == hash(same)
    assert one != nnx.StateSharding({nnx.Param: P("b"), ...: None}) and one != nnx.StateAxes({})
    assert one.filters == (nnx.Param, ...) and one.shardings == (P("a"), None)
    assert repr(one).startswith("StateSharding({") and "Ellipsis: None" in repr(one)
