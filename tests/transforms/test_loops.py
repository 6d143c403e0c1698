"""Loops and branches: carries, bounds, conditions, what the chosen branch does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxlite as nnx
from tests.laws.model import canonical, content, references
from tests.transforms.models import Foo, rebinds, snapshot, steps

MODES = [{}, {"graph_updates": False}, {"graph": False}]


def while_of(count):
    return lambda f, carry, **mode: nnx.while_loop(
        lambda c: c[0] < count, lambda c: (c[0] + 1, f(c[1])), (0, carry), **mode
    )[1]


def fori_of(lower, upper):
    return lambda f, carry, **mode: nnx.fori_loop(lower, upper, lambda i, c: f(c), carry, **mode)


def scan_of(length):
    scan = functools.partial(nnx.scan, in_axes=nnx.Carry, out_axes=nnx.Carry, length=length)
    return lambda f, carry, **mode: scan(lambda c: f(c), **mode)(carry)


LOOPS = {
    "while": while_of(4),
    "fori": fori_of(1, 5),
    "scan": scan_of(4),
    "fori, traced bound": fori_of(1, jnp.int32(5)),
    "fori, Variables as bounds": fori_of(nnx.Variable(1), nnx.Variable(jnp.int32(5))),
}
OUTER = pytest.mark.parametrize("outer", [lambda f: f, nnx.jit], ids=["eager", "jit"])
every_loop = pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)


# Values and state ---------------------------------------------------------------------------------


def model():
    m = Foo(2.0, 5.0)
    m.raw, m.plain = jnp.ones(2), [jnp.ones(2), jnp.zeros(3)]
    m.tree = nnx.Variable((jnp.zeros(2), [jnp.array(1)]))
    return m


VALUES = [
    lambda m: m.n.set_value((m.n + m.x) % 16),
    lambda m: m.x.set_value(3 - m.y),
    lambda m: m.tree.set_value((m.raw + 1, [m.tree.value[1][0] * 2 % 16])),
]
ARRAYS = [
    lambda m: setattr(m, "raw", (m.raw * 3 + m.n) % 16),
    lambda m: m.plain.__setitem__(0, m.plain[0] + m.x),
]


@settings(max_examples=30)
@given(
    st.sampled_from([*LOOPS]),
    st.lists(st.tuples(st.sampled_from(VALUES + ARRAYS), st.booleans()), max_size=4),
    st.sampled_from(MODES),
    st.booleans(),
)
def test_L5_a_loop_leaves_what_the_same_loop_of_python_leaves(name, program, mode, jitted):
    def body(m, choose):
        for edit, always in program:
            if always or edit in ARRAYS:
                edit(m)
            else:
                choose(m.n < 8, edit, lambda m: None, m)
        return m

    def run(m):
        return LOOPS[name](lambda m: body(m, nnx.cond), m, **mode)

    mine, theirs = model(), model()
    refs, values = references(mine), [v.get_raw_value() for v in (mine.x, mine.n, mine.y)]
    out = nnx.jit(run)(mine) if jitted and not mode else run(mine)
    for _ in range(4):
        body(theirs, lambda chosen, one, other, m: (one if chosen else other)(m))
    assert canonical(out, content) == canonical(theirs, content)
    assert mode or out is mine  # without updates an object of its own, with the caller's Variables
    assert all(x is y for x, y in zip(references(out)[1:], refs[1:], strict=True))
    edits = [edit for edit, _ in program]
    for edit, old, v in zip([VALUES[1], VALUES[0], None], values, (mine.x, mine.n, mine.y)):
        assert edit in edits or v.get_raw_value() is old  # what is only read is not returned


@every_loop
def test_new_variables_may_come_beside_objects_that_stay(loop):
    m, total = Foo(2.0), nnx.State({"a": nnx.Param(1.0), "b": jnp.zeros(2)})

    def f(carry):
        m, total, v = carry
        v[...] = v * 100  # of a Variable that is replaced: what is written goes nowhere
        return steps(m), jax.tree.map(lambda x: x + m.n, total), nnx.Cache(total["a"] * 1)

    v = nnx.Cache(0.0)
    same, new, last = loop(f, (m, total, v))
    assert same is m and float(m.n.value) == 8.0
    assert isinstance(new, nnx.State) and isinstance(new["a"], nnx.Param)
    assert float(new["a"].value) == 21.0 and new["b"].tolist() == [20.0, 20.0]
    assert isinstance(last, nnx.Cache) and float(last.value) == 13.0 and last is not v
    assert float(total["a"].value) == 1.0 and not total["b"].any() and v.value == 0.0


@OUTER
@pytest.mark.parametrize("name", ["fori", "fori, traced bound", "scan"])
def test_a_variable_may_be_replaced_by_a_new_one(name, outer):
    foo, loop = Foo(), LOOPS[name]
    x, f = foo.x, lambda m: steps(rebinds(m))
    assert outer(lambda foo: loop(f, foo))(foo) is foo
    assert foo.x is not x and [float(v.value) for v in (x, foo.x, foo.n)] == [1, 16, 30]
    if "traced" not in name:
        grads = outer(nnx.grad(lambda foo: loop(f, foo).x * 1))(Foo())
        assert float(grads.x.value) == 16


# Bounds of fori_loop ------------------------------------------------------------------------------


def summed(lower, upper):
    return nnx.fori_loop(lower, upper, lambda i, c: (c[0] + i, c[1] + 1), (0, 0))


@pytest.mark.parametrize("mixed", [False, True], ids=["both", "mixed"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64"])
def test_bounds_of_every_integer_type(dtype, mixed):
    with jax.enable_x64(dtype.endswith("64")):
        for make, (lower, upper) in (
            (np.dtype(dtype).type, (100, 120)),
            (lambda n: jnp.array(n, dtype), (0, 127)),
            (lambda n: np.array(n, dtype), (5, 2)),
        ):
            bounds = (lower if mixed else make(lower)), make(upper)
            expected = [sum(range(lower, upper)), len(range(lower, upper))]
            assert [*map(int, summed(*bounds))] == expected
            assert [*map(int, nnx.jit(lambda: summed(*bounds))())] == expected  # noqa: B023
            if not mixed:  # traced, they count in their own type
                wrapped = np.array(expected).astype(dtype).tolist()
                assert [*map(int, nnx.jit(summed)(*bounds))] == [wrapped[0], expected[1]]


@pytest.mark.parametrize("dtype", ["int8", "uint64"])
def test_a_loop_with_known_bounds_of_any_integer_type_has_a_gradient(dtype):
    def slope(lower, upper):
        loss = lambda m: nnx.fori_loop(lower, upper, lambda i, x: x * m.x, 1.0)
        return lambda m: nnx.grad(loss)(m)["x"].value

    with jax.enable_x64(dtype.endswith("64")):
        one, four = np.dtype(dtype).type(1), np.dtype(dtype).type(4)
        slopes = [slope(one, four)(Foo(2.0)), slope(jnp.asarray(one), four)(Foo(2.0))]
        slopes.append(nnx.jit(slope(one, four))(Foo(2.0)))  # where JAX's own arrays are traced
        assert [*map(float, slopes)] == [12.0] * 3


def test_a_known_bound_that_the_other_type_cannot_have():
    count = lambda n: nnx.fori_loop(200, n, lambda i, c: c + 1, 0)
    assert int(nnx.jit(count)(jnp.int8(100))) == 0
    count = lambda n: nnx.fori_loop(-3, n, lambda i, c: c + i, 0)
    assert int(nnx.jit(count)(jnp.uint8(2))) == -5
    with pytest.raises(TypeError, match="must have equal types"):
        nnx.jit(lambda a, b: nnx.fori_loop(a, b, lambda i, c: c, 0))(jnp.int8(0), jnp.int16(1))


def test_the_index_of_a_fori_loop_is_as_weak_as_its_bounds():
    add = lambda i, c: c + i
    for bounds in ((0, 3), (jnp.array(0), jnp.array(3)), (np.int64(0), jnp.uint8(3))):
        assert nnx.fori_loop(*bounds, add, jnp.int8(1)).dtype == jnp.int8
        assert nnx.fori_loop(*bounds, add, 0).weak_type
    assert nnx.jit(lambda n: nnx.fori_loop(0, n, add, jnp.int8(1)))(3).dtype == jnp.int8


@every_loop
def test_a_python_scalar_takes_the_type_that_the_body_gives_it(loop):
    def f(carry):
        carry[0].value = carry[0] + 0.5
        return carry[0], carry[1] + 0.5

    scalar, total = loop(f, (nnx.Variable(0), 0))
    assert float(scalar.value) == float(total) == 2.0
    assert scalar.value.dtype == total.dtype == jnp.float32


# Conditions of while_loop -------------------------------------------------------------------------


def test_a_condition_may_be_a_variable():
    v = nnx.Variable(jnp.array(True))
    assert nnx.while_loop(lambda v: v, lambda v: (v.set_value(v[...] & False), v)[1], v) is v
    assert not v.value


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_a_condition_sees_what_the_body_writes_into_references(jit, mode):
    def body(carry):
        i, m = carry
        m.total[...] += 2.0
        return i + 1, m

    def run(m):
        more = lambda carry: (carry[1].total[...] < 5) & (carry[0] < 10)
        return nnx.while_loop(more, body, (0, m), **mode)[0]

    m = nnx.Dict(total=nnx.Variable(jnp.float32(0.0), ref=True))
    assert (int(jit(run)(m)), float(m.total[...])) == (3, 6.0)
    assert (int(jit(run)(m)), float(m.total[...])) == (0, 6.0)


# Objects that the body makes ----------------------------------------------------------------------


@every_loop
@pytest.mark.parametrize("mode", MODES)
def test_variables_may_move_to_new_objects(loop, mode):
    def f(m):
        new = Foo()
        new.x, new.n, new.y = m.x, m.n, m.y
        new.x[...] += 1
        return steps(new)

    m = Foo(2.0, 5.0)
    if loop in (LOOPS["while"], LOOPS["scan"]) and not mode:
        with pytest.raises(ValueError, match="the body puts a new Foo in the place of 'c.*'"):
            loop(f, m)
        return
    out = loop(f, m, **mode)
    assert out is not m and (out.x, out.y, out.n) == (m.x, m.y, m.n)
    assert [float(v.value) for v in (m.x, m.y, m.n)] == [6, 5, 18]


# cond and switch ----------------------------------------------------------------------------------


def up(m, k=1.0):
    m.n[...] += k
    return m.n * 1.0


def double(m, k=1.0):
    m.x[...] *= 2
    return m.x * k


def keep(m, k=1.0):
    return m.n * k


def test_predicates_and_indices_of_every_kind():
    m = Foo()
    for pred in (True, jnp.array(True), np.bool_(True), 1, 2.5, nnx.Variable(True), m.x):
        assert float(nnx.cond(pred, lambda: 1.0, lambda: 2.0)) == 1.0
    assert float(nnx.cond(nnx.Variable(jnp.array(False)), lambda: 1.0, lambda: 2.0)) == 2.0
    triple = [lambda x: x, lambda x: 2 * x, lambda x: 3 * x]
    clamped = {-7: 1.0, 0: 1.0, 1: 2.0, 2: 3.0, 9: 3.0, nnx.Variable(1): 2.0}
    for index, expected in clamped.items():
        assert float(nnx.switch(index, triple, 1.0)) == expected
    assert float(nnx.switch(jnp.int8(2), iter(triple), 1.0)) == 3.0
    nnx.switch(5, [up], m)  # a single branch
    assert float(m.n.value) == 1.0


@pytest.mark.parametrize("mode", MODES)
def test_branches_may_pass_on_arrays_of_a_state_or_make_new_ones(mode):
    a, b = nnx.State({"w": jnp.ones(2)}), nnx.State({"w": jnp.zeros(2)})
    branches = [
        lambda a, b: a,
        lambda a, b: b,
        lambda a, b: jax.tree.map(lambda x: x * 3, a),
        lambda a, b: nnx.State({"w": b["w"]}),
    ]
    for number, value in enumerate((1.0, 0.0, 3.0, 0.0)):
        out = nnx.switch(number, branches, a, b, **mode)
        assert isinstance(out, nnx.State) and out["w"].tolist() == [value] * 2
    assert float(a["w"][0]) == 1.0


def test_inside_vmap_each_lane_chooses():
    m = Foo(jnp.ones(4), jnp.ones(4))
    m.n.value = jnp.zeros(4)
    out = nnx.vmap(lambda m, i: nnx.switch(i, [up, double, keep], m))(m, jnp.array([0, 1, 2, 0]))
    assert out.tolist() == [1.0, 2.0, 0.0, 1.0]
    assert m.n.value.tolist() == [1.0, 0.0, 0.0, 1.0] and m.x.value.tolist() == [1, 2, 1, 1]


# Structure ----------------------------------------------------------------------------------------


def grows(m, scale):
    m.new = nnx.Dict(w=nnx.Param(m.x * scale))
    m.again, m.mode = m.new.w, "grown"
    del m.y
    m.x, m.n = m.n, m.x
    m.x.set_metadata(note="n")
    return m.new, nnx.Param(scale * jnp.ones(2))


def test_the_same_structure_change_in_every_branch_is_repeated_outside():
    one, other = (functools.partial(grows, scale=s) for s in (2.0, 3.0))
    for flag, scale in ((True, 2.0), (False, 3.0)):
        m = Foo(5.0)
        x, n = m.x, m.n
        new, made = nnx.cond(flag, one, other, m)
        assert new is m.new and m.again is m.new.w and m.mode == "grown" and not hasattr(m, "y")
        assert m.x is n and m.n is x and n.note == "n"
        assert float(m.new.w.value) == 5.0 * scale and made.value.tolist() == [scale] * 2


def test_the_jaxpr_of_a_branch_returns_what_one_or_the_other_writes():
    m = Foo()
    before = snapshot(m)
    run = lambda m, p: nnx.cond(p, up, double, m)
    assert nnx.eval_shape(run, m, True).shape == ()
    jaxpr = nnx.make_jaxpr(run)(m, True)
    assert "cond" in [str(e.primitive) for e in jaxpr.eqns]
    assert len(jaxpr.jaxpr.outvars) == 3  # the result, and the two Variables
    assert snapshot(m) == before


# Captured objects ---------------------------------------------------------------------------------


@OUTER
def test_a_captured_object_that_a_branch_returns_is_a_copy(outer):
    def run(m):
        out, other = nnx.cond(m.n.value < 5, lambda: (m, {"x": m.x}), lambda: (m, {"x": m.x}))
        assert out is not m and out.x is other["x"] and type(out) is Foo
        out.x.value += 1
        return out.x * 1.0, m.x * 1.0

    new, old = outer(run)(Foo())
    assert (float(new), float(old)) == (2.0, 1.0)


def test_a_captured_object_that_a_branch_stores_is_copied_too():
    def attach(m):
        m.other = other

    m, other = Foo(), Foo()
    nnx.cond(True, attach, attach, m)
    assert m.other is not other and float(m.other.x.value) == float(other.x.value)
