"""`ArrayOperators`: every operator gives what it gives on the bare arrays."""

import math  # noqa: F401 - for the expressions
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.variables._operators import ArrayOperators

FLOATS = jnp.array([[1.5, -2.0], [3.25, 4.0]])
INTS = jnp.array([[5, 2], [3, 7]])
BOOLS = jnp.array([[True, False], [True, True]])

ARITHMETIC = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"]
BITWISE = ["and_", "or_", "xor"]
SHIFTS = ["lshift", "rshift"]
COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge"]
OF_SCALARS = [name for name in [*ARITHMETIC, *COMPARISONS] if name != "matmul"]

CASES = [
    *((name, FLOATS, INTS) for name in [*ARITHMETIC, *COMPARISONS]),
    *((name, FLOATS.astype(jnp.bfloat16), FLOATS) for name in [*ARITHMETIC, *COMPARISONS]),
    *((name, INTS, INTS) for name in [*BITWISE, *SHIFTS]),
    *((name, BOOLS, ~BOOLS) for name in BITWISE),
    *((name, a, b) for a, b in [(FLOATS, 2), (2.0, INTS), (7, 2)] for name in OF_SCALARS),
]


def assert_same(got, wanted):
    assert type(got) is type(wanted)
    if isinstance(wanted, (list, tuple)):
        for g, w in zip(got, wanted, strict=True):
            assert_same(g, w)
        return
    if isinstance(wanted, jax.Array):
        assert (got.dtype, got.weak_type) == (wanted.dtype, wanted.weak_type)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(("name", "a", "b"), CASES)
def test_binary_operators_are_those_of_arrays(name, a, b):
    op = getattr(operator, name)
    wanted = op(a, b)
    assert_same(op(nnx.Variable(a), nnx.Variable(b)), wanted)
    assert_same(op(nnx.Variable(a), b), wanted)
    assert_same(op(a, nnx.Variable(b)), wanted)


@pytest.mark.parametrize("name", [*ARITHMETIC, *COMPARISONS])
def test_an_array_of_numpy_on_the_left(name):
    op = getattr(operator, name)
    got = op(np.asarray(FLOATS), nnx.Variable(INTS))
    assert isinstance(got, jax.Array) or name in COMPARISONS
    np.testing.assert_array_equal(got, op(FLOATS, INTS))
    assert isinstance(np.float32(2) * nnx.Variable(FLOATS), jax.Array)


@pytest.mark.parametrize("wrap", [nnx.Variable, lambda x: x], ids=["variable", "array"])
@pytest.mark.parametrize("name", [*ARITHMETIC, *BITWISE, *SHIFTS])
def test_in_place_forms_write_once_and_keep_the_variable_and_the_old_value(name, wrap):
    op = getattr(operator, f"i{name.strip('_')}")
    a, b = np.asarray(FLOATS if name in ARITHMETIC else INTS), INTS
    writes = []
    variable = nnx.Variable(a.copy(), on_set_value=lambda _, value: writes.append(1) or value)
    before = variable.value
    assert op(variable, wrap(b)) is variable
    assert len(writes) == 1
    np.testing.assert_array_equal(variable.value, op(jnp.asarray(a), b))
    np.testing.assert_array_equal(before, a)


EXPRESSIONS = """
    -f, -i, +f, +i, ~i, ~b
    abs(f), abs(i), round(f, 1), round(i, 1)
    len(f), len(i), list(f), list(i), list(reversed(row)), list(table)
    2.0 in row, 5.0 in row, "a" in table
    divmod(f, 2), divmod(7.0, f), divmod(f, i)
    pow(three, three, five), math.trunc(half), math.floor(half), math.ceil(half)
    bool(two), int(two), float(two), complex(two), ["a", "b", "c"][two], f"{two:.1f}"
    np.asarray(f), np.asarray(f, dtype=np.float64), np.array(f, copy=True)
    jnp.stack([f]), jnp.stack([half])
"""
VALUES = {
    "f": FLOATS,
    "i": INTS,
    "b": BOOLS,
    "row": jnp.array([1.0, 2.0, 3.0]),
    "two": jnp.array(2),
    "three": 3,
    "five": 5,
    "half": 2.5,
    "table": {"a": 1, "b": 2},
}


@pytest.mark.parametrize("expressions", EXPRESSIONS.strip().splitlines())
def test_expressions_are_those_of_arrays(expressions):
    variables = {name: nnx.Variable(value) for name, value in VALUES.items()}
    code = f"[{expressions.strip()}]"
    assert_same(eval(code, globals() | variables), eval(code, globals() | VALUES))


def test_rounding_without_digits_keeps_the_type():
    assert_same(round(nnx.Variable(FLOATS)), round(FLOATS, 0))
    assert_same(round(nnx.Variable(2.5)), 2.0)


TRUTH = [
    *[(FLOATS, True), (jnp.zeros(1), True), (np.zeros(2), True), (jnp.zeros((0, 3)), False)],
    *[(jnp.array(0), False), (np.float32(2), True), ([], False), ([0], True), (None, False)],
]


def test_truth_of_an_array_is_whether_it_is_longer_than_zero():
    assert [bool(nnx.Variable(value)) for value, _ in TRUTH] == [expected for _, expected in TRUTH]


def test_conversion_to_numpy_copies_on_request():
    held = np.ones(2)
    variable = nnx.Variable(held)
    assert np.shares_memory(np.asarray(variable), held)
    assert not np.shares_memory(np.array(variable, copy=True), held)
    with pytest.raises(ValueError, match="copy"):
        np.array(variable, dtype=np.int32, copy=False)


@pytest.mark.parametrize("value", [FLOATS, np.ones(2), 3, 2.5])
def test_conversion_to_jax(value):
    assert_same(nnx.Variable(value).__jax_array__(), jnp.asarray(value))


def test_hash_goes_by_identity_and_equality_by_element():
    a, b = nnx.Variable(jnp.zeros(2)), nnx.Variable(jnp.zeros(2))
    assert {a: 1, b: 2}[a] == 1
    assert (a == b).tolist() == [True, True] and (a != b).tolist() == [False, False]
    assert (a == "text") is False
    assert (a == None) is False  # noqa: E711
    a.value = jnp.ones(2)
    assert {a} == {a}


def test_operators_see_callbacks_and_write_into_references():
    doubled = nnx.Param(FLOATS, on_get_value=lambda variable, value: 2 * value)
    assert_same(doubled + 1, 2 * FLOATS + 1)
    halved = nnx.Param(FLOATS, on_set_value=lambda variable, value: value / 2)
    halved += FLOATS
    assert_same(halved.value, FLOATS)
    ref = nnx.Param(FLOATS, ref=True)
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
