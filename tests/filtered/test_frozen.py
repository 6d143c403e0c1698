"""Frozen modules: fields, immutability, methods as pytrees."""

import collections
import copy
import dataclasses
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx


class Affine(nnx.Module, frozen=True):
    weight: jax.Array = nnx.field(converter=jnp.asarray)
    flag: bool = False
    size: int = nnx.field(static=True, default=3)

    def __call__(self, x, exponent=1):
        return x if self.flag else self.weight * x**exponent

    def twice(self, x, exponent=1):
        return self(self(x, exponent))


class Built(Affine):
    extra: jax.Array

    def __init__(self, value):
        super().__init__(value)
        self.extra = jnp.zeros(2)


def test_generated_and_written_init():
    assert Affine(2.0, True).flag is True and Affine(weight=1).weight.dtype == jnp.int32
    built = Built(2.0)
    assert built.weight == 2 and built.extra.shape == (2,) and built.size == 3
    assert dataclasses.replace(Affine(2.0), flag=True).flag is True


def test_nothing_can_be_assigned_afterwards():
    frozen = dataclasses.FrozenInstanceError
    for model, other in ((Affine(2.0), Affine(5.0)), (Built(1.0), Built(5.0))):
        with pytest.raises(frozen, match="cannot assign to field 'weight'"):
            model.weight = 3
        with pytest.raises(frozen, match="Make a changed copy: nnx.tree_at"):
            del model.weight
        with pytest.raises(frozen):
            nnx.update(model, nnx.state(other))
    changed = nnx.tree_at(lambda m: (m.weight, m.flag), Affine(2.0), (3.0, True))
    assert changed.weight == 3 and changed.flag is True


def test_messages():
    class Missing(nnx.Module, frozen=True):
        a: int

        def __init__(self):
            pass

    class Unknown(nnx.Module, frozen=True):
        def __init__(self):
            self.b = 1

    with pytest.raises(TypeError, match=r"Missing: __init__ ended without a value for .*\['a'\]"):
        Missing()
    with pytest.raises(AttributeError, match="Unknown has no field 'b'. Declare every attribute"):
        Unknown()


def test_default_factories_converters_and_post_init():
    class Full(nnx.Module, frozen=True):
        a: list = dataclasses.field(default_factory=lambda: [jnp.ones(1)])
        b: int = nnx.field(default=0, metadata={"note": "kept"})
        rate: float = nnx.field(converter=float, default="0.5")

        def __post_init__(self):
            self.b = 7

    assert Full().b == 7 and Full().a[0] == 1
    assert Full.__dataclass_fields__["b"].metadata["note"] == "kept"
    assert jax.tree.leaves(Full(a=[], rate="0.25")) == [7, 0.25]  # text that becomes a number


def test_methods_are_pytrees():
    model = Affine(2.0)
    assert jax.vmap(model)(jnp.ones(3)).tolist() == [2, 2, 2]
    assert jax.tree.leaves(model.twice) == [False, 2.0]
    assert nnx.filter_jit(lambda f, x: f(x))(model.twice, 1.0) == 4
    assert nnx.filter_grad(model.twice)(jnp.array(1.0)) == 4
    assert nnx.filter_grad(lambda f: f(3.0))(model.twice).__self__.weight == 12
    assert model.twice == model.twice and hash(model.twice) == hash(model.twice)
    assert model.twice != Affine(2.0).twice and model.twice.__name__ == "twice"
    assert "bound method Affine.twice" in repr(model.twice)
    assert Affine.twice(model, 1.0) == pickle.loads(pickle.dumps(model.twice))(1.0) == 4


def test_copies_and_pickles():
    class Local(nnx.Module, frozen=True):
        weight: jax.Array

        def __call__(self, x):
            return self.weight * x

    model = Affine(2.0)
    for new in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert nnx.tree_equal(new, model) and new is not model
    new = pickle.loads(cloudpickle.dumps(Local(jnp.ones(1))))
    assert new(2.0).tolist() == [2.0]
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'weight'"):
        new.weight = jnp.zeros(1)


class Net(nnx.Module, frozen=True):
    weight: jax.Array
    activation: object
    layers: list
    name: str = "net"
    rate: float = 0.5
    marked: nnx.Data[object] = "marked"
    fixed: int = nnx.field(static=True, default=2)


def net(activation=jnp.tanh):
    return Net(jnp.ones(2), activation, [jnp.ones(1), activation, "text", 3, {"f": len}])


def test_functions_and_text_are_static_unless_they_are_called_data():
    leaves = jax.tree.leaves(net())
    plain = [x if isinstance(x, (int, float, str)) else x.shape for x in leaves]
    assert plain == [(1,), 3, "marked", 0.5, (2,)]
    assert jax.tree.structure(net()) != jax.tree.structure(net(lambda x: x))
    Unsorted = collections.namedtuple("Unsorted", "z a")
    pair = jax.tree.map(lambda x: x, nnx.List([Unsorted(jnp.ones(2), "text")]))[0]
    assert pair.a == "text" and pair.z.shape == (2,)
    bare = nnx.tree_at(lambda m: m.marked, net(), None)
    assert nnx.jit(lambda m: m.activation(m.weight) * m.rate)(bare).shape == (2,)


def test_functions_and_text_are_replaced_by_tree_at():
    count = lambda model: len(jax.tree.leaves(model))
    for where in (lambda m: m.activation, lambda m: m.layers[1], lambda m: m.layers[4]["f"]):
        new = nnx.tree_at(where, net(), jnp.sin)
        assert where(new) is jnp.sin and where(net()) is not jnp.sin and count(new) == count(net())
        assert count(nnx.tree_at(where, net(), jnp.zeros(3))) == count(net()) + 1
    assert count(nnx.tree_at(lambda m: m.weight, net(), jnp.tanh)) == count(net()) - 1
    new = nnx.tree_at(lambda m: jax.tree.leaves(m), net(), [*range(5)])
    assert jax.tree.leaves(new) == [*range(5)] and new.layers[1] is jnp.tanh
    with pytest.raises(ValueError, match="For a static attribute give its path instead"):
        nnx.tree_at(lambda m: m.fixed, net(), 3)
