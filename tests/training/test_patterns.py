"""Patterns of dotted names."""

import random
import re

import pytest

from nnxlite.training.patterns import Pattern


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        ("a.b", "a.b.c", None),
        ("a.layer*.w*", "a.layer12.w", {"*1": "12", "*2": ""}),
        ("a.**", "a", {"**1": ""}),
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
        ("**", "a.b", "model.**", "model.a.b"),
        ("model.**", "model.a", "**", "a"),
        ("*_*.x", "left_right.x", "*.*", "left.right"),
        ("{i}", "a", "{i}.{i}", "a.a"),
    ],
)
def test_what_was_matched_fills_another_pattern(pattern, name, template, new):
    assert Pattern(template).fill(Pattern(pattern).match(name)) == new


def tried(pattern, name):
    """What the wildcards stand for, by an expression that tries all ways, the greedy ones first."""
    expression = ""
    for part in pattern.split("."):  # letters and wildcards
        one = re.sub(r"\{\w\}", "([^.]+)", part.replace("*", "([^.]*)"))
        expression += r"((?:\.[^.]+)*)" if part == "**" else rf"\.{one}"
    found = re.fullmatch(expression, f".{name}")
    return None if found is None else list(found.groups())


def segment(rng, names):
    if rng.random() < 0.3:
        return "**"
    parts = [rng.choice(["a", "b", "*", "{", "a"]) for _ in range(rng.randint(1, 5))]
    return "".join(next(names, "*") if part == "{" else part for part in parts).replace("**", "*")


def test_the_way_that_counts_is_the_greedy_one_and_fills_the_pattern_again():
    rng, matches = random.Random(0), 0
    for _ in range(1000):
        names = iter(("{i}", "{j}", "{k}"))
        pattern = ".".join(segment(rng, names) for _ in range(rng.randint(1, 5)))
        for _ in range(5):
            lengths = [rng.randint(1, 4) for _ in range(rng.randint(1, 6))]
            name = ".".join("".join(rng.choices("ab", k=length)) for length in lengths)
            found, wanted = Pattern(pattern).match(name), tried(pattern, name)
            assert (found is None) == (wanted is None), (pattern, name)
            if found is not None:
                assert list(found.values()) == wanted, (pattern, name)
                assert Pattern(pattern).fill(found) == name
                matches += 1
    assert matches > 300


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("x*a*a*a*a*a*b", "a" * 50_000 + "b"),
        ("{i}a{j}a{k}a{l}x.b", "a" * 50_000 + ".b"),
        ("x.**.a.**.a.**.a.**.b", ".".join("a" * 20_000) + ".b"),
        ("x.**.a*a*b.**.*a*a*b.**.b", ".".join(["aaab"] * 5000) + ".b"),
        ("**.x.**.a.**", ".".join("a" * 20_000)),
    ],
    ids=["stars", "names", "segments", "both", "around"],
)
def test_no_name_takes_for_ever(pattern, name):
    """An expression that tries all ways would go on for years."""
    assert Pattern(pattern).match(name) is None
