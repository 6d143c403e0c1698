"""`Pytree` and `Object`: which attributes are data, what is refused, and how they are copied."""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import itertools
import pickle
import typing as tp

import cloudpickle
import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx

T = tp.TypeVar("T")


def paths(node):
    """The leaves of a pytree by key path."""
    return {jax.tree_util.keystr(p): v for p, v in jax.tree.flatten_with_path(node)[0]}


def make(body):
    """An instance of a fresh Pytree class named Made whose `__init__` does `body(self)`."""
    return type("Made", (nnx.Pytree,), {"__init__": body})()


def holding(value):
    return make(lambda self: setattr(self, "held", value))


def test_annotations_decide():
    class Annotated(nnx.Pytree):
        a: nnx.Data[list]
        b: nnx.Static[tuple]
        c: nnx.Data[Undefined]  # noqa: F821 - a string, never evaluated
        d: list[nnx.Data]  # no declaration: the mark is inside

        def __init__(self):
            self.a = []
            self.b = (1,)
            self.c = 3
            self.d = []
            self.a.append(jnp.zeros(2))

    class Further(Annotated):
        d: nnx.Data[int]

    assert Annotated()._nnx_status == {"a": True, "b": False, "c": True, "d": False}
    assert Further()._nnx_status == {"a": True, "b": False, "c": True, "d": True}

    class Evaluated(nnx.Pytree):
        def __init__(self):
            self.a, self.b = 1, ()

    Evaluated.__annotations__ = {"a": nnx.Data[int], "b": nnx.Static[tuple]}
    assert Evaluated()._nnx_status == {"a": True, "b": False}
    assert repr(nnx.Data) == "Data" and repr(nnx.Static) == "Static"


@pytest.mark.parametrize("touch", [nnx.check_pytree, nnx.split, nnx.state, jax.tree.leaves])
def test_arrays_put_into_a_static_list_later_are_found(touch):
    node = holding([1])
    touch(node)
    node.held.append(nnx.Param(1.0))
    with pytest.raises(ValueError, match=r"in static attribute 'held' of Pytree type 'Made'"):
        touch(node)


def test_pytree_is_a_property_of_each_class_but_objects_stay_objects():
    class Loose(nnx.Module, pytree=False): ...

    class Below(Loose): ...

    class BelowObject(nnx.Object): ...

    class Mixed(BelowObject, nnx.Module): ...

    leaves = [jax.tree_util.all_leaves([c()]) for c in (Loose, Below, BelowObject, Mixed)]
    assert leaves == [True, False, True, True]


# Dataclasses -------------------------------------------------------------------------------------


@nnx.dataclass
class Record(nnx.Pytree):
    i: int = nnx.data()
    x: jax.Array
    a: int
    s: str = nnx.static(default="hi", kw_only=True)


@nnx.dataclass(frozen=True)
class Settings(nnx.Pytree):
    width: int = 3
    name: str = "a"
    inner: Settings | None = None


def test_frozen_settings_are_hashable_and_static_arguments():
    traces = []

    @functools.partial(nnx.jit, static_argnames="settings")
    def scaled(x, settings):
        traces.append(settings)
        return x * settings.width

    x = jnp.ones(2)
    for inner in (None, None, Settings(4), Settings(4)):
        assert scaled(x, Settings(inner=inner)).tolist() == [3, 3]
    assert len(traces) == 2
    assert scaled(x, Settings(1)).dtype == scaled(x, Settings(1.0)).dtype and len(traces) == 4
    assert scaled(x, Settings(True)).tolist() == [1, 1] and len(traces) == 5
    assert hash(Settings()) == hash(Settings()) and Settings() == Settings() != Settings(4)
    assert jax.jit(lambda s, x: x * s.width, static_argnums=0)(Settings(), x).tolist() == [3, 3]
    assert nnx.jit(lambda s, x: x * s.width)(Settings(), x).tolist() == [3, 3]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().width = 4
    with pytest.raises(ValueError, match=r"its class an nnx.dataclass\(frozen=True\)"):
        scaled(x, Record(1, jnp.ones(1), 2))
    with pytest.raises(ValueError, match="holds a Settings: its values would be constants"):
        scaled(x, Settings(jnp.ones(2)))


