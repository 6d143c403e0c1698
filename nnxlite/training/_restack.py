"""`restack`: the state of an optimizer after the layers of its model were stacked or unstacked."""

from __future__ import annotations

import itertools
import typing as tp

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from nnxlite._base.errors import path_text, short_type
from nnxlite.filters import Frozen, Not, PathIn
from nnxlite.graph._functional import state as state_of
from nnxlite.objects._fields import data
from nnxlite.training._leaves import Path, flatten, pairs, paths, read
from nnxlite.training.optimizer import Optimizer, initial_state, parameter_of
from nnxlite.transforms._shapes import eval_shape

Source: tp.TypeAlias = tuple[tuple[Path, ...], int | None]
"""The path of an array and the entry to take of it, None for all of it; or several paths and STACK."""

STACK = -1


def restack(optimizer: Optimizer[tp.Any], model: tp.Any) -> None:
    """Restructure an optimizer's state, in place, after its model's layers were stacked or unstacked.

    After `model.blocks = nnx.stack_layers(model.blocks)`, the states of
    `blocks.0.kernel`, `blocks.1.kernel`, ... become the state of `blocks.kernel`, with the sharding of
    that parameter; after `nnx.unstack_layers`, the other way round. Counts continue.

    The next updates are those of the model as it was, if the transformation treats each number by itself
    (SGD, Adam, ...) or all parameters together (clipping by the global norm). One that looks at
    parameters one by one (`optax.lamb`, `optax.adafactor`) sees the stack as one parameter.

    Args:
        optimizer: made for the model before its layers were stacked or unstacked.
        model: the model as it is now.

    Raises:
        ValueError: if a parameter of the model is not one of the optimizer's, stacked, unstacked or as
            it was; if the optimizer has state for one that the model lacks; or if state has another
            shape for the stack than for its layers together. Nothing has changed then.

    >>> import nnxlite as nnx, optax
    >>> blocks = nnx.List(nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(3))
    >>> model = nnx.Dict(blocks=blocks)
    >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    >>> model.blocks = nnx.stack_layers(model.blocks)
    >>> nnx.restack(optimizer, model)
    >>> optimizer.opt_state[0].mu["blocks"]["kernel"].shape
    (3, 2, 2)
    """
    params = state_of(model, optimizer.wrt)
    left_out: tp.Any = frozenset()
    if optimizer.without_state:
        left_out = frozenset(paths(state_of(params, Frozen())))
        params = state_of(params, Not(PathIn(*left_out)))
    new = eval_shape(lambda params: initial_state(optimizer.tx, params, left_out), params)
    old = {path: read(leaf) for path, leaf in pairs(optimizer.opt_state)}
    leaves, treedef = flatten(new)
    sources = [_source(path, old) for path in paths(new)]
    unused = old.keys() - {path for found, _ in sources for path in found}
    if unused:
        raise ValueError(
            f"restack: the optimizer has state at '{path_text(min(unused, key=str))}', for a parameter "
            "that the model does not have. Only stack and unstack layers between the two."
        )

    def computed(values: list[tp.Any]) -> list[tp.Any]:
        by_path = dict(zip(old, values))
        return [_computed(by_path, *source) for source in sources]

    values = list(old.values())
    for path, leaf, got in zip(paths(new), leaves, jax.eval_shape(computed, values)):
        if got.shape != read(leaf).shape:
            raise ValueError(
                f"restack: the state '{path_text(path)}' is {short_type(got)} from what the optimizer "
                f"has, and {short_type(read(leaf))} for the model as it is: there are other layers, or "
                "the transformation treats a stack differently. Make a new Optimizer."
            )
    where = _shardings(paths(new), [read(leaf).shape for leaf in leaves], params)
    values = jax.jit(computed, out_shardings=where)(values)
    filled = [leaf.replace(value) for leaf, value in zip(leaves, values)]
    optimizer.opt_state = data(treedef.unflatten(filled))
    if left_out:
        optimizer.without_state = left_out
    elif optimizer.without_state:
        del optimizer.without_state


def _source(path: Path, old: dict[Path, tp.Any]) -> Source:
    if path in old:
        return (path,), None
    for k in range(len(path)):
        row = lambda i, k=k: (*path[:k], i, *path[k:])
        rows = tuple(itertools.takewhile(old.__contains__, map(row, itertools.count())))
        if rows:
            return rows, STACK
        whole = (*path[:k], *path[k + 1 :])
        entry = path[k]
        if isinstance(entry, int) and whole in old and entry < len(old[whole]):
            return (whole,), entry
    raise ValueError(
        f"restack: the optimizer has no state for '{path_text(path)}', which the model needs. It has to "
        "be made for the same model with its layers stacked or unstacked."
    )


def _computed(old: dict[Path, tp.Any], found: tuple[Path, ...], entry: int | None) -> tp.Any:
    if entry == STACK:
        return jnp.stack([old[path] for path in found])
    value = old[found[0]]
    return value if entry is None else value[entry]


def _shardings(
    of: list[Path], shapes: list[tuple[int, ...]], params: tp.Any
) -> list[NamedSharding | None]:
    """The shardings of the parameters that the state belongs to, where the shapes are equal."""
    known = {path: read(leaf) for path, leaf in pairs(params)}
    shardings: list[NamedSharding | None] = []
    for path, shape in zip(of, shapes):
        value = known.get(parameter_of(path, known))
        sharding = getattr(value, "sharding", None)
        alike = isinstance(sharding, NamedSharding) and getattr(value, "shape", None) == shape
        shardings.append(sharding if alike else None)
    return shardings
