"""Gradients of all parameters and floating inputs against central differences in float64.

Every layer, and a sample of the other rows of each family of the catalogue, go through a transform.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn.catalogue import FAMILIES


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
