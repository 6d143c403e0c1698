"""Every layer through transforms, copies, exports and files, and with functions of JAX replaced.

What is expected is what the layer does by itself. Gradients are tested in `tests/numerics`.
"""

import contextlib
import copy
import functools
import itertools
import pickle
import types

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import nnxlite as nnx
from nnxlite.objects._module import layer_name
from tests.nn.catalogue import LAYERS

DEPTH = 3
every_layer = pytest.mark.parametrize("name", LAYERS)


@functools.cache
def prototype(name):
    return LAYERS[name].make(nnx.Rngs(0))


def fresh(name):
    return nnx.clone(prototype(name))


@functools.cache
def plain_call(name):
    """What a call without any transform returns, and the state it leaves."""
    layer = fresh(name)
    return LAYERS[name].run(layer, LAYERS[name].x), leaves(layer)


@functools.cache
def stacks():
    """`DEPTH` layers in one for each entry, all different; one program draws them all."""

    @nnx.jit
    @nnx.split_rngs(splits=DEPTH)
    @nnx.vmap
    def make(rngs):
        return {name: layer.make(rngs) for name, layer in LAYERS.items()}

    return make(nnx.Rngs(1))


def stacked(name):
    return nnx.clone(stacks()[name])


def leaves(node):
    """The values of an object by path; keys as numbers."""

    def number(value):
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(value) if is_key else value

    return {
        ".".join(map(str, path)): jax.tree.map(number, leaf.get_value())
        for path, leaf in nnx.to_flat_state(nnx.state(node))
    }


def unstacked(layers):
    """The layers of a stack, one by one."""
    graphdef, state = nnx.split(layers)
    for index in range(DEPTH):
        yield nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[index], state), copy=True)  # noqa: B023


def stack(trees):
    return jax.tree.map(lambda *values: jnp.stack(values), *trees)


