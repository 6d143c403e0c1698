"""Functions of JAX that are replaced for a while are seen by every layer, exactly for that while.

Libraries for quantisation and adapters work so: they put a function of their own in the place of
`jax.lax.dot_general`, say, which may also write to the layer that calls it.
"""

from __future__ import annotations

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import nnxlite as nnx
from tests.nn import spies
from tests.nn.catalogue import LAYERS

DOT = (lax, "dot_general")
RSQRT = (lax, "rsqrt")
CALLED = {
    **dict.fromkeys(LAYERS, DOT),
    **dict.fromkeys(("BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm"), RSQRT),
    "Identity": None,
    "Einsum": (jnp, "einsum"),
    "Embed": (jnp, "take"),
    "Conv": (lax, "conv_general_dilated"),
    "ConvTranspose": (lax, "conv_transpose"),
    "MultiHeadAttention": (jnp, "einsum"),
    "MultiHeadAttention, recording weights": (jnp, "einsum"),
    "RoPE": (jnp, "concatenate"),
    "Dropout": (lax, "select"),
    "PReLU": (jnp, "where"),
}
"""A function of JAX that a layer calls."""

LOOPS = ("RNN", "Bidirectional")


@pytest.fixture(autouse=True)
def nothing_seen():
    spies.SEEN.clear()
    spies.ON_CALL.clear()


def eagerly(run, layer, x):
    return run(layer, x)


def jitted(run, layer, x):
    """As in JAX, what was compiled for a function stays; a new function is traced."""
    return nnx.jit(lambda layer, x: run(layer, x))(layer, x)


def shapes(run, layer, x):
    return nnx.eval_shape(run, layer, x)


ONE_OF_EACH = {called: name for name, called in CALLED.items() if called and name not in LOOPS}
a_layer_for_each_function = pytest.mark.parametrize(
    "name, how", [*zip(ONE_OF_EACH.values(), itertools.cycle([eagerly, jitted, shapes]))]
)


def same(y, z):
    """Whether two results are equal bit for bit; shapes have no bits."""
    pairs = zip(jax.tree.leaves(y), jax.tree.leaves(z), strict=True)
    return all(isinstance(a, jax.ShapeDtypeStruct) or np.array_equal(a, b) for a, b in pairs)


@a_layer_for_each_function
def test_a_replaced_function_is_seen_while_it_is_in_place(name, how):
    (module, fun), row = CALLED[name], LAYERS[name]
    layer, run, x = row.make(nnx.Rngs(0)), row.run, row.x

    def call():
        spies.SEEN.clear()
        return how(run, nnx.clone(layer), x), spies.SEEN.count(fun)

    with spies.replaced(module, fun):
        _, before_any_plain_call = call()
    plain, none = call()
    results = []
    for by_code in (False, *[True] * isinstance(getattr(module, fun), types.FunctionType), False):
        with spies.replaced(module, fun, by_code):
            y, count = call()
        results.append(y)
        assert count >= before_any_plain_call > 0 == none
        again, count = call()
        assert count == 0
        assert same(again, plain)
    assert how is shapes or not any(same(y, plain) for y in results)


@a_layer_for_each_function
def test_a_replacement_may_write_to_the_layer(name, how):
    (module, fun), row = CALLED[name], LAYERS[name]
    layer, run, x = row.make(nnx.Rngs(0)), row.run, row.x
    run(nnx.clone(layer), x)

    def write(layer, x):
        spies.ON_CALL[:] = [lambda: add(layer)]
        return run(layer, x)

    def add(layer):
        if not hasattr(layer, "added"):
            layer.added = nnx.Param(jnp.ones(3))
            layer.calls = 0
        layer.calls += 1
        layer.added.value += 1

    with spies.replaced(module, fun):
        how(write, layer, x)
    assert spies.SEEN
    if how is not shapes:
        assert layer.calls == len(spies.SEEN)
        assert layer.added.value.tolist() == [1 + layer.calls] * 3


class Unrelated(nnx.Module):
    """A module that knows nothing of the layer whose attributes it is given."""


def unrelated(**attributes):
    other = Unrelated()
    for name, value in attributes.items():
        setattr(other, name, nnx.data(value) if isinstance(value, dict) else value)
    return other


KINDS = itertools.cycle([types.SimpleNamespace, unrelated])


@pytest.mark.parametrize("name, kind", [*zip(LAYERS, KINDS)])
def test_a_call_needs_public_attributes_only(name, kind):
    row = LAYERS[name]
    layer, run, x = row.make(nnx.Rngs(0)), row.run, row.x
    expected = run(nnx.clone(layer), x)
    public = {key: value for key, value in vars(layer).items() if not key.startswith("_")}
    if "recording" in name and kind is types.SimpleNamespace:
        pytest.skip("what records has `sow`")
    borrowed = kind(**public)
    if isinstance(layer, nnx.RNNCellBase):
        type(layer).initialize_carry(borrowed, x.shape)
    result = run(functools.partial(type(layer).__call__, borrowed), x)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    assert same(result, expected)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_asks_the_array_for_its_shape(name, monkeypatch):
    """Exporters replace `jnp.shape` and its like by operations that they record."""
    row = LAYERS[name]
    layer, run, x = row.make(nnx.Rngs(0)), row.run, row.x

    def recorded(*args, **kwargs):
        raise AssertionError("a shape as the result of an operation")

    for function in ("shape", "size", "ndim", "iscomplexobj"):
        monkeypatch.setattr(jnp, function, recorded)
    run(layer, x)
