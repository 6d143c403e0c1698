"""A model as a JAX pytree."""

from __future__ import annotations

import jax

from benchmarks.harness import Budget, Calls, Sampler, case
from benchmarks.models import WIDTH, library, linears

LAYERS = 100


def equinox_linears():
    """The same layers in Equinox."""
    import equinox as eqx

    class Tower(eqx.Module):
        layers: list[eqx.nn.Linear]

    key = jax.random.key(0)
    return Tower([eqx.nn.Linear(WIDTH, WIDTH, key=key) for _ in range(LAYERS)])


def flatten(tree) -> Sampler:
    """`jax.tree.flatten`."""
    return Calls(lambda: jax.tree.flatten(tree))


def unflatten(tree) -> Sampler:
    """`jax.tree.unflatten`."""
    leaves, treedef = jax.tree.flatten(tree)
    return Calls(lambda: jax.tree.unflatten(treedef, leaves))


def contenders(work):
    """The same work on the models of all libraries, and on a plain list of dicts as the limit."""
    return {
        "limit": lambda: work([{"kernel": i, "bias": i} for i in range(LAYERS)]),
        "nnxlite": lambda: work(linears(library("nnxlite"), LAYERS)),
        "flax": lambda: work(linears(library("flax"), LAYERS)),
        "equinox": lambda: work(equinox_linears()),
    }


@case("pytree", f"flatten {LAYERS} Linears", Budget(1.0, "equinox"))
def flattening():
    """What a plain `jax.jit` does with a module first."""
    return contenders(flatten)


@case("pytree", f"unflatten {LAYERS} Linears")
def unflattening():
    """What `jax.tree.map` does with a module last."""
    return contenders(unflatten)
