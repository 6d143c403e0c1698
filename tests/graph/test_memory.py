"""No plan, table or cache keeps an object alive, and none grows with the number of calls."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from nnxlite.graph import _defs, _graphdef
from nnxlite.graph._plan import PLANS_PER_ROOT, view

ONE = jnp.ones(2)


class Layer(nnx.Module):
    def __init__(self, size=2):
        self.kernel = nnx.Param(ONE)
        self.size = size


class Model(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([Layer(i) for i in range(3)])
        self.plain = [nnx.Param(ONE), {"array": ONE}]
        self.tied = self.layers[0]


def every_call(model):
    graphdef, state = nnx.split(model)
    nnx.merge(graphdef, state)
    nnx.update(model, state)
    nnx.find_duplicates(model)
    nnx.recursive_map(lambda path, value: value, nnx.map(lambda path, leaf: leaf, model))
    nnx.merge(*nnx.unpack(model, lambda path, leaf: True, ...))
    hash(graphdef)


HELD = {
    "nothing": lambda m: None,
    "cycle": lambda m: m,
    "static bound method": lambda m: nnx.static(m.__repr__),
    "static closure": lambda m: nnx.static(lambda: m),
    "static partial": lambda m: nnx.static(functools.partial(print, m.__repr__)),
    "static default": lambda m: nnx.static(lambda f=m.__repr__: f),
    "static tuple": lambda m: nnx.static((1, (m.__repr__,))),
    "metadata": lambda m: nnx.Param(ONE, on_get_value=lambda variable, x: (m, x)[1]),
}
"""How an object may hold itself."""


@pytest.mark.parametrize("held", HELD)
def test_L9_an_object_dies_though_every_function_has_seen_it(held):
    model = Model()
    model.layers[0].held = HELD[held](model)
    every_call(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@nnx.jit
def read(model):
    return model.kernel * 1


@nnx.jit
def step(model, other):
    model.kernel *= 2
    other.kernel *= 2


USES = {"jit": read, "filter_jit": nnx.filter_jit(read.fun), "writing": lambda m: step(m, Layer())}
WRITES = {
    "value": lambda m: setattr(m.kernel, "value", 2 * ONE),
    "update": lambda m: nnx.update(m, {"kernel": 2 * ONE}),
    "part": lambda m: m.kernel.__setitem__(slice(0, 2), 1.0),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("write", WRITES)
def test_L9_no_value_outlives_its_writing_over(use, write):
    model = Layer()
    model.kernel.value = jnp.full(2, 0.5)
    for _ in range(3):
        USES[use](model)
    old = weakref.ref(model.kernel.value)
    WRITES[write](model)
    assert old() is None


@pytest.mark.parametrize("leaves", ["an attribute", "a companion"])
def test_L9_a_repeated_call_keeps_no_value_of_what_left(leaves):
    model, other = Layer(), Layer()
    for _ in range(3):
        step(model, other)
    owner = model if leaves == "an attribute" else other
    value = weakref.ref(owner.kernel.value)
    if leaves == "an attribute":
        del model.kernel
    else:
        del other
    del owner
    gc.collect()
    assert value() is None


def test_a_class_keeps_a_bounded_number_of_definitions():
    class Kept(nnx.Module):
        def __init__(self, size):
            self.size = size

    for i in range(3 * _defs.DEFINITIONS_PER_CLASS):
        nnx.split(Kept(i))
    assert len(Kept._nnx_definitions) <= _defs.DEFINITIONS_PER_CLASS

    class NotKept(nnx.Module):
        def __init__(self, thing):
            self.thing = thing

    class Thing:
        pass

    nnx.split(NotKept(Thing()))
    assert "_nnx_definitions" not in vars(NotKept)


def test_a_definition_keeps_a_bounded_number_of_groups():
    model = Model().layers
    for i in range(3 * _graphdef.CACHED_GROUPS):
        nnx.state(model, nnx.PathContains(f"name {i}"), ...)
    assert len(nnx.graphdef(model)._cache["groups"]) <= _graphdef.CACHED_GROUPS


def test_a_root_keeps_a_bounded_number_of_plans():
    model = Layer()
    others = [Layer(i) for i in range(3 * PLANS_PER_ROOT)]
    for other in others:
        view(model, other)
    assert len(model._nnx_plans) <= PLANS_PER_ROOT


def test_a_split_of_the_same_object_allocates_nothing_that_stays():
    model = Model()
    for _ in range(3):
        every_call(model)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(200):
        every_call(model)
    gc.collect()
    assert len(gc.get_objects()) <= before + 50


def test_an_object_with_a_method_of_its_own_as_an_attribute_is_freed_after_a_transform():
    def once():
        model = Layer()
        model.method = model.__repr__
        for transform in (nnx.jit, nnx.grad):
            transform(lambda model: model.kernel.sum())(model)
        return weakref.ref(model)

    gone = once()
    jax.clear_caches()
    gc.collect()
    assert gone() is None
