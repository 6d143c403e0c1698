"""find_nan: the first value that is not finite, forward, backward, under transforms."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx
from tests.messages import rows


class Divide(nnx.Module):
    """Divides by its parameter."""

    def __init__(self, by):
        self.by = nnx.Param(jnp.asarray(by))

    def __call__(self, x, *, scale=None):
        return x / self.by[...]


class Root(nnx.Module):
    def __call__(self, x):
        return jnp.sqrt(x)  # finite at zero, its gradient is not


class Net(nnx.Module):
    def __init__(self, *layers):
        self.layers = nnx.List(layers)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


X = jnp.ones((1, 2))
loss = lambda model, x: model(x).sum()
twice = lambda model, x: model(model(x) / 0).sum()
shown = lambda found: (found.where, found.path, found.module)


def test_finite_values_give_none_and_the_arguments_stay():
    model = Net(Divide(2.0), nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    before = nnx.clone(model)
    assert nnx.find_nan(loss, model, X) is None
    assert not nnx.diff(before, model)
    model.itself = model  # the result is in a circle
    assert nnx.find_nan(lambda model: model, model) is None
    with jax.enable_x64(True):
        assert nnx.find_nan(Root(), jnp.full((), 1e300)) is None
    mask = np.array([0, -np.inf])  # meant so; of NumPy, as the next, which is finite as given
    assert nnx.find_nan(lambda by, mask: by.sum() / 2, np.full(2, 1e300), mask) is None
    assert "mask.by" in str(nnx.find_nan(lambda mask: 0.0, nnx.Dict(by=nnx.Param(mask))))


@pytest.mark.parametrize(
    "wrap", [lambda f: f, nnx.filter_jit, nnx.remat], ids=["plain", "jit", "remat"]
)
def test_the_first_module_whose_output_is_not_finite(wrap):
    model = Net(Divide(2.0), Divide(0.0), Root())
    found = nnx.find_nan(wrap(loss), model, X)
    assert shown(found) == ("output", "model.layers.1", "Divide")
    assert found.values.infinities == 2 and found.values.nans == 0
    (given,) = found.inputs
    assert (given.name, given.type, given.low, given.high) == ("x", "float32[1,2]", 0.5, 0.5)
    assert str(found).splitlines() == [
        "First not finite: the output of model.layers.1 (Divide)",
        "  output: float32[1,2], 2 infinite",
        "  called with",
        "    x: float32[1,2] from 0.5 to 0.5",
    ]


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit])
def test_the_first_module_to_which_a_bad_gradient_comes_back(wrap):
    model = Net(Divide(2.0), Root(), Divide(3.0))
    step = lambda model, x: nnx.value_and_grad(loss)(model, x)
    found = nnx.find_nan(wrap(step), model, 0 * X)
    assert (found.where, found.path) == ("gradient", "model.layers.0")
    assert found.values.infinities == 2 and found.inputs == ()


def test_a_training_step_with_an_optimizer_under_scan():
    model = Net(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 2, rngs=nnx.Rngs(1)))
    optimizer = nnx.Optimizer(model, optax.sgd(1e38), wrt=nnx.Param)

    @nnx.jit
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def train(carry, x):
        model, optimizer = carry
        value, grads = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return carry, value

    found = nnx.find_nan(train, (model, optimizer), jnp.ones((4, 1, 2)))
    assert (found.where, found.path) == ("output", "carry.0.layers.1")
    with pytest.raises(KeyError, match="mine"):  # what the function raises passes through
        nnx.find_nan(lambda model: {}["mine"], Net())


def test_a_module_and_its_methods_are_functions_too():
    class Counted(Net):
        def __init__(self, *layers):
            super().__init__(*layers)
            self.count = nnx.Variable(jnp.zeros(()))

        def run(self, x):
            self.count[...] += 1
            return self(x)

        jitted = nnx.jit(run)

    model = Counted(Divide(2.0), Divide(0.0))
    for fun in (model, model.run, model.jitted, nnx.jit(model)):
        assert shown(nnx.find_nan(fun, X)) == ("output", "layers.1", "Divide")
        assert model.count[...] == 0
    assert shown(nnx.find_nan(Counted(Divide(jnp.nan)).run, X)) == ("argument", "layers.0.by", "")


class Scaled(nnx.Module):
    def __init__(self, by):
        self.inner = Divide(by)

    def __call__(self, x):
        return self.inner(x)


class Between(nnx.Module):
    """Divides by zero between two blocks, or before one."""

    def __init__(self, first):
        self.a, self.b, self.first = Scaled(2.0), Scaled(4.0), first

    def __call__(self, x):
        return self.b((x if self.first else self.a(x)) / 0)


class Attend(nnx.Module):
    def __call__(self, x, mask):
        return jax.nn.softmax(x + mask)

    def several(self, x):
        return x, {"bad": x / 0}, 3, jnp.zeros((0,)), jnp.arange(2)


FOUND = """
nnx.find_nan(loss, Net(Divide(jnp.nan)), X)
    the argument model.layers.0.by: float32[], 1 NaN
