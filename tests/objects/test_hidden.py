"""Data in plain objects: the class that forgot to derive from Module."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx


class Block:
    def __init__(self):
        self.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))


def owner_class():
    """A new one: each class is warned of once."""

    class Net(nnx.Module):
        def __init__(self, value):
            self.held = value

    return Net


@dataclasses.dataclass
class Temps:
    t: jax.Array
    count: int = 0


@dataclasses.dataclass
class Settings:
    names: tuple[str, ...] = ("a", "b")
    scales: np.ndarray = dataclasses.field(default_factory=lambda: np.ones(2))
    inner: object = jax.nn.gelu


# A new class each time: without weak references to its instances, `nnx.static` marks the class.
slots = lambda: dataclasses.make_dataclass("Slots", ["t"], slots=True)(jnp.ones(1))

FORGOTTEN = {
    "module": (Block, "'held.layer' is a Linear in a Block"),
    "containers": (lambda: [{"a": (Block(),)}], "'held.0.a.0.layer' is a Linear in a Block"),
    "rngs": (lambda: Temps(nnx.Rngs(0)), "'held.t' is a Rngs in a Temps"),
    "array": (lambda: Temps(jnp.ones(1)), r"'held.t' is a float32\[1\] in a Temps"),
    "slots": (slots, r"'held.t' is a float32\[1\] in a Slots"),
    "variable": (lambda: Temps(nnx.Param(jnp.ones(1))), "'held.t' is a .* in a Temps"),
    "nested": (lambda: Settings(inner=Temps(jnp.ones(1))), r"'held.inner.t' is a .* in a Temps"),
}


@pytest.mark.parametrize("name", FORGOTTEN)
def test_data_in_a_plain_object_is_warned_of_once(name, recwarn):
    make, text = FORGOTTEN[name]
    cls = owner_class()
    with pytest.warns(UserWarning, match=f"Net: {text}, which is neither .*nnx.Module.*nnx.static"):
        model = cls(make())
        nnx.split(model)
    nnx.split(model)
    nnx.Optimizer(cls(make()), optax.sgd(0.1), wrt=nnx.OfType(nnx.Variable))
    assert not [w for w in recwarn if "neither" in str(w.message)]
    found = nnx.check(model).entries
    assert [f.kind for f in found if f.path[:1] == ("held",)] == ["hidden data"]


@pytest.mark.parametrize(
    "value",
    [
        Settings(),
        [Settings()],
        jax.nn.gelu,
        optax.adam(1e-3),
        lambda x: x,
        jax.sharding.PartitionSpec("a"),
        nnx.initializers.ones,
        "text",
    ],
    ids=lambda value: type(value).__name__,
)
def test_settings_are_not_warned_of(value):
    nnx.split(owner_class()(value))


def test_a_value_that_is_marked_static_is_meant():
    for make, _ in FORGOTTEN.values():
        model = owner_class()(nnx.static(make()))
        nnx.split(model)
        assert not nnx.check(model)

    class Declared(nnx.Module):
        held: nnx.Static[Temps]

        def __init__(self, value):
            self.held = value

    nnx.split(Declared(Temps(jnp.ones(1))))


TRANSFORMS = {
    "jit": lambda f, m: nnx.jit(f)(m),
    "grad": lambda f, m: nnx.grad(lambda m: f(m).sum())(m),
    "vmap": lambda f, m: nnx.vmap(f, in_axes=None, axis_size=2)(m),
    "remat": lambda f, m: nnx.jit(nnx.remat(f))(m),
    "eval_shape": lambda f, m: nnx.eval_shape(f, m),
    "filter_jit": lambda f, m: nnx.filter_jit(f)(m),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_write_to_a_plain_object_in_a_program_is_taken_back_and_refused(transform):
    class Net(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.ones(1))
            self.temps = nnx.static(Temps(jnp.ones(1)))

        def __call__(self, x):
            return write(self) + x

    def write(model):
        model.temps.count += 1
        model.temps.t = model.scale * 2.0
        return model.temps.t

    def add(model):
        model.temps.new = model.scale * 2.0
        return model.scale[...]

    def fail(model):
        raise ValueError(f"{add(model)} to the attribute 'new' of a Temps, not of an nnx.Module")

    model = Net()
    before = model.temps.t
    for f, name in ((write, "t"), (add, "new"), (fail, "new")):
        with pytest.raises(ValueError, match=f"to the attribute '{name}' of a Temps.*nnx.Module"):
            TRANSFORMS[transform](f, model)
        assert model.temps.t is before and not hasattr(model.temps, "new")
    nnx.check(model, None, jnp.ones(1))
    assert model.temps.t is before


def test_a_counter_in_a_plain_object_counts_traces_as_in_the_reference():
    class Net(nnx.Module):
        def __init__(self):
            self.temps = nnx.static(Temps(jnp.ones(1)))

        def __call__(self, x):
            self.temps.count += 1
            return x * self.temps.t[0]

    model = Net()
    assert nnx.jit(lambda m, x: m(x))(model, 2.0) == 2.0 and model.temps.count == 1
    assert nnx.cond(True, lambda m: m(2.0), lambda m: m(3.0), model) == 2.0
    loop = nnx.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + c[1](1.0), c[1]), (0.0, model))
    assert loop[0] == 3


def test_attributes_of_a_class_without_pytree_are_not_checked():
    class Loose(nnx.Module, pytree=False):
        def __init__(self):
            self.held = Block()

    assert nnx.state(Loose()) == nnx.State({})  # no warning: they are errors here
