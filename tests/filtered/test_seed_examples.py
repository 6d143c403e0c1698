"""The examples of the documents this style comes from, in our words, where no other test has them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx


class LinearOrIdentity(nnx.Module, frozen=True):
    weight: jax.Array
    flag: bool

    def __init__(self, inputs, outputs, flag, key):
        self.weight = jax.random.normal(key, (outputs, inputs))
        self.flag = flag

    def __call__(self, x):
        return x if self.flag else self.weight @ x


def loss(model, x, y):
    return jnp.mean((y - jax.vmap(model)(x)) ** 2)


def data():
    key, x_key, y_key = jax.random.split(jax.random.key(0), 3)
    model = LinearOrIdentity(2, 3, flag=False, key=key)
    return model, jax.random.normal(x_key, (10, 2)), jax.random.normal(y_key, (10, 3))


def test_a_model_is_data_and_a_function():
    model, x, y = data()
    step = functools.partial(nnx.filter_jit, default=nnx.is_inexact_array)(
        nnx.filter_grad(loss, arg=nnx.is_inexact_array)
    )
    grads = step(model, x, y)
    expected = jax.grad(lambda w: jnp.mean((y - x @ w.T) ** 2))(model.weight)
    assert type(grads) is LinearOrIdentity and grads.flag is None
    np.testing.assert_allclose(grads.weight, expected, rtol=1e-5)
    new = nnx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))
    assert new.flag is False and loss(new, x, y) < loss(model, x, y)


def test_a_tree_of_bools_says_what_learns():
    model, x, y = data()
    frozen = jax.tree.map(lambda _: False, model)
    learns = nnx.tree_at(lambda m: m.weight, frozen, replace=True)
    assert nnx.filter_grad(loss, arg=frozen)(model, x, y).weight is None
    assert nnx.filter_grad(loss, arg=learns)(model, x, y).weight.shape == (3, 2)


def test_several_arguments_are_differentiated_as_one():
    grads = nnx.filter_grad(lambda pair: pair[0] * pair[1])((jnp.array(2.0), jnp.array(3.0)))
    assert grads == (3, 2)


def test_what_cannot_be_traced_is_refused_by_name():
    h = nnx.filter_jit(args=(True,))(lambda x: x)
    assert h(1) == h(jnp.array(1)) == 1
    with pytest.raises(
        TypeError, match="the leaf at 'x' must be traced, but str 'hi' is neither an array"
    ):
        h("hi")


def test_slices_on_several_devices():
    add = lambda x, y: x + y
    one, two = jnp.array([1, 2]), jnp.array([3, 4])
    assert nnx.filter_pmap(add)(one, two).tolist() == [4, 6]
    assert nnx.filter_pmap(add)(one, 3).tolist() == [4, 5]
    assert nnx.filter_pmap(kwargs={"x": 1})(add)(jnp.array([[1, 2]]), two).tolist() == [[4], [6]]
    assert nnx.filter_pmap(args=(None,))(add)(jnp.array(1), jnp.array([2, 3])).tolist() == [3, 4]
    apply = nnx.filter_pmap(lambda f, x: f(x))
    assert apply(lambda x: x + 1, jnp.array([2, 3])).tolist() == [3, 4]
