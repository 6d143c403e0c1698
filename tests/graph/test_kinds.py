"""What counts as data, classes of others as graph nodes, and walking with them."""

import collections
import copy
import dataclasses
import gc
import pickle
import types
import typing as tp
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite._state._flat import sorted_keys
from nnxlite.graph import _kinds
from tests.laws.graphs import Box, Pair

ONE = jnp.ones(2)


class Foreign:
    """A class that knows nothing of this library."""

    def __init__(self, **fields):
        self.fields = fields


nnx.graphlib.register_graph_node_type(
    Foreign,
    lambda node: (sorted(node.fields.items()), Foreign),
    lambda node, key, value: node.fields.__setitem__(key, value),
    lambda node, key: node.fields.pop(key),
    lambda metadata: metadata(),
    lambda node: node.fields.clear(),
    lambda node, pairs: node.fields.update(pairs),
)


@nnx.register_data_type
class Table:
    """Data, though it is nothing that JAX knows."""

    def __init__(self, rows):
        self.rows = rows


def test_what_is_data():
    for value in (ONE, np.ones(2), nnx.Param(1), nnx.Dict(), jax.new_ref(ONE), Table(1), Foreign()):
        assert nnx.is_data(value) and nnx.has_data(value)
    abstract = jax.ShapeDtypeStruct((2,), jnp.float32)  # a description, where it is not in data
    for value in ([ONE], (1, {"a": [nnx.Param(1)]}), Box(ONE), nnx.State({"a": ONE})):
        assert nnx.has_data(value) and not nnx.is_data(value)
    for value in (1, "a", None, len, object(), abstract, [abstract], [1], {"a": (1,)}, Box(1)):
        assert not nnx.has_data(value) and not nnx.is_data(value)


class Tables(nnx.Module):
    """Arrays without a Variable, in each kind of container."""

    def __init__(self):
        self.bare, self.pair, self.named = ONE, (ONE, ONE), Pair(ONE, "name")
        self.listed, self.by_name = nnx.data([ONE, 3]), nnx.data({"a": {"b": ONE}})
        self.box, self.weight = nnx.data(Box(ONE)), nnx.Param(ONE)

    def __call__(self, x):
        return self.listed[0] * x + self.by_name["a"]["b"] + self.box.content + self.weight


ABSTRACT = {
    "eval_shape": lambda: nnx.eval_shape(Tables),
    "as_abstract": lambda: nnx.as_abstract(Tables()),
    "abstract state": lambda: nnx.merge(*nnx.split(nnx.eval_shape(Tables))),
}


@pytest.mark.parametrize("how", ABSTRACT)
def test_an_abstract_array_counts_as_an_array_in_every_container(how):
    abstract, model = ABSTRACT[how](), Tables()
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(model))]
    assert len(paths) == 8
    assert [path for path, _ in nnx.to_flat_state(nnx.state(abstract))] == paths
    graphdef = nnx.graphdef(abstract)
    assert graphdef == nnx.graphdef(model)
    assert nnx.tree_equal(nnx.merge(graphdef, nnx.state(model)), model)
    compiled = nnx.jit(lambda m, x: m(x)).lower(abstract, abstract.bare).compile()
    assert compiled(model, ONE).tolist() == [4, 4]
    assert nnx.tabulate(abstract, abstract.bare) == nnx.tabulate(model, ONE)
    nnx.update(abstract, nnx.state(model))
    assert abstract(ONE).tolist() == [4, 4]


def test_what_is_a_node():
    is_node, is_graph_node = nnx.graphlib.is_node, nnx.graphlib.is_graph_node
    is_leaf = nnx.graphlib.is_node_leaf
    for value in (nnx.Dict(), Foreign(), [1], (1,), {}, nnx.State({}), Box(1), None):
        assert is_node(value) and not is_leaf(value)
    for value in (nnx.Dict(), Foreign(), nnx.Param(1)):
        assert is_graph_node(value)
    for value in ([1], ONE, 3, None, nnx.State({})):
        assert not is_graph_node(value)
    for value in (nnx.Param(1), ONE, np.ones(1), jax.new_ref(ONE)):
        assert is_leaf(value)


def model():
    foreign = Foreign(weight=nnx.Param(ONE), size=3, array=ONE, sizes=[1, 2])
    root = nnx.Dict(a=foreign, b=[foreign])
    foreign.fields["up"] = root
    return root, foreign


