"""Nested mappings to flat ones and back."""

from __future__ import annotations

import pickle

import nnxlite as nnx
from tests.messages import refused, rows

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


@rows("""
    tr.flatten_mapping([1])
        TypeError: flatten_mapping needs a mapping, got list
    tr.flatten_to_sequence([1])
        TypeError: flatten_to_sequence needs a mapping, got list
    tr.flatten_mapping({1: {"a": 2}}, sep="/")
        TypeError: Cannot join the path (1, 'a') by sep='/' ... type int
    tr.unflatten_mapping(3)
        TypeError: unflatten_mapping needs a mapping or an iterable ... got int
    tr.unflatten_mapping({"ab": 1})
        TypeError: The path 'ab' is a string: give its separator as sep=
    tr.unflatten_mapping({("a",): 1}, sep="/")
        TypeError: With sep='/' a path must be a string, got
    tr.unflatten_mapping({(): 1})
        ValueError: An empty path is not possible
    tr.unflatten_mapping({("a",): 1, ("a", "b"): 2})
        TypeError: 'a.b' leads through the key 'a', ... leaf (int)
""")
def test_a_refusal_says_why(line, message):
    refused(line, message, globals())
