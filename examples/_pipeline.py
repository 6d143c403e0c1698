"""The layers of a model on several devices, which work on several parts of a batch at once: to copy.

The schedule is GPipe's (Huang et al. 2019, https://arxiv.org/abs/1811.06965).  In each tick every stage
applies its layers to one microbatch and hands the result to the next stage:

    tick        0    1    2    3    4
    stage 0    m0   m1   m2    -    -
    stage 1     -   m0   m1   m2    -
    stage 2     -    -   m0   m1   m2

The backward pass is the derivative of this loop: the same schedule from the last tick to the first.  A
stage is idle in `(stages - 1) / (microbatches + stages - 1)` of the ticks: it computes on whatever
microbatch it has, and the result is dropped.
"""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import nnxlite as nnx


def pipeline(
    f: tp.Callable[[tp.Any, jax.Array], jax.Array],
    layers: tp.Any,
    x: jax.Array,
    *,
    microbatches: int,
    axis: str = "stage",
) -> jax.Array:
    """Apply stacked layers one after the other, each device those of its stage.

    Args:
        f: `f(layer, x)` applies one layer; the result is like `x`. With `nnx.remat(f)`, each layer
            keeps only its input for the gradient. It must not write to its layer.
        layers: as `nnx.stack_layers` returns them.  Their number is a multiple of the number of stages.
        x: an array (batch, ...).
        microbatches: number of parts of the batch; it divides the batch.
        axis: the axis of the stages, in the mesh of `jax.set_mesh`; without it, the layers run here.

    Returns:
        What the last layer returns, like `x`.
    """

    def looped(layers: tp.Any, x: jax.Array) -> jax.Array:
        body = lambda x, layer: f(layer, x)
        return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, layers)

    def run(layers: tp.Any, parts: jax.Array) -> jax.Array:
        here, stages = lax.axis_index(axis), lax.axis_size(axis)
        hops = [(i, i + 1) for i in range(stages - 1)]
        graphdef, state = nnx.split(layers)

        def stage(x: jax.Array) -> jax.Array:
            return looped(nnx.merge(graphdef, state, copy=True), x)

        def tick(received: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
            first = parts[jnp.minimum(number, microbatches - 1)]
            y = stage(jnp.where(here == 0, first, received))
            return lax.ppermute(y, axis, hops), y

        # Idle stages get a microbatch as well: zeros might make their gradients NaN.
        _, out = lax.scan(tick, parts[0], jnp.arange(microbatches + stages - 1))
        last = jnp.where(here == stages - 1, out[stages - 1 :], 0)
        return lax.psum(last, axis)

    if axis not in jax.sharding.get_abstract_mesh().axis_names:
        return looped(layers, x)
    # Microbatch `i` has the rows i, i + microbatches, ...: a batch that other axes of the mesh divide
    # stays divided by them in each part.
    parts = x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1)
    # Stages have different microbatches, so JAX cannot verify that the result is replicated.
    out = nnx.shard_map(
        run, mesh=None, in_specs=(P(axis), P()), out_specs=P(), axis_names={axis}, check_vma=False
    )(layers, parts)
    return out.swapaxes(0, 1).reshape(x.shape)
