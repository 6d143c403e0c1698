"""Programs in the filtered style, run by this library and by Equinox as a black box.

What `filtered_fuzz` does not write: modules of the peer, names of arguments, texts of trees, callbacks,
and the classes of errors.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx

eqx = pytest.importorskip("equinox")

X = jnp.arange(3.0)
MLP = eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(0))


class Scaled(eqx.Module):
    """A callable of the peer, to be transformed itself."""

    weight: jax.Array

    def __call__(self, x):
        return self.weight * x

    def scaled(self, x):
        return self.weight * x


SCALED = Scaled(X)


def custom_jvp(lib, tangent=lambda t: 5 * t):
    @lib.filter_custom_jvp
    def f(x, n):
        return x * n

    @f.def_jvp
    def rule(primals, tangents):
        assert tangents[1] is None
        return f(*primals), tangent(tangents[0])

    return jax.grad(lambda x: f(x, 2).sum())(X)


TIMES = lambda x, y: x * y
MIXED = lambda x, y: (x * 2, y * 3, x * y, "a", 2.0, jnp.arange(2))
HALF = eqx.tree_at(lambda m: m.layers[1].bias, MLP, None)
BIASES = lambda m: [layer.bias for layer in m.layers if layer.bias is not None]


def rules(lib, call, bwd=lambda r, g, p, x, *a, **k: g * 5):
    """Differentiate a call of a function with rules, and what these were told."""
    seen = []
    f = lib.filter_custom_vjp(lambda x, *a, **k: jnp.sum(x * 2))
    f.def_fwd(
        lambda p, x, *a, **k: (seen.append((p, len(a), sorted(k))), (jnp.sum(x * 2), None))[1]
    )
    f.def_bwd(bwd)
    return jax.grad(lambda x: call(f, x))(X), repr(seen)


def converted(lib, example, *args):
    f = lib.filter_closure_convert(lambda x: (x * X, "a"), example)
    return f(*args), repr(f.in_struct), repr(f.out_struct)


LINES = {
    "places": """
        lib.tree_at(lambda t: t['b'], {'a': (), 'b': ()}, 5)
        lib.tree_at(lambda t: (t['a'], t['b']), {'a': (), 'b': ()}, (5, 6))
        lib.tree_at(BIASES, HALF, replace_fn=lambda b: b * 0)
        lib.tree_at(lambda t: (t[0], t[1]), [1, None], (2, 3))
        lib.tree_at(lambda t: t[1], [None, None], 5, is_leaf=lambda x: x is None)
        lib.tree_at(jax.tree.leaves, [X, (1, None), 'a'], [9, 8, 7])
        lib.tree_at(lambda t: t[:2], [1, 2, 3], 'ab')
        type(lib.apply_updates([1.0], [None]))
    """,
    "tangents": """
        lib.filter_jvp(MIXED, (X, X), (X, None))
        lib.filter_jvp(MIXED, (X, np.ones(3, np.float32)), (X, None))
        lib.filter_jvp(jnp.sin, (X,), (X + 1j,))
        lib.filter_jvp(jnp.sin, (X,), (X.astype(jnp.bfloat16),))
        lib.filter_jvp(jnp.sin, (1.0,), (1,))
        lib.filter_jvp(jnp.sin, (X,), (np.ones(3),))
        lib.filter_vjp(lambda x: (x, 3.0), X)[1]((X, None))
        lib.filter_vjp(jnp.sin, X)[1](X + 1j)
        lib.filter_vjp(jnp.sin, X)[1](X.astype(jnp.bfloat16))
        lib.filter_vjp(jnp.sin, jnp.array(1.0))[1](1.0)
    """,
    "with rules": """
        rules(lib, lambda f, x: f(x))
        rules(lib, lambda f, x: f(x, x))
        rules(lib, lambda f, x: jax.jit(f)(X, x))
        rules(lib, lambda f, x: f(x, y=x))
        rules(lib, lambda f, x: f(x, X, 2, y='a'))
        rules(lib, lambda f, x: f(x), bwd=lambda r, g, p, x: None)
    """,
    "converted": """
        converted(lib, jnp.array(1.0), jnp.ones(()))
        converted(lib, jnp.ones(()), jnp.array(1.0))
        converted(lib, jax.ShapeDtypeStruct((3,), jnp.float32), X)
        converted(lib, X, jnp.arange(3))
        converted(lib, 1.0, 2.0)
        [np.shape(c) for c in lib.filter_make_jaxpr(SCALED)(X)[0].consts]
        [np.shape(c) for c in lib.filter_make_jaxpr(SCALED.scaled)(X)[0].consts]
        lib.filter_jit(jnp.sin).lower(X).compile(compiler_options={'xla_cpu_enable_fast_math': True})(X)
    """,
    "by name": """
        lib.filter_vmap(TIMES, in_axes={'x': 0, 'y': None})(X, X)
        lib.filter_vmap(TIMES, in_axes={'y': None})(X, X)
        lib.filter_vmap(SCALED.scaled, in_axes={'x': 0})(X)
        lib.filter_vmap(SCALED, in_axes={'x': None}, axis_size=2)(X)
        lib.filter_vmap(SCALED.scaled, in_axes={'self': 0})(X)
        lib.filter_vmap(TIMES, in_axes={'z': None})(X, X)
        lib.filter_vmap(lambda x, y=1: x, in_axes={'y': 0})(X)
        lib.filter_pmap(TIMES, in_axes={'y': None})(X, X)
        lib.filter_pmap(lambda: jnp.ones(2), axis_size=2)()
        lib.filter_pmap(lambda x, y, z: (x, y, z), in_axes=0)(X, 2.0, 'a')
        lib.filter_pmap(TIMES, in_axes=0)(X, np.float32(2))
        lib.filter_pmap(lambda x: x * 2, axis_size=2)(2.0)
        lib.filter_pmap(lambda x: x)(jnp.array(1.0))
        lib.filter_pmap(lambda x, n: (x * n, n)).lower(X, 2).compile()(X, 2)
    """,
    "mapped": """
        lib.filter_vmap(SCALED)(X)
        lib.filter_vmap(SCALED.scaled)(X)
        lib.filter_pmap(SCALED)(X)
        lib.filter_vmap(jax.tree_util.Partial(jnp.add, X))(X)
        lib.filter_vmap(functools.partial(jnp.add, X))(X)
        lib.filter_vmap(lambda t: t['a'] * 2 + t['b'], in_axes=({'a': lib.if_array(0), 'b': None},))({'a': X, 'b': 1.0})
        lib.filter_vmap(lambda a, b: a, in_axes=(0, 0))(X, 'a')
        lib.filter_vmap(lambda a: (a, 3.0), out_axes=(0, None))(jnp.ones((2, 3)))
        lib.filter_vmap(lambda a: 'a', out_axes=0)(X)
        lib.filter_vmap(lambda a: a, in_axes=(0, 0))(X)
        lib.filter_vmap(lambda a, b: a, in_axes=(0,))(X, X)
        lib.filter_vmap(MLP)(jnp.ones((3, 2)))
        lib.filter_vmap(MLP.layers[0].__call__)(jnp.ones((3, 2)))
        lib.filter_vmap(lambda k: eqx.nn.MLP(2, 2, 2, 1, key=k))(jax.random.split(jax.random.key(0), 3))
        lib.filter_vmap(in_axes=(None, 0))(lambda a, b: a + b)(X, X)
        lib.filter_vmap(lambda a: jax.lax.psum(a, 'i'), axis_name='i', out_axes=None)(X)
        lib.filter_vmap(lambda a: a, spmd_axis_name='i')(X)
        lib.filter_vmap(lambda a, b: (a, b), out_axes=(0, None))(np.ones((2, 3)), 2.0)
        lib.filter_vmap(lambda a: a, in_axes=-1, out_axes=-1)(jnp.ones((2, 3)))
        lib.filter_vmap(lambda a: a, in_axes=1.5)(X)
    """,
    "jitted": """
        lib.filter_jit(MLP)(jnp.ones(2))
        lib.filter_jit(lambda x: x)(bytearray(b'a'))
        lib.filter_jit(lambda x: 1 if x else 2)(jnp.array(True))
        lib.filter_jit(lambda x: 1 if x else 2)(True)
        lib.filter_jit(lambda x: x, static_argnums=0)(1)
        lib.filter_jit(lambda x: x, donate_argnums=0)(1)
        lib.filter_jit(lambda x: x, donate='yes')(1)
        lib.filter_jit(lambda x: x)()
        lib.filter_jit(functools.partial(lambda x, y: x + y, X))(1.0)
        lib.filter_jit(eqx.Partial(lambda x, y: x + y, X))(1.0)
        lib.filter_jit(lambda x: x)(jax.ShapeDtypeStruct((2,), jnp.float32))
        jax.random.key_data(lib.filter_jit(lambda x: x)(jax.random.key(0)))
        lib.filter_jit(lambda f: f)(jnp.sin) is jnp.sin
        lib.filter_jit(3)(1)
    """,
    "derivatives": """
        lib.filter_grad(lambda m: m(jnp.ones(2)).sum())(MLP)
        lib.filter_grad(lambda x: jnp.array(1))(X)
        lib.filter_grad(lambda x: 'a')(X)
        lib.filter_grad(lambda x: None)(X)
        lib.filter_grad(lambda: 1.0)()
        lib.filter_grad(lambda x, y: x.sum() * y)(X, y=3)
        lib.filter_grad(lambda x, y: x.sum() * y, argnums=1)(X, 2.0)
        lib.filter_grad(lambda x: jnp.real(x * x))(jnp.array(1 + 2j))
        lib.filter_grad(lambda x: x * x)(jnp.array(1 + 2j))
        lib.filter_grad(lambda x: x * x, holomorphic=True)(jnp.array(1 + 2j))
        lib.filter_jvp(lambda x: x, (X,), ())
        lib.filter_jvp(lambda x: x['a'], ({'a': X},), ({'b': X},))
        lib.filter_jvp(lambda x, y=None: x * y, (X,), (X,), y=2.0)
        lib.filter_jvp(lambda x, y: x * y, [X, X], [X, X])
        lib.filter_vjp(lambda x: (x, 'a'), X)[1]((X, 'a'))
        lib.filter_vjp(lambda m, x: m(x), MLP, jnp.ones(2))[1](jnp.ones(2))
        lib.filter_jacrev(lambda t: (t * 2, 'aux'), has_aux=True)(X)
        lib.filter_eval_shape(eqx.nn.MLP, 2, 2, 4, 1, key=jax.random.key(0))
        lib.filter_eval_shape(lambda x: x.sum(), jax.ShapeDtypeStruct((2,), jnp.float32))
        lib.filter_closure_convert(lambda x: x * X, X)(jnp.arange(3))
        lib.filter_pure_callback(lambda x, s: np.asarray(x) * s, X, 2, result_shape_dtypes=jax.ShapeDtypeStruct((3,), jnp.float32))
        lib.filter_pure_callback(lambda x: np.ones(2, np.float32), X, result_shape_dtypes=jax.ShapeDtypeStruct((3,), jnp.float32))
        lib.filter_shard((X, 'a'), jax.devices()[0])
    """,
    "trees": """
        lib.tree_at(lambda t: t[0], [1, 2], 3, replace_fn=lambda x: x)
        lib.tree_at(lambda t: (t[0], t[1]), [1, 2], (3,))
        lib.tree_at(lambda t: (t[1], t[1][0]), [1, [2, 3]], ('x', 'y'))
        lib.tree_at(lambda t: t.foo, [1], 1)
        (lambda a: lib.tree_check([a, a]))([1])
        lib.tree_flatten_one_level(1)
        lib.tree_inference(eqx.nn.Dropout(0.5)).inference
        lib.tree_equal([1])
        lib.tree_pformat({'a': X, 'b': [1, 'x', None, (2.0,)], 'c': np.ones(2)})
        lib.tree_pformat([[], {}, (), (1,), set(), frozenset({1})])
        lib.tree_pformat(jax.ShapeDtypeStruct((2,), jnp.float32), struct_as_array=True)
        lib.tree_pformat(jax.ShapeDtypeStruct((2,), jnp.float32))
        lib.tree_pformat([X, 1, 'a'], truncate_leaf=lambda x: isinstance(x, str))
        lib.tree_pformat([X], short_arrays=False)
        lib.tree_pformat({'a': "it's", 'b': 'line\\nbreak'})
    """,
    "rules": """
        custom_jvp(lib)
        custom_jvp(lib, lambda t: None)
        lib.filter_custom_jvp(lambda x: x)(X)
    """,
}


def plain(value):
    """A leaf in a form that `==` compares."""
    if not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return repr(value) if isinstance(value, float) else value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return type(value), str(value.dtype), jnp.asarray(value, jnp.complex64).round(4).tolist()


def outcome(line, lib):
    try:
        leaves, treedef = jax.tree.flatten(
            eval(line, {**globals(), "lib": lib, "functools": functools})
        )
    except NameError:  # a mistake of the line
        raise
    except Exception as error:
        return type(error)
    return [plain(leaf) for leaf in leaves], treedef


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line.strip(), id=f"{group}: {line.strip()}")
        for group, lines in LINES.items()
        for line in lines.strip().splitlines()
    ],
)
def test_both_do_the_same(line):
    assert outcome(line, nnx) == outcome(line, eqx)