def test_foreign_nodes_are_shared_rebuilt_and_part_of_cycles():
    root, foreign = model()
    for _ in range(3):
        graphdef, state = nnx.split(root)
        assert graphdef.paths == (("a", "array"), ("a", "weight"))
        back = nnx.merge(graphdef, state)
        assert type(back.a) is Foreign and back.a is not foreign
        assert back.b[0] is back.a
        assert back.a.fields["up"] is back
        assert back.a.fields["size"] == 3 and back.a.fields["sizes"] == [1, 2]
    assert nnx.graphdef(back) == graphdef
    assert nnx.clone(root).a.fields["weight"] is not foreign.fields["weight"]
    foreign.fields["size"] = 4
    foreign.fields["more"] = nnx.Param(ONE)
    assert nnx.merge(*nnx.split(root)).a.fields["size"] == 4
    assert "more" in nnx.state(root)["a"]


def test_update_and_pop_reach_into_foreign_nodes_and_lists():
    root, foreign = model()
    weight = foreign.fields["weight"]
    nnx.update(root, {"a": {"weight": 2 * ONE, "array": 3 * ONE, "new": nnx.Param(ONE)}})
    assert foreign.fields["weight"] is weight
    assert weight[...].tolist() == [2, 2]
    assert foreign.fields["array"].tolist() == [3, 3]
    assert isinstance(foreign.fields["new"], nnx.Param)
    with pytest.raises(ValueError, match=r"path 'a.size' of Dict is static"):
        nnx.update(root, {"a": {"size": ONE}})
    assert list(nnx.pop(root, nnx.Param)["a"]) == ["new", "weight"]
    assert sorted(foreign.fields) == ["array", "size", "sizes", "up"]
    items = [nnx.Param(ONE), stat := nnx.BatchStat(ONE)]
    assert list(nnx.pop(nnx.Dict(a=items, b=items), nnx.Param)) == ["a"] and items == [stat]


def test_walks_pass_through_foreign_nodes():
    root, foreign = model()
    del foreign.fields["up"]
    paths = [".".join(map(str, path)) for path, _ in nnx.iter_graph(root)]
    assert paths == "a.array a.size a.sizes.0 a.sizes.1 a.sizes a.weight a b".split() + [""]
    assert nnx.find_duplicates(root) == [[("a",), ("b", 0)]]
    assert [name for name, _ in nnx.iter_children(root)] == ["a"]
    doubled = nnx.recursive_map(lambda path, x: 2 * x if isinstance(x, int) else x, root)
    assert doubled.a.fields["size"] == 6 and doubled.a.fields["sizes"] == [2, 4]
    assert doubled.b[0] is doubled.a and doubled.a is not foreign
    assert foreign.fields["size"] == 3


def test_what_recursive_map_gives_away_is_alive_to_the_end():
    given = []

    def replace(path, x):
        given.append(weakref.ref(x))
        assert all(reference() is not None for reference in given)
        return nnx.List() if type(x) is nnx.Dict else x

    root = nnx.List([nnx.Dict(a=nnx.Dict()) for _ in range(2)])
    assert len(nnx.recursive_map(replace, root)) == 2 and len(given) == 5


def test_a_registered_data_type_is_a_leaf():
    table = Table([1])
    holder = nnx.Dict(table=table, items=[table, ONE], size=3)
    for _ in range(2):
        assert nnx.state(holder)["table"] is table
        assert nnx.state(holder)["items"][0] is table
    nnx.update(holder, {"table": Table([2])})
    assert holder.table.rows == [2]
    holder["items"][0] = Table([3])
    assert nnx.state(holder)["items"][0].rows == [3]


def test_other_containers_of_python_are_flattened_as_jax_does():
    ordered = collections.OrderedDict(b=ONE, a=nnx.Param(ONE))
    default = collections.defaultdict(list, {"y": [ONE]})
    holder = nnx.Dict(ordered=ordered, default=default)
    for _ in range(3):
        back = nnx.merge(*nnx.split(holder))
        assert type(back.ordered) is collections.OrderedDict
        assert list(back.ordered) == ["b", "a"] and back.ordered["a"] is ordered["a"]
        assert type(back.default) is collections.defaultdict
        assert back.default.default_factory is list
    default["z"].append(ONE)
    ordered.move_to_end("b")
    back = nnx.merge(*nnx.split(holder))
    assert list(back.default) == ["y", "z"] and list(back.ordered) == ["a", "b"]


