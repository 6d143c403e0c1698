"""find_nan: the first value that is not finite, forward, backward, under transforms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import nnxlite as nnx


class Divide(nnx.Module):
    """Divides by its parameter."""

    def __init__(self, by):
        self.by = nnx.Param(jnp.asarray(by))

    def __call__(self, x, *, scale=None):
        return x / self.by[...]


class Root(nnx.Module):
    """Finite at zero, its gradient is not."""

    def __call__(self, x):
        return jnp.sqrt(x)


class Net(nnx.Module):
    def __init__(self, *layers):
        self.layers = nnx.List(layers)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


X = jnp.ones((1, 2))


def loss(model, x):
    return model(x).sum()


def test_finite_values_give_none_and_the_arguments_stay():
    model = Net(Divide(2.0), nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    before = nnx.clone(model)
    assert nnx.find_nan(loss, model, X) is None
    assert not nnx.diff(before, model)


def shown(found):
    return found.where, found.path, found.module


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

    def step(model, x):
        return nnx.value_and_grad(loss)(model, x)

    found = nnx.find_nan(wrap(step), model, 0 * X)
    assert (found.where, found.path) == ("gradient", "model.layers.0")
    assert found.values.infinities == 2 and found.inputs == ()


def test_an_argument_that_is_not_finite():
    model = Net(Divide(jnp.nan))
    found = nnx.find_nan(loss, model, X)
    assert (found.where, found.path) == ("argument", "model.layers.0.by")
    assert str(found) == "First not finite: the argument model.layers.0.by: float32[], 1 NaN"
    found = nnx.find_nan(lambda model, *, batch: loss(model, batch["x"]), Net(), batch={"x": X / 0})
    assert (found.where, found.path) == ("argument", "batch.x")


def test_a_result_that_no_module_made():
    found = nnx.find_nan(lambda model, x: {"loss": loss(model, x) / 0}, Net(Divide(2.0)), X)
    assert (found.where, found.path, found.module) == ("result", "result.loss", "")
    assert str(found) == "First not finite: the result.loss: float32[], 1 infinite"
    found = nnx.find_nan(lambda model, x: loss(model, x) / 0, Net(Divide(2.0)), X)
    assert str(found) == "First not finite: the result: float32[], 1 infinite"


def test_a_training_step_with_an_optimizer_under_scan_and_vmap():
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
    mapped = nnx.vmap(lambda model, x: model(x), in_axes=(None, 0))
    found = nnx.find_nan(mapped, Net(Divide(0.0)), jnp.ones((3, 2)))
    assert (found.where, found.path) == ("output", "model.layers.0")


def test_methods_other_than_call_and_several_outputs():
    class Pair(nnx.Module):
        def encode(self, x):
            return x, {"bad": x / 0}, 3, jnp.zeros((0,)), jnp.arange(2)

    found = nnx.find_nan(lambda model, x: model.encode(x)[0], Pair(), X)
    assert (found.module, found.values.name) == ("Pair.encode", "output 1")
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

    model = Counted(Divide(2.0), Divide(0.0))
    for fun in (model, model.run):
        assert shown(nnx.find_nan(fun, X)) == ("output", "layers.1", "Divide")
        assert model.count[...] == 0
    found = nnx.find_nan(Counted(Divide(jnp.nan)).run, X)
    assert (found.where, found.path) == ("argument", "layers.0.by")


class Scaled(nnx.Module):
    """A block that returns what it was given, and another one inside."""

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


WRAPS = {
    "plain": lambda f: f,
    "jit": nnx.jit,
    "grad": nnx.grad,
    "vmap": lambda f: nnx.vmap(f, in_axes=(None, 0)),
}
IN_BETWEEN = {
    "between two": (
        *(Between(False), loss, "model", "Between"),
        ("model.a (Scaled)", "model.b (Scaled)"),
    ),
    "before the first": (Between(True), loss, "model", "Between", ("", "model.b (Scaled)")),
    "in the function": (
        *(Divide(2.0), lambda model, x: model(model(x) / 0).sum(), "", ""),
        ("model (Divide)", "model (Divide)"),
    ),
}


@pytest.mark.parametrize(
    ("case", "wrap"),
    [
        ("between two", "plain"),
        ("between two", "jit"),
        ("between two", "grad"),
        ("before the first", "jit"),
        ("before the first", "vmap"),
        ("in the function", "plain"),
        ("in the function", "grad"),
    ],
)
def test_what_arises_between_two_modules_is_found_there(case, wrap):
    """Not in the next module, which was given it, nor in the blocks inside that one."""
    model, fun, path, module, between = IN_BETWEEN[case]
    found = nnx.find_nan(WRAPS[wrap](fun), model, X)
    assert (found.where, found.path, found.module) == ("between", path, module)
    assert found.between == between and found.values.name == f"x of {between[1].split(' ')[0]}"
    head, values = str(found).splitlines()
    place = f"between {between[0]} and {between[1]}" if between[0] else f"before {between[1]}"
    who = f"{path} ({module})" if path else "the function"
    assert head == f"First not finite: {place}, in {who}"
    assert values.strip() == str(found.values)


def test_a_mask_of_infinities_is_meant_so():
    class Attend(nnx.Module):
        def __call__(self, x, mask):
            return jax.nn.softmax(x + mask)

    attend = lambda model, x: model(x, jnp.full_like(x, -jnp.inf)).sum()
    found = nnx.find_nan(attend, Attend(), X)
    assert (found.where, found.path) == ("output", "model")


def by_scan(blocks, x):
    return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
        x, blocks
    )


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit])
def test_the_iteration_of_a_scan(wrap):
    blocks = nnx.vmap(Scaled)(jnp.array([1.0, 2.0, 0.0, 4.0]))
    found = nnx.find_nan(wrap(by_scan), blocks, X[0])
    assert (found.where, found.path) == ("output", "blocks.inner") and found.iteration == 2
    assert "the output of blocks.inner (Divide), in iteration 2" in str(found)

    def step(x, block):
        return block(x / (block.inner.by - 4))

    scan = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    blocks = nnx.vmap(Scaled)(jnp.array([1.0, 2.0, 3.0, 4.0]))
    found = nnx.find_nan(wrap(lambda blocks, x: scan(x, blocks)), blocks, X[0])
    assert (found.where, found.path, found.iteration) == ("between", "", 3)
    assert str(found).startswith(
        "First not finite: between blocks (Scaled) and blocks (Scaled), in the function, in iteration 3"
    )
    found = nnx.find_nan(wrap(nnx.vmap(by_scan, in_axes=(None, 0))), blocks, jnp.ones((3, 2)) * 0)
    assert found is None
