"""to_tree, from_tree, NodeStates, prefix; the namespace compat."""

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from nnxlite.transforms._trees import is_tree_node
from tests.transforms.models import Counted, Foo, Tied


def test_there_and_back_with_sharing_and_cycles():
    m = Tied()
    tree = nnx.to_tree((m, 3, [m, {"v": m.a}], jnp.ones(1)))
    assert is_tree_node(tree[0]) and tree[1] == 3
    assert len(jax.tree.leaves(tree)) == 3  # the one parameter, 3, the array
    a, three, (b, rest), ones = nnx.from_tree(tree)
    assert a is b and a is not m and rest["v"] is a.a and a.child.owner is a and three == 3
    assert a.a.value.tolist() == m.a.value.tolist()


def test_a_state_is_opened_and_the_leaves_may_be_chosen():
    m = Foo()
    tree = nnx.to_tree((nnx.state(m), m.x))
    assert isinstance(tree[0], nnx.State) and is_tree_node(tree[0]["x"])
    state, x = nnx.from_tree(tree)
    assert state["x"] is x
    assert is_tree_node(nnx.from_tree(tree, is_node_leaf=lambda x: False)[1])


def test_with_an_update_context_the_objects_come_back():
    m = Foo()
    with nnx.update_context("tree"):
        inside = nnx.from_tree(nnx.to_tree((m, 1), ctxtag="tree"), ctxtag="tree", is_inner=True)
        inside[0].size = 3
        out = nnx.from_tree(nnx.to_tree(inside, ctxtag="tree"), ctxtag="tree", is_inner=False)
    assert out[0] is m and m.size == 3


def test_split_and_merge_functions_see_path_prefix_and_node():
    m = Counted()
    seen = []

    def split_fn(ctx, path, prefix, x):
        seen.append((jax.tree_util.keystr(path), prefix, type(x).__name__))
        if isinstance(prefix, nnx.StateAxes):
            return nnx.NodeStates.from_split(*ctx.split(x, *prefix.filters), metadata=prefix.axes)
        return x

    axes = nnx.StateAxes({nnx.Param: 0, ...: None})
    tree = nnx.to_tree(({"m": m}, 2.0), prefix=(axes, 7), split_fn=split_fn)
    assert seen == [("[0]['m']", axes, "Counted")]
    assert [list(s) for s in tree[0]["m"].states] == [["w"], ["count"]]
    assert tree[0]["m"].metadata == (0, None)

    def merge_fn(ctx, path, prefix, leaf):
        seen.append((jax.tree_util.keystr(path), prefix, type(leaf).__name__))
        return ctx.merge(leaf.graphdef, *leaf.states) if is_tree_node(leaf) else leaf + 1

    back = nnx.from_tree(tree, prefix=(0, 1), merge_fn=merge_fn, map_non_graph_nodes=True)
    assert back[0]["m"].w.value.tolist() == [1.0, 2.0] and back[1] == 3.0
    assert seen[1:] == [("[0]['m']", 0, "NodeStates"), ("[1]", 1, "float")]
    everything = nnx.to_tree((m, 2.0), split_fn=lambda c, p, s, x: 1, map_non_graph_nodes=True)
    assert everything == (1, 1)


def test_node_states():
    m = Counted()
    one = nnx.NodeStates.from_split(*nnx.split(m))
    two = nnx.NodeStates.from_split(*nnx.split(m, nnx.Param, ...), metadata="x")
    assert sorted(one.state) == ["count", "w"] and one.graphdef == nnx.graphdef(m)
    assert two.metadata == "x" and two.replace(metadata=None).metadata is None
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(two)]
    assert paths == [".states[0]['w'].value", ".states[1]['count'].value"]
    axes = nnx.NodeStates.from_prefixes((0, None), metadata="x")
    stacked = two.replace(states=(jax.tree.map(lambda x: x[None], two.states[0]), two.states[1]))

    def f(node):
        return nnx.from_tree(node)(1.0)

    assert jax.vmap(f, in_axes=(axes,))(stacked).tolist() == [[4.0, 8.0]]


def net():
    return nnx.Dict(w=nnx.Param(jnp.arange(3.0)), m=nnx.Dict(c=nnx.BatchStat(2.0)))


def product(m):
    return m.w * m.m.c


def test_a_prefix_chooses_by_filter_wherever_prefixes_go():
    m = nnx.Dict(w=nnx.Param(jnp.ones((3, 2))), c=nnx.BatchStat(jnp.array(2.0)), a=jnp.arange(3.0))
    axes = nnx.prefix(m, {nnx.BatchStat: None, ...: 0})
    out = nnx.vmap(lambda m: m.w.sum() * m.c * m.a, in_axes=(axes,))(m)
    assert out.tolist() == [0.0, 4.0, 8.0]
    given = {"m": m, "k": jnp.ones(1)}
    tree = nnx.prefix(given, {nnx.PathContains("w"): 0, ...: None})
    assert tree["k"] is None
    out = nnx.vmap(lambda t: t["m"].w.sum() * t["m"].a.sum(), in_axes=(tree,))(given)
    assert out.tolist() == [6.0, 6.0, 6.0]
    axes = nnx.prefix(nnx.state(net()), {nnx.Param: 0, ...: None})
    f = nnx.vmap(lambda s: s["w"] * s["m"]["c"], in_axes=(axes,))
    assert f(nnx.state(net())).tolist() == [0.0, 2.0, 4.0]
    assert nnx.prefix(m.w, {nnx.Param: 5}) == 5


