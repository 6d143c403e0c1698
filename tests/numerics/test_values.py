"""Layers of the catalogue in each dtype beside the reference, for unusual batches, and their gradients.

Each test goes through a family of rows with few compilations. Gradients of all parameters and floating
inputs, through a transform, are compared with central differences in float64.
"""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn.catalogue import FAMILIES


def run(rows, layers, inputs, lib=nnx):
    """The calls of all rows as one program."""
    each = lib.jit(lambda *both: [row.run(x, *y) for row, x, y in zip(rows.values(), *both)])
    return each(layers, inputs)


def difference(found, expected, units=8.0):
    """What is wrong with a result, which may be so many units of rounding off where it is of size 1."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"{found.dtype}{found.shape}, not {expected.dtype}{expected.shape}"
    if not jnp.issubdtype(found.dtype, jnp.inexact):
        return None if np.array_equal(found, expected) else "other numbers"
    unit = float(jnp.finfo(found.dtype).eps) * units
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    error = np.abs(found - expected).max(initial=0) / max(np.abs(expected).max(initial=0), 1)
    return None if error <= unit else f"off by {error:.3g}, in units {error / unit:.3g}"


def numbers(lib, layer):
    """The values that a layer has after a call."""
    found = {}
    for path, leaf in lib.to_flat_state(lib.state(layer)):
        value = leaf.get_value() if isinstance(leaf, lib.Variable) else leaf
        for i, x in enumerate(jax.tree.leaves(value)):
            is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            found[*path, i] = jax.random.key_data(x) if is_key else x
    return found


OTHERWISE = re.compile("WeightNorm|SimpleCell|Bidirectional|MultiHeadAttention, decoding")
"""What the reference refuses in half precision, or widens."""
HALVES = (
    ("float16", {"param_dtype": "float16"}),
    ("bfloat16", {"param_dtype": "float32", "dtype": "bfloat16"}),
)


def cases(family):
    """Rows by name and dtype, each with the dtype of inputs and those of its layer."""
    rows = {name: row for name, row in FAMILIES[family].items() if row.peer}
    found = {(name, "float32"): (row, "float32", {}) for name, row in rows.items()}
    halves = [name for name, row in rows.items() if row.types and not OTHERWISE.search(name)]
    # XLA has no fused attention in float16 on a CPU.
    kinds = HALVES[1:] if family == "attention" else HALVES
    for name, (dtype, types) in zip(halves, itertools.cycle(kinds)):
        found[name, dtype] = rows[name], dtype, types
    return found


@pytest.mark.filterwarnings("ignore")  # of the reference
@pytest.mark.parametrize("family", FAMILIES)
def test_results_and_state_are_those_of_the_reference(family):
    from tests.parity.layers import OLDER, ref

    if OLDER:
        pytest.skip("the reference lacks some of the options")
    chosen = cases(family)
    rows = {name: row for name, (row, _, _) in chosen.items()}
    inputs = [row.arrays(dtype) for row, dtype, _ in chosen.values()]
    pairs = []
    for lib in (nnx, ref):
        layers = [row.made(lib, **types) for row, _, types in chosen.values()]
        pairs.append((run(rows, layers, inputs, lib), [numbers(lib, layer) for layer in layers]))
    (ours, left), (theirs, left_there) = pairs
    wrong = {name: difference(*both) for name, *both in zip(rows, ours, theirs)}
    for name, one, other in zip(rows, left, left_there):
        assert one.keys() == other.keys(), name
        if not name[0].startswith("WeightNorm"):  # where the reference stores the product
            wrong |= {(*name, path): difference(one[path], other[path]) for path in one}
    assert not {name: text for name, text in wrong.items() if text}


BATCHES = {  # a change of the batch, and whether it takes one without that axis
    "no example": (lambda x: x[:0], False),
    "one example": (lambda x: x[:1], False),
    "no batch axis": (lambda x: x[0], True),
    "two batch axes": (lambda x: x[None], True),
    "an empty batch axis more": (lambda x: x[None][:0], True),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_of_any_shape(family):
    """Each example has its result; without one, gradients are zero."""
    rows = {n: row for n, row in FAMILIES[family].items() if row.batched and len(row.inputs) == 1}
    rows = dict([*rows.items()][::2])
    made = lambda rows: [row.made() for row in rows.values()]
    whole = dict(zip(rows, run(rows, made(rows), [row.arrays("float32") for row in rows.values()])))
    for name, (change, without) in BATCHES.items():
        chosen = {n: row for n, row in rows.items() if row.unbatched or not without}
        inputs = [(change(row.x),) for row in chosen.values()]
        for n, y in zip(chosen, run(chosen, made(chosen), inputs)):
            assert not difference(y, change(whole[n]), 64), (name, n)
        if name == "no example":
            total = lambda layers: sum(y.sum() for y in run(chosen, layers, inputs))  # noqa: B023
            grads = nnx.jit(nnx.grad(total))(made(chosen))
            assert not any(np.any(np.asarray(g) != 0) for g in jax.tree.leaves(grads))


# Gradients --------------------------------------------------------------------------------------


def loop(run, layer, inputs):
    """The layer for each of a stack of inputs."""
    return jnp.stack([run(layer, *(x[i] for x in inputs)) for i in range(2)])


def scan(run, layer, inputs):
    """The same in a scan that carries all but parameters."""
    axes = nnx.StateAxes({nnx.Param: None, ...: nnx.Carry})
    return nnx.scan(run, in_axes=(axes, *(0 for _ in inputs)), out_axes=0)(layer, *inputs)


def vmap(run, layer, inputs):
    return nnx.vmap(run, in_axes=(None, *(0 for _ in inputs)))(layer, *inputs)


def remat(run, layer, inputs):
    return loop(nnx.remat(run), layer, inputs)


def sample(family, every, through):
    """Rows of a family, each with the transform that it goes through."""
    chosen = {}
    for i, (name, row) in enumerate(FAMILIES[family].items()):
        if row.smooth and (row.everywhere or i % every == 0):
            # Calls of a mapped layer write nothing, and weight normalisation writes parameters.
            other = not row.stateless if through is vmap else name.startswith("WeightNorm")
            chosen[name] = row, remat if other else through
    return chosen


def floating(x):
    return x if jnp.issubdtype(x.dtype, jnp.floating) else None


def check(chosen, order=1):
    """Along a random direction, the derivative is the difference of the function, or the gradient."""
    rows, ways = zip(*chosen.values())
    layers = [row.made(param_dtype="float64", dtype="float64") for row in rows]
    parts = [nnx.split(layer, nnx.Param, ...) for layer in layers]
    given = [row.arrays("float64") for row in rows]
    point = [(params, [*map(floating, xs)]) for (_, params, _), xs in zip(parts, given)]
    draw = np.random.default_rng(0)
    direction = jax.tree.map(lambda x: draw.normal(size=x.shape), point)

    def losses(point, ways):
        """A number for each row, which weighs all of its results."""
        for row, through, (graphdef, _, rest), xs, (params, own) in zip(
            rows, ways, parts, given, point
        ):
            layer = nnx.merge(graphdef, params, rest, copy=True)
            xs = [x if mine is None else mine for x, mine in zip(xs, own)]
            y = through(row.run, layer, [jnp.stack([x, x[::-1]]) for x in xs])
            yield (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum()

    def moved(by):
        return jax.tree.map(lambda x, v: x + by * v, point, direction)

    def along(gradients):
        """The products with the direction, for each row."""
        products = jax.tree.map(lambda g, v: (g * v).sum(), gradients, direction)
        return jnp.stack([sum(jax.tree.leaves(row)) for row in products])

    gradient = jax.jit(jax.grad(lambda point: sum(losses(point, ways))))
    if order == 1:
        function = jax.jit(lambda point: jnp.stack([*losses(point, [loop] * len(rows))]))
        found = along(gradient(point))
    else:
        function = lambda point: along(gradient(point))
        found = along(jax.jit(lambda v: jax.jvp(gradient, (point,), (v,))[1])(direction))
    wanted = (function(moved(1e-5)) - function(moved(-1e-5))) / 2e-5
    for name, a, b in zip(chosen, found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-8 * 10**order, atol=2e-7 * 10**order, err_msg=name)


@pytest.mark.parametrize(
    "family, through, every",
    [
        ("linear", remat, 2),
        ("convolutions", vmap, 5),
        ("pools", loop, 6),
        ("norms", scan, 9),
        ("attention", vmap, 7),
        ("recurrence", scan, 5),
    ],
)
def test_gradients_are_the_limits_of_differences(family, through, every):
    with jax.enable_x64(True):
        check(sample(family, every, through))


@pytest.mark.parametrize("family, every", [("linear", 9), ("norms", 21), ("attention", 21)])
def test_gradients_of_gradients(family, every):
    with jax.enable_x64(True):
        check(dict([*sample(family, 1, loop).items()][::every]), order=2)
