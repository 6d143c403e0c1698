"""grad and value_and_grad: what is differentiated, the form of gradients, state, refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.transforms.models import Counted, Foo, Tied, snapshot, values

X = jnp.array([1.0, 2.0])
MODES = [{}, {"graph_updates": False}, {"graph": False}]
BOTH = [nnx.grad, nnx.value_and_grad]


def product(m, *more):
    """Every argument takes part: m.x ** 2 * m.y * ..."""
    y = m.x**2 * m.y
    for x in more:
        y = y * (x.x if isinstance(x, Foo) else x)
    return y


# The form of gradients ------------------------------------------------------------------------------


def test_kinds_and_metadata_of_gradients_are_those_of_the_variables():
    class Weight(nnx.Param):
        pass

    m = nnx.Dict(a=Weight(2.0, note="kept"), b=nnx.BatchStat(3.0), c=nnx.LoRAParam(1.0))
    grads = nnx.grad(lambda m: m.a**2 * m.b * m.c)(m)
    assert sorted(grads) == ["a", "c"]
    assert type(grads["a"]) is Weight and grads["a"].note == "kept"
    assert type(grads["c"]) is nnx.LoRAParam
    assert values(grads) == [12.0, 12.0]


@pytest.mark.parametrize("mode", MODES[1:])
def test_without_updates_gradients_are_objects_of_the_arguments_own_type(mode):
    m = Foo(3.0, 2.0)
    m.name = "static"
    d_m = nnx.grad(product, **mode)(m)
    assert type(d_m) is Foo and d_m is not m and d_m.name == "static"
    assert (float(d_m.x.value), float(d_m.y.value), float(d_m.n.value)) == (12.0, 9.0, 0.0)
    assert type(d_m.n) is nnx.BatchStat
    d_pair = nnx.grad(lambda pair: product(pair["m"], pair["x"]), **mode)({"m": m, "x": 2.0})
    assert type(d_pair["m"]) is Foo and float(d_pair["x"]) == 18.0


def test_the_gradient_of_a_state_has_its_empty_parts_too():
    state = nnx.State({"a": nnx.Param(jnp.array(2.0)), "none": {}})
    grads = nnx.grad(lambda state: state["a"] ** 2)(state)
    assert jax.tree.structure(grads) == jax.tree.structure(state) and float(grads["a"].value) == 4


def test_the_gradient_of_a_state_is_without_what_is_frozen():
    model = nnx.Dict(a=nnx.Param(jnp.array(2.0)), b=nnx.Param(jnp.array(3.0)))
    nnx.freeze(model, nnx.PathContains("b"))
    grads = nnx.grad(lambda state: state["a"] ** 2 * state["b"])(nnx.state(model))
    assert list(grads) == ["a"] and float(grads["a"].value) == 12


def test_arrays_held_without_a_variable():
    m = Foo()
    m.array = jnp.array(4.0)
    assert "array" not in nnx.grad(lambda m: m.x * m.array)(m)
    grads = nnx.grad(lambda m: m.x * m.array, argnums=nnx.DiffState(0, ...))(m)
    assert float(grads["array"]) == 1.0
    d_m = nnx.grad(lambda m: m.x * m.array, graph_updates=False)(m)
    assert float(d_m.array) == 1.0


def test_a_value_that_is_a_pytree():
    m = nnx.Dict(p=nnx.Param({"a": jnp.array(2.0), "b": (jnp.array(3.0),)}))
    grads = nnx.grad(lambda m: m.p["a"] ** 2 * m.p["b"][0])(m)
    assert values(grads["p"].value) == [12.0, 4.0]


# argnums --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "argnums, expected",
    [
        (0, [24.0, 18.0]),
        (1, [18.0]),
        (-1, [18.0]),
        (-2, [24.0, 18.0]),
        ((0,), [24.0, 18.0]),
        ([0, 1], [24.0, 18.0, 18.0]),
        ((1, 0), [18.0, 24.0, 18.0]),
        ((-1, -2), [18.0, 24.0, 18.0]),
        (np.int64(1), [18.0]),
    ],
    ids=str,
)
def test_argnums(argnums, expected, mode):
    grads = nnx.grad(product, argnums=argnums, **mode)(Foo(3.0, 2.0), 2.0)
    assert isinstance(grads, tuple) == isinstance(argnums, (tuple, list))
    params = nnx.state(grads, nnx.Not(nnx.BatchStat)) if mode else grads
    assert sorted(values(params)) == sorted(expected)


def test_arguments_given_by_name():
    grads = nnx.grad(product_of_two, argnums=(0, 1))(x=2.0, m=Foo(3.0, 2.0))
    assert values(grads) == [24.0, 18.0, 18.0]
    assert values(nnx.grad(product_of_two)(Foo(3.0, 2.0), x=2.0)) == [24.0, 18.0]
    assert float(nnx.grad(product_of_two, argnums=1)(m=Foo(3.0, 2.0), x=2.0)) == 18.0


def product_of_two(m, x):
    return product(m, x)


@pytest.mark.parametrize(
    "argnums, expected",
    [
        (nnx.DiffState(0, nnx.BatchStat), {"n": 5.0}),
        (nnx.DiffState(-1, (nnx.BatchStat, nnx.PathContains("y"))), {"n": 5.0, "y": 1.0}),
        (nnx.DiffState(0, ...), {"n": 5.0, "x": 3.0, "y": 1.0}),
        (nnx.DiffState(0, True), {"n": 5.0, "x": 3.0, "y": 1.0}),
        (nnx.DiffState(0, nnx.Not(nnx.Param)), {"n": 5.0}),
        (nnx.DiffState(0, nnx.Cache), {}),
        (nnx.DiffState(0, lambda path, v: path == ("x",)), {"x": 3.0}),
    ],
    ids=["kind", "several", "everything", "True", "rest", "nothing", "function"],
)
def test_diff_state_chooses_variables(argnums, expected):
    m = Foo()
    grads = nnx.grad(lambda m: 3 * m.x + m.y + 5 * m.n, argnums=argnums)(m)
    assert {k: float(v.value) for k, v in grads.items()} == expected


def test_diff_state_among_others():
    d = nnx.DiffState(0, nnx.BatchStat)
    f = lambda m, x, k: (m.n + 1) * m.x * x * k.y
    grads = nnx.grad(f, argnums=(d, 1, 2))(Foo(2.0), 3.0, Foo())
    assert values(grads) == [12.0, 4.0, 0.0, 6.0]
    assert repr(d) == f"DiffState(argnum=0, filter={nnx.BatchStat!r})"
    assert d == nnx.DiffState(0, nnx.BatchStat) != nnx.DiffState(1, nnx.BatchStat)


# Values, aux, state ---------------------------------------------------------------------------------


def test_gradients_are_taken_at_the_values_that_came_in():
    def f(m):
        y = m.x**2
        m.x.value = m.x * 10
        m.y.value = m.x * 1
        return y + m.y * m.x  # x**2 + 100 x**2

    m = Foo(2.0)
    value, grads = nnx.value_and_grad(f)(m)
    assert float(value) == 404.0 and values(grads) == [404.0, 0.0]
    assert (float(m.x.value), float(m.y.value)) == (20.0, 20.0)


def test_values_may_be_variables_and_of_any_size_one_dtype():
    m = Foo(3.0)
    value, grads = nnx.value_and_grad(lambda m: m.x)(m)
    assert float(value) == 3.0 and values(grads) == [1.0, 0.0]
    half = nnx.Dict(w=nnx.Param(jnp.array(2.0, jnp.bfloat16)))
    assert nnx.grad(lambda m: m.w**2)(half)["w"].dtype == jnp.bfloat16


# Sharing --------------------------------------------------------------------------------------------


def test_a_shared_parameter_has_one_gradient_the_sum():
    m = Tied()
    grads = nnx.grad(lambda m: m(X).sum())(m)
    a = m.a.value
    expected = (jnp.cos(a) * a + jnp.sin(a) + 1) * X
    assert [".".join(map(str, p)) for p, _ in nnx.to_flat_state(grads)] == ["a"]
    assert jnp.allclose(grads["a"].value, expected)
    d_m = nnx.grad(lambda m: m(X).sum(), graph_updates=False)(m)
    assert d_m.a is d_m.b and d_m.child.owner is d_m and jnp.allclose(d_m.a.value, expected)


def test_one_object_in_two_arguments():
    m = Foo(3.0)
    grads = nnx.grad(lambda a, b: a.x * b.x + b.y, argnums=(0, 1))(m, m)
    assert values(grads[0]) == [6.0, 1.0] and values(grads[1]) == []
    before = snapshot(m)
    for f in (nnx.grad(lambda a, b: a.x * b.x), nnx.grad(lambda a, b: a.x * b.x, argnums=1)):
        with pytest.raises(ValueError, match="different differentiation for a shared Param"):
            f(m, m)
    with pytest.raises(ValueError, match=r"shared Param: at 'a\.x' it is True, at 'b' it is False"):
        nnx.grad(lambda a, b: a.x * b)(m, m.x)
    assert snapshot(m) == before
    nnx.grad(lambda a, b: a.x * b, argnums=0)(m, m.n)  # a statistic is not differentiated


def test_a_diff_state_by_path_need_not_match_the_other_places_of_a_shared_variable():
    m = Tied()
    by_name = nnx.grad(lambda m: m(X).sum(), argnums=nnx.DiffState(0, nnx.PathContains("a")))(m)
    by_kind = nnx.grad(lambda m: m(X).sum())(m)
    assert list(by_name) == ["a"] and jnp.array_equal(by_name["a"].value, by_kind["a"].value)


def test_a_diff_state_that_matches_only_a_later_place_of_a_shared_variable():
    m = Tied()
    with pytest.raises(ValueError, match="at 'm.a' it is False, at 'm.b' it is True"):
        nnx.grad(lambda m: m(X).sum(), argnums=nnx.DiffState(0, nnx.PathContains("b")))(m)


@pytest.mark.parametrize("kind", [nnx.BatchStat, nnx.Param])
def test_the_first_place_decides_between_a_variable_and_the_object_that_has_it(kind):
    m = nnx.Dict(n=nnx.BatchStat(jnp.array(3.0)))
    of = nnx.DiffState(0, kind)
    g, rest = nnx.grad(lambda pair: pair[0] * pair[1].n, argnums=of)([m.n, m])
    assert g.value == 6.0 and not rest
    state, g = nnx.grad(lambda pair: pair[1] * pair[0].n, argnums=of)([m, m.n])
    assert {name: x.value.item() for name, x in state.items()} == (
        {"n": 6.0} if kind is nnx.BatchStat else {}
    )
    assert g == nnx.State({})


def test_a_variable_that_one_argument_differentiates_and_another_does_not():
    m = nnx.Dict(n=nnx.BatchStat(jnp.array(3.0)))
    params = nnx.DiffState(1, nnx.Param)
    with pytest.raises(ValueError, match="at 'v' it is True, at 'm.n' it is False"):
        nnx.grad(lambda v, m: v * m.n, argnums=(0, params))(m.n, m)
    with pytest.raises(ValueError, match="at 'm.n' it is False, at 'v' it is True"):
        nnx.grad(lambda m, v: v * m.n, argnums=nnx.DiffState(1, nnx.Param))(m, m.n)


# What has a derivative ------------------------------------------------------------------------------


def test_allow_int():
    m = nnx.Dict(a=nnx.Param(2.0), k=nnx.Param(jnp.array(3)))
    grads = nnx.grad(lambda m: m.a**2 * m.k, allow_int=True)(m)
    assert float(grads["a"].value) == 12.0 and grads["k"].value.dtype == jax.dtypes.float0
    assert nnx.grad(lambda x: x * 2.0, allow_int=True)(3).dtype == jax.dtypes.float0


def test_holomorphic():
    m = nnx.Dict(z=nnx.Param(jnp.array(1.0 + 1.0j)))
    grads = nnx.grad(lambda m: m.z**2, holomorphic=True)(m)
    assert complex(grads["z"].value) == 2 + 2j
    with pytest.raises(TypeError, match="holomorphic=True requires inputs with complex dtype"):
        nnx.grad(lambda m: m.x**2, holomorphic=True)(Foo())
    assert complex(nnx.grad(lambda m: m.z.real**2)(m)["z"].value) == 2 + 0j


@pytest.mark.parametrize("transform", BOTH)
@pytest.mark.parametrize(
    "argument, where, kind",
    [
        (3, "x", "a value of type int"),
        (jnp.array(True), "x", "bool"),
        (np.arange(2), "x", "int64"),
        ({"a": [1.0, 2]}, "x.a.1", "a value of type int"),
        ("text", "x", "a value of type str"),
        ("float32", "x", "a value of type str"),  # NumPy reads it as a dtype
        (nnx.Dict(deep=nnx.List([nnx.Param(jnp.array(2))])), "x.deep.0", "int32"),
        (nnx.Param({"k": jnp.array(2)}), "x", "int32"),
        (nnx.state(nnx.Rngs(0), nnx.RngKey), "x.default.key", "key<fry>"),
    ],
    ids=["int", "bool", "numpy", "pytree", "text", "dtype", "object", "Variable", "key"],
)
def test_a_leaf_without_a_derivative_is_named(transform, argument, where, kind):
    with pytest.raises(TypeError) as error:
        transform(lambda x: 1.0)(argument)
    for text in (
        f"{transform.__name__} requires real- or complex-valued inputs",
        f"argument '{where}' is {kind}",
        "DiffState(argnum, filter)",
        "allow_int=True",
    ):
        assert text in str(error.value)


def test_other_leaves_may_be_anything_jax_takes():
    rngs = nnx.Rngs(0)
    grads = nnx.grad(lambda m, rngs, k: m.x * rngs.uniform(()) * k)(Foo(), rngs, 3)
    assert 0 < float(grads["x"].value) < 3 and int(rngs.default.count.value) == 1
    assert float(nnx.grad(lambda m, label: m.x * len(label))(Foo(), "abc")["x"].value) == 3.0


@pytest.mark.parametrize(
    "fun, message",
    [
        (lambda m: m.x * X, r"scalar-output functions. Output had shape: \(2,\)"),
        (lambda m: 1, "real-valued outputs .* but got int"),
        (lambda m: None, "Output was None"),
        (lambda m: (m.x, m.y), "scalar-output functions"),
    ],
)
def test_the_value_must_be_a_real_scalar(fun, message):
    m = Foo()
    before = snapshot(m)
    with pytest.raises(TypeError, match=message):
        nnx.grad(lambda m: (m.n.set_value(5.0), fun(m))[1])(m)
    assert snapshot(m) == before


# Refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", BOTH)
@pytest.mark.parametrize(
    "argnums, kind, message",
    [
        ("0", TypeError, "an int, a DiffState, or a sequence of these, got '0' of type str"),
        ((0, 1.5), TypeError, "got 1.5 of type float"),
        (None, TypeError, "got None of type NoneType"),
        ((), ValueError, "argnums is empty"),
        (3, TypeError, "argnums=3 requires at least 4 positional arguments, .* called with 2"),
        ((0, 2), TypeError, "with respect to argnums=2 requires at least 3 positional"),
        (-3, ValueError, "argnums=-3 requires at least 3 positional arguments, .* with 2"),
        (nnx.DiffState(5, ...), TypeError, "argnums=5 requires at least 6"),
        ((0, 0), ValueError, "argnums names argument 0 twice"),
        ((1, -1), ValueError, "argnums names argument 1 twice"),
        ((nnx.DiffState(0, nnx.Param), nnx.DiffState(0, nnx.BatchStat)), ValueError,
         "argument 0 twice.* DiffState whose filter matches all"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_argnums(transform, argnums, kind, message):
    m = Foo()
    before = snapshot(m)
    with pytest.raises(kind, match=message):
        transform(product, argnums=argnums)(m, 1.0)
    assert snapshot(m) == before


def test_argnums_count_what_is_given_not_what_is_bound():
    with pytest.raises(TypeError, match="at least 2 positional arguments, .* called with 1"):
        nnx.grad(Counted().__call__, argnums=1)(1.0)
    with pytest.raises(TypeError, match="at least 1 positional arguments, .* called with 0"):
        nnx.grad(lambda: 1.0)()


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_diff_state_needs_updates(mode):
    argnums = (nnx.DiffState(0, nnx.Param), 1)
    with pytest.raises(
        ValueError,
        match=r"`argnums` cannot contain `DiffState` objects when "
        r"`graph=False` or `graph_updates=False`, got DiffState\(argnum=0, ",
    ):
        nnx.grad(product, argnums=argnums, **mode)(Foo(), 1.0)


@pytest.mark.parametrize(
    ("result", "error", "got"),
    [(1.0, TypeError, "got float"), ((1.0, 2.0, 3.0), ValueError, "got tuple of 3")],
    ids=["one", "three"],
)
def test_aux_needs_a_pair(result, error, got):
    def f(m):
        m.n.value = jnp.array(9.0)
        return result

    m = Foo()
    before = snapshot(m)
    match = rf"has_aux=True .*f must return a pair \(value, aux\), {got}"
    with pytest.raises(error, match=match):
        nnx.grad(f, has_aux=True)(m)
    assert snapshot(m) == before


def test_the_pair_may_be_a_list():
    grads, aux = nnx.grad(lambda m: [m.x * 3.0, m.y], has_aux=True)(m := Foo())
    assert float(grads["x"].value) == 3.0 and aux is m.y


def test_captured_objects_are_constants_and_protected():
    m, other = Foo(2.0), Foo(5.0)
    assert values(nnx.grad(lambda m: m.x * other.x)(m)) == [5.0, 0.0]
    before = snapshot(other)
    with pytest.raises(nnx.TraceContextError, match="different trace level: it belongs to eager"):
        nnx.grad(lambda m: (other.n.set_value(m.x * 1), m.x * 1)[1])(m)
    with pytest.raises(ValueError, match="different trace level: the Foo"):
        nnx.grad(lambda m: (m.x * 1, other), has_aux=True, graph_updates=False)(m)
    _, copy = nnx.grad(lambda m: (m.x * 1, other), has_aux=True)(m)
    assert copy is not other and snapshot(copy) == snapshot(other)
    assert snapshot(other) == before


# Forms and composition ------------------------------------------------------------------------------


def test_concrete_values_decide_outside_jit_as_in_jax():
    def f(m):
        return m.x if m.x > 0 else -m.x

    assert values(nnx.grad(f)(Foo(-2.0))) == [-1.0, 0.0]
    with pytest.raises(jax.errors.TracerBoolConversionError):
        nnx.jit(nnx.grad(f))(Foo(-2.0))