def test_dataclass_arguments_and_inheritance():
    @nnx.dataclass(kw_only=True, order=True)
    class Ordered(nnx.Pytree):
        a: int
        b: int = 1

    @nnx.dataclass
    class Below(Record):
        z: int = nnx.data(9)

    assert Ordered(a=1) < Ordered(a=2)
    assert paths(Below(1, 2.0, 3)) == {".i": 1, ".z": 9} and paths(Below(1, 2.0, 3, 6))[".z"] == 6
    assert nnx.static(default=1, metadata={"more": 2}).metadata == {"more": 2, "static": True}


# Copies ------------------------------------------------------------------------------------------


def test_copy_is_shallow():
    node = nnx.Dict(one=nnx.data(1), inner=nnx.List())
    new = copy.copy(node)
    assert new is not node and new.inner is node.inner
    new.extra = jnp.zeros(1)
    assert not hasattr(node, "extra")
    assert new._nnx_status["extra"] is True and new._nnx_status["one"] is True


class Selective(nnx.Module):
    """Leaves an attribute out of its pickles."""

    def __init__(self):
        self.w, self.n, self.cache = nnx.Param(jnp.ones(1)), nnx.data(3), jnp.zeros(3)

    def __getstate__(self):
        state = super().__getstate__()
        del state["cache"]
        return state


class OwnState(Selective):
    """Says what a pickle holds without asking the base class."""

    def __getstate__(self):
        return {"w": self.w}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.f = None


def test_classes_may_choose_what_they_pickle():
    new = pickle.loads(pickle.dumps(Selective()))
    assert sorted(vars(new)) == ["n", "w"] and list(paths(new)) == [".n", ".w.value"]
    own = pickle.loads(pickle.dumps(OwnState()))
    assert sorted(vars(own)) == ["f", "w"] and list(paths(own)) == [".w.value"]


# Classes of all sorts ----------------------------------------------------------------------------


def test_properties_are_no_attributes():
    class Doubled(nnx.Module):
        def __init__(self):
            self.val = jnp.ones(2)
            self.half = 3.0

        @property
        def double(self):
            return self.val * 2

        @property
        def half(self):
            return self._half

        @half.setter
        def half(self, value):
            self._half = value / 2

    node = Doubled()
    assert (node.double + node.half).tolist() == [3.5, 3.5]
    assert sorted(vars(node)) == ["_half", "val"] and list(paths(node)) == [".val"]
    with pytest.raises(AttributeError, match="double"):
        node.double = 1
    with pytest.raises(AttributeError, match="'Doubled' object has no attribute 'missing'"):
        _ = node.missing
    with pytest.raises(AttributeError, match="missing"):
        del node.missing


def test_a_cached_property_is_no_attribute():
    class Cached(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))
            self.calls = []

        @functools.cached_property
        def double(self):
            self.calls.append(1)
            return self.w * 2

    node = Cached()
    node.double
    assert node.double is node.double and node.calls == [1]
    assert list(nnx.state(node)) == ["w"] and list(paths(node)) == [".w.value"]
    assert nnx.clone(node).double.tolist() == [2.0, 2.0]


def test_generic_abstract_and_mixed_classes():
    class Box(nnx.Module, tp.Generic[T]):
        def __init__(self, content: T):
            self.content = content

    class Shape(nnx.Module, abc.ABC):
        @abc.abstractmethod
        def area(self): ...

    class Left(nnx.Module):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.a = 1

    class Both(Left, Box): ...

    class Mixin:
        def __init__(self):
            self.m = jnp.ones(1)

    class Mixed(Mixin, nnx.Module): ...

    class Chosen(nnx.Pytree):
        def __new__(cls, other):
            return other

    assert Box[jax.Array](jnp.ones(1)).content.tolist() == [1.0]
    assert nnx.clone(Box[int](3)).content == 3
    assert type("Square", (Shape,), {"area": lambda self: 1})().area() == 1
    with pytest.raises(TypeError, match="abstract"):
        Shape()
    assert list(paths(Both(content=jnp.ones(1)))) == [".content"] and Both(content=2).a == 1
    assert list(paths(Mixed())) == [".m"] and Chosen(3) == 3


