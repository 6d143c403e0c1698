"""grad, vjp, jvp and remat: what is differentiated, the form of gradients, sharing, references."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.transforms.models import Counted, Foo, Tied, values

X = jnp.array([1.0, 2.0])
MODES = [{}, {"graph_updates": False}, {"graph": False}]


def product(m, *more):
    """Every argument takes part: m.x ** 2 * m.y * ..."""
    y = m.x**2 * m.y
    for x in more:
        y = y * x
    return y


def call(m, x):
    return m(x)


# grad: the form of gradients ----------------------------------------------------------------------


class Weight(nnx.Param):
    """A kind of a user."""


def medley():
    """Kinds, metadata, a value that is a pytree, an array without a Variable, a static value."""
    tree = nnx.Param({"a": jnp.array(2.0), "b": (jnp.array(3.0),)})
    a, c = Weight(2.0, note="kept"), nnx.LoRAParam(1.0)
    return nnx.Dict(a=a, b=nnx.BatchStat(3.0), c=c, tree=tree, array=jnp.array(4.0), name="static")


def loss(m):
    return m.a**2 * m.b * m.c * m.tree.value["a"] ** 2 * m.tree.value["b"][0] * m.array


def test_kinds_and_metadata_of_gradients_are_those_of_the_variables():
    grads = nnx.grad(loss)(medley())
    assert sorted(grads) == ["a", "c", "tree"]
    assert type(grads["a"]) is Weight and grads["a"].note == "kept"
    assert type(grads["c"]) is nnx.LoRAParam
    assert values(grads) == [576.0, 576.0, 576.0, 192.0]
    everything = nnx.grad(loss, argnums=nnx.DiffState(0, ...))(medley())
    assert float(everything["array"]) == 144.0 and float(everything["b"].value) == 192.0


def test_without_updates_gradients_are_objects_of_the_arguments_own_type():
    m = medley()
    d_m = nnx.grad(loss, graph_updates=False)(m)
    assert type(d_m) is nnx.Dict and d_m is not m and d_m.name == "static"
    assert type(d_m.b) is nnx.BatchStat and float(d_m.b.value) == 192.0


def test_the_gradient_of_a_state_has_its_empty_parts_and_not_what_is_frozen():
    state = nnx.State({"a": nnx.Param(jnp.array(2.0)), "none": {}})
    grads = nnx.grad(lambda state: state["a"] ** 2)(state)
    assert jax.tree.structure(grads) == jax.tree.structure(state) and float(grads["a"].value) == 4
    model = Foo(2.0, 3.0)
    nnx.freeze(model, nnx.PathContains("y"))
    grads = nnx.grad(lambda s: s["x"] ** 2 * s["y"])(nnx.state(model, nnx.Param))
    assert list(grads) == ["x"] and float(grads["x"].value) == 12


# argnums ------------------------------------------------------------------------------------------


def test_argnums_from_the_end_in_a_list_and_by_keyword():
    def gradients(argnums, *args, **kwargs):
        grads = nnx.grad(lambda m, x: product(m, x), argnums=argnums)(*args, **kwargs)
        assert isinstance(grads, tuple) == isinstance(argnums, (tuple, list))
        return sorted(values(grads))

    m = Foo(3.0, 2.0)
    assert gradients(0, m, 2.0) == gradients(-2, m, 2.0) == gradients(0, m, x=2.0) == [18.0, 24.0]
    assert gradients([0, 1], m, 2.0) == gradients((-1, -2), m, 2.0) == [18.0, 18.0, 24.0]


def test_diff_state_among_others():
    d = nnx.DiffState(-3, nnx.BatchStat)
    f = lambda m, x, k: (m.n + 1) * m.x * x * k.y
    grads = nnx.grad(f, argnums=(d, 1, 2))(Foo(2.0), 3.0, Foo())
    assert values(grads) == [12.0, 4.0, 0.0, 6.0]
    assert repr(d) == f"DiffState(argnum=-3, filter={nnx.BatchStat!r})"
    assert d == nnx.DiffState(-3, nnx.BatchStat) != nnx.DiffState(1, nnx.BatchStat)


def test_one_object_in_two_arguments():
    m = Foo(3.0)
    grads = nnx.grad(lambda a, b: a.x * b.x + b.y, argnums=(0, 1))(m, m)
    assert values(grads[0]) == [6.0, 1.0] and values(grads[1]) == []
    nnx.grad(lambda a, b: a.x * b, argnums=0)(m, m.n)  # a statistic is not differentiated


def test_a_diff_state_by_path_need_not_match_the_other_places_of_a_shared_variable():
    m = Tied()
    by_name = nnx.grad(lambda m: m(X).sum(), argnums=nnx.DiffState(0, nnx.PathContains("a")))(m)
    by_kind = nnx.grad(lambda m: m(X).sum())(m)
    assert list(by_name) == ["a"] and jnp.array_equal(by_name["a"].value, by_kind["a"].value)


@pytest.mark.parametrize("kind", [nnx.BatchStat, nnx.Param])
def test_the_first_place_decides_between_a_variable_and_the_object_that_has_it(kind):
    m, of = nnx.Dict(n=nnx.BatchStat(jnp.array(3.0))), nnx.DiffState(0, kind)
    g, rest = nnx.grad(lambda pair: pair[0] * pair[1].n, argnums=of)([m.n, m])
    assert g.value == 6.0 and not rest
    state, g = nnx.grad(lambda pair: pair[1] * pair[0].n, argnums=of)([m, m.n])
    assert values(state) == ([6.0] if kind is nnx.BatchStat else []) and g == nnx.State({})


# What has a derivative ----------------------------------------------------------------------------


def test_integers_complex_numbers_and_small_floats():
    m = nnx.Dict(a=nnx.Param(2.0), k=nnx.Param(jnp.array(3)))
    grads = nnx.grad(lambda m: m.a**2 * m.k, allow_int=True)(m)
    assert float(grads["a"].value) == 12.0 and grads["k"].value.dtype == jax.dtypes.float0
    assert nnx.grad(lambda x: x * 2.0, allow_int=True)(3).dtype == jax.dtypes.float0
    m = nnx.Dict(z=nnx.Param(jnp.array(1.0 + 1.0j)))
    assert complex(nnx.grad(lambda m: m.z**2, holomorphic=True)(m)["z"].value) == 2 + 2j
    assert complex(nnx.grad(lambda m: m.z.real**2)(m)["z"].value) == 2 + 0j
    half = nnx.Dict(w=nnx.Param(jnp.array(2.0, jnp.bfloat16)))
    assert nnx.grad(lambda m: m.w**2)(half)["w"].dtype == jnp.bfloat16


def test_concrete_values_decide_outside_jit_as_in_jax():
    f = lambda m: m.x if m.x > 0 else -m.x
    value, grads = nnx.value_and_grad(f)(Foo(-2.0))
    assert value == 2.0 and values(grads) == [-1.0, 0.0]
    with pytest.raises(jax.errors.TracerBoolConversionError):
        nnx.jit(nnx.grad(f))(Foo(-2.0))


# vjp ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_cotangents_have_the_form_of_the_primals(mode):
    m = Counted()
    y, pull = nnx.vjp(call, m, jnp.ones(2), **mode)
    d_m, d_x = pull(jnp.ones(2))
    assert y.tolist() == d_x.tolist() == [4.0, 8.0]
    assert type(d_m) is Counted and d_m is not m
    assert d_m.w.value.tolist() == [4.0, 4.0] and float(d_m.count.value) == 3.0
    assert float(m.count.value) == 4.0


def test_sharing_and_cycles_hold_in_cotangents():
    m = Tied()
    _, pull = nnx.vjp(lambda m, pair: m(1.0) + pair[0](1.0), m, (m, 2.0))
    d_m, (again, _) = pull(jnp.ones(2))
    assert again is d_m
    assert d_m.a is d_m.b and d_m.child.leaf is d_m.a and d_m.child.owner is d_m


def test_the_result_may_hold_objects_of_the_caller_and_new_ones():
    m = Foo()
    (same, new), pull = nnx.vjp(lambda m: (m, nnx.Dict(z=nnx.Param(m.x * 3))), m)
    assert same is m and float(new.z.value) == 3.0
    (d_m,) = pull((Foo(1.0, 5.0), nnx.Dict(z=nnx.Param(10.0))))
    assert (float(d_m.x.value), float(d_m.y.value)) == (31.0, 5.0)
    (d_m,) = pull((None, nnx.State({"z": nnx.Param(1.0)})))
    assert (float(d_m.x.value), float(d_m.y.value)) == (3.0, 0.0)
    y, pull = nnx.vjp(lambda m: m.x, m)
    assert y is m.x
    assert float(pull(4.0)[0].x.value) == float(pull(nnx.Param(4.0))[0].x.value) == 4.0


def test_a_state_a_variable_arrays_integers_and_keys_as_primals():
    m, rngs = Foo(), nnx.Rngs(0)
    m.array = jnp.array(5.0)
    f = lambda s, v, m, r: s["x"] * v * m.array + 0 * r.uniform(())
    _, pull = nnx.vjp(f, nnx.state(m, nnx.Param), m.y, m, rngs)
    d_s, d_v, d_m, d_rngs = pull(1.0)
    assert float(d_s["x"].value) == 10.0 and float(d_v.value) == 5.0 and type(d_v) is nnx.Param
    assert float(d_m.array) == 2.0 and int(rngs.default.count.value) == 1
    assert d_rngs.default.count.value.dtype == jax.dtypes.float0
    assert d_rngs.default.key.value.dtype == jax.dtypes.float0


def test_a_later_form_has_options_at_the_call_and_is_a_method():
    assert nnx.vjp(lambda m: (m.w * 1.0, 7))(Counted(), has_aux=True)[2] == 7
    pushed = type("Net", (Counted,), {"pushed": nnx.jvp(call)})().pushed
    assert pushed((1.0,), (1.0,))[1].tolist() == [4.0, 8.0]


def test_the_pullback_keeps_the_primals_alive_only_as_far_as_needed():
    m = Foo()
    _, pull = nnx.vjp(lambda m: m.x + m.y, m)
    seen = weakref.ref(m)
    del m
    gc.collect()
    assert seen() is None
    assert float(pull(1.0)[0].x.value) == 1.0


# jvp ----------------------------------------------------------------------------------------------


def test_a_state_names_the_variables_to_move_along():
    m = Counted()
    m.rngs = nnx.Rngs(0)  # no tangent for its key and count is asked for
    _, dy = nnx.jvp(call, [m, 1.0], [nnx.state(m, nnx.Param), 0.0])
    assert dy.tolist() == [4.0, 8.0]
    m, v = Foo(), nnx.Param({"a": jnp.array(1.0), "b": jnp.array(2.0)})
    shared, t = nnx.state(m, nnx.Param), nnx.Param({"a": jnp.array(10.0), "b": jnp.array(20.0)})
    assert float(nnx.jvp(lambda a, b: a.x * b.x, (m, m), (shared, shared))[1]) == 2.0
    assert float(nnx.jvp(lambda v: v.value["a"] * v.value["b"], (v,), (t,))[1]) == 40.0
    zero = np.zeros((), jax.dtypes.float0)
    assert float(nnx.jvp(lambda n, x: n * x, (2, 3.0), (zero, 1.0))[1]) == 2.0


def test_the_tangent_of_an_object_is_a_new_object():
    m = Foo()
    out, tangent = nnx.jvp(lambda m: {"m": m, "n": nnx.Dict(z=m.x * 2)}, (m,), (Foo(10.0, 20.0),))
    assert out["m"] is m and tangent["m"] is not m
    assert (float(tangent["m"].x.value), float(tangent["n"].z)) == (10.0, 20.0)
    assert type(tangent["m"].n) is nnx.BatchStat


def scaled_by_reference(m):
    m.r[...] = m.r + m.x.sum()
    return m.x.sum() * m.r[...]


def test_jvp_differentiates_along_array_references():
    r = nnx.Variable(jnp.array(1.0), ref=True)
    m = nnx.Dict(x=nnx.Param(jnp.ones(2)), r=r, n=nnx.Variable(jnp.array(0), ref=True))
    y, dy = nnx.jvp(scaled_by_reference, (m,), (nnx.state(m, nnx.Param),))
    assert (float(y), float(dy), float(m.r.value)) == (6.0, 10.0, 3.0)
    moved = nnx.State({"x": jnp.zeros(2), "r": nnx.Variable(jnp.array(2.0), ref=True)})
    for tangent in (moved, nnx.State({"r": jnp.array(2.0)})):
        m.r[...] = 1.0
        y, dy = nnx.jvp(scaled_by_reference, (m,), (tangent,))
        assert (float(y), float(dy), float(m.r.value)) == (6.0, 4.0, 3.0)


def test_vjp_beside_array_references():
    m = nnx.Dict(x=nnx.Param(jnp.ones(2)), r=nnx.Variable(jnp.array(1.0), ref=True))
    y, _ = nnx.vjp(scaled_by_reference, m)
    assert (float(y), float(m.r.value)) == (6.0, 3.0)
    m.n = nnx.Variable(jnp.array(2), ref=True)
    del m.r
    (d_m,) = nnx.vjp(lambda m: (m.x * m.n).sum(), m)[1](1.0)
    assert d_m.x.value.tolist() == [2.0, 2.0] and d_m.n.get_raw_value().dtype == jax.dtypes.float0


# remat --------------------------------------------------------------------------------------------


def test_the_jaxpr_holds_a_checkpoint_and_fewer_residuals():
    def program(**options):
        deep = lambda m: jnp.sin(jnp.sin(jnp.sin(m.x)))
        return str(nnx.make_jaxpr(nnx.grad(nnx.remat(deep, **options)))(Foo()))

    policy = jax.checkpoint_policies.everything_saveable
    assert program(policy=policy).count(" sin ") < program().count(" sin ")
    assert "prevent_cse=True" in program() and "prevent_cse=False" in program(prevent_cse=False)


@pytest.mark.parametrize("outer", [nnx.remat, nnx.filter_checkpoint, nnx.checkify])
def test_constants_that_a_function_leaves_are_arrays(outer):
    def f(m):
        m.a[...], m.flag = jnp.float16(0.25), nnx.Variable(jnp.bool_(True))
        return m.a + 1

    m = nnx.Dict(a=nnx.Param(jnp.ones((), jnp.float16)))
    for _ in range(2):  # a literal of a program could not be written into
        outer(f)(m)
        left = [m.a.value, m.flag.value]
        assert all(isinstance(x, jax.Array) for x in left) and left == [0.25, True]
        assert [x.dtype for x in left] == [jnp.float16, jnp.bool_]


def test_static_arguments_of_remat_by_number_keyword_and_default():
    def f(m, x, twice=False, text=""):
        return m.x * x * (2 if twice else 1) + len(text)

    m = Foo(3.0)
    g = functools.partial(nnx.remat, static_argnums=(2, 3))(f)
    calls = (g(m, 1.0), g(m, 1.0, twice=True), g(m, x=1.0, text="abc"), g(m, 1.0, True, text="a"))
    assert list(map(float, calls)) == [3.0, 6.0, 6.0, 7.0]
    assert float(nnx.grad(lambda m: g(m, 2.0, twice=True))(m)["x"].value) == 4.0
    assert float(nnx.remat(lambda m, k: m.x * len(k), static_argnums=-1)(m, [1, 2])) == 6.0
    for shared in (object(), bytearray(b"a")):  # hashable or not, a static argument may be anything
        assert nnx.remat(lambda x, k: k is shared, static_argnums=1)(1.0, shared)  # noqa: B023
