"""The carries of while_loop, fori_loop and scan: values, state, constants, gradients, refusals."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.transforms.models import Foo, snapshot

MODES = [{}, {"graph_updates": False}, {"graph": False}]


def step(m):
    """Writes one Variable, reads another."""
    m.n[...] += m.x
    return m


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


def loops(*names):
    return pytest.mark.parametrize("loop", [LOOPS[name] for name in names], ids=names)


every_loop = loops(*LOOPS)
all_but_scan = loops(*(name for name in LOOPS if name != "scan"))
jitted_or_not = pytest.mark.parametrize("outer", [lambda f: f, nnx.jit], ids=["eager", "jit"])


# values and state ----------------------------------------------------------------------------------


@every_loop
@pytest.mark.parametrize("mode", MODES)
def test_the_carry_is_the_callers_own_object(loop, mode):
    m = Foo(2.0)
    n, x, raw = m.n, m.x, m.x.value
    out = loop(step, m, **mode)
    assert out is m or mode  # without updates an object of its own, with the caller's Variables
    assert out.n is m.n is n and float(n.value) == 8.0
    assert out.x is m.x is x and x.value is raw  # only read: not even returned


@every_loop
@pytest.mark.parametrize("mode", MODES[1:])
def test_without_updates_an_array_that_is_no_variable_stays_what_it_was(loop, mode):
    def halved(m):
        m.raw, m.n[...] = m.raw * 0.5, m.n + 1.0
        return m

    m = Foo(1.0)
    m.raw = jnp.ones(2)
    out = loop(halved, m, **mode)
    assert out is not m and out.n is m.n and float(m.n.value) == 4.0
    assert m.raw.tolist() == [1.0, 1.0] and out.raw.tolist() == [0.0625, 0.0625]


@every_loop
def test_new_variables_may_come_beside_objects_that_stay(loop):
    m, total = Foo(2.0), nnx.State({"a": nnx.Param(1.0), "b": jnp.zeros(2)})

    def f(carry):
        m, total, v = carry
        v[...] = v * 100  # of a Variable that is replaced: what is written goes nowhere
        return step(m), jax.tree.map(lambda x: x + m.n, total), nnx.Cache(total["a"] * 1)

    v = nnx.Cache(0.0)
    same, new, last = loop(f, (m, total, v))
    assert same is m and float(m.n.value) == 8.0
    assert isinstance(new, nnx.State) and isinstance(new["a"], nnx.Param)
    assert float(new["a"].value) == 21.0 and new["b"].tolist() == [20.0, 20.0]
    assert isinstance(last, nnx.Cache) and float(last.value) == 13.0 and last is not v
    assert float(total["a"].value) == 1.0 and not total["b"].any() and v.value == 0.0


@every_loop
def test_variables_that_hold_pytrees_are_carried(loop):
    def f(c):
        kept, new = c
        kept.value = {"a": kept.value["a"] + 1, "b": (kept.value["b"][0] * 1.5,)}
        return kept, jax.tree.map(lambda x: x + 1, new)

    v, new = nnx.Variable({"a": jnp.zeros(2), "b": (2,)}), nnx.Cache([jnp.zeros(2), {}])
    kept, out = loop(f, (v, new))
    assert (
        kept is v and v.value["a"].tolist() == [4.0, 4.0] and float(v.value["b"][0]) == 2 * 1.5**4
    )
    assert out.value[0].tolist() == [4.0, 4.0] and new.value[0].tolist() == [0.0, 0.0]


@every_loop
def test_inside_jit_and_with_other_carries_beside(loop):
    m, v = Foo(2.0), nnx.Variable(jnp.zeros(2))
    shared = m.x

    def f(carry):
        assert carry["k"][0].x is carry["x"]
        carry["v"][...] += 1
        return {**carry, "k": [step(carry["k"][0]), carry["k"][1] * 2]}

    out = nnx.jit(lambda c: loop(f, c))({"v": v, "k": [m, jnp.array(1.0)], "x": m.x, "none": None})
    assert out["v"] is v and out["k"][0] is m and out["x"] is shared and float(out["k"][1]) == 16.0
    assert v.value.tolist() == [4.0, 4.0] and float(m.n.value) == 8.0 and out["none"] is None


@all_but_scan
def test_new_objects_of_the_same_structure_are_results_of_their_own(loop):
    m = Foo(2.0)
    before = snapshot(m)

    def f(m):
        new = Foo()
        new.x.value, new.y.value, new.n.value = m.x[...], m.y + 1, m.n + m.x
        return new

    out = loop(f, m)
    assert out is not m and type(out) is Foo and snapshot(m) == before
    assert (float(out.x.value), float(out.y.value), float(out.n.value)) == (2.0, 6.0, 8.0)
    assert float(loop(lambda m: nnx.clone(step(m)), m).n.value) == 8.0 and snapshot(m) == before


def test_the_index_counts_as_in_python():
    m = nnx.Dict(seen=nnx.Variable(jnp.zeros(6, jnp.int32)))

    def f(i, m):
        m.seen[i] = i
        return m

    for bounds in ((2, 5), (jnp.int32(2), 5), (2, jnp.int32(5))):
        m.seen.value = jnp.zeros(6, jnp.int32)
        nnx.fori_loop(*bounds, f, m)
        assert m.seen.value.tolist() == [0, 0, 2, 3, 4, 0]
    nnx.fori_loop(5, 2, f, m)  # no iteration
    assert m.seen.value.tolist() == [0, 0, 2, 3, 4, 0]
    assert nnx.fori_loop(0, 3, lambda i, c: c, None) is None
    sizes = lambda n: nnx.fori_loop(jnp.uint8(0), n, lambda i, c: c + i.dtype.itemsize, 0)
    assert int(sizes(jnp.uint8(3))) == 12 and int(nnx.jit(sizes)(jnp.uint8(3))) == 3


INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


def summed(lower, upper):
    return nnx.fori_loop(lower, upper, lambda i, c: (c[0] + i, c[1] + 1), (0, 0))


@pytest.mark.parametrize("mixed", [False, True], ids=["both", "mixed"])
@pytest.mark.parametrize("dtype", INTEGERS)
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


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint64"])
def test_a_loop_with_known_bounds_of_any_integer_type_has_a_gradient(dtype):
    def slope(lower, upper, jit):
        loss = lambda m: nnx.fori_loop(lower, upper, lambda i, x: x * m.x, 1.0)
        f = lambda m: nnx.grad(loss)(m)["x"].value
        return float((nnx.jit(f) if jit else f)(Foo(2.0)))

    with jax.enable_x64(dtype.endswith("64")):
        one, four = np.dtype(dtype).type(1), np.dtype(dtype).type(4)
        slopes = [slope(one, four, False), slope(jnp.asarray(one), four, False)]
        slopes.append(slope(one, four, True))  # where JAX's own arrays are traced
    assert slopes == [12.0] * 3


def test_a_known_bound_that_the_other_type_cannot_have():
    count = lambda n: nnx.fori_loop(200, n, lambda i, c: c + 1, 0)
    assert int(nnx.jit(count)(jnp.int8(100))) == 0
    count = lambda n: nnx.fori_loop(-3, n, lambda i, c: c + i, 0)
    assert int(nnx.jit(count)(jnp.uint8(2))) == -5
    with pytest.raises(TypeError, match="must have equal types"):
        nnx.jit(lambda a, b: nnx.fori_loop(a, b, lambda i, c: c, 0))(jnp.int8(0), jnp.int16(1))


def test_unroll():
    m, bounds = Foo(2.0), jax.make_jaxpr(lambda n: nnx.fori_loop(0, n, lambda i, c: c, 0))
    for unroll in (2, True, 1):
        m.n.value = jnp.array(0.0)
        nnx.fori_loop(jnp.int32(0), jnp.int32(5), lambda i, m: step(m), m, unroll=unroll)
        assert float(m.n.value) == 10.0
    assert "while" in str(bounds(3))
    with pytest.raises(
        ValueError, match="`unroll` in `fori_loop` if the loop bounds are statically"
    ):
        jax.jit(lambda n: nnx.fori_loop(0, n, lambda i, c: c, 0, unroll=2))(3)


def test_a_condition_may_look_at_variables():
    m = Foo(2.0)
    m.done = nnx.Variable(False)

    def body(m):
        step(m)
        m.done.value = m.n > 5
        return m

    nnx.while_loop(lambda m: jnp.logical_not(m.done[...]), body, m)
    assert (float(m.n.value), bool(m.done.value)) == (6.0, True)
    m.done.value, m.n.value = jnp.array(True), jnp.array(0.0)
    flag = nnx.while_loop(lambda d: d["go"], lambda d: {**d, "go": d["go"] & False}, {"go": True})
    assert not flag["go"]
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


@every_loop
def test_a_python_scalar_takes_the_type_that_the_body_gives_it(loop):
    v = nnx.Variable(0)

    def f(carry):
        v, total = carry
        v.value = v + 0.5
        return v, total + 0.5

    v, total = loop(f, (v, 0))
    assert float(v.value) == float(total) == 2.0
    assert v.value.dtype == total.dtype == jnp.float32


@every_loop
def test_arrays_held_without_a_variable_are_carried_too(loop):
    m = nnx.Dict(a=jnp.zeros(2), b=[jnp.ones(2), jnp.ones(3)])
    kept = m.b[1]

    def f(m):
        m.a = m.a + m.b[0]
        m.b[0] = m.b[0] * 2
        return m

    assert loop(f, m) is m
    assert m.a.tolist() == [15.0] * 2 and m.b[0].tolist() == [16.0] * 2 and m.b[1] is kept


# constants -----------------------------------------------------------------------------------------


def test_the_index_of_a_fori_loop_is_as_weak_as_its_bounds():
    add = lambda i, c: c + i
    for bounds in ((0, 3), (jnp.array(0), jnp.array(3)), (np.int64(0), jnp.uint8(3))):
        assert nnx.fori_loop(*bounds, add, jnp.int8(1)).dtype == jnp.int8
        assert nnx.fori_loop(*bounds, add, 0).weak_type
    assert nnx.jit(lambda n: nnx.fori_loop(0, n, add, jnp.int8(1)))(3).dtype == jnp.int8


def rebinds(m):
    m.x = nnx.Param(m.x * 2)
    m.n[...] += 1
    return m


@jitted_or_not
@loops("fori", "fori, traced bound", "scan")
def test_a_variable_may_be_replaced_by_a_new_one(loop, outer):
    foo = Foo()
    x = foo.x
    assert outer(lambda foo: loop(rebinds, foo))(foo) is foo
    assert foo.x is not x and [float(v.value) for v in (x, foo.x, foo.n)] == [1, 16, 4]
    if loop is not LOOPS["fori, traced bound"]:
        grads = outer(nnx.grad(lambda foo: loop(rebinds, foo).x * 1))(Foo())
        assert float(grads.x.value) == 16
    with pytest.raises(ValueError, match=f"{START}: the body changes attributes .'x'. of 'm'"):
        nnx.while_loop(lambda m: m.n[...] < 5, rebinds, foo)
    assert [float(v.value) for v in (foo.x, foo.n)] == [16, 4]


def takes_over(m):
    new = Foo()
    new.x, new.n = m.x, m.n
    new.x[...] += 1
    return new


@every_loop
@pytest.mark.parametrize("mode", MODES)
def test_variables_may_move_to_new_objects(loop, mode):
    def f(m):
        new = takes_over(m)
        new.y = m.y
        return step(new)

    m = Foo(2.0, 5.0)
    if loop in (LOOPS["while"], LOOPS["scan"]) and not mode:
        match = f"({START}|{REFERENCES}): the body puts a new Foo in the place of 'c.*'"
        with pytest.raises(ValueError, match=match):
            loop(f, m)
        return
    out = loop(f, m, **mode)
    assert out is not m and (out.x, out.y, out.n) == (m.x, m.y, m.n)
    assert [float(v.value) for v in (m.x, m.y, m.n)] == [6, 5, 18]


# refusals ------------------------------------------------------------------------------------------


def sets(m):
    m.extra = 1
    return m


def adds(m):
    m.new = nnx.Param(jnp.ones(()))
    return m


def removes(m):
    del m.y
    return m


def annotates(m):
    m.x.set_metadata(note=1)
    return m


def reshapes(m):
    m.n.value = jnp.ones(3)
    return m


START = (
    "(?:(?:scan|fori_loop) body function carry input and carry output must have the same pytree "
    "structure|(?:while|fori)_loop requires body function's input and output to have the same "
    "reference and pytree structure), but they differ"
)
REFERENCES = "Carry references must be the same between iterations of scan, but they differ"
TYPES = "body function carry input and carry output must have equal types, but they differ at "
# The classes are those of the reference: of while_loop a ValueError, of fori_loop, of scan
REFUSED = {
    "sets": (sets, r": the body changes attributes \['extra'\] of 'c'. Do this before the loop",
             TypeError, None),
    "adds": (adds, r": the body changes attributes \['new'\] of 'c'.*Do this before the loop",
             TypeError, TypeError),
    "removes": (removes, r": the body changes attributes \['y'\] of 'c'", TypeError, TypeError),
    "annotates": (annotates, ": the body changes metadata of 'c.x'.*Do this before",
                  TypeError, TypeError),
    "to a dict": (lambda m: {"m": m}, ": the output is .* in place of ", ValueError, ValueError),
    "to an array": (lambda m: m.x * 1, (": at 'c' the input is an object, the output an array. "
                    "Return objects and Variables where they came in"), TypeError, ValueError),
    "to another object": (lambda m: nnx.Dict(x=nnx.Param(m.x * 1)),
                          "(?:: 'c': Foo became Dict|: the body puts a new Dict in the place of 'c')",
                          TypeError, ValueError),
    "to another kind": (lambda m: nnx.Dict(x=nnx.Param(m.x * 1)).x, ": 'c': Foo became Param",
                        TypeError, ValueError),
    "to nothing": (lambda m: None, ": the output is None in place of ", ValueError, ValueError),
}  # fmt: skip


@every_loop
@pytest.mark.parametrize(("f", "match", "fori", "scan"), REFUSED.values(), ids=REFUSED)
def test_a_carry_of_another_structure_is_told_of_by_path(loop, f, match, fori, scan):
    m = Foo()
    before = snapshot(m)
    if f is sets and loop is LOOPS["scan"]:
        assert loop(f, m) is m and m.extra == 1
        return
    error = {LOOPS["while"]: ValueError, LOOPS["scan"]: scan}.get(loop, fori)
    if loop is LOOPS["while"]:  # the carry is a part of its pytree
        match = match.replace("'c'", "'c.1'").replace("'c.x'", "'c.1.x'")
        match = re.sub("(?<=the output is ).*", "", match)
    start = REFERENCES if loop is LOOPS["scan"] and scan is not fori else START
    with pytest.raises(error, match=start + match):
        loop(f, m)
    assert snapshot(m) == before


def named(f):
    return lambda c: {**c, "m": f(c["m"])}


WRONG = {
    "variable": (named(reshapes), TYPES + r"'.*m.n': the input is float32\[\], the output float32\[3\]"),
    "array": (lambda c: {**c, "k": jnp.ones(2)}, TYPES + r"'.*k': the input is float32\[\]"),
    "dtype": (lambda c: {**c, "k": c["k"] * 1j}, TYPES + r"'.*k': .* the output complex64\[\]"),
    "result": (lambda c: {**c, "k": "x"}, "returned a value of type 'str' at '.*k', which is not a"),
}  # fmt: skip


@every_loop
@pytest.mark.parametrize(("f", "match"), WRONG.values(), ids=WRONG)
def test_a_carry_of_other_types_is_told_of_by_path(loop, f, match):
    m = Foo()
    before = snapshot(m)
    with pytest.raises(TypeError, match=match):
        loop(f, {"m": m, "k": jnp.float32(1.0)})
    assert snapshot(m) == before


def test_a_captured_object_leaves_a_fori_loop_as_a_copy():
    m, other = Foo(), Foo()
    other.n.value = jnp.array(7.0)
    before = snapshot(m, other)
    out = nnx.fori_loop(0, 2, lambda i, m: other, m)
    assert out is not other and out is not m and out.n.value == 7
    assert snapshot(m, other) == before
    for mode in ({"graph_updates": False}, {"graph": False}):
        with pytest.raises(ValueError, match="different trace level"):
            nnx.fori_loop(0, 2, lambda i, m: other, m, **mode)
    with pytest.raises(ValueError, match="different trace level"):
        nnx.while_loop(lambda m: m.n < 3, lambda m: other, m)
    assert snapshot(m, other) == before


@pytest.mark.parametrize(
    ("loop", "error"),
    [
        ("while", ValueError),
        ("fori", TypeError),
        ("fori, traced bound", TypeError),
        ("scan", ValueError),
    ],
)
def test_objects_must_come_back_where_they_came_in(loop, error):
    a, b = Foo(), Foo()
    before = snapshot(a, b)
    moved = (
        "the body puts '.*' in the place of '.*'. Return each object of the carry where it came in"
    )
    exchanges = lambda c: (setattr(c, "x", c.y), c)[1]
    for f, carry, match in (
        (lambda c: (c[0], c[0]), (a, b), "the body puts '.*0' in the place of '.*1'"),
        (lambda c: c[::-1], (a, b), moved),
        (lambda c: (c[1], c[0], nnx.Variable(c[2] + 1)), (a, b, nnx.Variable(0)), moved),
        (exchanges, a, r"the body puts '.*\.y' in the place of '.*\.x'"),
        (lambda c: (c[0], (nnx.Param(c[0].x * 1), c[1][1])), (a, (a.x, b)), "carry that is shared"),
        (lambda c: c[::-1], (a, 1.0), "at '.*0' the input is an object, the output an array"),
        (lambda c: (c[0], nnx.Variable(c[1])), (a, 1.0), "1' the input is an array, the output an"),
        (lambda c: (c[0], nnx.clone(c[1])), (a, a), "that is shared with another, at '.*1'"),
    ):
        shared = loop == "scan" and "that is shared" in match
        with pytest.raises(TypeError if shared else error, match=match):
            LOOPS[loop](f, carry)
        assert snapshot(a, b) == before


def writing_condition(m):
    step(m)
    return m.n < 3


@pytest.mark.parametrize(
    ("condition", "match", "error"),
    [
        (writing_condition, r"cond_fun \(writing_condition\) changed its argument\. Only body_fun",
         ValueError),
        (lambda m: (sets(m), True)[1], r"cond_fun \(.*\) changed its argument", ValueError),
        (lambda m: m.n, "cond_fun must return a boolean scalar, but got .*float32", TypeError),
        (lambda m: None, "cond_fun must return a boolean scalar", TypeError),
        (lambda m: 1 // 0, "by zero", ZeroDivisionError),
    ],
    ids=["writes", "restructures", "float", "nothing", "fails"],
)  # fmt: skip
def test_conditions_only_look(condition, match, error):
    m = Foo()
    before = snapshot(m)
    with pytest.raises(error, match=match):
        nnx.while_loop(condition, step, m)
    assert snapshot(m) == before


def test_arguments_that_are_no_arrays_and_sharing_in_tree_mode():
    m = Foo()
    body = lambda i, c: c
    for bounds in ((0, 3), (0, jnp.int32(3))):
        with pytest.raises(
            TypeError, match="fori_loop: cannot interpret argument 'c.k' as an array"
        ):
            nnx.fori_loop(*bounds, body, {"m": m, "k": "x"})
    with pytest.raises(
        TypeError, match="fori_loop: cannot interpret argument 'lower' as an array, it is of"
    ):
        nnx.fori_loop("0", 3, body, m)
    with pytest.raises(TypeError, match="lower and upper arguments to fori_loop must have equal"):
        nnx.fori_loop(jnp.float32(0), jnp.int32(3), body, m)
    with pytest.raises(TypeError, match="while_loop: cannot interpret argument 'c.1' as an array"):
        nnx.while_loop(lambda c: False, lambda c: c, (m, "x"))
    for loop in LOOPS.values():
        with pytest.raises(ValueError, match="Duplicate Foo"):
            loop(lambda c: c, [m, m], graph=False)


STAYS = (
    "Variable identity must be preserved across iterations, but the body puts another Variable in "
    "the place of "
)
LOST = {
    "sets": (sets, START + r": the body changes attributes \['extra'\] of "),
    "adds": (adds, START + r": the body changes attributes \['new'\] of "),
    "annotates": (annotates, START + ": the body changes metadata of '.*x'"),
    "rebinds": (rebinds, STAYS + "'.*x'.* write into the Variable"),
    "exchanges": (lambda m: (setattr(m, "x", m.y), m)[1],
        STAYS + "'.*x'|Duplicate Param found at paths of the result"),
    "is new": (nnx.clone, STAYS + "'.*'"),
}  # fmt: skip


@every_loop
@pytest.mark.parametrize("name", LOST)
def test_without_graph_updates_structure_must_stay(loop, name):
    f, match = LOST[name]
    mode = MODES[1 + [*LOST].index(name) % 2]
    m = Foo(2.0)
    before = snapshot(m)
    if f is sets and loop is LOOPS["scan"]:  # of an object of its own
        assert loop(f, m, **mode).extra == 1 and snapshot(m) == before
        return
    with pytest.raises(ValueError, match=match):
        loop(f, m, **mode)
    assert snapshot(m) == before
