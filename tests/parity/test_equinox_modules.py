"""Programs of Equinox with this library in its place, and modules of Equinox in this library."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx

eqx = pytest.importorskip("equinox")

X = jnp.linspace(-1.0, 1.0, 6).reshape(3, 2)


@functools.cache
def modules(lib):
    """A layer and a network: of Equinox, or of this library with `frozen=True`."""
    options = {} if lib is eqx else {"frozen": True}

    class Layer(lib.Module, **options):
        weight: jax.Array
        bias: jax.Array | None
        activation: object

        def __call__(self, x):
            return self.activation(x @ self.weight + (0 if self.bias is None else self.bias))

    class Net(lib.Module, **options):
        layers: list
        extra: dict
        name: str
        rate: float
        size: int = lib.field(static=True, default=2)

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x * self.rate * self.extra["rate"]

    return Layer, Net


def make(lib):
    Layer, Net = modules(lib)
    first = Layer(jnp.full((2, 2), 0.5), jnp.ones(2), jnp.tanh)
    last = Layer(jnp.full((2, 1), 0.25), None, lambda x: x)
    extra = {"rate": 0.5, "text": "t", "steps": 3, "flag": True, "array": np.arange(2)}
    return Net([first, jax.nn.relu, last], extra, "net", 2.0)


def loss(model):
    return jnp.sum(model(X) ** 2)


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


def scanned(lib):
    arrays, rest = lib.partition(make(lib), lib.is_array)

    def body(arrays, _):
        grads = lib.filter_grad(loss)(lib.combine(arrays, rest))
        return lib.apply_updates(arrays, jax.tree.map(lambda g: -0.1 * g, grads)), None

    return lib.combine(jax.lax.scan(body, arrays, None, length=2)[0], rest)


def content(tree):
    """The leaves by path, without functions and text, which are leaves of Equinox alone."""
    pairs = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): x for path, x in pairs if eqx.is_array_like(x)}


@pytest.mark.parametrize("program", [trained, scanned])
def test_programs_of_equinox(program):
    expected, found = (content(program(lib)) for lib in (eqx, nnx))
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
        np.testing.assert_allclose(one.filter_jit(mapped)(model, X), jax.vmap(model)(X), rtol=1e-6)
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
    exported = nnx.export(lambda m, x: jax.vmap(m)(x), source, X, shapes="b, 2")
    np.testing.assert_allclose(exported(X[:2]), jax.vmap(source)(X[:2]), rtol=1e-6)
    exported.save(tmp_path / "program.nnx")
    again = nnx.load_exported(tmp_path / "program.nnx")
    np.testing.assert_allclose(again(X), jax.vmap(source)(X), rtol=1e-6)