def assert_close(found, expected, rtol=1e-4, atol=1e-4):
    """Two pytrees of one structure with equal dtypes and shapes, and close values."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (jnp.shape(a), a.dtype) == (jnp.shape(b), b.dtype)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def test_the_catalogue_holds_every_layer():
    layers = {
        name
        for name, kind in vars(nnx.nn).items()
        if isinstance(kind, type) and issubclass(kind, nnx.Module) and name != "RNNCellBase"
    }
    assert {name.split(",")[0] for name in LAYERS} == layers


@every_layer
def test_jit(name):
    """The same result and state, from one trace for all calls that change no structure."""
    traces = []

    @nnx.jit
    def run(layer, x):
        traces.append(None)
        return LAYERS[name].run(layer, x)

    layer = fresh(name)
    y = run(layer, LAYERS[name].x)
    expected, left = plain_call(name)
    assert_close(y, expected)
    assert_close(leaves(layer), left)
    records = nnx.graphdef(layer) != nnx.graphdef(prototype(name))
    assert records == ("recording" in name)
    run(layer, LAYERS[name].x)
    run(fresh(name), LAYERS[name].x)
    assert len(traces) == 1 + records


@every_layer
def test_vmap(name):
    """A stack of layers, each with an input of its own, is each layer with its input."""
    layers, run, x = stacked(name), LAYERS[name].run, LAYERS[name].x
    xs = jnp.stack([x, x[::-1], x])
    singles = [*unstacked(layers)]
    expected = stack([run(single, x) for single, x in zip(singles, xs, strict=True)])
    assert_close(nnx.jit(nnx.vmap(run))(layers, xs), expected)
    assert_close(leaves(layers), stack([leaves(single) for single in singles]))


@every_layer
def test_scan(name):
    """A scan over a stack is one layer after the other, where the shape allows it."""
    layers, run, x = stacked(name), LAYERS[name].run, LAYERS[name].x
    singles = [*unstacked(layers)]
    y = plain_call(name)[0]
    chained = isinstance(y, jax.Array) and (y.shape, y.dtype) == (x.shape, x.dtype)

    def step(x, layer):
        y = run(layer, x)
        return (y, y) if chained else (x, y)

    carry, ys = nnx.scan(step, length=DEPTH)(x, layers)
    expected = []
    for single in singles:
        x, y = step(x, single)
        expected.append(y)
    assert_close((carry, ys), (x, stack(expected)))
    assert_close(leaves(layers), stack([leaves(single) for single in singles]))


@every_layer
def test_eval_shape_leaks_nothing(name):
    """An abstract layer is the layer without its numbers; a call, or one that fails, leaks nothing."""
    abstract = nnx.eval_shape(lambda: LAYERS[name].make(nnx.Rngs(0)))
    assert nnx.graphdef(abstract) == nnx.graphdef(prototype(name))
    before = nnx.state(abstract)
    assert_shapes(before, nnx.state(prototype(name)))

    def called(layer, x):
        y = LAYERS[name].run(layer, x)
        with contextlib.suppress(Exception):
            layer(jnp.zeros((3, 1, 7, 5, 2, 11)), nonsense=layer_name(layer))
        return y

    with jax.checking_leaks():
        found = nnx.eval_shape(nnx.jit(called), abstract, LAYERS[name].x)
    assert_shapes(found, plain_call(name)[0])
    assert_shapes(before, nnx.state(prototype(name)))


def assert_shapes(abstract, concrete):
    assert jax.tree.structure(abstract) == jax.tree.structure(concrete)
    for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(concrete), strict=True):
        assert isinstance(a, jax.ShapeDtypeStruct) and (a.shape, a.dtype) == (b.shape, b.dtype)


@every_layer
def test_copies(name):
    """A copy equals its original in structure and values, computes the same, and is apart from it."""
    layer = fresh(name)
    expected, left = plain_call(name)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(copied) is type(layer) and nnx.graphdef(copied) == nnx.graphdef(layer)
        assert_close(leaves(copied), leaves(layer), 0, 0)
        assert_close(LAYERS[name].run(copied, LAYERS[name].x), expected)
        assert_close(leaves(copied), left)
        assert_close(leaves(layer), leaves(prototype(name)), 0, 0)


def test_export():
    """One exported program takes batches of any size, and leaves the state that the layers do."""
    fixed = {"MultiHeadAttention, decoding", "LinearGeneral"}  # which have a size
    rows = {name: row for name, row in LAYERS.items() if name not in fixed}
    graphdef, state = nnx.split({name: prototype(name) for name in rows})

    def run(state, inputs):
        layers = nnx.merge(graphdef, state, copy=True)
        return {n: (row.run(layers[n], inputs[n]), leaves(layers[n])) for n, row in rows.items()}

    def symbolic(x):
        return jax.ShapeDtypeStruct((*size, *x.shape[1:]), x.dtype)

    size, inputs = jax.export.symbolic_shape("b"), {name: row.x for name, row in rows.items()}
    program = jax.export.export(jax.jit(run))(state, jax.tree.map(symbolic, inputs))
    assert_close(program.call(state, inputs), {name: plain_call(name) for name in rows})


def test_checkpoint(tmp_path):
    """A file of all layers gives its values to others of the same make."""
    layers = nnx.List([fresh(name) for name in LAYERS])
    others = nnx.List([row.make(nnx.Rngs(5)) for row in LAYERS.values()])
    nnx.checkpoint.save(tmp_path / "layers", model=layers)
    nnx.checkpoint.restore(tmp_path / "layers", model=others)
    assert_close(leaves(others), leaves(layers), 0, 0)


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


def same(y, z):
    """Whether two results are equal bit for bit."""
    pairs = zip(jax.tree.leaves(y), jax.tree.leaves(z), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name, jitted", [*zip(CALLED, itertools.cycle([False, True]))])
def test_a_replaced_function_is_seen_while_it_is_in_place(name, jitted, monkeypatch):
    """Exactly for that while; libraries for quantisation and adapters put theirs in JAX's place."""
    (module, function), row = CALLED[name], LAYERS[name]
    original, current, calls = getattr(module, function), [], []
    prototype = row.make(nnx.Rngs(0))

    def doubled_that_writes(*args, **kwargs):
        calls.append(name)
        (layer,) = current
        if not hasattr(layer, "added"):
            layer.added = nnx.Param(jnp.ones(3))
        layer.added.value += 1
        return 2 * original(*args, **kwargs)

    def run(layer, x):
        current[:] = [layer]
        return row.run(layer, x)

    def call():
        layer = nnx.clone(prototype)
        # As in JAX, what was compiled for a function stays; a new function is traced.
        y = (nnx.jit(lambda *both: run(*both)) if jitted else run)(layer, row.x)
        assert hasattr(layer, "added") == bool(calls)
        assert not calls or layer.added.value.tolist() == [1 + len(calls)] * 3
        return y

    results = []
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(module, function, doubled_that_writes)
            results.append(call())
        calls.clear()
        results.append(call())
    assert same(results[0], results[2]) and same(results[1], results[3])
    assert not same(results[0], results[1])


@every_layer
def test_a_call_needs_public_attributes_only_and_asks_arrays_for_their_shape(name, monkeypatch):
    """Exporters replace `jnp.shape` and its like by operations that they record."""
    row = LAYERS[name]
    layer, run, x = row.make(nnx.Rngs(0)), row.run, row.x
    expected = run(nnx.clone(layer), x)
    public = {key: value for key, value in vars(layer).items() if not key.startswith("_")}
    borrowed = nnx.Module() if "recording" in name else types.SimpleNamespace()
    for key, value in public.items():
        setattr(borrowed, key, value)
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
