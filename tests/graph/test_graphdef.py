"""`GraphDef`: which static values are equal, what an edit of one does, copies, and its text."""

import argparse
import collections
import copy
import dataclasses
import functools
import pickle
import threading
import types

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


class Model(nnx.Module):
    def __init__(self):
        self.a = Layer()
        self.b = self.a
        self.items = [nnx.Param(ONE), 3, (ONE,)]
        self.none = nnx.data(None)


# Static values that can be edited ------------------------------------------------------------------


@dataclasses.dataclass
class Settings:
    scale: float = 2.0
    sizes: list[int] = dataclasses.field(default_factory=lambda: [1, 2])
    inner: object = None
    note: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(slots=True)
class Slotted:
    scale: float = 2.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    sizes: list[int]


class Beside(Frozen):
    """May have attributes that are no fields."""


class Sized(tuple):
    """May have attributes beside its items."""


def beside(kind, scale=2.0):
    value = kind([[1]])
    value.scale = scale
    return value


class Compared:
    """Something with `==` and no hash."""

    __slots__ = ("scale",)

    def __init__(self, scale=2.0):
        self.scale = scale

    def __eq__(self, other):
        return isinstance(other, Compared) and self.scale == other.scale

    __hash__ = None


class ComparedWithHash(Compared):
    __slots__ = ()

    def __hash__(self):
        return hash(self.scale)


class WithDict(ComparedWithHash):
    """Not only slots."""


@dataclasses.dataclass(unsafe_hash=True)
class Hashed:
    scale: float = 2.0
    inner: object = None


@dataclasses.dataclass(frozen=True)
class Around:
    inner: Hashed = dataclasses.field(default_factory=Hashed)
    scale = property(lambda self: self.inner.scale)


class Table(dict):
    """A subclass of a container."""


class Secret:
    """Does not tell what it has."""

    __hash__ = None

    def __eq__(self, other):
        return self is other

    def __reduce_ex__(self, protocol):
        raise RuntimeError("no")


def cyclic():
    settings = Settings()
    settings.inner = [settings]
    return settings


def namespace():
    return types.SimpleNamespace(scale=2.0, more={"a": [1]})


BESIDE = [functools.partial(beside, kind) for kind in (Beside, Sized)]
MAKERS = [
    *(Settings, Slotted, Compared, ComparedWithHash, Hashed, Around, namespace, cyclic),
    *(*BESIDE, WithDict, lambda: Frozen([1])),
    lambda: types.MappingProxyType({"a": [1]}),
    lambda: Settings(inner={Hashed(): (1, Hashed(inner=Hashed()))}),
    lambda: Settings(inner=(Settings(), {"a": Compared()}, np.arange(3))),
    lambda: argparse.Namespace(scale=2.0),
    lambda: Table(a=[1]),
]

# equality and hash --------------------------------------------------------------------------------

LARGE, LOCKED = np.arange(2000), types.SimpleNamespace(lock=threading.Lock())
SAME = [
    *((x, copy.deepcopy(x)) for x in (3, "x", (1, (2, "a")), [1, 2], {"a": 1}, float("nan"))),
    *((x, copy.deepcopy(x)) for x in (jnp.float32, np.dtype("float32"), np.float32(1), Size(1))),
    *((x, copy.deepcopy(x)) for x in (functools.partial(double, 1), Pair(1, 2), slice(1, None))),
    (lambda x, y=(1, 2): x, None),
    ({1, 2}, {2, 1}),
    (Settings(note="a"), Settings(note="b")),
    *((x, copy.copy(x)) for x in (Settings(inner=ONE), Settings(inner=LARGE), LOCKED)),
    (Secret(), None),
    *((make(), make()) for make in MAKERS),
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
    (np.timedelta64(1, "s"), np.timedelta64(1, "m")),
    *((make(), make(3.0)) for make in BESIDE),
    ("a", b"a"),
    (None, False),
    (jnp.float32, np.dtype("float32")),
    ((slice(1), 2), (slice(1.0), 2)),
    (Settings(scale=1), Settings(scale=1.0)),
    (Settings(inner=LARGE), Settings(inner=LARGE.copy())),
    (Settings(inner=ONE), Settings(inner=ONE + 0)),
    (Secret(), Secret()),
]


