"""Laws L1 to L4 of the functional API, on random graphs, against the slow model."""

from __future__ import annotations

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxlite as nnx
from tests.laws import model
from tests.laws.graphs import Count, Node, graphs, roots
from tests.laws.model import same_pairs


def flat(state) -> list:
    """The (path, leaf) pairs of a nested State, sorted as leaves are."""
    return [(path, leaf) for path, leaf in nnx.to_flat_state(state)]


@given(roots)
def test_L1_L3_every_function_sees_what_the_model_sees(root):
    """`merge(*split(x))` is isomorphic to x, `update(x, state(x))` changes nothing, and so on."""
    for _ in range(2):  # cold, then from a plan
        model.check(root)
    graphdef = nnx.graphdef(root)
    assert list(graphdef.paths) == [path for path, _ in model.leaves(root)]
    assert graphdef.num_leaves == len(graphdef.paths)


@given(roots)
def test_L1_split_of_merge_gives_the_same_definition_and_state(root):
    graphdef, state = nnx.split(root)
    again, state_again = nnx.split(nnx.merge(graphdef, state))
    assert again == graphdef
    assert same_pairs(flat(state_again), flat(state))


@given(roots)
def test_L1_merge_of_pure_values_restores_kinds_and_metadata(root):
    graphdef, state = nnx.split(root)
    pure = nnx.to_pure_dict(state)
    assert model.canonical(nnx.merge(graphdef, pure)) == model.canonical(root)


@given(roots)
def test_L1_split_by_filters_and_merge_in_any_order(root):
    graphdef, params, counts, rest = nnx.split(root, nnx.Param, (Count, nnx.BatchStat), ...)
    assert all(isinstance(leaf, nnx.Param) for _, leaf in flat(params))
    assert all(isinstance(leaf, (Count, nnx.BatchStat)) for _, leaf in flat(counts))
    for states in [(params, counts, rest), (rest, counts, params)]:
        assert model.canonical(nnx.merge(graphdef, *states)) == model.canonical(root)


@given(roots)
def test_L1_flatten_and_unflatten_are_inverse(root):
    graphdef, pairs = nnx.flatten(root)
    assert same_pairs(list(pairs), model.leaves(root))
    assert model.canonical(nnx.unflatten(graphdef, pairs)) == model.canonical(root)
    again, values = nnx.flatten(root, with_paths=False)
    assert again == graphdef
    assert model.canonical(nnx.unflatten(graphdef, values)) == model.canonical(root)


@given(roots)
def test_L1_an_abstract_graph_has_the_structure_of_the_concrete_one(root):
    graphdef, state = nnx.split(root)
    again, shapes = nnx.split(nnx.as_abstract(root))
    assert again == graphdef
    assert [path for path, _ in flat(shapes)] == [path for path, _ in flat(state)]
    assert model.canonical(nnx.merge(again, state)) == model.canonical(root)


@given(roots)
def test_L1_clone_shares_nothing_but_values(root):
    copy = nnx.clone(root)
    assert model.canonical(copy) == model.canonical(root)
    mine, theirs = ({id(x) for x in model.owners(r)} for r in (root, copy))
    assert not mine & theirs
    ours = {id(v) for _, v in model.leaves(root) if model.is_variable(v)}
    assert not ours & {id(v) for _, v in model.leaves(copy)}
    kept = nnx.clone(root, variables=False)
    assert same_pairs(model.leaves(kept), model.leaves(root))


@given(roots)
def test_L1_unpacked_graph_state_merges(root):
    assert model.canonical(nnx.merge(nnx.unpack(root))) == model.canonical(root)
    parts = nnx.unpack(root, nnx.Param, ...)
    assert model.canonical(nnx.merge(*parts)) == model.canonical(root)
    assert isinstance(nnx.unpack(root, ...), nnx.GraphState)


@given(roots, st.sampled_from([nnx.Param, Count, jax.Array, nnx.Variable, "x"]))
def test_filtered_state_gives_the_leaves_that_match(root, wanted):
    matches = nnx.filterlib.to_predicate(wanted)
    chosen = [(p, x) for p, x in model.leaves(root) if matches(p, x)]
    others = [(p, x) for p, x in model.leaves(root) if not matches(p, x)]
    for _ in range(2):
        found, rest = nnx.state(root, wanted, ...)
        assert same_pairs(flat(found), chosen)
        assert same_pairs(flat(rest), others)


@given(roots)
def test_map_sees_every_leaf_once_and_keeps_the_structure(root):
    seen = []
    new = nnx.map(lambda path, leaf: seen.append((path, leaf)) or leaf, root)
    assert same_pairs(seen, model.leaves(root))
    assert model.canonical(new) == model.canonical(root)


@given(roots)
def test_recursive_map_of_the_identity_is_a_copy(root):
    new = nnx.recursive_map(lambda path, x: x, root)
    assert new is not root
    assert model.canonical(new) == model.canonical(root)


