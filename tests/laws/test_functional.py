"""Laws L1 to L4 and L8 of the functional API, on random graphs and edits, against the slow model."""

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxlite as nnx
from tests.laws import model
from tests.laws.edits import EDIT, REAL
from tests.laws.graphs import Count, Node, graphs, roots
from tests.laws.model import references, same_pairs
from tests.laws.programs import run, steps


def flat(state):
    """The (path, leaf) pairs of a nested State, sorted as leaves are."""
    return [(path, leaf) for path, leaf in nnx.to_flat_state(state)]


@given(roots)
def test_L1_L3_every_function_sees_what_the_model_sees(root):
    """`merge(*split(x))` is isomorphic to x, `update(x, state(x))` changes nothing, and so on."""
    for _ in range(2):  # cold, then from a plan
        model.check(root)
    graphdef, state = nnx.split(root)
    assert list(graphdef.paths) == [path for path, _ in model.leaves(root)]
    assert graphdef.num_leaves == len(graphdef.paths)
    found = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    assert all(x is y for x, (_, y) in zip(found, model.leaves(root), strict=True))
    again, state_again = nnx.split(nnx.merge(graphdef, state))
    assert again == graphdef
    assert same_pairs(flat(state_again), flat(state))


def merged_in_any_order(root):
    graphdef, params, counts, rest = nnx.split(root, nnx.Param, (Count, nnx.BatchStat), ...)
    assert all(isinstance(leaf, nnx.Param) for _, leaf in flat(params))
    assert all(isinstance(leaf, (Count, nnx.BatchStat)) for _, leaf in flat(counts))
    return nnx.merge(graphdef, rest, counts, params)


def mapped(root):
    seen = []
    new = nnx.map(lambda path, leaf: seen.append((path, leaf)) or leaf, root)
    assert same_pairs(seen, model.leaves(root))
    return new


def from_abstract(root):
    graphdef, shapes = nnx.split(nnx.as_abstract(root))
    assert [path for path, _ in flat(shapes)] == [path for path, _ in model.leaves(root)]
    return nnx.merge(graphdef, nnx.state(root))


ROUND_TRIPS = {
    "pure values": lambda root: nnx.merge(nnx.graphdef(root), nnx.to_pure_dict(nnx.state(root))),
    "filters": merged_in_any_order,
    "flatten": lambda root: nnx.unflatten(*nnx.flatten(root)),
    "values": lambda root: nnx.unflatten(*nnx.flatten(root, with_paths=False)),
    "abstract": from_abstract,
    "unpack": lambda root: nnx.merge(nnx.unpack(root)),
    "unpack by filters": lambda root: nnx.merge(*nnx.unpack(root, nnx.Param, ...)),
    "the same Variables": lambda root: nnx.clone(root, variables=False),
    "map": mapped,
    "recursive_map": lambda root: nnx.recursive_map(lambda path, x: x, root),
    "clone": nnx.clone,
}


@given(roots)
def test_L1_whatever_rebuilds_a_graph_gives_an_isomorphic_one(root):
    for name, rebuilt in ROUND_TRIPS.items():
        new = rebuilt(root)
        assert model.canonical(new) == model.canonical(root), name
        assert nnx.graphdef(new) == nnx.graphdef(root), name
        assert new is not root
    assert not {id(x) for x in references(new)} & {id(x) for x in references(root)}  # the clone


@given(roots, st.sampled_from([nnx.Param, Count, jax.Array, nnx.Variable, "x"]))
def test_filtered_state_gives_the_leaves_that_match(root, wanted):
    matches = nnx.filterlib.to_predicate(wanted)
    chosen = [(p, x) for p, x in model.leaves(root) if matches(p, x)]
    others = [(p, x) for p, x in model.leaves(root) if not matches(p, x)]
    for _ in range(2):
        found, rest = nnx.state(root, wanted, ...)
        assert same_pairs(flat(found), chosen)
        assert same_pairs(flat(rest), others)


@given(roots, st.randoms(use_true_random=False))
def test_L2_leaf_order_does_not_depend_on_insertion_history(root, rng):
    other = model.copied(root, lambda items: rng.sample(items, len(items)))
    assert model.canonical(other) == model.canonical(root)
    assert nnx.graphdef(other).paths == nnx.graphdef(root).paths
    values, theirs = (nnx.flatten(r, with_paths=False)[1] for r in (root, other))
    assert all(x is y for x, y in zip(values, theirs, strict=True))


