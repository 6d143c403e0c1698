"""`ArrayOperators`: every operator gives what it gives on the bare arrays."""

from __future__ import annotations

import math
import operator
import pickle
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxlite.variables._kinds import Param
from nnxlite.variables._operators import ArrayOperators


class Box(ArrayOperators[tp.Any]):
    """The least that the operators need."""

    __slots__ = ("held", "writes")

    def __init__(self, held):
        self.held, self.writes = held, 0

    def get_value(self, *, index=None):
        return self.held

    def set_value(self, value, *, index=None):
        self.held = value
        self.writes += 1


FLOATS = jnp.array([[1.5, -2.0], [3.25, 4.0]])
INTS = jnp.array([[5, 2], [3, 7]])
BOOLS = jnp.array([[True, False], [True, True]])

ARITHMETIC = ["add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "pow"]
BITWISE = ["and_", "or_", "xor"]
SHIFTS = ["lshift", "rshift"]
COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge"]

CASES = [
    *((name, FLOATS, INTS) for name in [*ARITHMETIC, *COMPARISONS]),
    *((name, FLOATS.astype(jnp.bfloat16), FLOATS) for name in [*ARITHMETIC, *COMPARISONS]),
    *((name, INTS, INTS) for name in [*BITWISE, *SHIFTS]),
    *((name, BOOLS, ~BOOLS) for name in BITWISE),
]


def assert_same(got, wanted):
    assert type(got) is type(wanted)
    if isinstance(wanted, tuple):
        for g, w in zip(got, wanted, strict=True):
            assert_same(g, w)
    elif isinstance(wanted, jax.Array):
        assert (got.dtype, got.weak_type) == (wanted.dtype, wanted.weak_type)
        np.testing.assert_array_equal(got, wanted)
    else:
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(("name", "a", "b"), CASES)
def test_binary_operators_are_those_of_arrays(name, a, b):
    op = getattr(operator, name)
    wanted = op(a, b)
    assert_same(op(Box(a), Box(b)), wanted)
    assert_same(op(Box(a), b), wanted)
    assert_same(op(a, Box(b)), wanted)


@pytest.mark.parametrize("name", [*ARITHMETIC, *COMPARISONS])
def test_scalars_and_numpy_arrays_on_either_side(name):
    op = getattr(operator, name)
    if name != "matmul":
        assert_same(op(Box(FLOATS), 2), op(FLOATS, 2))
        assert_same(op(2.0, Box(INTS)), op(2.0, INTS))
        assert_same(op(Box(7), Box(2)), op(7, 2))
    left = op(np.asarray(FLOATS), Box(INTS))
    assert isinstance(left, jax.Array) or name in COMPARISONS
    np.testing.assert_array_equal(left, op(FLOATS, INTS))
    assert isinstance(np.float32(2) * Box(FLOATS), jax.Array)


def test_divmod_and_modular_power():
    assert_same(divmod(Box(FLOATS), 2), divmod(FLOATS, 2))
    assert_same(divmod(7.0, Box(FLOATS)), divmod(7.0, FLOATS))
    assert_same(divmod(Box(FLOATS), Box(INTS)), divmod(FLOATS, INTS))
    assert pow(Box(3), Box(4), Box(5)) == pow(3, 4, 5)


@pytest.mark.parametrize("wrap", [Box, lambda x: x], ids=["variable", "array"])
@pytest.mark.parametrize("name", [*ARITHMETIC, *BITWISE, *SHIFTS])
def test_in_place_forms_write_once_and_keep_the_variable(name, wrap):
    op = getattr(operator, f"i{name.strip('_')}")
    a, b = FLOATS if name in ARITHMETIC else INTS, INTS
    box = Box(a)
    assert op(box, wrap(b)) is box
    assert box.writes == 1
    assert_same(box.held, op(a, b))


def test_an_in_place_form_leaves_the_old_value_alone():
    old = np.ones(2)
    box = Box(old)
    box += 1
    assert old.tolist() == [1, 1]
    assert box.held.tolist() == [2, 2]


@pytest.mark.parametrize(
    "op",
    [operator.neg, operator.pos, abs, lambda x: round(x, 1), list, len],
    ids=["neg", "pos", "abs", "round_digits", "iter", "len"],
)
@pytest.mark.parametrize("value", [FLOATS, INTS], ids=["float", "int"])
def test_operators_of_one_operand(op, value):
    assert_same(op(Box(value)), op(value))


def test_rounding_and_inversion():
    assert_same(round(Box(FLOATS)), round(FLOATS, 0))
    assert_same(round(Box(2.5)), 2.0)
    assert_same(~Box(INTS), ~INTS)
    assert_same(~Box(BOOLS), ~BOOLS)
    assert [f(Box(1.5)) for f in (math.trunc, math.floor, math.ceil)] == [1, 1, 2]


def test_conversion_of_a_scalar():
    box = Box(jnp.array(2))
    assert [bool(box), int(box), float(box), complex(box)] == [True, 2, 2.0, 2 + 0j]
    assert ["a", "b", "c"][box] == "c"
    assert not Box(jnp.array(0.0))
    assert f"{Box(jnp.array(1.25)):.1f}" == "1.2"


TRUTH = [
    *[(FLOATS, True), (jnp.zeros(1), True), (np.zeros(2), True), (jnp.zeros((0, 3)), False)],
    *[(jnp.array(0), False), (np.float32(2), True), ([], False), ([0], True), (None, False)],
]


def test_truth_of_an_array_is_whether_it_is_longer_than_zero():
    assert [bool(Box(value)) for value, _ in TRUTH] == [expected for _, expected in TRUTH]


def test_sequence_protocol():
    row = jnp.array([1.0, 2.0, 3.0])
    assert 2.0 in Box(row)
    assert 5.0 not in Box(row)
    assert_same(list(reversed(Box(row))), list(reversed(row)))
    assert "a" in Box({"a": 1})
    assert list(Box({"a": 1, "b": 2})) == ["a", "b"]


def test_conversion_to_numpy():
    array = np.asarray(Box(FLOATS))
    assert type(array) is np.ndarray
    assert array.dtype == np.float32
    assert np.asarray(Box(FLOATS), dtype=np.float64).dtype == np.float64
    held = np.ones(2)
    assert np.shares_memory(np.asarray(Box(held)), held)
    assert not np.shares_memory(np.array(Box(held), copy=True), held)
    with pytest.raises(ValueError, match="copy"):
        np.array(Box(held), dtype=np.int32, copy=False)


@pytest.mark.parametrize("value", [FLOATS, np.ones(2), 3, 2.5])
def test_conversion_to_jax(value):
    assert_same(Box(value).__jax_array__(), jnp.asarray(value))
    assert_same(jnp.stack([Box(value)]), jnp.stack([value]))


def test_hash_goes_by_identity_and_equality_by_element():
    a, b = Box(jnp.zeros(2)), Box(jnp.zeros(2))
    assert {a: 1, b: 2}[a] == 1
    assert (a == b).tolist() == [True, True]
    assert (a != b).tolist() == [False, False]
    assert (a == "text") is False
    assert (a == None) is False  # noqa: E711
    a.held = jnp.ones(2)
    assert {a} == {a}


def test_operators_see_callbacks_and_write_into_references():
    doubled = Param(FLOATS, on_get_value=lambda variable, value: 2 * value)
    assert_same(doubled + 1, 2 * FLOATS + 1)
    halved = Param(FLOATS, on_set_value=lambda variable, value: value / 2)
    halved += FLOATS
    assert_same(halved.value, FLOATS)
    ref = Param(FLOATS, ref=True)
    raw = ref.get_raw_value()
    ref *= 3
    assert ref.get_raw_value() is raw
    assert_same(raw[...], FLOATS * 3)


@pytest.mark.parametrize("name", [n for n, v in vars(ArrayOperators).items() if callable(v)])
def test_operators_are_called_what_python_calls_them(name):
    operator_of = vars(ArrayOperators)[name]
    if name != "__hash__":
        assert operator_of.__name__ == name
        assert operator_of.__qualname__ == f"ArrayOperators.{name}"
        assert pickle.loads(pickle.dumps(operator_of)) is operator_of