def test_a_prefix_of_shardings():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = (jax.NamedSharding(mesh, jax.P(*p)) for p in (("d",), ()))
    model = nnx.Dict(w=nnx.Param(jnp.ones(8)), c=nnx.BatchStat(jnp.ones(3)))
    placed = nnx.prefix(model, {nnx.Param: rows, ...: whole})
    nnx.jit(lambda m: m.w.set_value(m.w * 2), in_shardings=(placed,))(model)
    assert model.w.value.sharding == rows and model.w.value.tolist() == [2.0] * 8


def test_a_prefix_by_function_of_path_and_leaf():
    m = Tied()
    seen = {}
    choose = lambda path, x: seen.setdefault(path, type(x).__name__)
    found = nnx.prefix({"q": [m, m.a]}, choose)
    assert seen == {("q", 0, "a"): "Param"}
    assert jax.tree.leaves(found) == ["Param"] and jax.tree.leaves(found["q"][1]) == []
    seen.clear()
    nnx.prefix([nnx.Dict(a=m.a, b=m.a), m.a], choose, graph=False)
    assert set(seen) == {(0, "a"), (0, "b"), (1,)}


def test_the_first_place_of_what_is_shared_decides_its_prefix():
    m = nnx.Dict(a=nnx.Param(jnp.ones((2, 3))), m=nnx.Dict(w=nnx.Param(jnp.ones(2))))
    m.b = m.a
    trees = [m, m.m, m.b, m]
    axes = nnx.prefix(trees, lambda path, x: 0 if path[0] == 0 and path[-1] != "b" else None)
    assert jax.tree.leaves(axes) == [0, 0]
    for prefix in (axes, jax.tree.map(lambda axis: axis, axes)):
        run = nnx.vmap(lambda t: t[1].w * t[2].sum() * t[3].b.sum(), in_axes=(prefix,))
        assert run(trees).tolist() == [9.0, 9.0]
    axes = nnx.prefix([m.b, m], {...: 0})
    assert axes[0] == 0 and jax.tree.leaves(axes[1]) == [0]


class NotATree(nnx.Object):
    def __init__(self):
        self.x = nnx.Param(jnp.ones(2))


def test_a_prefix_of_a_tree_holds_settings_in_place_of_leaves():
    m = net()
    axes = nnx.prefix((m, {"m": m}), {nnx.Param: 0, ...: None}, graph=False)
    assert type(axes[0]) is nnx.Dict and axes[1]["m"].w == 0 and axes[0].m.c is None
    assert jax.vmap(product, in_axes=(axes[0],))(m).tolist() == [0.0, 2.0, 4.0]
    state = nnx.prefix(nnx.state(m), {nnx.Param: 0, ...: None})
    assert dict(nnx.to_flat_state(state)) == {("m", "c"): None, ("w",): 0}
    assert dict(nnx.prefix(nnx.Dict(m=NotATree()), {...: 0}, graph=False).m) == {"x": 0}


@pytest.mark.parametrize("graph", [True, False])
def test_an_object_of_settings_is_a_prefix_wherever_the_part_is(graph):
    m = net()
    axes = nnx.prefix(m, {...: None}, graph=False)
    axes.w = nnx.Param(0)  # as jax.tree.map over a module gives it
    assert nnx.vmap(product, in_axes=(axes,), graph=graph)(m).tolist() == [0.0, 2.0, 4.0]
    axes.w, axes.m = None, 0  # a setting for all that is below a part
    m.w.value, m.m.c.value = jnp.array(2.0), jnp.arange(2.0)
    assert nnx.vmap(product, in_axes=(axes,), graph=graph)(m).tolist() == [0, 2]


def compat_names():
    return [n for n, f in vars(nnx.compat).items() if isinstance(f, functools.partial)]


@pytest.mark.parametrize("name", compat_names())
def test_compat_names_fix_the_modes_of_the_public_functions(name):
    home = nnx.rnglib if name == "backup_keys" else nnx
    fixed, public = getattr(nnx.compat, name), getattr(home, name)
    assert fixed.func is public
    modes = {"graph", "graph_updates"} & set(inspect.signature(public).parameters)
    assert fixed.keywords == dict.fromkeys(modes, True)


def test_keys_are_backed_up_without_counts():
    rngs = nnx.Rngs(0, params=1)
    backups = nnx.compat.backup_keys(rngs)
    before = [key for _, key in backups]
    rngs.params()
    nnx.reseed(rngs, default=5, params=6)
    rngs.params(), rngs.params()
    nnx.restore_rngs(backups)
    assert [bool(s.key.value == key) for (s, _), key in zip(backups, before)] == [True, True]
    assert int(rngs.params.count.value) == 2


def test_numbers_in_containers_are_leaves_after_a_call_that_took_them_as_static():
    seen = []

    def look(m):
        seen.append(isinstance(m.sizes[0], int))

    m = nnx.Dict(sizes=nnx.data([3, nnx.Param(jnp.ones(2))]))
    for options in ({}, {}, {"graph": False}, {"graph": False}):
        nnx.jit(look, **options)(m)
    assert seen == [True, False]
