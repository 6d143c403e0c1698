"""Patterns of dotted names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnxlite._patterns import Pattern


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        ("a.b", "a.b", {}),
        ("a.b", "a.b.c", None),
        ("a.*", "a.b", {"*1": "b"}),
        ("a.*", "a.b.c", None),
        ("a.layer*.w*", "a.layer12.w", {"*1": "12", "*2": ""}),
        ("a.**", "a.b.c", {"**1": ".b.c"}),
        ("a.**", "a", {"**1": ""}),
        ("**.kernel", "kernel", {"**1": ""}),
        ("**.{i}.*", "x.y.0.w", {"**1": ".x.y", "i": "0", "*1": "w"}),
        ("{i}.{i}", "1.1", {"i": "1"}),
        ("{i}.{i}", "1.2", None),
        ("a.(b|c)", "a.b", None),
    ],
)
def test_what_a_pattern_matches(pattern, name, found):
    assert Pattern(pattern).match(name) == found


@pytest.mark.parametrize(
    ("pattern", "name", "template", "new"),
    [
        ("encoder.**", "encoder.0.w", "backbone.**", "backbone.0.w"),
        ("h.{i}.mlp.{name}", "h.3.mlp.up", "{name}.of.{i}", "up.of.3"),
        ("**.w", "w", "**.kernel", "kernel"),
        ("**", "a.b", "model.**", "model.a.b"),
        ("model.**", "model.a", "**", "a"),
        ("*_*.x", "left_right.x", "*.*", "left.right"),
        ("{i}", "a", "{i}.{i}", "a.a"),
    ],
)
def test_what_was_matched_fills_another_pattern(pattern, name, template, new):
    assert Pattern(template).fill(Pattern(pattern).match(name)) == new


@given(st.lists(st.sampled_from(["a", "b1", "0", "a.b"]), min_size=1, max_size=4))
def test_a_pattern_filled_with_what_it_matched_is_the_name(segments):
    name = ".".join(segments)
    for pattern in map(Pattern, ("**", "*.**", "**.*", "{i}.**", "a.**", "**.0")):
        found = pattern.match(name)
        assert found is None or pattern.fill(found) == name
