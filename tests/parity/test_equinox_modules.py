"""Programs of Equinox with this library in its place, and modules of Equinox in this library.

Lines have what `filtered_fuzz` does not write: modules of the peer, names of arguments, texts of trees,
callbacks, and the classes of errors.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx

eqx = pytest.importorskip("equinox")

from tests.parity.filtered_fuzz import modules  # noqa: E402

X = jnp.arange(3.0)
XS = jnp.linspace(-1.0, 1.0, 6).reshape(3, 2)


@functools.cache
def net(lib):
    """A network of Equinox, or of this library with `frozen=True`."""

    class Net(lib.Module, **({} if lib is eqx else {"frozen": True})):
        layers: list
        extra: dict
        name: str
        rate: float
        size: int = lib.field(static=True, default=2)

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x * self.rate * self.extra["rate"]

    return Net


def make(lib):
    layer = modules(lib)["Layer"]
    layers = [layer(jnp.full(2, 0.5), jnp.ones(2)), jax.nn.relu, layer(jnp.full(2, 0.25))]
    extra = {"rate": 0.5, "text": "t", "steps": 3, "flag": True, "array": np.arange(2)}
    return net(lib)(layers, extra, "net", 2.0)


def loss(model):
    return jnp.sum(model(XS) ** 2)


def trained(lib):
    model, tx = make(lib), optax.adam(0.1)
    state = tx.init(lib.filter(model, lib.is_inexact_array))

    @lib.filter_jit
    def step(model, state):
        grads = lib.filter_grad(loss)(model)
        updates, state = tx.update(grads, state, lib.filter(model, lib.is_inexact_array))
        return lib.apply_updates(model, updates), state

    for _ in range(2):
        model, state = step(model, state)
    return model


def content(tree):
    """The leaves by path, without functions and text, which are leaves of Equinox alone."""
    pairs = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): x for path, x in pairs if eqx.is_array_like(x)}


def test_a_training_loop_of_equinox():
    expected, found = (content(trained(lib)) for lib in (eqx, nnx))
    assert found.keys() == expected.keys() and found
    for path, x in expected.items():
        np.testing.assert_allclose(found[path], x, rtol=1e-6, err_msg=path)


@pytest.mark.parametrize(
    "model", [make(nnx), make(eqx), eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))]
)
def test_modules_are_taken_by_the_transforms_of_either(model):
    for one, other in ((eqx, nnx), (nnx, eqx)):
        arrays, rest = one.partition(model, one.is_array)
        assert eqx.tree_equal(other.combine(arrays, rest), model)
        assert all(map(eqx.is_array, jax.tree.leaves(arrays)))
        mapped = other.filter_vmap(lambda m, x: m(x), in_axes=(None, 0))
        np.testing.assert_allclose(
            one.filter_jit(mapped)(model, XS), jax.vmap(model)(XS), rtol=1e-6
        )
    optax.adam(0.1).init(nnx.filter(model, nnx.is_inexact_array))


def test_modules_of_equinox_are_restored_and_exported(tmp_path):
    build = lambda i: eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(i))
    source, target, abstract = build(0), build(1), eqx.filter_eval_shape(build, 0)
    holder = nnx.Dict(inner=target)
    nnx.save_safetensors(tmp_path / "w.safetensors", source)
    nnx.checkpoint.save(tmp_path / "c", model=source)
    nnx.checkpoint.save(tmp_path / "d", model=nnx.Dict(inner=source))
    nnx.checkpoint.restore(tmp_path / "d", model=holder)
    restored = [nnx.load_safetensors(tmp_path / "w.safetensors", target)]
    restored += [nnx.checkpoint.restore(tmp_path / "c", model=x) for x in (target, abstract)]
    news = [holder.inner, *(one.values["model"] for one in restored)]
    for new in news:
        assert eqx.tree_equal(new, source)
    assert not eqx.tree_equal(target, source)
    exported = nnx.export(lambda m, x: jax.vmap(m)(x), source, XS, shapes="b, 2")
    np.testing.assert_allclose(exported(XS[:2]), jax.vmap(source)(XS[:2]), rtol=1e-6)
    exported.save(tmp_path / "program.nnx")
    again = nnx.load_exported(tmp_path / "program.nnx")
    np.testing.assert_allclose(again(XS), jax.vmap(source)(XS), rtol=1e-6)


MLP = eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(0))


class Scaled(eqx.Module):
    """A callable of the peer, to be transformed itself."""

    weight: jax.Array

    def __call__(self, x):
        return self.weight * x

    def scaled(self, x):
        return self.weight * x


SCALED = Scaled(X)
TIMES = lambda x, y: x * y
MIXED = lambda x, y: (x * 2, y * 3, x * y, "a", 2.0, jnp.arange(2))
LINES = """
    lib.tree_at(lambda t: t['b'], {'a': (), 'b': ()}, 5)
    lib.tree_at(lambda t: (t['a'], t['b']), {'a': (), 'b': ()}, (5, 6))
    lib.tree_at(lambda t: (t[0], t[1]), [1, None], (2, 3))
    lib.tree_at(lambda t: t[1], [None, None], 5, is_leaf=lambda x: x is None)
    lib.tree_at(jax.tree.leaves, [X, (1, None), 'a'], [9, 8, 7])
    lib.tree_at(lambda t: t[:2], [1, 2, 3], 'ab')
    type(lib.apply_updates([1.0], [None]))
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
    [np.shape(c) for c in lib.filter_make_jaxpr(SCALED)(X)[0].consts]
    [np.shape(c) for c in lib.filter_make_jaxpr(SCALED.scaled)(X)[0].consts]
    lib.filter_jit(jnp.sin).lower(X).compile(compiler_options={'xla_cpu_enable_fast_math': True})(X)
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
    lib.filter_vmap(SCALED)(X)
    lib.filter_pmap(SCALED)(X)
    lib.filter_vmap(jax.tree_util.Partial(jnp.add, X))(X)
    lib.filter_vmap(lambda t: t['a'] * 2 + t['b'], in_axes=({'a': lib.if_array(0), 'b': None},))({'a': X, 'b': 1.0})
    lib.filter_vmap(lambda a, b: a, in_axes=(0, 0))(X, 'a')
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
    lib.filter_jit(MLP)(jnp.ones(2))
    lib.filter_jit(lambda x: x)(bytearray(b'a'))
    lib.filter_jit(lambda x: 1 if x else 2)(jnp.array(True))
    lib.filter_jit(lambda x: x, static_argnums=0)(1)
    lib.filter_jit(lambda x: x, donate_argnums=0)(1)
    lib.filter_jit(lambda x: x, donate='yes')(1)
    lib.filter_jit(eqx.Partial(lambda x, y: x + y, X))(1.0)
    lib.filter_jit(lambda x: x)(jax.ShapeDtypeStruct((2,), jnp.float32))
    jax.random.key_data(lib.filter_jit(lambda x: x)(jax.random.key(0)))
    lib.filter_jit(3)(1)
    lib.filter_jit(lambda f: f)(jnp.sin) is jnp.sin
    lib.filter_jit(lambda x: 1 if x else 2)(True)
    lib.filter_vmap(SCALED.scaled)(X)
    lib.filter_custom_jvp(lambda x: x)(X)
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
    lib.filter_vjp(lambda m, x: m(x), MLP, jnp.ones(2))[1](jnp.ones(2))
    lib.filter_jacrev(lambda t: (t * 2, 'aux'), has_aux=True)(X)
    lib.filter_eval_shape(eqx.nn.MLP, 2, 2, 4, 1, key=jax.random.key(0))
    lib.filter_eval_shape(lambda x: x.sum(), jax.ShapeDtypeStruct((2,), jnp.float32))
    lib.filter_pure_callback(lambda x, s: np.asarray(x) * s, X, 2, result_shape_dtypes=jax.ShapeDtypeStruct((3,), jnp.float32))
    lib.filter_pure_callback(lambda x: np.ones(2, np.float32), X, result_shape_dtypes=jax.ShapeDtypeStruct((3,), jnp.float32))
    lib.filter_shard((X, 'a'), jax.devices()[0])
    lib.tree_at(lambda t: t[0], [1, 2], 3, replace_fn=lambda x: x)
    lib.tree_at(lambda t: (t[0], t[1]), [1, 2], (3,))
    lib.tree_at(lambda t: (t[1], t[1][0]), [1, [2, 3]], ('x', 'y'))
    lib.tree_at(lambda t: t.foo, [1], 1)
    (lambda a: lib.tree_check([a, a]))([1])
    lib.tree_flatten_one_level(1)
    lib.tree_inference(eqx.nn.Dropout(0.5)).inference
    lib.tree_pformat({'a': X, 'b': [1, 'x', None, (2.0,)], 'c': np.ones(2)})
    lib.tree_pformat([[], {}, (), (1,), set(), frozenset({1})])
    lib.tree_pformat(jax.ShapeDtypeStruct((2,), jnp.float32), struct_as_array=True)
    lib.tree_pformat([X, 1, 'a'], truncate_leaf=lambda x: isinstance(x, str))
    lib.tree_pformat([X], short_arrays=False)
    lib.tree_pformat({'a': "it's", 'b': 'line\\nbreak'})
"""


def plain(value):
    """A leaf in a form that `==` compares."""
    if not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return repr(value) if isinstance(value, float) else value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return type(value), str(value.dtype), jnp.asarray(value, jnp.complex64).round(4).tolist()


def outcome(line, lib):
    try:
        leaves, treedef = jax.tree.flatten(eval(line, {**globals(), "lib": lib}))
    except NameError:  # a mistake of the line
        raise
    except Exception as error:
        return type(error)
    return [plain(leaf) for leaf in leaves], treedef


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("line", [line.strip() for line in LINES.strip().splitlines()])
def test_both_do_the_same(line):
    assert outcome(line, nnx) == outcome(line, eqx)