@given(roots, st.randoms(use_true_random=False))
def test_L2_leaf_order_does_not_depend_on_insertion_history(root, rng):
    def shuffled(items):
        items = list(items)
        rng.shuffle(items)
        return items

    other = model.copied(root, shuffled)
    assert model.canonical(other) == model.canonical(root)
    assert nnx.graphdef(other).paths == nnx.graphdef(root).paths
    values, theirs = (nnx.flatten(r, with_paths=False)[1] for r in (root, other))
    assert all(x is y for x, y in zip(values, theirs, strict=True))


@given(roots)
def test_L2_states_flatten_in_leaf_order(root):
    state = nnx.state(root)
    variable = lambda x: isinstance(x, nnx.Variable)
    found = jax.tree.leaves(state, is_leaf=variable)
    assert all(x is y for x, (_, y) in zip(found, model.leaves(root), strict=True))


@given(roots)
def test_L3_update_with_the_own_state_changes_nothing(root):
    before = model.canonical(root)
    identities = [id(x) for x in model.owners(root)]
    for state in (nnx.state(root), nnx.to_pure_dict(nnx.state(root))):
        nnx.update(root, state)
        assert model.canonical(root) == before
        assert [id(x) for x in model.owners(root)] == identities


@given(roots)
def test_L3_update_writes_every_value_and_keeps_every_variable(root):
    pairs = model.leaves(root)
    state = nnx.state(nnx.clone(root))
    fresh = lambda x: x + 0 if isinstance(x, jax.Array) and x.dtype == "float32" else x
    new = jax.tree.map(fresh, state)
    nnx.update(root, new)
    for (path, leaf), (path_after, after) in zip(pairs, model.leaves(root), strict=True):
        assert path == path_after
        if model.is_variable(leaf):
            assert after is leaf
    expected = [x.get_raw_value() if model.is_variable(x) else x for _, x in flat(new)]
    found = [x.get_raw_value() if model.is_variable(x) else x for _, x in model.leaves(root)]
    assert all(a is b for a, b in zip(expected, found, strict=True))


@given(roots)
def test_L3_a_partial_state_is_a_valid_update(root):
    before = model.canonical(root)
    nnx.update(root, nnx.state(root, nnx.Param))
    nnx.update(root, {}, nnx.State({}))
    assert model.canonical(root) == before


@given(graphs())
def test_L4_sharing_between_arguments_of_one_call_survives_the_round_trip(made):
    root, pool = made
    shared = pool.known[-1]
    both = [root, shared, {"again": root}]
    back = nnx.merge(*nnx.split(both))
    assert model.canonical(back) == model.canonical(both)
    assert back[2]["again"] is back[0]


@given(roots)
def test_one_numbering_for_several_graphs(root):
    index = nnx.graphlib.RefMap()
    first, leaves = nnx.flatten(root, ref_index=index)
    second, more = nnx.flatten([root, Node()], ref_index=index)
    made = {}
    a = nnx.unflatten(first, leaves, index_ref=made)
    b = nnx.unflatten(second, more, index_ref=made)
    assert b[0] is a
    assert len(made) == len(index)


@given(roots)
def test_pop_takes_what_the_model_takes(root):
    inside_tuple = any(
        isinstance(child, nnx.Param) and (isinstance(x, tuple) or model.is_foreign(x))
        for x in model.owners(root)
        for _, child, _ in model.children(x)
    )
    other = model.copied(root)
    if inside_tuple:
        before = model.canonical(root)
        with pytest.raises(ValueError, match="cannot lose an element"):
            nnx.pop(root, nnx.Param)
        assert model.canonical(root) == before
        return
    expected = [(path, leaf) for path, leaf in model.leaves(root) if isinstance(leaf, nnx.Param)]
    nnx.split(root)
    popped = nnx.pop(root, nnx.Param)
    model.without(other, nnx.Param)
    assert same_pairs(flat(popped), sorted_pairs(expected))
    assert model.canonical(root) == model.canonical(other)
    assert nnx.state(root, nnx.Param) == {}


def sorted_pairs(pairs):
    return sorted(pairs, key=lambda pair: [(isinstance(k, str), k) for k in pair[0]])


def test_the_strategy_meets_sharing_cycles_and_containers():
    """What the laws say is worth no more than the graphs they are tried on."""
    seen = {"shared": 0, "cycle": 0, "list": 0, "State": 0, "Pair": 0, "Box": 0, "raw": 0}

    @settings(derandomize=True, database=None, max_examples=150)
    @given(roots)
    def look(root):
        duplicates = model.duplicates(root)
        seen["shared"] += bool(duplicates)
        seen["cycle"] += any(
            path[: len(found[0])] == found[0] for found in duplicates for path in found[1:]
        )
        for x in model.owners(root):
            if type(x).__name__ in seen:
                seen[type(x).__name__] += 1
        seen["raw"] += any(model.is_array(x) for _, x in model.leaves(root))

    look()
    assert all(seen.values()), seen
