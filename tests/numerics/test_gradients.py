"""Gradients of all parameters and floating inputs against central differences in float64.

A sample of each family of the catalogue goes through one transform.
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
    rows = [(n, row) for n, row in FAMILIES[family].items() if row.formula and row.smooth]
    if through is vmap:
        rows = [(n, row) for n, row in rows if row.stateless]
    if through is scan:  # weight normalisation writes parameters
        rows = [(n, row) for n, row in rows if not n.startswith("WeightNorm")]
    return dict(rows[::every])


def floating(xs):
    return all(jnp.issubdtype(x.dtype, jnp.floating) for x in xs)


def check(rows, through, order=1):
    """Along a random direction, the derivative is the difference of the function, or the gradient."""
    layers = [row.made(param_dtype="float64", dtype="float64") for row in rows.values()]
    parts = [nnx.split(layer, nnx.Param, ...) for layer in layers]
    given = [row.arrays("float64") for row in rows.values()]
    point = [(params, xs if floating(xs) else ()) for (_, params, _), xs in zip(parts, given)]
    draw = np.random.default_rng(0)
    direction = jax.tree.map(lambda x: draw.normal(size=x.shape), point)

    def losses(point, through):
        """A number for each row, which weighs all of its results."""
        for row, (graphdef, _, rest), xs, (params, own) in zip(rows.values(), parts, given, point):
            layer = nnx.merge(graphdef, params, rest, copy=True)
            y = through(row.run, layer, [jnp.stack([x, x[::-1]]) for x in own or xs])
            yield (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum()

    def moved(by):
        return jax.tree.map(lambda x, v: x + by * v, point, direction)

    def along(gradients):
        """The products with the direction, for each row."""
        products = jax.tree.map(lambda g, v: (g * v).sum(), gradients, direction)
        return jnp.stack([sum(jax.tree.leaves(row)) for row in products])

    gradient = jax.jit(jax.grad(lambda point: sum(losses(point, through))))
    if order == 1:
        function = jax.jit(lambda point: jnp.stack([*losses(point, loop)]))
        found = along(gradient(point))
    else:
        function = lambda point: along(gradient(point))
        found = along(jax.jit(lambda v: jax.jvp(gradient, (point,), (v,))[1])(direction))
    wanted = (function(moved(1e-5)) - function(moved(-1e-5))) / 2e-5
    for name, a, b in zip(rows, found, wanted, strict=True):
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
        check(sample(family, every, through), through)


@pytest.mark.parametrize("family, every", [("linear", 9), ("norms", 21), ("attention", 21)])
def test_gradients_of_gradients(family, every):
    with jax.enable_x64(True):
        check(sample(family, every, loop), loop, order=2)