def numbered(pairs):
    """Ids that name no address: every process that collects them must see the same."""
    return [f"{number}-{type(first).__name__}" for number, (first, _) in enumerate(pairs)]


@pytest.mark.filterwarnings("ignore:.*neither an nnx.Module")
@pytest.mark.parametrize("a, b", SAME, ids=numbered(SAME))
def test_equal_static_values_make_one_definition(a, b):
    b = a if b is None else b
    one, other = nnx.graphdef(Layer(a)), nnx.graphdef(Layer(b))
    assert one == other and one.structure is other.structure
    assert hash(one) == hash(other)
    assert one != "GraphDef"
    assert jax.tree.structure(Layer(a)) == jax.tree.structure(Layer(b))


@pytest.mark.filterwarnings("ignore:.*neither an nnx.Module")
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


@pytest.mark.parametrize("make", [*MAKERS[:5], namespace, WithDict, *BESIDE])
def test_an_edit_is_noticed(make):
    traces = []

    @nnx.jit
    def call(layer):
        traces.append(1)
        return layer.size.scale * layer.kernel

    layer = Layer(make())
    before = nnx.graphdef(layer)
    for scale, count in [(2.0, 1), (5.0, 2), (2.0, 2), (5.0, 2), (7.0, 3)]:
        layer.size.scale = scale
        np.testing.assert_array_equal(call(layer), scale * ONE)
        assert len(traces) == count
        assert (nnx.graphdef(layer) == before) is (scale == 2.0)


def test_an_edit_far_inside_is_noticed():
    settings = Settings(inner=types.MappingProxyType({"a": [Settings()]}))
    call = nnx.jit(lambda layer: layer.size.inner["a"][0].sizes[0] * layer.kernel)
    for size in (1, 10):
        settings.inner["a"][0].sizes[0] = size
        np.testing.assert_array_equal(call(Layer(settings)), size * ONE)


@pytest.mark.parametrize("make", [Hashed, Around, ComparedWithHash])
@pytest.mark.parametrize("edited", [0, 1, 2])
def test_an_edit_of_what_has_a_hash_is_seen_in_its_own_models(make, edited):
    inside = (lambda part: (1, part)) if make is Hashed or edited == 1 else lambda part: part
    part = lambda value: value[1] if type(value) is tuple else value
    layers = [Layer(inside(make())) for _ in range(2)]
    for layer in layers:
        layer.kernel.set_metadata(note=inside(make()))
    layers.append(nnx.merge(*nnx.split(layers[1])))
    run = nnx.jit(lambda layer, get: part(get(layer)).scale * layer.kernel, static_argnums=1)
    for get in (lambda layer: layer.size, lambda layer: layer.kernel.get_metadata("note")):
        found = [part(get(layer)) for layer in layers]
        if edited != 0:
            run(layers[0], get)
        (found[edited].inner if make is Around else found[edited]).scale = 5.0
        for layer, settings in zip(layers, found):
            np.testing.assert_array_equal(run(layer, get), settings.scale * ONE)
        assert [settings.scale for settings in found].count(5.0) == (1 if edited == 0 else 2)


def test_shared_settings_are_looked_at_once():
    seen = []

    class Watched(Compared):
        def __getstate__(self):
            seen.append(1)
            return vars(self)

    settings = Watched()
    model = nnx.List([Layer(settings) for _ in range(50)])
    call = nnx.jit(lambda model: model[0].size.scale * 1.0)
    for _ in range(3):
        seen.clear()
        call(model)
    assert len(seen) == 1


def test_a_definition_is_a_pytree_without_leaves():
    graphdef = nnx.graphdef(Model())
    assert jax.tree.leaves(graphdef) == []
    assert jax.tree.map(lambda x: x, graphdef) is graphdef
    found, state = jax.jit(lambda parts: nnx.split(nnx.merge(*parts)))(nnx.split(Model()))
    assert found == graphdef and nnx.merge(found, state).a.kernel.tag == "k"