def test_array_references_are_shared():
    ref = jax.new_ref(ONE)
    holder = nnx.Dict(a=ref, b=[ref], c=nnx.Variable(ref))
    for _ in range(2):
        graphdef, state = nnx.split(holder)
        assert graphdef.paths == (("a",), ("c",))
        assert state["a"] is ref
        back = nnx.merge(graphdef, state)
        assert back.a is ref and back.b[0] is ref
    nnx.update(holder, {"a": 3 * ONE})
    assert holder.a is ref and ref[...].tolist() == [3, 3]
    assert nnx.find_duplicates(holder) == [[("a",), ("b", 0)]]
    v, raw, w = copy.deepcopy([holder.c, ref, nnx.Variable(ref)])
    assert v.get_raw_value() is raw is w.get_raw_value() is not ref


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Backwards:
    b: tp.Any
    a: tp.Any
    _fields = ()  # as named tuples have


class BackwardsTuple(tp.NamedTuple):
    b: tp.Any
    a: tp.Any


@pytest.mark.parametrize(
    "make",
    [Backwards, BackwardsTuple, lambda b, a: collections.OrderedDict(b=b, a=a)],
    ids=["dataclass", "namedtuple", "ordered-dict"],
)
def test_children_of_pytree_nodes_are_sorted_and_go_back_to_their_places(make):
    node = make(nnx.Param(1.0), nnx.Param(2.0))
    assert list(nnx.state(node)) == ["a", "b"]
    assert [path for path, _ in nnx.iter_graph(node)] == [("a",), ("b",), ()]
    holder = nnx.Dict(node=node, raw=make(jnp.ones(()), jnp.zeros(())))
    graphdef, state = pickle.loads(pickle.dumps(nnx.split(holder)))
    for _ in range(2):
        back = nnx.merge(graphdef, state)
        assert type(back.node) is type(node)
        assert [float(x) for x in jax.tree.leaves(back)] == [1.0, 2.0, 1.0, 0.0]
        graphdef, state = nnx.split(back)

    @nnx.jit
    def step(holder):
        jax.tree.leaves(holder.node, is_leaf=lambda x: isinstance(x, nnx.Param))[0][...] += 2
        holder.raw = jax.tree.map(lambda x: x + 1, holder.raw)

    step(holder)
    step(holder)
    assert [float(x) for x in jax.tree.leaves(holder)] == [5.0, 2.0, 3.0, 2.0]


@jax.tree_util.register_pytree_node_class
class Bag:
    """A pytree node whose child is a new list each time, and that has a static part."""

    def __init__(self, items, notes=None):
        self.items, self.notes = items, notes

    def tree_flatten(self):
        return [list(self.items)], self.notes

    @classmethod
    def tree_unflatten(cls, notes, children):
        return cls(children[0], notes)


def test_containers_that_are_made_anew_while_they_are_searched():
    """The next one soon has the id of a list that `flatten` has made."""

    class Shelf(nnx.Module):
        def __init__(self, at):
            self.bags = [Bag([jnp.ones(1)] if i == at else ["text"]) for i in range(21)]

    assert [len(jax.tree.leaves(nnx.state(Shelf(at)))) for at in range(21)] == [1] * 21


@pytest.mark.parametrize("notes", [[1], types.SimpleNamespace(a=1), np.arange(2)], ids=repr)
def test_a_pytree_node_with_a_static_part_that_has_no_hash(notes):
    holder = nnx.Dict(held=Bag([ONE], notes))
    for _ in range(3):
        assert nnx.merge(*nnx.split(holder)).held.notes is notes


def test_keys_of_mixed_types_have_one_order_in_states_and_definitions():
    class A:
        def __init__(self, name):
            self.name = name

        def __repr__(self):
            return self.name

    a, b = type("A", (A,), {})("1"), type("A.B", (A,), {})("0")
    for keys in (["x", a, b], [b, a, "x"]):
        graphdef, _ = nnx.split({key: jnp.ones(1) for key in keys})
        assert [path[-1] for path in graphdef.paths] == sorted_keys(keys) == ["x", a, b]


def test_the_kinds_of_classes_are_bounded(monkeypatch):
    monkeypatch.setattr(_kinds, "MOST_KINDS", len(_kinds.kind_by_type) + 3)

    def new_class():
        pair = collections.namedtuple("pair", "a b")
        model = nnx.Dict(pair=nnx.data(pair(nnx.Param(1.0), [nnx.Param(2.0)])))
        assert len(nnx.to_flat_state(nnx.state(model))) == 2
        return weakref.ref(pair)

    first, *_ = [new_class() for _ in range(6)]
    gc.collect()
    assert first() is None
    assert len(_kinds.kind_by_type) <= _kinds.MOST_KINDS
    assert _kinds.kind_of([]) == _kinds.Kind.LIST and _kinds.kind_of(ONE) == _kinds.Kind.ARRAY
