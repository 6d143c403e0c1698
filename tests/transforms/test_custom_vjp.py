"""custom_vjp: both signatures, nondifferentiated arguments, state, structure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.transforms.models import Foo, snapshot, steps

UPDATES = {"graph_updates": True}
PLAIN = {"graph_updates": False}
MODES = [UPDATES, PLAIN]
copied = lambda tree: jax.tree.map(lambda x: x, tree)


def ruled(fun, backward, fwd=None, **options):
    """A function with rules; the residual is its arguments."""
    f = nnx.custom_vjp(fun, **options)
    f.defvjp(lambda *args: ((fwd or f)(*args), args), backward)
    return f


def plain_sine(m, a):
    return jnp.sin(m.x) * m.y * a


def sine(mode, write=lambda m: None, fwd=None):
    """`sin(x) * y * a` with the right derivatives times 10, in the signature of the mode."""

    def f(m, a):
        write(m)
        return plain_sine(m, a)

    def backward(residual, g):
        m, a = residual
        if mode is UPDATES:
            (d_m, none), g = g
            assert none is None
            d_m = copied(d_m)
        else:
            d_m = jax.tree.map(jnp.zeros_like, m)
        x, y = (d_m["x"], d_m["y"]) if mode is UPDATES else (d_m.x, d_m.y)
        x[...] += 10 * jnp.cos(m.x) * m.y * a * g
        y[...] += 10 * jnp.sin(m.x) * a * g
        return d_m, 10 * jnp.sin(m.x) * m.y * g

    return ruled(f, backward, fwd, **mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("outer", [lambda f: f, nnx.jit, nnx.remat])
def test_the_backward_rule_is_used(mode, outer):
    f, m = sine(mode), Foo()
    assert float(f(m, 3.0)) == float(plain_sine(m, 3.0))
    d_m, d_a = nnx.grad(outer(f), argnums=(0, 1))(m, 3.0)
    e_m, e_a = nnx.grad(plain_sine, argnums=(0, 1))(m, 3.0)
    for name in ("x", "y"):
        assert jnp.allclose(d_m[name].value, 10 * e_m[name].value)
    assert jnp.allclose(d_a, 10 * e_a)


def test_it_runs_in_vmap_and_equal_calls_trace_once():
    traces = []
    g = sine(UPDATES, lambda m: traces.append(None))
    per_row = nnx.jit(nnx.vmap(lambda m, a: nnx.grad(g)(m, a)["y"].value, in_axes=(None, 0)))
    for _ in range(2):
        slopes = per_row(Foo(), jnp.arange(3.0))
        assert jnp.allclose(slopes, 10 * jnp.sin(1.0) * jnp.arange(3.0))
        before = len(traces)
    per_row(Foo(), jnp.arange(3.0))
    assert len(traces) == before


def write_n(m):
    m.n[...] += 1


def write_x(m):
    m.x[...] += 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fwd_calls", [True, False])
def test_what_the_function_writes_is_kept(mode, fwd_calls):
    f, m = sine(mode, write_n, fwd=None if fwd_calls else plain_sine), Foo()
    f(m, 1.0)
    assert float(m.n.value) == 1.0
    nnx.grad(f)(m, 1.0)
    assert float(m.n.value) == (2.0 if fwd_calls else 1.0)


def test_without_updates_the_cotangent_of_a_written_value_is_not_lost():
    f, m = sine(PLAIN, write_x), Foo()
    assert float(f(m, 1.0)) == float(jnp.sin(2.0) * 2)  # nothing is differentiated here
    before = snapshot(m)

    def loss(m, a):
        return f(m, a) + m.x * 5

    match = r"f writes the Variable 'm\.x', which is being.*'updates_g', if it has"
    for transform in (nnx.grad(loss), nnx.jit(nnx.grad(loss))):
        with pytest.raises(ValueError, match=match):
            transform(m, 1.0)
        assert snapshot(m) == before
    only_y = nnx.DiffState(0, nnx.PathContains("y"))
    nnx.grad(loss, argnums=only_y)(m, 1.0)  # x is a constant now
    assert float(m.x.value) == 3.0
    grads = nnx.grad(f)(m, 1.0)  # nobody uses the new value
    assert jnp.allclose(grads["x"].value, 10 * jnp.cos(4.0) * 2) and float(m.x.value) == 4.0


def test_statistics_in_a_loop_are_constants():
    f = sine(PLAIN, steps)

    def loss(m, xs):
        return nnx.scan(lambda m, a: (m, f(m, a)))(m, xs)[1].sum() + m.n

    m, xs = Foo(), jnp.arange(3.0)
    for transform in (nnx.grad(loss), nnx.jit(nnx.grad(loss))):
        grads = transform(m, xs)
        assert jnp.allclose(grads["x"].value, 10 * jnp.cos(1.0) * 2 * 3)
    assert float(m.n.value) == 6.0


def test_structure_changes_propagate_with_updates():
    def f(m):
        m.new = nnx.Param(m.x * 2)
        m.size = 3
        return m.new * 1.0, m

    def backward(residual, g):
        shown.append(g)
        (d_m,), _ = g
        return (nnx.State({"x": d_m["new"], "y": d_m["y"], "n": d_m["n"]}),)

    shown, m, f = [], Foo(), ruled(f, backward)
    y, same = f(m)
    assert same is m and (float(m.new.value), m.size) == (2.0, 3)
    grads = nnx.grad(lambda m: f(m)[0] * 1.0 + m.new * 4)(Foo())
    assert float(grads["x"].value) == 4.0
    ((d_m,), (d_y, rest)) = shown[0]
    assert sorted(d_m) == ["n", "new", "x", "y"] and float(d_y) == 1.0 and rest == nnx.State({})


@pytest.mark.parametrize("mode", MODES)
def test_a_numpy_value_is_written_in_an_eager_call(mode):
    m = Foo()
    m.n.value = np.zeros(2, np.float32)  # JAX hands it to the function in a class of its own
    sine(mode, write_n)(m, 1.0)
    assert np.asarray(m.n.value).tolist() == [1.0, 1.0]


def test_without_updates_objects_in_the_result_have_cotangents_of_their_own_type():
    def backward(residual, g):
        d_dict, d_param = g
        assert type(d_dict) is nnx.Dict and type(d_param) is nnx.Param
        return (d_dict.z * 100 + d_param * 1000,)

    make = lambda x: (nnx.Dict(z=nnx.Param(x * 2)), nnx.Param(x * 3))
    f = ruled(make, backward, **PLAIN)

    def loss(x):
        d, p = f(x)
        return d.z * 1.0 + p * 2.0

    assert float(nnx.grad(loss)(1.0)) == 2100.0


def test_shared_objects_are_one_inside():
    def f(a, b):
        assert a is b["m"]
        return a.x * b["m"].x

    def backward(residual, g):
        a, b = residual
        (d_a, d_b), d_y = g
        assert a is b["m"] and d_b == {"m": nnx.State({})}
        return copied(jax.tree.map(lambda x: x + 1, d_a)), None

    f = ruled(f, backward)
    assert float(nnx.grad(lambda m: f(m, {"m": m}))(Foo())["x"].value) == 1.0


def test_the_rule_has_the_cotangent_of_a_variable_that_is_returned_beside_a_new_one():
    def backward(residual, g):
        (d_m,), _ = g
        return (jax.tree.map(lambda x: 10 * x, d_m),)

    both = ruled(lambda m: (m.x, nnx.Cache(m.y * 1)), backward)
    m = Foo(2.0)
    assert both(m)[0] is m.x
    assert float(nnx.grad(lambda m: both(m)[0] * 3.0)(m).x.value) == 30


def test_calls_of_other_shapes_share_nothing():
    """What left the function in one call, odd sizes write, is nothing to the rule of another."""

    def f(m, x):
        if x.shape[0] % 2:
            m.a.value = m.a.value + 1.0
        return (m.w.value * x).sum()

    def backward(kept, cotangents):
        (dm, _), dy = cotangents
        m, x = kept
        dm["w"].value = dy * x.sum()
        return dm, dy * m.w.value * jnp.ones_like(x)

    model = lambda: nnx.Dict(w=nnx.Param(jnp.ones(())), a=nnx.Variable(jnp.ones(())))
    g = ruled(f, backward)
    for n in (1, 2, 3, 2):
        grads = nnx.grad(lambda m, x: g(m, x))(model(), jnp.ones(n))
        assert float(grads["w"].value) == n
        g(model(), jnp.ones(n + 1))  # another shape between function and rule


def test_symbolic_zeros_reach_the_rules():
    def forward(x, y):
        seen.append((x.perturbed, y.perturbed))
        return (x.value * y.value, x.value + y.value), x.value

    def backward(x, g):
        _, (d_product, d_sum) = g
        seen.append(type(d_sum).__name__)
        return d_product * 2, None

    seen, f = [], nnx.custom_vjp(lambda x, y: (x * y, x + y))
    f.defvjp(forward, backward, symbolic_zeros=True)
    assert float(nnx.grad(lambda x: f(x, 3.0)[0])(1.0)) == 2.0
    assert seen == [(True, False), "SymbolicZero"]


@pytest.mark.parametrize("mode", MODES)
def test_nondifferentiated_arguments_reach_the_backward_rule(mode):
    def f(scale, m, x, name):
        return m.x * x * scale if name == "double" else m.x * x

    def backward(scale, name, residual, g):
        assert (scale, name) == (2, "double")
        if mode is UPDATES:
            inputs, g = g
            assert len(inputs) == 2
        zeros = jax.tree.map(jnp.zeros_like, residual)
        return nnx.State({**nnx.state(zeros), "x": nnx.Param(100 * g)}), None

    f = nnx.custom_vjp(f, nondiff_argnums=(3, 0), **mode)
    f.defvjp(lambda scale, m, x, name: (f(scale, m, x, name), m), backward)
    grads = nnx.grad(lambda m, x: f(2, m, x, name="double"), argnums=(0, 1))(Foo(), 3.0)
    assert float(grads[0]["x"].value) == 100.0 and float(grads[1]) == 0.0


@pytest.mark.parametrize("mode", MODES)
def test_a_whole_object_can_be_left_out(mode):
    def f(m, x):
        write_n(m)
        return m.x * x

    def backward(m, residual, g):
        assert type(m) is Foo
        return (m.y * 1.0,)

    f, m = ruled(f, backward, nondiff_argnums=(0,), **mode), Foo(1.0, 7.0)
    assert float(nnx.grad(f, argnums=1)(m, 3.0)) == 7.0
    assert float(nnx.jit(nnx.grad(f, argnums=1))(m, 3.0)) == 7.0
    assert float(m.n.value) == 2.0


def test_a_diff_state_names_the_variables_that_are_differentiated():
    only_x = nnx.DiffState(0, nnx.PathContains("x"))

    def backward(residual, g):
        (d_m,), d_y = g
        assert sorted(d_m) == ["n", "x", "y"]
        return (nnx.State({"x": nnx.Param(50.0 * d_y)}),)

    f, m = ruled(lambda m: m.x * m.y, backward, nondiff_argnums=(only_x,)), Foo()
    grads = nnx.grad(f, argnums=only_x)(m)
    assert {k: float(v.value) for k, v in grads.items()} == {"x": 50.0}
    with pytest.raises(ValueError, match=r"'m\.y' of .* is being differentiated"):
        nnx.grad(f)(m)
    f.defvjp(lambda m: (f(m), None), lambda residual, g: (g[0][0],))
    with pytest.raises(TypeError, match="cotangent at 'm.n' is a .*not differentiated"):
        nnx.grad(f, argnums=only_x)(m)


def test_integer_leaves_need_no_cotangent():
    def backward(residual, g):
        zeros = jax.tree.map(jnp.zeros_like, residual[0])
        zeros.w[...] = 3.0 * g
        return zeros, jnp.zeros((), int)

    m = nnx.Dict(w=nnx.Param(2.0), n=nnx.Variable(jnp.array(0)))
    f = ruled(lambda m, k: (write_n(m), m.w * k)[1], backward, **PLAIN)
    assert float(nnx.grad(f)(m, 4)["w"].value) == 3.0 and int(m.n.value) == 1


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
    assert Layer.__call__.fun.__name__ == "__call__"
