"""Nested mappings to flat ones and back."""

from __future__ import annotations

import pickle

import pytest

import nnxlite as nnx

tr = nnx.traversals


def test_a_later_entry_counts():
    assert tr.unflatten_mapping([(("a", "b"), 1), (("a",), 2)]) == {"a": 2}


def test_a_mapping_that_came_as_a_leaf_is_not_edited():
    leaf = {"x": {"y": 1}}
    flat = {("a",): leaf, ("a", "x", "z"): 2}
    assert tr.unflatten_mapping(flat) == {"a": {"x": {"y": 1, "z": 2}}}
    assert leaf == {"x": {"y": 1}}


def test_depth_is_not_bounded_by_the_recursion_limit():
    tree: dict = {"leaf": 1}
    for _ in range(10_000):
        tree = {"a": tree}
    [(path, leaf)] = tr.flatten_mapping(tree).items()
    assert len(path) == 10_001
    assert leaf == 1
    back = tr.unflatten_mapping({path: leaf})
    for _ in range(10_000):
        back = back["a"]
    assert back == {"leaf": 1}


def test_the_empty_node_is_one_object():
    assert repr(tr.empty_node) == "empty_node"
    assert pickle.loads(pickle.dumps(tr.empty_node)) is tr.empty_node


@pytest.mark.parametrize("flatten", [tr.flatten_mapping, tr.flatten_to_sequence])
def test_flatten_refuses_what_is_no_mapping(flatten):
    with pytest.raises(TypeError, match=f"{flatten.__name__} needs a mapping, got list"):
        flatten([1])


def test_flatten_refuses_keys_it_cannot_join():
    with pytest.raises(TypeError, match=r"Cannot join the path \(1, 'a'\) by sep='/'.*type int"):
        tr.flatten_mapping({1: {"a": 2}}, sep="/")


@pytest.mark.parametrize(
    ("xs", "sep", "error", "message"),
    [
        (3, None, TypeError, "unflatten_mapping needs a mapping or an iterable .* got int"),
        ({"ab": 1}, None, TypeError, "The path 'ab' is a string: give its separator as sep="),
        ({("a",): 1}, "/", TypeError, "With sep='/' a path must be a string, got"),
        ({(): 1}, None, ValueError, "An empty path is not possible"),
        (
            {("a",): 1, ("a", "b"): 2},
            None,
            TypeError,
            r"'a.b' leads through the key 'a', .* leaf .int.",
        ),
    ],
)
def test_unflatten_refuses(xs, sep, error, message):
    with pytest.raises(error, match=message):
        tr.unflatten_mapping(xs, sep=sep)