nnx.find_nan(lambda model, *, batch: loss(model, batch["x"]), Net(), batch={"x": X / 0})
    the argument batch.x: float32[1,2], 2 infinite
nnx.find_nan(lambda model, x: loss(model, x) / 0, Net(Divide(2.0)), X)
    the result: float32[], 1 infinite
nnx.find_nan(lambda model, x: {"loss": loss(model, x) / 0}, Net(Divide(2.0)), X)
    the result.loss: float32[], 1 infinite
nnx.find_nan(lambda model: float("nan") * float(model.by), Divide(2.0))
    the result: float64[], 1 NaN
nnx.find_nan(lambda model: model.by.set_value({"a": model.by / 0}), Divide(2.0))
    the value written to model.by.a: float32[], 1 infinite
nnx.find_nan(lambda model, x: model(x * 1j), Divide(0.0), X)
    the output of model (Divide) output: complex64[1,2], 2 NaN
nnx.find_nan(lambda model, x: model(x, jnp.full_like(x, -jnp.inf)).sum(), Attend(), X)
    the output of model (Attend) ... called with ... mask: ... infinite
nnx.find_nan(lambda model, x: jax.jvp(model, (x,), (x,)), Divide(0.0), X)
    the output of model (Divide) output: float32[1,2], 2 infinite
nnx.find_nan(lambda model, x: model.several(x)[0], Attend(), X)
    the output of model (Attend.several) output 1: float32[1,2], 2 infinite
nnx.find_nan(nnx.vmap(loss, in_axes=(None, 0)), Net(Divide(0.0)), jnp.ones((3, 2)))
    the output of model.layers.0 (Divide)
nnx.find_nan(loss, Between(False), X)
    between model.a (Scaled) and model.b (Scaled), in model (Between) x of model.b: float32[1,2], 2 inf
nnx.find_nan(nnx.jit(loss), Between(False), X)
    between model.a (Scaled) and model.b (Scaled), in model (Between) x of model.b: float32[1,2], 2 inf
nnx.find_nan(nnx.grad(loss), Between(False), X)
    between model.a (Scaled) and model.b (Scaled), in model (Between) x of model.b: float32[1,2], 2 inf
nnx.find_nan(nnx.jit(loss), Between(True), X)
    before model.b (Scaled), in model (Between) x of model.b: float32[1,2], 2 inf
nnx.find_nan(nnx.vmap(loss, in_axes=(None, 0)), Between(True), X)
    before model.b (Scaled), in model (Between) x of model.b: float32[
nnx.find_nan(twice, Divide(2.0), X)
    between model (Divide) and model (Divide), in the function x of model: float32[1,2], 2 inf
nnx.find_nan(nnx.grad(twice), Divide(2.0), X)
    between model (Divide) and model (Divide), in the function x of model: float32[1,2], 2 inf
"""


@rows(FOUND)
def test_found(line, message):
    """Between two modules, it is not in the next one, which was given it, nor in the blocks inside."""
    pattern = re.escape("First not finite: " + message).replace(r"\ \.\.\.", ".*")
    found = eval(line)
    assert re.match(pattern, " ".join(str(found).split()))
    place = message.removeprefix("the ").removeprefix("value ")
    place = place.partition(" ")[0].partition(".")[0].rstrip(":")
    assert found.where == ("between" if place == "before" else place)


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit])
def test_the_iteration_of_a_scan(wrap):
    def by_scan(blocks, x, step=lambda x, block: block(x)):
        return nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, blocks)

    blocks = nnx.vmap(Scaled)(jnp.array([1.0, 2.0, 0.0, 4.0]))
    found = nnx.find_nan(wrap(by_scan), blocks, X[0])
    assert (found.where, found.path) == ("output", "blocks.inner") and found.iteration == 2
    assert "the output of blocks.inner (Divide), earlier calls in the loop: 2" in str(found)

    divided = lambda x, block: block(x / (block.inner.by - 4))
    blocks = nnx.vmap(Scaled)(jnp.array([1.0, 2.0, 3.0, 4.0]))
    found = nnx.find_nan(wrap(lambda blocks, x: by_scan(blocks, x, divided)), blocks, X[0])
    assert (found.where, found.path, found.iteration) == ("between", "", 3)
    place = (
        "between blocks (Scaled) and blocks (Scaled), in the function, earlier calls in the loop: 3"
    )
    assert str(found).startswith(f"First not finite: {place}")
    found = nnx.find_nan(wrap(nnx.vmap(by_scan, in_axes=(None, 0))), blocks, jnp.ones((3, 2)) * 0)
    assert found is None
