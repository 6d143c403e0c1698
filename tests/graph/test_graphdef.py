"""`GraphDef`: equality, hashing, copies, its public spelling, and calls on what it describes."""

from __future__ import annotations

import collections
import copy
import functools
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.laws import model as slow
from tests.laws.graphs import Pair, Size, adder, double

ONE = jnp.ones(2)


class Layer(nnx.Module):
    def __init__(self, size=3, act=double):
        self.kernel = nnx.Param(ONE, tag="k")
        self.array = ONE
        self.size = size
        self.act = act

    def __call__(self, x):
        self.calls = nnx.Variable(self.calls[...] + 1 if hasattr(self, "calls") else 1)
        return x @ self.kernel

    def scaled(self, x, *, by):
        return by * (x @ self.kernel)


class Model(nnx.Module):
    def __init__(self):
        self.a = Layer()
        self.b = self.a
        self.items = [nnx.Param(ONE), 3, (ONE,)]
        self.none = nnx.data(None)


# equality and hash --------------------------------------------------------------------------------

SAME = [
    (3, 3),
    ("x", "x"),
    ((1, (2, "a")), (1, (2, "a"))),
    ([1, 2], [1, 2]),
    ({"a": 1}, {"a": 1}),
    (float("nan"), float("nan")),
    (functools.partial(double, 1), functools.partial(double, 1)),
    (lambda x, y=(1, 2): x, None),
    (jnp.float32, jnp.float32),
    (np.dtype("float32"), np.dtype("float32")),
    (np.float32(1), np.float32(1)),
    (Size(1), Size(1)),
    (Pair(1, 2), Pair(1, 2)),
    ({1, 2}, {2, 1}),
]
DIFFERENT = [
    (1, True),
    (1, 1.0),
    (0.0, -0.0),
    (0j, -0j),
    (complex(0.0, 1.0), complex(-0.0, 1.0)),
    ((1,), (True,)),
    ((0.0,), (-0.0,)),
    ([1], (1,)),
    ([1], [1.0]),
    ({"a": 1}, {"a": True}),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    (frozenset({1}), frozenset({True})),
    ({1}, frozenset({1})),
    (Pair(1, 2), (1, 2)),
    (Pair(1, 2), Pair(1.0, 2)),
    (adder(1), adder(1)),
    (adder(1), adder(2)),
    (adder(1), adder(True)),
    (functools.partial(double, 1), functools.partial(double, 1.0)),
    (np.float32(0.0), np.float32(-0.0)),
    (np.float32(1), np.float64(1)),
    ("a", b"a"),
    (None, False),
    (jnp.float32, np.dtype("float32")),
]


def numbered(pairs):
    """Ids that name no address: every process that collects them must see the same."""
    return [f"{number}-{type(first).__name__}" for number, (first, _) in enumerate(pairs)]


@pytest.mark.parametrize("a, b", SAME, ids=numbered(SAME))
def test_equal_static_values_make_one_definition(a, b):
    b = a if b is None else b
    one, other = nnx.graphdef(Layer(a)), nnx.graphdef(Layer(b))
    assert one == other and one.structure is other.structure
    assert hash(one) == hash(other)
    assert one != "GraphDef"


@pytest.mark.parametrize("a, b", DIFFERENT, ids=numbered(DIFFERENT))
def test_different_static_values_make_different_definitions(a, b):
    for first, second in [(a, b), (b, a)]:
        one, other = Layer(first), Layer(second)
        assert nnx.graphdef(one) != nnx.graphdef(other)
        for layer, value in [(one, first), (other, second)]:
            back = nnx.merge(*nnx.split(layer)).size
            assert slow.spelled(back) == slow.spelled(value)
        held = nnx.graphdef([ONE, first]), nnx.graphdef([ONE, second])
        if not isinstance(first, (list, dict)):
            assert held[0] != held[1]


def test_a_closure_whose_captured_variable_was_rebound_is_not_taken_for_another():
    def make(n):
        def rebind(m):
            nonlocal n
            n = m

        return (lambda x: x + n), rebind

    first, rebind = make(1)
    one = Layer(first)
    nnx.split(one)
    held, hooked = [ONE, first], nnx.Param(ONE, hook=first)
    nnx.split([held, hooked])
    rebind(5)
    second, _ = make(1)
    for _ in range(2):
        assert nnx.merge(*nnx.split(Layer(second))).size(0) == 1
        assert nnx.merge(*nnx.split([ONE, second]))[1](0) == 1
        assert nnx.clone(nnx.Param(ONE, hook=second)).hook(0) == 1
    assert nnx.clone(one).size(0) == 5
    assert nnx.clone(held)[1](0) == 5
    assert nnx.clone(hooked).hook(0) == 5