def test_copies_of_a_definition():
    text = pickle.dumps(nnx.split(Model()))
    graphdef, state = pickle.loads(text)  # made anew: the original is gone
    assert graphdef == nnx.graphdef(Model()) and nnx.merge(graphdef, state).a.kernel.tag == "k"
    assert copy.copy(graphdef) is copy.deepcopy(graphdef) is graphdef
    assert pickle.loads(pickle.dumps(graphdef)) is graphdef
    local = nnx.graphdef(Layer(act=lambda x: x))
    assert nnx.merge(cloudpickle.loads(cloudpickle.dumps(local)), nnx.state(Layer())).act(3) == 3


def test_numbers_of_an_outer_graph():
    model = Model()
    index = nnx.graphlib.RefMap()
    nnx.flatten(model, ref_index=index)
    inner, _ = nnx.flatten(model, ref_outer_index=index)
    assert inner.outer == tuple(range(len(index)))
    assert inner == nnx.graphdef(model).with_same_outer_index() != nnx.graphdef(model)
    assert inner.with_no_outer_index() == nnx.graphdef(model)
    assert nnx.graphdef(model).with_matching_outer_index(inner) == inner


# use ----------------------------------------------------------------------------------------------


def test_copies_of_variables_and_arrays():
    model = Layer()
    graphdef, state = nnx.split(model)
    assert nnx.merge(graphdef, state).kernel is model.kernel
    other = nnx.unflatten(*nnx.flatten(model), copy_variables=True)
    for copied in (nnx.merge(graphdef, state, copy=True), other):
        assert copied.kernel is not model.kernel and copied.kernel.value is model.kernel.value
    deep = nnx.clone(model, arrays=True)
    assert deep.kernel.value is not model.kernel.value and deep.array is not model.array
    np.testing.assert_array_equal(deep.array, model.array)
    for host in (np.ones(2, np.float32), np.float32(1.0), 1.0):
        own = nnx.clone(nnx.Variable(host), arrays=True).value
        assert isinstance(own, jax.Array) and np.all(own == 1)
    assert nnx.clone(nnx.Dict(a=np.array("text")), arrays=True).a == "text"
    tied = nnx.Dict(a=model.kernel, b=model.kernel)
    nnx.update(tied, {"a": nnx.Param(7 * ONE, tag="new"), "b": 7 * ONE})  # equal: one leaf
    assert model.kernel.tag == "new" and model.kernel[0] == 7


def test_maps_of_objects_and_numbers():
    layer = Layer()
    index = nnx.graphlib.RefMap([(layer, 0)])
    assert layer in index and Layer() not in index
    assert list(index) == [layer] and len(index) == 1
    numbers = nnx.graphlib.IndexMap.from_refmap(index)
    assert numbers == {0: layer} and numbers.to_refmap()[layer] == 0
    del index[layer]
    assert len(index) == 0 and "RefMap" in repr(nnx.graphlib.RefMap({layer: 3}))


Point = collections.namedtuple("Point", ["x", "y"])


def test_the_text_of_a_definition_shows_what_is_in_plain_containers():
    model = nnx.Dict(a=(ONE, "label"), b=[nnx.Param(ONE), 3], c={"k": ONE, "n": 2})
    model.d, model.e = Point(ONE, None), (nnx.Param(ONE),)
    assert repr(nnx.graphdef(model)).splitlines() == [
        "GraphDef[Dict]( # 1 object, 5 leaves",
        "  a=(Array, 'label'),",
        "  b=[Param, 3],",
        "  c={'k': Array, 'n': 2},",
        "  d=Point(x=Array, y=None),",
        "  e=(Param,)",
        ")",
    ]
    assert {"  b: list", "  c: dict", "  e: tuple"} <= {*str(nnx.graphdef(model)).splitlines()}
