"""Functions of JAX that are replaced for a while are seen by every layer, exactly for that while.

Libraries for quantisation and adapters work so: they put a function of their own in the place of
`jax.lax.dot_general`, say, or other code into it, which may also write to the layer that calls it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import nnxlite as nnx
from tests.nn.catalogue import LAYERS

CALLED = {  # a layer for each function of JAX that layers call
    "Linear": (lax, "dot_general"),
    "BatchNorm": (lax, "rsqrt"),
    "Einsum": (jnp, "einsum"),
    "Embed": (jnp, "take"),
    "Conv": (lax, "conv_general_dilated"),
    "ConvTranspose": (lax, "conv_transpose"),
    "RoPE": (jnp, "concatenate"),
    "Dropout": (lax, "select"),
    "PReLU": (jnp, "where"),
}


def eagerly(run, layer, x):
    return run(layer, x)


def jitted(run, layer, x):
    """As in JAX, what was compiled for a function stays; a new function is traced."""
    return nnx.jit(lambda layer, x: run(layer, x))(layer, x)


a_layer_for_each_function = pytest.mark.parametrize(
    "name, how", [*zip(CALLED, itertools.cycle([eagerly, jitted]))]
)


def _hooked(*args, **kwargs):  # its code runs among the globals of the function that gets it
    import jax

    return jax._hook_of_the_test(*args, **kwargs)


@contextlib.contextmanager
def replaced(module, name, by_code=False, action=lambda: None):
    """Replace a function by one that gives twice as much, under its name or by its code; the calls."""
    fun, calls = getattr(module, name), []
    original = fun

    def doubled(*args, **kwargs):
        calls.append(name)
        action()
        return 2 * original(*args, **kwargs)

    if not by_code:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, doubled)
            yield calls
        return
    code = fun.__code__
    original = types.FunctionType(code, fun.__globals__, name, fun.__defaults__, fun.__closure__)
    original.__kwdefaults__ = fun.__kwdefaults__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "_hook_of_the_test", doubled, raising=False)
        patch.setattr(fun, "__code__", _hooked.__code__)
        yield calls


def same(y, z):
    """Whether two results are equal bit for bit."""
    pairs = zip(jax.tree.leaves(y), jax.tree.leaves(z), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@a_layer_for_each_function
def test_a_replaced_function_is_seen_while_it_is_in_place(name, how):
    (module, fun), row = CALLED[name], LAYERS[name]
    layer, run, x = row.make(nnx.Rngs(0)), row.run, row.x
    call = lambda: how(run, nnx.clone(layer), x)
    with replaced(module, fun) as before_any_plain_call:
        call()
    plain = call()
    for by_code in (False, *[True] * isinstance(getattr(module, fun), types.FunctionType), False):
        with replaced(module, fun, by_code) as calls:
            y = call()
        assert len(calls) >= len(before_any_plain_call) > 0
        assert not same(y, plain)
        assert same(call(), plain)


@a_layer_for_each_function
def test_a_replacement_may_write_to_the_layer(name, how):
    (module, fun), row = CALLED[name], LAYERS[name]
    layer, x, current = row.make(nnx.Rngs(0)), row.x, []
    row.run(nnx.clone(layer), x)

    def run(layer, x):
        current[:] = [layer]
        return row.run(layer, x)

    def add():
        (layer,) = current
        if not hasattr(layer, "added"):
            layer.added = nnx.Param(jnp.ones(3))
        layer.added.value += 1

    with replaced(module, fun, action=add) as calls:
        how(run, layer, x)
    assert calls and layer.added.value.tolist() == [1 + len(calls)] * 3


class Unrelated(nnx.Module):
    """A module that knows nothing of the layer whose attributes it is given."""


def unrelated(**attributes):
    other = Unrelated()
    for name, value in attributes.items():
        setattr(other, name, nnx.data(value) if isinstance(value, dict) else value)
    return other


@pytest.mark.parametrize("name", LAYERS)
def test_a_call_needs_public_attributes_only_and_asks_arrays_for_their_shape(name, monkeypatch):
    """Exporters replace `jnp.shape` and its like by operations that they record."""
    row = LAYERS[name]
    layer, run, x = row.make(nnx.Rngs(0)), row.run, row.x
    expected = run(nnx.clone(layer), x)
    public = {key: value for key, value in vars(layer).items() if not key.startswith("_")}
    borrowed = unrelated(**public) if "recording" in name else types.SimpleNamespace(**public)
    if isinstance(layer, nnx.RNNCellBase):
        type(layer).initialize_carry(borrowed, x.shape)

    def recorded(*args, **kwargs):
        raise AssertionError("a shape as the result of an operation")

    for function in ("shape", "size", "ndim", "iscomplexobj"):
        monkeypatch.setattr(jnp, function, recorded)
    result = run(functools.partial(type(layer).__call__, borrowed), x)
    monkeypatch.undo()
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    assert same(result, expected)
