"""cond and switch: values, state, structure, closures, refusals; looking transforms inside them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import nnxlite as nnx
from tests.transforms.models import Foo, Tied, snapshot

MODES = [{}, {"graph_updates": False}, {"graph": False}]
OUTER = pytest.mark.parametrize("outer", [lambda f: f, nnx.jit], ids=["eager", "jit"])


def up(m, k=1.0):
    m.n[...] += k
    return m.n * 1.0


def double(m, k=1.0):
    m.x[...] *= 2
    return m.x * k


def keep(m, k=1.0):
    return m.n * k


# values and state ----------------------------------------------------------------------------------


@OUTER
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chosen", range(3))
def test_the_chosen_branch_does_what_python_does(outer, mode, chosen):
    branches = (up, double, keep)
    m, other = Foo(), Foo()
    y, raw = m.y, m.y.value
    run = outer(lambda i, m, k: nnx.switch(i, branches, m, k, **mode))
    assert float(run(chosen, m, 3.0)) == float(branches[chosen](other, 3.0))
    assert [float(v.value) for v in (m.x, m.y, m.n)] == [
        float(v.value) for v in (other.x, other.y, other.n)
    ]
    assert m.y is y and y.value is raw  # no branch writes it
    a, b = Foo(), Foo()
    run = outer(lambda p, m: nnx.cond(p, up, double, m, **mode))
    for flag, f in ((True, up), (False, double)):
        assert float(run(flag, a)) == float(f(b))
    assert float(a.n.value) == 1.0 and float(a.x.value) == 2.0


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


@OUTER
def test_operands_may_be_any_pytree_and_sharing_holds(outer):
    m, other = Tied(), Tied()

    def f(tree, again):
        (a, b), x = tree["pair"], tree["x"]
        assert a is b is again and a.a is a.b is a.child.leaf and a.child.owner is a
        a.child.leaf[...] *= x
        return {"m": again, "child": a.child, "y": a(x)}

    def g(tree, again):
        return {"m": again, "child": again.child, "y": again(0.0)}

    tree = {"pair": (m, m), "x": jnp.array(3.0), "none": None}
    out = outer(lambda t, m: nnx.cond(True, f, g, t, m))(tree, m)
    expected = f({"pair": (other, other), "x": 3.0}, other)
    assert out["m"] is m and out["child"] is m.child and m.a is m.b
    np.testing.assert_allclose(out["y"], expected["y"], rtol=1e-6)
    np.testing.assert_array_equal(m.a.value, other.a.value)


@OUTER
@pytest.mark.parametrize("mode", MODES)
def test_branches_may_pass_on_arrays_of_a_state_or_make_new_ones(outer, mode):
    a, b = nnx.State({"w": jnp.ones(2)}), nnx.State({"w": jnp.zeros(2)})
    branches = [
        lambda a, b: a,
        lambda a, b: b,
        lambda a, b: jax.tree.map(lambda x: x * 3, a),
        lambda a, b: nnx.State({"w": b["w"]}),
    ]
    run = outer(lambda i, a, b: nnx.switch(i, branches, a, b, **mode))
    for number, value in enumerate((1.0, 0.0, 3.0, 0.0)):
        out = run(number, a, b)
        assert isinstance(out, nnx.State) and out["w"].tolist() == [value] * 2
    assert float(a["w"][0]) == 1.0


def test_inside_vmap_each_lane_chooses():
    m = Foo(jnp.ones(4), jnp.ones(4))
    m.n.value = jnp.zeros(4)
    out = nnx.vmap(lambda m, i: nnx.switch(i, [up, double, keep], m))(m, jnp.array([0, 1, 2, 0]))
    assert out.tolist() == [1.0, 2.0, 0.0, 1.0]
    assert m.n.value.tolist() == [1.0, 0.0, 0.0, 1.0] and m.x.value.tolist() == [1, 2, 1, 1]


# structure -----------------------------------------------------------------------------------------


def grows(m, scale):
    m.new = nnx.Dict(w=nnx.Param(m.x * scale))
    m.again, m.mode = m.new.w, "grown"
    del m.y
    m.x, m.n = m.n, m.x
    m.x.set_metadata(note="n")
    return m.new, nnx.Param(scale * jnp.ones(2))


@OUTER
def test_the_same_structure_change_in_every_branch_is_repeated_outside(outer):
    one, other = (functools.partial(grows, scale=s) for s in (2.0, 3.0))
    run = outer(lambda p, m: nnx.cond(p, one, other, m))
    for flag, scale in ((True, 2.0), (False, 3.0)):
        m = Foo(5.0)
        x, n = m.x, m.n
        new, made = run(flag, m)
        assert new is m.new and m.again is m.new.w and m.mode == "grown" and not hasattr(m, "y")
        assert m.x is n and m.n is x and n.note == "n"
        assert float(m.new.w.value) == 5.0 * scale and made.value.tolist() == [scale] * 2


def test_without_graph_updates_structure_may_differ_and_stays():
    m = Foo()
    one = functools.partial(grows, scale=2.0)
    out = nnx.cond(True, lambda m: (one(m), m.x * 1)[1], lambda m: m.x * 1, m, graph_updates=False)
    assert out.shape == () and hasattr(m, "y") and not hasattr(m, "new")


def sets(value):
    return lambda m: setattr(m, "mode", value)


def adds(value):
    return lambda m: setattr(m, "new", nnx.Param(value))


def reshapes(m):
    m.n.value = jnp.ones(3)


def nothing(m):
    pass


def annotates(m):
    m.x.set_metadata(note=1)


def exchanges(m):
    m.x, m.y = m.y, m.x


def removes(m):
    del m.y


STRUCTURE = r"cond branch outputs must have the same structure, but true_fun \(.*\) and false_fun "
REFUSED = {
    "adds": (adds(1.0), nothing, STRUCTURE + r"\(nothing\) differ: the first changes attributes "
             r"\['new'\] of 'm', the second no structure. Make every branch create"),
    "removes": (nothing, removes, STRUCTURE + r"\(removes\) differ: the first changes no structure, "
                r"the second attributes \['y'\] of 'm'"),
    "exchanges": (exchanges, nothing, r"the first changes attributes \['x', 'y'\] of 'm'"),
    "annotates": (annotates, nothing, "the first changes metadata of 'm.x', the second no"),
    "sets": (sets("a"), sets("b"), r"from the first to the second, 'm.mode': 'a' became 'b'"),
    "kinds": (adds(1.0), lambda m: setattr(m, "new", nnx.BatchStat(1.0)),
              "from the first to the second, 'm.new': Param became BatchStat"),
    "new types": (adds(1.0), adds(jnp.ones(2)), (r"have equal output types, but .* differ at 'm.new': "
                  r"float32\[\] and float32\[2\]. Convert one of the two")),
    "written types": (reshapes, nothing, (r"have equal output types, .* at 'm.n': float32\[3\] and "
                      r"float32\[\]")),
    "results": (lambda m: {"a": 1.0, "b": (1, 2)}, lambda m: {"a": 1.0}, STRUCTURE + ".* the result "
                "of the second is without 'b.0', 'b.1'"),
    "result types": (lambda m: {"a": m.x * 1}, lambda m: {"a": jnp.arange(2)}, ("cond branches must "
                     r"have equal output types, .* differ at 'result.a': float32\[\] and")),
    "result object types": (lambda m: [nnx.Param(m.x * 1)], lambda m: [nnx.Param(jnp.ones(2))],
                            r"differ at 'result.0': float32\[\] and float32\[2\]"),
    "result objects": (lambda m: m.x, lambda m: m.y, "the first returns 'm.x', the second 'm.y'"),
    "old and new": (lambda m: m, nnx.clone, "the first returns 'm', the second a new Foo"),
    "new kinds": (lambda m: Foo(), lambda m: nnx.Dict(), ("first returns a new Foo, the second a new "
                  "Dict")),
    "object and array": (lambda m: m.x, lambda m: m.x * 1,
                         r"the first returns 'm.x', the second .*float32\[\]"),
    "no array": (lambda m: "x", lambda m: "x", "returned a value of type 'str' at '<root>'"),
}  # fmt: skip


@OUTER
@pytest.mark.parametrize(("f", "g", "match"), REFUSED.values(), ids=REFUSED)
def test_branches_that_leave_different_things_are_told_apart_by_path(f, g, match, outer):
    m = Foo()
    before = snapshot(m)
    for flag in (True, False):
        with pytest.raises(TypeError, match=match):
            outer(lambda p, m: nnx.cond(p, f, g, m))(flag, m)
    assert snapshot(m) == before


def test_switch_names_its_branches_by_number():
    m = Foo()
    with pytest.raises(
        TypeError, match=r"switch .* but branch 0 \(nothing\) and branch 2 \(removes\)"
    ):
        nnx.switch(0, [nothing, nothing, removes], m)
    with pytest.raises(
        TypeError, match="switch branches must have equal output types, but branch 0"
    ):
        nnx.switch(0, [nothing, reshapes], m)
    with pytest.raises(ValueError, match="switch needs at least one branch"):
        nnx.switch(0, [], m)


@pytest.mark.parametrize(
    ("call", "match", "error"),
    [
        (lambda m: nnx.cond(None, up, up, m), "cond: 'pred' must be a boolean scalar", TypeError),
        (lambda m: nnx.cond(m, up, up, m), "'pred' must be .* got an object, None or", TypeError),
        (lambda m: nnx.switch((0, 1), [up], m), "'index' must be an integer scalar", TypeError),
        (lambda m: nnx.cond("x", up, up, m), "cond: cannot interpret argument 'pred' as", TypeError),
        (lambda m: nnx.cond(jnp.ones(2), up, up, m), "Pred must be a scalar", TypeError),
        (lambda m: nnx.switch(1.5, [up, up], m), "Index type must be an integer", TypeError),
        (lambda m: nnx.switch("x", [up], m), "switch: cannot interpret argument 'index'", TypeError),
        (lambda m: nnx.cond(True, up, up, m, {"k": "x"}), ("interpret argument 'k.k' as an array, it "
         "is of type 'str'. Pass an array"), TypeError),
        (lambda m: nnx.cond(True, up, lambda m: m, m, 1.0), "takes 1 positional argument", TypeError),
        (lambda m: nnx.cond(True, up, 3, m), "Expected a callable to transform, got int", TypeError),
        (lambda m: nnx.cond(True, lambda: up(m), lambda: 1.0), "BatchStat.* from a different trace",
         nnx.TraceContextError),
        (lambda m: nnx.switch(0, [lambda: m], graph=False), "different trace level: the Foo",
         ValueError),
        (lambda m: nnx.cond(True, lambda a, b: a.x, lambda a, b: b.x, m, m, graph=False),
         "Duplicate Foo.*nnxlite.cond", ValueError),
        (lambda m: nnx.cond(True, up, lambda m: (adds(1)(m), 1 // 0), m), "by zero",
         ZeroDivisionError),
    ],
    ids=["none", "object", "tuple", "text", "vector", "float", "index", "operand", "arity",
         "callable", "write", "return", "tree", "failure"],
)  # fmt: skip
def test_bad_input_changes_nothing(call, match, error):
    m = Foo()
    before = snapshot(m)
    with pytest.raises(error, match=match):
        call(m)
    assert snapshot(m) == before


# in company ----------------------------------------------------------------------------------------


def test_checks_shapes_and_jaxprs_of_branches():
    m = Foo()

    def run(m, p):
        return nnx.cond(p, up, double, m)

    def checked(m, p):
        checkify.check(m.n < 1, "counted {n}", n=m.n[...])
        return run(m, p)

    before = snapshot(m)
    assert nnx.eval_shape(run, m, True).shape == ()
    jaxpr = nnx.make_jaxpr(run)(m, True)
    assert "cond" in [str(e.primitive) for e in jaxpr.eqns]
    # the result, and the two Variables that one branch or the other writes
    assert len(jaxpr.jaxpr.outvars) == 3
    assert snapshot(m) == before
    for expected in (None, "counted 1.0"):
        error, _ = nnx.checkify(checked)(m, True)
        assert expected is None or expected in error.get()
    assert float(m.n.value) == 2.0


# Captured objects --------------------------------------------------------------------------------


@OUTER
def test_a_captured_object_that_a_branch_returns_is_a_copy(outer):
    def run(m):
        out, other = nnx.cond(m.n.value < 5, lambda: (m, {"x": m.x}), lambda: (m, {"x": m.x}))
        assert out is not m and out.x is other["x"] and type(out) is Foo
        out.x.value += 1
        return out.x * 1.0, m.x * 1.0

    m = Foo()
    x = float(m.x.value)
    new, old = outer(run)(m)
    assert (float(new), float(old)) == (x + 1, x)


def test_a_captured_object_that_a_branch_stores_is_copied_too():
    m, other = Foo(), Foo()

    def attach(m):
        m.other = other

    nnx.cond(True, attach, attach, m)
    assert m.other is not other and float(m.other.x.value) == float(other.x.value)


UNEQUAL = [
    (lambda m: nnx.state(m), lambda m: None, "the first returns a new State, the second None"),
    (lambda m: None, lambda m: m, "the first returns None, the second 'm'"),
    (lambda m: m.n[...], lambda m: None, r"the first returns float32\[\], the second None"),
    (lambda m: nnx.Param(m.n[...]), lambda m: m.n[...],
     r"the first returns a new Param, the second float32\[\]"),
    (lambda m: [m, nnx.state(m)], lambda m: m,
     r"the second is 'm' in place of \['m', a new State\]"),
]  # fmt: skip


@pytest.mark.parametrize("one, two, text", UNEQUAL)
def test_unequal_results_are_told_in_words(one, two, text):
    m = Foo(jnp.float32(2))
    m.n.value = jnp.float32(1)
    before = snapshot(m)
    for branches in ([one, two], [one, one, two]):
        with pytest.raises(TypeError, match=text) as caught:
            nnx.switch(0, branches, m)
        assert "PyTreeDef" not in str(caught.value) and snapshot(m) == before
    if "None" in text and "'m'" in text:
        with pytest.raises(ValueError, match="the output is None in place of the Foo"):
            nnx.while_loop(lambda m: m.n[...] < 3, one, m)
