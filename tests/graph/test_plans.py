"""Plans: every kind of structural edit is seen by the next call of every function.

The functions are called until they answer from a plan; then the model is edited, and their answers
are compared with those for a copy that was built by hand and that nothing has looked at before.
"""

import copy
import gc
import types

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from nnxlite._base.interning import epoch
from nnxlite.graph import _plan
from nnxlite.graph._plan import find_plan
from tests.laws import model as slow
from tests.laws.graphs import Count, Pair

ONE, TWO = jnp.ones(2), jnp.zeros(2)


class Leaf(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(ONE, tag="k")
        self.count = Count(jnp.array(0))


class Mixed(nnx.Module):
    """Attributes of many kinds."""

    def __init__(self):
        self.child = Leaf()
        self.kernel = nnx.Param(ONE, tag="k")
        self.array = ONE
        self.number = 2
        self.sizes = [1, [2, 3]]
        self.options = {"a": {"b": 1}}
        self.flat = [1, "b", None]
        self.words = {"a": 1, "b": 2}
        self.settings = types.SimpleNamespace(width=1, sizes=[2])
        self.names = {"x", "y"}
        self.fixed = (2, [3])
        self.config = Pair(1, [2])
        self.none = nnx.data(None)
        self.plain = [nnx.Param(TWO), ONE, 5, [TWO, {"deep": [ONE, nnx.Param(ONE)]}]]
        self.pair = Pair(nnx.Param(ONE), [TWO])
        self.memory = nnx.State({"m": {"n": ONE}, "v": nnx.Param(TWO)})
        self.mode = "train"


EDITS = {
    "static: type only": lambda m: setattr(m, "number", 2.0),
    "status: static to data": lambda m: setattr(m, "number", nnx.data(2)),
    "status: data to static": lambda m: setattr(m, "none", nnx.static(None)),
    "status: array to static": lambda m: setattr(m, "array", nnx.static(1)),
    "metadata: all": lambda m: nnx.set_metadata(m, tag="all"),
    "plain list: type of static": lambda m: m.plain.__setitem__(2, 5.0),
    "plain list: array by None": lambda m: m.plain.__setitem__(1, None),
    "plain list: deep": lambda m: m.plain[3][1]["deep"].append(ONE),
    "plain list: kind of container": lambda m: m.plain[3].__setitem__(1, [*m.plain[3][1].values()]),
    "list inside a tuple": lambda m: m.pair.second.append(TWO),
    "tuple replaced by an equal one": lambda m: setattr(m, "pair", Pair(*m.pair)),
    "static list: type only": lambda m: m.sizes.__setitem__(0, 1.0),
    "flat list: type only": lambda m: m.flat.__setitem__(0, True),
    "flat dict: type only": lambda m: m.words.update(a=True),
    "flat dict: order": lambda m: m.words.update(a=m.words.pop("a")),
    "settings: other value": lambda m: setattr(m.settings, "width", 2),
    "settings: deep": lambda m: m.settings.sizes.append(3),
    "static dict: deep": lambda m: m.options["a"].update(b=2),
    "static set": lambda m: m.names.add("z"),
    "list inside a static tuple": lambda m: m.fixed[1].append(1),
    "list inside a static named tuple": lambda m: m.config.second.append(1),
    "State: deep": lambda m: m.memory["m"].__setitem__("o", TWO),
    "State: replaced": lambda m: setattr(m, "memory", nnx.State({"m": {"k": ONE}})),
    "updated with metadata": lambda m: nnx.update(m, {"kernel": nnx.Param(ONE, tag="new")}),
}
"""Edits that `laws/test_functional` does not draw, or rarely."""


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_is_seen_by_every_function_through_every_root_above_it(edit):
    for beside in (False, True):  # of another change, after which a plan is renewed
        inner = Mixed()
        roots = (nnx.Dict(inner=inner), nnx.List([inner, inner]), inner)
        for root in roots:
            slow.check(root)
        if beside:
            inner.mode = "eval"
        edit(inner)
        for root in roots:
            slow.check(root)


def test_writing_values_is_no_structural_change():
    model = Mixed()
    graphdef, _ = nnx.split(model)
    now, plans = epoch.now, dict(model._nnx_plans)
    model.kernel.value = TWO
    model.kernel[...] = ONE
    model.array = TWO
    assert model.memory["m"]["n"] is ONE  # reading is no change either
    nnx.update(model, {"kernel": TWO, "array": ONE})
    assert epoch.now == now and nnx.graphdef(model) is graphdef
    assert plans.items() <= model._nnx_plans.items()
    assert nnx.state(model)["array"] is ONE


def test_edits_of_objects_that_nobody_looked_at_do_not_move_the_epoch():
    watched = Leaf()
    nnx.split(watched)
    now = epoch.now
    fresh = Leaf()
    fresh.extra = 1
    fresh.layers = nnx.List([Leaf()])
    fresh.layers.append(Leaf())
    fresh.kernel.set_metadata(tag=3)
    del fresh.extra
    assert epoch.now == now


@pytest.mark.parametrize(
    "kernel",
    [
        lambda m: nnx.state(m)["a"]["kernel"],
        lambda m: nnx.split(m)[1]["a"]["kernel"],
        lambda m: nnx.clone(m).a.kernel,
        lambda m: nnx.jit(lambda m: m.a.kernel * 1)(m),
    ],
    ids=["state", "split", "clone", "jit"],
)
def test_a_leaf_that_is_gone_is_no_part_of_a_plan(kernel):
    """Nobody is told of what is written into a `__dict__`; but the former Variable is no more."""
    model = nnx.Dict(a=Leaf())
    nnx.split(model), nnx.split(model)
    model.a.__dict__["kernel"] = nnx.Param(TWO)
    gc.collect()
    assert kernel(model)[...].tolist() == TWO.tolist()


def test_objects_of_one_layout_do_not_share_edits():
    a, b = Leaf(), Leaf()
    nnx.split(a), nnx.split(b)
    a.count = Count(ONE)  # the definition goes, the attributes stay the same ...
    a.extra = 1  # ... and now they do not
    assert not hasattr(b, "extra")
    assert nnx.graphdef(b) is nnx.graphdef(Leaf())
    c = nnx.clone(b)
    c.more = nnx.Param(ONE)
    del b.count
    assert list(nnx.state(Leaf())) == ["count", "kernel"]
    assert list(nnx.state(c)) == ["count", "kernel", "more"]
    assert list(nnx.state(b)) == ["kernel"]


def test_an_attribute_that_is_written_into_a_dict_counts_once_another_call_has_met_it():
    model = nnx.Dict(a=Leaf(), mode="train")
    nnx.split(model)
    vars(model.a)["extra"] = nnx.Param(TWO)
    nnx.split(model.a)
    model.mode = "eval"  # for which the plan of the model would be renewed
    slow.check(model)


def test_a_value_of_another_type_is_another_program():
    seen = []
    look = nnx.filter_jit(lambda model: seen.append(type(model.kernel.value)) or model.count * 1)
    model = Leaf()
    for value in (ONE, ONE, "words", "words", TWO):
        model.kernel.value = value
        look(model)
    assert [issubclass(kind, str) for kind in seen] == [False, True]


# Renewed without a traversal ----------------------------------------------------------------------


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.parts = nnx.List([nnx.Dropout(0.5, rngs=rngs), nnx.BatchNorm(2, rngs=rngs)])
        self.shared = self.parts[1]
        self.arrays = [ONE, {"a": TWO}]
        self.memory = nnx.State({"m": ONE})
        self.mode = "train"


@pytest.fixture
def traversals(monkeypatch):
    """The roots of every traversal from here on."""
    seen = []
    traverse = _plan.traverse

    def noted(roots, **options):
        seen.append(roots)
        return traverse(roots, **options)

    monkeypatch.setattr(_plan, "traverse", noted)
    return seen


def test_switching_between_training_and_evaluation_takes_no_traversal(traversals):
    net, other = Net(), Net()
    modes = nnx.jit(lambda net, other: (net.parts[0].deterministic, len(other.mode)))
    net.train()
    modes(net, other)
    before = len(traversals)
    for on in (True, False, True):
        net.eval() if on else net.train()
        other.mode = "x" * on
        assert modes(net, other) == (on, on)
        graphdef, state = nnx.split(net)
        again = nnx.merge(graphdef, state)
        assert again.parts[1].use_running_average is on and again.shared is again.parts[1]
    assert len(traversals) - before <= 1  # the first split of the net alone
    before, now = len(traversals), epoch.now
    net.eval() if on else net.train()  # set already
    assert (len(traversals), epoch.now) == (before, now)
    net.shared.scale.set_metadata(tag="x")
    assert nnx.split(net)[1]["parts"][1]["scale"].tag == "x"
    assert len(traversals) == before


def test_a_model_that_alternates_between_two_modes_has_two_plans():
    net = Net()
    plans = []
    for on in (True, False, True, False):
        net.eval() if on else net.train()
        nnx.split(net)
        plans.append(find_plan((net,)))
        assert plans[-1].graphdef is nnx.graphdef(net)
    assert plans[0] is not plans[1]
    assert plans[2] is plans[0] and plans[3] is plans[1]


def test_the_plan_of_another_mode_is_not_used_for_other_objects():
    net = Net()
    net.eval()
    nnx.split(net)
    net.train()
    nnx.split(net)
    old = net.shared
    net.shared = net.parts[1] = nnx.clone(old)  # the same structure, other Variables
    nnx.split(net)
    net.eval()
    nnx.update(net, jax.tree.map(lambda x: x + 1, nnx.state(net, nnx.Param)))
    assert (net.shared.scale[0], old.scale[0]) == (2.0, 1.0)
    assert nnx.state(net)["parts"][1]["scale"].get_value() is net.shared.scale.get_value()


# Replacing the content of an object ---------------------------------------------------------------


class Filled(nnx.Module):
    def __init__(self, value, times):
        self.scale = Count(jnp.float32(value))
        self.times = times
        self.inner = nnx.Dict(shift=nnx.Param(jnp.float32(value)))

    def __call__(self):
        return self.scale[...] * self.times + self.inner.shift[...]


class Negative(Filled):
    def __call__(self):
        return -super().__call__()


class WithState(Filled):
    """It restores itself as most classes do, around `__setattr__`."""

    def __getstate__(self):
        return dict(vars(self))

    def __setstate__(self, state):
        self.__dict__.update(state)


class Unchecked(nnx.Object):
    __init__, __call__ = Filled.__init__, Filled.__call__


class OtherCount(nnx.Variable): ...


REPLACED = {
    "setstate": lambda net, other: net.__setstate__(other.__getstate__()),
    "the state of a copy": lambda net, other: net.__setstate__(copy.copy(other).__getstate__()),
    "as unpickling does": lambda net, other: net.__setstate__(other.__reduce_ex__(2)[2]),
    "setstate without statuses": lambda net, other: net.__setstate__(dict(vars(other))),
    "setstate of a child": lambda net, other: net.inner.__setstate__(other.inner.__getstate__()),
    "setstate of a Variable": lambda net, other: net.scale.__setstate__(other.scale.__getstate__()),
    "init": lambda net, other: net.__init__(other.scale, 3),
    "init of a child": lambda net, other: net.inner.__init__(shift=other.inner.shift),
    "init of a Variable": lambda net, other: net.scale.__init__(other.scale[...], tag="new"),
    "dict": lambda net, other: setattr(net, "__dict__", dict(vars(other))),
    "class": lambda net, other: setattr(net, "__class__", OTHER_CLASS[type(net)]),
    "class of a Variable": lambda net, other: setattr(net.scale, "__class__", OtherCount),
    "setattr": lambda net, other: [setattr(net, name, value) for name, value in vars(other).items()],
    "delattr": lambda net, other: [delattr(net, "scale"), setattr(net, "scale", other.scale)],
    "items": lambda net, other: net.inner.update(other.inner),
    "update": lambda net, other: nnx.update(net, nnx.state(other)),
}  # fmt: skip
OTHER_CLASS = {Filled: Negative, WithState: WithState, Unchecked: Unchecked}
MAKERS = (WithState, Unchecked)
WAYS = [(way, make) for i, way in enumerate(REPLACED) for make in (Filled, MAKERS[i % 2])]


@pytest.mark.parametrize("way, make", WAYS)
def test_whatever_replaces_the_content_is_seen(way, make):
    """Each way to give an object another content leaves no plan of the former one valid."""
    net, other, former = make(1.0, 2), make(5.0, 3), []
    results = {
        "jit": nnx.jit(lambda net: net()),
        "split": lambda net: nnx.merge(*nnx.split(net))(),
        "clone": lambda net: nnx.clone(net)(),
        "vmap": lambda net: nnx.vmap(lambda net, x: net() * x, in_axes=(None, 0))(net, jnp.ones(1))[0],
    }  # fmt: skip
    kinds = nnx.jit(lambda net: former.append(type(net.scale)) or net.scale * 1)
    kinds(net)
    for result in results.values():
        assert float(result(net)) == 3.0
    kept = [net.scale, net.inner, net.inner.shift]  # they live on, as do the plans that have them
    REPLACED[way](net, other)
    expected = float(net())
    assert {name: float(result(net)) for name, result in results.items()} == dict.fromkeys(
        results, expected
    )
    kinds(net)
    assert former[-1] is type(net.scale)
    assert len(nnx.to_flat_state(nnx.state(net, type(net.scale)))) == 1
    del kept


@pytest.mark.parametrize("as_argument", [False, True])
def test_an_entry_that_a_state_of_variables_gets_is_seen(as_argument):
    holder, state = nnx.Dict(), nnx.State({"a": nnx.Param(ONE)})
    holder.state = state
    total = nnx.jit(lambda holder, state: sum(x.sum() for x in jax.tree.leaves(state)))
    read = lambda: float(total(holder, state if as_argument else holder.state))
    assert read() == read() == 2
    state["b"] = nnx.Param(TWO + 1)
    assert read() == 4
    holder.state["a"] = nnx.Param(3 * ONE)
    assert read() == 8
    state.__init__({"c": nnx.Param(3 * ONE)})
    assert read() == 6


class Scaled(nnx.Module):
    def __init__(self, scale, factor):
        self.scale, self.factor = scale, factor

    def __call__(self):
        return self.scale * self.factor


def test_an_object_at_the_address_of_one_that_is_gone_has_its_own_plan():
    """The plans of `first` are found by the ids of all arguments, and this one's Variable lives on."""
    first, scale, ids = nnx.Dict(count=Count(jnp.array(0))), nnx.Param(jnp.array(1.0)), set()
    read = nnx.jit(lambda first, scaled: scaled())
    for number in range(50):
        scaled = Scaled(scale, number % 3)
        ids.add(id(scaled))
        assert [float(read(first, scaled)) for _ in range(3)] == [number % 3] * 3
        del scaled
    assert len(ids) < 50  # some came again