@given(roots)
def test_L3_update_writes_every_value_and_keeps_every_object_and_variable(root):
    pairs, refs, before = model.leaves(root), references(root), model.canonical(root)
    nnx.update(root, nnx.to_pure_dict(nnx.state(root)))
    nnx.update(root, nnx.state(root, nnx.Param))  # a partial state is a valid update
    nnx.update(root, {}, nnx.State({}))
    assert model.canonical(root) == before
    fresh = lambda x: x + 0 if isinstance(x, jax.Array) and x.dtype == "float32" else x
    new = jax.tree.map(fresh, nnx.state(nnx.clone(root)))
    nnx.update(root, new)
    assert [path for path, _ in model.leaves(root)] == [path for path, _ in pairs]
    assert all(x is y for x, y in zip(refs, references(root), strict=True))
    expected, found = (
        [x.get_raw_value() if model.is_variable(x) else x for _, x in leaves]
        for leaves in (flat(new), model.leaves(root))
    )
    assert all(a is b for a, b in zip(expected, found, strict=True))


@given(graphs())
def test_L4_sharing_between_arguments_of_one_call_survives_the_round_trip(made):
    root, pool = made
    both = [root, pool.known[-1], {"again": root}]
    back = nnx.merge(*nnx.split(both))
    assert model.canonical(back) == model.canonical(both)
    assert back[2]["again"] is back[0]

    index = nnx.graphlib.RefMap()  # one numbering for several graphs
    first, leaves = nnx.flatten(root, ref_index=index)
    second, more = nnx.flatten([root, Node()], ref_index=index)
    rebuilt = {}
    a = nnx.unflatten(first, leaves, index_ref=rebuilt)
    assert nnx.unflatten(second, more, index_ref=rebuilt)[0] is a
    assert len(rebuilt) == len(index)


@given(roots)
def test_pop_takes_what_the_model_takes(root):
    inside_tuple = any(
        isinstance(child, nnx.Param) and (isinstance(x, tuple) or model.is_foreign(x))
        for x in model.owners(root)
        for _, child, _ in model.children(x)
    )
    other, before = model.copied(root), model.canonical(root)
    if inside_tuple:
        with pytest.raises(ValueError, match="cannot lose an element"):
            nnx.pop(root, nnx.Param)
        assert model.canonical(root) == before
        return
    expected = [(path, leaf) for path, leaf in model.leaves(root) if isinstance(leaf, nnx.Param)]
    nnx.split(root)
    popped = nnx.pop(root, nnx.Param)
    model.without(other, nnx.Param)
    in_order = lambda pair: [(isinstance(key, str), key) for key in pair[0]]
    assert same_pairs(flat(popped), sorted(expected, key=in_order))
    assert model.canonical(root) == model.canonical(other)
    assert nnx.state(root, nnx.Param) == {}


@settings(max_examples=100)
@given(graphs(depth=2), st.lists(steps(EDIT), min_size=1, max_size=5))
@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types")
def test_L8_every_function_sees_every_edit_and_a_refused_one_changes_nothing(made, program):
    """Also from a plan that was made before the edit."""
    root, _ = made
    model.check(root)
    for step in program:
        before = model.canonical(root)
        if run(REAL, [step], (root,)):
            assert model.canonical(root) == before
        try:
            nnx.split(root)
        except ValueError as error:  # data was put into a static container, or into itself
            assert "static attribute" in str(error) or "contains itself" in str(error)
            return
        model.check(root)


def test_the_strategy_meets_sharing_cycles_and_containers():
    """What the laws say is worth no more than the graphs they are tried on."""
    seen = dict.fromkeys(["shared", "cycle", "raw", "list", "State", "Pair", "Box"], 0)

    @settings(derandomize=True, database=None, max_examples=100)
    @given(roots)
    def look(root):
        duplicates = model.duplicates(root)
        seen["shared"] += bool(duplicates)
        seen["cycle"] += any(
            path[: len(found[0])] == found[0] for found in duplicates for path in found[1:]
        )
        seen["raw"] += any(model.is_array(x) for _, x in model.leaves(root))
        for x in model.owners(root):
            if type(x).__name__ in seen:
                seen[type(x).__name__] += 1

    look()
    assert all(seen.values()), seen
