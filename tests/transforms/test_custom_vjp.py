"""custom_vjp: both signatures, nondifferentiated arguments, state, structure, refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.transforms.models import Foo, snapshot

UPDATES = {"graph_updates": True}
PLAIN = {"graph_updates": False}
copied = lambda tree: jax.tree.map(lambda x: x, tree)


def write_nothing(m):
    pass


def write_n(m):
    m.n[...] += 1


def write_x(m):
    m.x[...] += 1


def sine(mode, write=write_nothing, fwd_calls=True, seen=None):
    """`sin(x) * y * a` with the right derivatives times 10, in the signature of the mode."""

    @nnx.custom_vjp(**mode)
    def f(m, a):
        write(m)
        return jnp.sin(m.x) * m.y * a

    def fwd(m, a):
        y = f(m, a) if fwd_calls else jnp.sin(m.x) * m.y * a
        return y, (m, a)

    def bwd(residual, g):
        if seen is not None:
            seen.append(g)
        m, a = residual
        if mode is UPDATES:
            (d_m, none), g = g
            assert none is None
            d_m = copied(d_m)
            d_m["x"][...] += 10 * jnp.cos(m.x) * m.y * a * g
            d_m["y"][...] += 10 * jnp.sin(m.x) * a * g
        else:
            d_m = jax.tree.map(jnp.zeros_like, m)
            d_m.x[...] = 10 * jnp.cos(m.x) * m.y * a * g
            d_m.y[...] = 10 * jnp.sin(m.x) * a * g
        return d_m, 10 * jnp.sin(m.x) * m.y * g

    f.defvjp(fwd, bwd)
    return f


def plain_sine(m, a):
    return jnp.sin(m.x) * m.y * a


MODES = [UPDATES, PLAIN]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("outer", [lambda f: f, nnx.jit, nnx.remat])
def test_the_backward_rule_is_used(mode, outer):
    f = sine(mode)
    m = Foo()
    assert float(f(m, 3.0)) == float(plain_sine(m, 3.0))
    d_m, d_a = nnx.grad(outer(f), argnums=(0, 1))(m, 3.0)
    e_m, e_a = nnx.grad(plain_sine, argnums=(0, 1))(m, 3.0)
    for name in ("x", "y"):
        assert jnp.allclose(d_m[name].value, 10 * e_m[name].value)
    assert jnp.allclose(d_a, 10 * e_a)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fwd_calls", [True, False])
def test_what_the_function_writes_is_kept(mode, fwd_calls):
    f = sine(mode, write_n, fwd_calls)
    m = Foo()
    f(m, 1.0)
    assert float(m.n.value) == 1.0
    nnx.grad(f)(m, 1.0)
    assert float(m.n.value) == (2.0 if fwd_calls else 1.0)


def test_with_updates_the_inputs_have_cotangents_as_the_function_left_them():
    seen = []
    f = sine(UPDATES, write_x, seen=seen)
    m = Foo(1.0, 2.0)

    def loss(m):
        y = f(m, 1.0)  # writes x: what follows depends on the new value
        return y + 5 * m.x + 7 * m.y

    grads = nnx.grad(loss)(m)
    ((d_m, none), g) = seen[0]
    assert type(d_m) is nnx.State and none is None
    assert {k: float(v.value) for k, v in d_m.items()} == {"n": 0.0, "x": 5.0, "y": 0.0}
    assert float(m.x.value) == 2.0
    assert jnp.allclose(grads["x"].value, 5 + 10 * jnp.cos(2.0) * 2.0)
    assert jnp.allclose(grads["y"].value, 7 + 10 * jnp.sin(2.0))  # 7 goes past the rule


def test_without_updates_the_cotangent_of_a_written_value_is_not_lost():
    f = sine(PLAIN, write_x)
    m = Foo()
    assert float(f(m, 1.0)) == float(jnp.sin(2.0) * 2)  # nothing is differentiated here
    before = snapshot(m)

    def loss(m, a):
        return f(m, a) + m.x * 5

    for transform in (nnx.grad(loss), nnx.jit(nnx.grad(loss))):
        with pytest.raises(
            ValueError,
            match=r"f writes the Variable 'm\.x', which is being.*'updates_g', if it has",
        ):
            transform(m, 1.0)
        assert snapshot(m) == before
    only_y = nnx.DiffState(0, nnx.PathContains("y"))
    nnx.grad(loss, argnums=only_y)(m, 1.0)  # x is a constant now
    assert float(m.x.value) == 3.0
    grads = nnx.grad(f)(m, 1.0)  # nobody uses the new value
    assert jnp.allclose(grads["x"].value, 10 * jnp.cos(4.0) * 2) and float(m.x.value) == 4.0


def test_statistics_in_a_loop_are_constants():
    f = sine(PLAIN, lambda m: m.n.set_value(m.n + m.x))

    def loss(m, xs):
        step = lambda m, a: (m, f(m, a))
        return nnx.scan(step)(m, xs)[1].sum() + m.n

    m, xs = Foo(), jnp.arange(3.0)
    for transform in (nnx.grad(loss), nnx.jit(nnx.grad(loss))):
        grads = transform(m, xs)
        assert jnp.allclose(grads["x"].value, 10 * jnp.cos(1.0) * 2 * 3)
    assert float(m.n.value) == 6.0


def test_structure_changes_propagate_with_updates():
    @nnx.custom_vjp
    def f(m):
        m.new = nnx.Param(m.x * 2)
        m.size = 3
        return m.new * 1.0, m

    shown = []

    def fwd(m):
        return f(m), None

    def bwd(residual, g):
        shown.append(g)
        (d_m,), (d_y, none) = g
        return (nnx.State({"x": d_m["new"], "y": d_m["y"], "n": d_m["n"]}),)

    f.defvjp(fwd, bwd)
    m = Foo()
    y, same = f(m)
    assert same is m and (float(m.new.value), m.size) == (2.0, 3)
    fresh = Foo()
    loss = lambda m: f(m)[0] * 1.0 + m.new * 4
    grads = nnx.grad(loss)(fresh)
    assert float(grads["x"].value) == 4.0
    ((d_m,), (d_y, rest)) = shown[0]
    assert sorted(d_m) == ["n", "new", "x", "y"] and float(d_y) == 1.0 and rest == nnx.State({})


def test_objects_in_the_result_have_cotangents_of_their_form():
    for mode in MODES:
        shown = []

        @nnx.custom_vjp(**mode)
        def f(x):
            return nnx.Dict(z=nnx.Param(x * 2)), nnx.Param(x * 3)

        def bwd(residual, g, shown=shown, mode=mode):
            d_dict, d_param = g[1] if mode is UPDATES else g
            shown.append((d_dict, d_param))
            z = d_dict["z"] if mode is UPDATES else d_dict.z
            return (z * 100 + d_param * 1000,)

        f.defvjp(lambda x: (f(x), None), bwd)

        def loss(x):
            d, p = f(x)
            return d.z * 1.0 + p * 2.0

        assert float(nnx.grad(loss)(1.0)) == 2100.0
        d_dict, d_param = shown[0]
        assert type(d_dict) is (nnx.State if mode is UPDATES else nnx.Dict)
        assert type(d_param) is nnx.Param


def test_shared_objects_are_one_inside():
    @nnx.custom_vjp
    def f(a, b):
        assert a is b["m"]
        return a.x * b["m"].x

    def bwd(residual, g):
        a, b = residual
        assert a is b["m"]
        (d_a, d_b), d_y = g
        assert d_b == {"m": nnx.State({})}
        return copied(jax.tree.map(lambda x: x + 1, d_a)), None

    f.defvjp(lambda a, b: (f(a, b), (a, b)), bwd)
    m = Foo()
    assert float(nnx.grad(lambda m: f(m, {"m": m}))(m)["x"].value) == 1.0


# nondifferentiated arguments ---------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_nondifferentiated_arguments_reach_the_backward_rule(mode):
    shown = []

    @nnx.custom_vjp(nondiff_argnums=(3, 0), **mode)
    def f(scale, m, x, name):
        return m.x * x * scale if name == "double" else m.x * x

    def fwd(scale, m, x, name):
        return f(scale, m, x, name), (m, x)

    def bwd(scale, name, residual, g):
        shown.append((scale, name))
        m, x = residual
        if mode is UPDATES:
            inputs, g = g
            assert len(inputs) == 2
            d_m = copied(inputs[0])
            d_m["x"][...] = 100 * g
        else:
            d_m = jax.tree.map(jnp.zeros_like, m)
            d_m.x[...] = 100 * g
        return d_m, None

    f.defvjp(fwd, bwd)
    grads = nnx.grad(lambda m, x: f(2, m, x, name="double"), argnums=(0, 1))(Foo(), 3.0)
    assert float(grads[0]["x"].value) == 100.0 and float(grads[1]) == 0.0
    assert shown == [(2, "double")]


@pytest.mark.parametrize("mode", MODES)
def test_a_whole_object_can_be_left_out(mode):
    @nnx.custom_vjp(nondiff_argnums=(0,), **mode)
    def f(m, x):
        m.n[...] += 1
        return m.x * x

    def bwd(m, residual, g):
        assert type(m) is Foo
        return (m.y * 1.0,)

    f.defvjp(lambda m, x: (f(m, x), None), bwd)
    m = Foo(1.0, 7.0)
    assert float(nnx.grad(f, argnums=1)(m, 3.0)) == 7.0
    assert float(nnx.jit(nnx.grad(f, argnums=1))(m, 3.0)) == 7.0
    assert float(m.n.value) == 2.0


def test_a_diff_state_names_the_variables_that_are_differentiated():
    only_x = nnx.DiffState(0, nnx.PathContains("x"))

    @nnx.custom_vjp(nondiff_argnums=(only_x,))
    def f(m):
        return m.x * m.y

    def bwd(residual, g):
        (d_m,), d_y = g
        assert sorted(d_m) == ["n", "x", "y"]
        return (nnx.State({"x": nnx.Param(50.0 * d_y)}),)

    f.defvjp(lambda m: (f(m), None), bwd)
    m = Foo()
    grads = nnx.grad(f, argnums=only_x)(m)
    assert {k: float(v.value) for k, v in grads.items()} == {"x": 50.0}
    with pytest.raises(ValueError, match=r"'m\.y' of .*f is being differentiated"):
        nnx.grad(f)(m)

    f.defvjp(lambda m: (f(m), None), lambda residual, g: (g[0][0],))
    with pytest.raises(TypeError, match="cotangent at 'm.n' is a .*not differentiated"):
        nnx.grad(f, argnums=only_x)(m)


def test_integer_leaves_need_no_cotangent():
    class Stepped(nnx.Module):
        def __init__(self):
            self.w, self.step = nnx.Param(2.0), nnx.Variable(jnp.array(0))

    @nnx.custom_vjp(**PLAIN)
    def f(m, k):
        m.step[...] += 1
        return m.w * k

    def bwd(residual, g):
        zeros = jax.tree.map(jnp.zeros_like, residual)
        zeros.w[...] = 3.0 * g
        return zeros, jnp.zeros((), int)

    f.defvjp(lambda m, k: (f(m, k), m), bwd)
    m = Stepped()
    assert float(nnx.grad(f)(m, 4)["w"].value) == 3.0
    assert int(m.step.value) == 1


# forms -------------------------------------------------------------------------------------------


def test_methods_and_defaults_and_keywords():
    class Layer(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(2.0)

        @nnx.custom_vjp
        def __call__(self, x, k=3.0):
            return self.w * x * k

        def forward(self, x, k):
            return self(x, k), None

        def backward(residual, g):
            (d_self, _, _), d_y = g
            return jax.tree.map(lambda v: v + 9 * d_y, d_self), None, None

        __call__.defvjp(forward, backward)

    layer = Layer()
    assert float(layer(2.0)) == 12.0
    for loss in (lambda m: m(2.0), lambda m: m(k=1.0, x=2.0)):
        assert float(nnx.grad(loss)(layer)["w"].value) == 9.0
    assert (
        repr(Layer.__call__).startswith("custom_vjp(") and Layer.__call__.fun.__name__ == "__call__"
    )


def test_it_runs_in_scan_and_vmap():
    f = sine(PLAIN, write_n)
    m = Foo()

    def loop(m):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        def body(m, a):
            return m, f(m, a)

        return body(m, jnp.arange(3.0))[1].sum()

    assert jnp.allclose(nnx.grad(loop)(m)["y"].value, 10 * jnp.sin(1.0) * 3)
    assert float(m.n.value) == 3.0
    g = sine(UPDATES)
    per_row = nnx.vmap(lambda m, a: nnx.grad(g)(m, a)["y"].value, in_axes=(None, 0))
    assert jnp.allclose(per_row(Foo(), jnp.arange(3.0)), 10 * jnp.sin(1.0) * jnp.arange(3.0))


def test_symbolic_zeros_reach_the_rules():
    @nnx.custom_vjp
    def f(x, y):
        return x * y, x + y

    seen = []

    def fwd(x, y):
        seen.append((x.perturbed, y.perturbed))
        return (x.value * y.value, x.value + y.value), x.value

    def bwd(x, g):
        (_, _), (d_product, d_sum) = g
        seen.append(type(d_sum).__name__)
        return d_product * 2, None

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    assert float(nnx.grad(lambda x: f(x, 3.0)[0])(1.0)) == 2.0
    assert seen == [(True, False), "SymbolicZero"]


def test_equal_calls_trace_once():
    traces = []

    @nnx.custom_vjp
    def f(m):
        traces.append("f")
        return m.x * 2.0

    def fwd(m):
        traces.append("fwd")
        return m.x * 2.0, None

    f.defvjp(fwd, lambda residual, g: (g[0][0],))
    step = nnx.jit(nnx.grad(f))
    step(Foo())
    first = len(traces)
    step(Foo())
    assert len(traces) == first


# refusals ----------------------------------------------------------------------------------------


def rules(fwd, bwd, **options):
    @nnx.custom_vjp(**options)
    def f(m, x):
        return m.x * x

    f.defvjp(fwd or (lambda m, x: (f(m, x), None)), bwd)
    return f


only_x = nnx.DiffState(0, "x")
SYNTAX = "`nondiff_argnums` cannot contain `DiffState` objects when"
MISSING = r"No VJP defined for custom_vjp function .*: call its defvjp\(fwd, bwd\)"
EXCLUDED = (
    r"custom_vjp: '{}' of .* is being differentiated, but nondiff_argnums excludes it: its gradient "
    "would be lost. Leave it out of nondiff_argnums, or differentiate with respect to something else"
)


def writes_n(m, x):
    m.n[...] = 1.0
    return m.x * x, None


def keyword_only(m, *, k):
    return m.x * k


def product(m, x):
    return m.x * x


def ruled(fun):
    f = nnx.custom_vjp(fun)
    f.defvjp(lambda *args: (1.0, None), lambda r, g: (None,))
    return f


def grad_of(fwd, bwd, argnums=(0, 1), **options):
    return lambda m: nnx.grad(rules(fwd, bwd, **options), argnums=argnums)(m, 2.0)


def returning(*cotangents):
    return grad_of(None, lambda r, g: cotangents)


def number(argnums):
    return lambda m: rules(None, None, nondiff_argnums=(argnums,))(m, 1.0)


INNER = nnx.jit(rules(writes_n, lambda r, g: (None, None)))
NUMBER = "nondiff_argnums={} requires at least . positional arguments, .* with 2"
REFUSED = [
    ("no rules", lambda m: nnx.custom_vjp(product)(m, 1.0), ValueError, MISSING),
    ("no rules, grad", lambda m: nnx.grad(nnx.custom_vjp(product))(m, 1.0), ValueError, MISSING),
    ("no rules, trees", lambda m: nnx.custom_vjp(product, graph=False)(m, 1.0), AttributeError,
     MISSING),
    ("too few", grad_of(None, lambda r, g: (g[0][0],)), TypeError,
     "one cotangent for each differentiated argument, 2"),
    ("a number", grad_of(None, lambda r, g: 3.0), TypeError, "of them, got float"),
    ("a number for an object", returning(1.0, 1.0), TypeError,
     "'m' is a float, which matches no leaf. Give"),
    ("a part", returning(nnx.State({"x": 1.0}), 1.0), TypeError, "at 'm.n' is nothing, where"),
    ("another part", returning(nnx.State({"q": 1.0}), 1.0), TypeError,
     "'m.q' is a float, which matches no"),
    ("a shape", returning(None, jnp.ones(2)), ValueError, r"at 'x' is float32\[2\], where"),
    ("a dtype", returning(None, jnp.array(1)), TypeError, r"at 'x' is int32\[\], .* own dtype"),
    ("no pair", grad_of(lambda m, x: m.x * x, lambda r, g: (None, None)), TypeError,
     r"must return a pair \(result, residual\)"),
    ("other writes", lambda m: nnx.jit(nnx.grad(INNER))(m, 2.0), TypeError,
     r"the function itself, but it writes 'm\.n'"),
    ("keyword only", lambda m: ruled(keyword_only)(m, k=2.0), TypeError,
     r"arguments \['k'\] of .* can only be given by keyword"),
    ("a DiffState", lambda m: rules(None, None, nondiff_argnums=only_x, **PLAIN), ValueError, SYNTAX),
    ("out of range", number(2), ValueError, NUMBER.format(2)),
    ("below range", number(-3), ValueError, NUMBER.format(-3)),
    ("DiffState out of range", number(nnx.DiffState(2, ...)), ValueError, NUMBER.format(2)),
    ("excluded object", grad_of(None, None, 0, nondiff_argnums=(0,)), ValueError,
     EXCLUDED.format("m.x")),
    ("excluded array", grad_of(None, None, 1, nondiff_argnums=(1,)), ValueError, EXCLUDED.format("x")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "match"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_refusals_name_paths_and_change_nothing(call, error, match):
    m = Foo()
    before = snapshot(m)
    with pytest.raises(error, match=match):
        call(m)
    assert snapshot(m) == before


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_rule_leaves_objects_as_they_were(mode):
    def fails(*args):
        raise RuntimeError("inside")

    m = Foo()
    before = snapshot(m)
    for f in (sine(mode, fails), rules(fails, None, **mode), rules(None, fails, **mode)):
        with pytest.raises(RuntimeError, match="inside"):
            nnx.grad(f)(m, 1.0)
        assert snapshot(m) == before


@pytest.mark.parametrize("mode", MODES)
def test_a_numpy_value_is_written_in_an_eager_call(mode):
    m = Foo()
    m.n.value = np.zeros(2, np.float32)  # JAX hands it to the function in a class of its own

    def write(m):
        m.n[...] = jnp.ones(2) + 1

    sine(mode, write)(m, 1.0)
    assert np.asarray(m.n.value).tolist() == [2.0, 2.0]


def test_the_rule_has_the_cotangent_of_a_variable_that_is_returned_beside_a_new_one():
    @nnx.custom_vjp(graph_updates=True)
    def both(m):
        return m.x, nnx.Cache(m.y * 1)

    def bwd(m, g):
        (d_m,), _ = g
        return (jax.tree.map(lambda x: 10 * x, d_m),)

    both.defvjp(lambda m: (both(m), m), bwd)
    m = Foo(2.0)
    assert both(m)[0] is m.x
    grads = nnx.grad(lambda m: both(m)[0] * 3.0)(m)
    assert float(grads.x.value) == 30


def test_calls_of_other_shapes_share_nothing():
    """What left the function in one call, odd sizes write, is nothing to the rule of another."""

    @nnx.custom_vjp
    def g(m, x):
        if x.shape[0] % 2:
            m.a.value = m.a.value + 1.0
        return (m.w.value * x).sum()

    def backward(kept, cotangents):
        (dm, _), dy = cotangents
        m, x = kept
        dm["w"].value = dy * x.sum()
        return dm, dy * m.w.value * jnp.ones_like(x)

    def model():
        return nnx.Dict(w=nnx.Param(jnp.ones(())), a=nnx.Variable(jnp.ones(())))

    g.defvjp(lambda m, x: (g(m, x), (m, x)), backward)
    for n in (1, 2, 3, 2):
        grads = nnx.grad(lambda m, x: g(m, x))(model(), jnp.ones(n))
        assert float(grads["w"].value) == n
        g(model(), jnp.ones(n + 1))  # another shape between function and rule
