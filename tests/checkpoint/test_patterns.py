"""Patterns of dotted names; `checkpoint/test_checkpoint.py` and `test_mapping.py` rename by them."""

import random
import re

from nnxlite.checkpoint.patterns import Pattern


def tried(pattern, name):
    """What the wildcards stand for, by an expression that tries all ways, the greedy ones first."""
    expression = ""
    for part in pattern.split("."):  # letters and wildcards
        one = re.sub(r"\{\w\}", "([^.]+)", part.replace("|", r"\|").replace("*", "([^.]*)"))
        expression += r"((?:\.[^.]+)*)" if part == "**" else rf"\.{one}"
    found = re.fullmatch(expression, f".{name}")
    return None if found is None else list(found.groups())


def segment(rng, names):
    if rng.random() < 0.3:
        return "**"
    parts = rng.choices(["a", "b", "|", "*", "{", "a"], k=rng.randint(1, 5))
    return "".join(next(names, "*") if part == "{" else part for part in parts).replace("**", "*")


def test_the_way_that_counts_is_the_greedy_one_and_fills_the_pattern_again():
    rng, matches = random.Random(0), 0
    for _ in range(1000):
        names = iter(("{i}", "{j}", "{k}"))
        pattern = ".".join(segment(rng, names) for _ in range(rng.randint(1, 5)))
        for _ in range(5):
            lengths = [rng.randint(1, 4) for _ in range(rng.randint(1, 6))]
            name = ".".join("".join(rng.choices("aabb|", k=length)) for length in lengths)
            found, wanted = Pattern(pattern).match(name), tried(pattern, name)
            assert (found is None) == (wanted is None), (pattern, name)
            if found is not None:
                assert list(found.values()) == wanted, (pattern, name)
                assert Pattern(pattern).fill(found) == name
                matches += 1
    assert matches > 300


def test_a_name_stands_for_the_same_everywhere_and_what_was_matched_fills_another_pattern():
    assert Pattern("{i}.{i}").match("1.1") == {"i": "1"} and Pattern("{i}.{i}").match("1.2") is None
    matched = Pattern("h.{i}.*_*.**").match("h.3.left_right.w")
    assert matched == {"i": "3", "*1": "left", "*2": "right", "**1": ".w"}
    assert Pattern("*.of.*.{i}.{i}.**").fill(matched) == "left.of.right.3.3.w"


def test_no_name_takes_for_ever():
    """An expression that tries all ways would go on for years."""
    for pattern, name in (
        ("x*a*a*a*a*a*b", "a" * 50_000 + "b"),
        ("{i}a{j}a{k}a{l}x.b", "a" * 50_000 + ".b"),
        ("x.**.a*a*b.**.*a*a*b.**.b", ".".join(["aaab"] * 5000) + ".b"),
    ):
        assert Pattern(pattern).match(name) is None, pattern
