"""Which names code refers to."""

from __future__ import annotations

import sys

import jax
import pytest

from nnxlite.closures._bytecode import TESTED, references

pytestmark = pytest.mark.skipif(sys.version_info[:2] not in TESTED, reason="untested bytecode")
COUNT = 0


def names_of(fun):
    found = references(fun.__code__)
    assert found is not None
    return {(name.name, name.is_cell, name.attributes) for name in found.names}


def test_globals_cells_and_chains_of_attributes():
    captured = 1

    def f(x):
        own = captured
        return jax.numpy.sin(x).real + own + len(x.shape)

    assert names_of(f) == {
        ("captured", True, ()),
        ("jax", False, ("numpy", "sin")),
        ("len", False, ()),
    }
    assert references(f.__code__).attributes == {"numpy", "sin", "real", "shape"}


def test_inner_functions_count():
    captured = 1

    def f(x):
        return (lambda y: [y + captured + COUNT for _ in x])(x)

    assert names_of(f) == {("captured", True, ()), ("COUNT", False, ())}


def test_what_is_only_incremented_is_a_counter():
    count = 0

    def f(x):
        nonlocal count
        global COUNT
        count += 1
        COUNT += 1
        return x

    found = references(f.__code__)
    assert found.names == () and set(found.counters) == {("count", True), ("COUNT", False)}


def imports(x):
    import math

    return math.sqrt(x)


def assigns(x):
    global COUNT
    COUNT = x


def reads_its_counter(x):
    global COUNT
    COUNT += 1
    return x * COUNT


@pytest.mark.parametrize("fun", [imports, assigns, reads_its_counter])
def test_code_that_imports_or_assigns_has_no_answer(fun):
    assert references(fun.__code__) is None