def test_a_definition_is_a_pytree_without_leaves():
    graphdef = nnx.graphdef(Model())
    assert jax.tree.leaves(graphdef) == []
    assert jax.tree.map(lambda x: x, graphdef) is graphdef

    @jax.jit
    def again(parts):
        return nnx.split(nnx.merge(*parts))

    found, state = again(nnx.split(Model()))
    assert found == graphdef
    assert nnx.merge(found, state).a.kernel.tag == "k"


def test_copies_of_a_definition():
    text = pickle.dumps(nnx.split(Model()))
    graphdef, state = pickle.loads(text)  # made anew: the original is gone
    assert graphdef == nnx.graphdef(Model())
    assert nnx.merge(graphdef, state).a.kernel.tag == "k"
    assert copy.copy(graphdef) is graphdef
    assert copy.deepcopy(graphdef) is graphdef
    assert pickle.loads(pickle.dumps(graphdef)) is graphdef
    local = nnx.graphdef(Layer(act=lambda x: x))
    assert nnx.merge(cloudpickle.loads(cloudpickle.dumps(local)), nnx.state(Layer())).act(3) == 3


def test_numbers_of_an_outer_graph():
    model = Model()
    index = nnx.graphlib.RefMap()
    nnx.flatten(model, ref_index=index)
    inner, _ = nnx.flatten(model, ref_outer_index=index)
    assert inner.outer == tuple(range(len(index)))
    assert inner == nnx.graphdef(model).with_same_outer_index()
    assert inner.with_no_outer_index() == nnx.graphdef(model)
    assert nnx.graphdef(model).with_matching_outer_index(inner) == inner
    assert inner != nnx.graphdef(model)


# use ----------------------------------------------------------------------------------------------


def test_copies_of_variables_and_arrays():
    model = Layer()
    graphdef, state = nnx.split(model)
    assert nnx.merge(graphdef, state).kernel is model.kernel
    copied = nnx.merge(graphdef, state, copy=True)
    assert copied.kernel is not model.kernel
    assert copied.kernel.value is model.kernel.value
    deep = nnx.clone(model, arrays=True)
    assert deep.kernel.value is not model.kernel.value
    assert deep.array is not model.array
    np.testing.assert_array_equal(deep.array, model.array)
    for host in (np.ones(2, np.float32), np.float32(1.0), 1.0):
        own = nnx.clone(nnx.Variable(host), arrays=True).value
        assert isinstance(own, jax.Array) and np.all(own == 1)
    flat, values = nnx.flatten(model)
    assert nnx.unflatten(flat, values, copy_variables=True).kernel is not model.kernel


def test_maps_of_objects_and_numbers():
    layer = Layer()
    index = nnx.graphlib.RefMap([(layer, 0)])
    assert layer in index and Layer() not in index
    assert list(index) == [layer] and len(index) == 1
    numbers = nnx.graphlib.IndexMap.from_refmap(index)
    assert numbers == {0: layer}
    assert numbers.to_refmap()[layer] == 0
    del index[layer]
    assert len(index) == 0
    assert "RefMap" in repr(nnx.graphlib.RefMap({layer: 3}))


Point = collections.namedtuple("Point", ["x", "y"])


def test_the_text_of_a_definition_shows_what_is_in_plain_containers():
    model = nnx.Dict(
        a=(ONE, "label"),
        b=[nnx.Param(ONE), 3],
        c={"k": ONE, "n": 2},
        d=Point(ONE, None),
        e=(nnx.Param(ONE),),
    )
    assert repr(nnx.graphdef(model)).splitlines() == [
        "GraphDef[Dict]( # 1 object, 5 leaves",
        "  a=(Array, 'label'),",
        "  b=[Param, 3],",
        "  c={'k': Array, 'n': 2},",
        "  d=Point(x=Array, y=None),",
        "  e=(Param,)",
        ")",
    ]