def test_a_class_may_define_getattr_len_bool_and_eq():
    class Odd(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(1.0)

        def __getattr__(self, name):
            if name == "magic":
                return 5
            raise AttributeError(name)

        def __len__(self):
            return 0

        def __eq__(self, other):
            return True

        def __call__(self, x):
            return jnp.sin(self.w * x)

    node = nnx.Dict(a=Odd(), b=Odd())
    for new in (nnx.clone(node), copy.deepcopy(node), pickle.loads(cloudpickle.dumps(node))):
        assert new.a.magic == 5 and new.a is not new.b
        assert new.a.w is not new.b.w and len(nnx.to_flat_state(nnx.state(new))) == 2
        program = jax.make_jaxpr(new.a)(0.0)
        assert str(program.eqns[-1].source_info.name_stack) == "Odd"


def test_attributes_written_around_setattr_are_adopted():
    def body(self):
        self.__dict__["raw"] = jnp.ones(1)
        object.__setattr__(self, "other", 3)

    assert make(body)._nnx_status == {"raw": True, "other": False}


def test_an_equal_static_value_is_no_change_of_structure():
    node = holding(1000)
    before = nnx.graphdef(node), node._nnx_version
    node.held = int("1000")
    assert (nnx.graphdef(node), node._nnx_version) == before and node._nnx_version
    node.held = 1000.0
    assert nnx.graphdef(node) != before[0]


class Node(nnx.Module):
    pass


def itself(described=False):
    node = Node()
    node.me = node
    if described:
        nnx.split(node)
    return node


def parent_and_child(searched=False):
    """With `searched`, JAX looked through both before the parent got the child."""
    root, child = Node(), Node()
    child.parent = root
    assert not searched or not jax.tree.leaves(child)
    root.child = child
    return root


def through_containers():
    root = nnx.Dict(items=nnx.List([Node()]))
    root.items[0].above = nnx.data([{"root": (root,)}])
    return root


def built_by_jax():
    node = jax.tree.map(lambda x: x, nnx.Dict(a=Node()))
    node.a.back = node
    return node


AGAIN = "'child.parent' of it is the Node again"
CIRCLES = {
    "itself": (itself, "'me' of it is the Node again"),
    "described before": (lambda: itself(described=True), "'me' of it is the Node again"),
    "parent and child": (parent_and_child, AGAIN),
    "searched before": (lambda: parent_and_child(searched=True), AGAIN),
    "below": (
        lambda: nnx.Dict(inner=parent_and_child()),
        "'inner.child.parent' of it is the Node at 'inner'",
    ),
    "containers": (through_containers, "'items.0.above.0.root.0' of it is the Dict again"),
    "built by JAX": (built_by_jax, " of it is the "),  # it is named from either object
}


def depth(n=0):
    try:
        return depth(n + 1)
    except RecursionError:
        return n


@pytest.mark.parametrize("make, message", CIRCLES.values(), ids=CIRCLES)
def test_a_circle_is_refused_where_jax_wants_a_pytree(make, message):
    root, before = make(), depth()
    calls = [
        lambda: jax.tree.leaves(root),
        lambda: jax.tree.map(lambda x: x, [root]),
        lambda: jax.tree_util.tree_leaves_with_path(root),
        lambda: jax.jit(lambda r: r)(root),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="JAX cannot take it as a pytree") as caught:
            call()
        assert message in str(caught.value) and "nnx.split(" in str(caught.value)
    assert before - depth() <= 3 * len(calls)  # nothing is broken afterwards
    graphdef, state = nnx.split(root)  # the remedies
    jax.jit(lambda s: nnx.merge(graphdef, s))
    nnx.jit(lambda r: None)(root)


def test_what_is_shared_is_in_no_circle():
    part = nnx.Param(jnp.ones(1))
    both = nnx.Dict(a=Node(), b=Node(), c=[Node()])
    for node in (both.a, both.b):
        node.part = part
    both.a.other = both.b
    assert len(jax.tree.leaves(both)) == 3


def test_without_pytree_the_value_alone_says_whether_an_attribute_is_data():
    class Loose(nnx.Module, pytree=False): ...

    Loose.__annotations__ = {"held": nnx.Static[list]}  # marks say nothing here
    data, static = ([nnx.Param(1.0)], jnp.ones(2), nnx.Param(1.0)), ([], "text", object())
    for before, after in itertools.product((*data, *static), repeat=2):
        node = Loose()
        node.held = nnx.static(before)
        nnx.split(node)
        node.held = after if before is static[0] else nnx.data(after)
        expected = any(after is value for value in data)
        assert len(jax.tree.leaves(nnx.state(node))) == expected
        assert len(jax.tree.leaves(nnx.state(nnx.clone(node)))) == expected


ASSIGNMENTS = {
    "object.__setattr__": lambda node, name, value: object.__setattr__(node, name, value),
    "vars": lambda node, name, value: vars(node).update({name: value}),
    "super": lambda node, name, value: nnx.Module.__setattr__(node, name, value),
}


@pytest.mark.parametrize("assign", ASSIGNMENTS.values(), ids=ASSIGNMENTS)
@pytest.mark.parametrize("inherited", [False, True])
def test_a_setattr_of_the_user_that_writes_around_ours_is_noticed(assign, inherited):
    methods = {
        "__setattr__": lambda self, name, value: assign(self, name, value),
        "__delattr__": lambda self, name: object.__delattr__(self, name),
    }
    Mixin = type("Mixin", (), methods)
    bases = (Mixin, nnx.Module) if inherited else (nnx.Module,)
    net = type("Net", bases, {} if inherited else methods)()
    net.rate, net.w, net.x = 1.0, nnx.Param(2.0), jnp.zeros(2)
    traces = []

    @nnx.jit
    def read(net):
        traces.append(net.rate)
        return net.rate * net.w.value + net.x

    assert read(net).tolist() == [2.0, 2.0]
    net.rate = 3.0
    assert read(net).tolist() == [6.0, 6.0]
    net.w = nnx.Param(4.0)
    net.x = jnp.ones(2)  # no other structure
    assert read(net).tolist() == [13.0, 13.0] and traces == [1.0, 3.0]
    net.more = nnx.Param(0.0)
    kept = net.more
    assert [*nnx.state(net)] == ["more", "w", "x"]
    del net.more
    assert [*nnx.state(net)] == ["w", "x"] and kept.value == 0.0


BEHIND = {
    "__delattr__": lambda value: delattr(value, "extra"),
    "__reduce__": pickle.dumps,
    "__reduce_ex__": pickle.dumps,
    "__copy__": copy.copy,
    "__deepcopy__": copy.deepcopy,
    "__format__": format,
}


@pytest.mark.parametrize("name", BEHIND)
@pytest.mark.parametrize("base", [nnx.Module, nnx.Param])
def test_methods_of_a_base_behind_count_where_the_reference_has_none(base, name):
    if (base, name) in ((nnx.Module, "__deepcopy__"), (nnx.Param, "__delattr__")):
        return  # the reference has them
    log = []

    def method(self, *args):
        log.append(name)
        return (str, ("named",)) if "reduce" in name else ""

    Behind = type("Behind", (), {name: method})
    value = type("Both", (base, Behind), {})(*([1.0] if base is nnx.Param else []))
    if base is nnx.Module:
        value.extra = 1
    BEHIND[name](value)
    assert log == [name]


def test_the_new_of_a_base_behind_runs_and_may_assign():
    class Behind:
        def __new__(cls, *args, **kwargs):
            new = object.__new__(cls)
            new.given, new.w = args, nnx.Param(1.0)
            return new

    class Both(nnx.Module, Behind):
        def __init__(self, size):
            self.size = size

    both = Both(3)
    assert (both.given, both.size) == ((3,), 3) and [*nnx.state(both)] == ["w"]
    for other in (nnx.clone(both), copy.deepcopy(both), nnx.merge(*nnx.split(both))):
        assert (other.given, other.size, other.w[...]) == ((3,), 3, 1.0)
    both.given = (4,)
    assert nnx.jit(lambda m: m.w + m.given[0])(both) == 5.0
