"""Shared by `cond`, `switch`, `while_loop` and `fori_loop`, which run when they are called."""

from __future__ import annotations

import typing as tp

from nnxlite._config import Modes
from nnxlite._jax import drop_hidden_frames
from nnxlite.boundary import Inputs
from nnxlite.graph import build, view
from nnxlite.transforms._core import Core


class FlowOptions(tp.NamedTuple):
    """The options of control flow, in one object."""

    name: str
    modes: Modes
    unroll: tuple[type, tp.Any] = (type(None), None)  # with the type, since True equals 1
    bounds: tuple[int, int] | None = None


def run_flow(
    kind: type[Core],
    funs: tuple[tp.Callable[..., tp.Any], ...],
    options: FlowOptions,
    names: tuple[str, ...],
    *args: tp.Any,
    **kwargs: tp.Any,
) -> tp.Any:
    """Run functions on arguments of these names, as a kind of control flow does."""
    core = kind(funs, options)
    try:
        inputs = Inputs.of_call(args, kwargs, names)
        return core(inputs.in_mode(options.modes.graph, options.name))
    except Exception as error:
        drop_hidden_frames(error)
        raise


def loop_arguments(tree: tp.Any, modes: Modes) -> tp.Any:
    """The arguments of a loop: without updates, new objects with the same Variables."""
    if modes.updates:
        return tree
    seen = view(tree)
    return build(seen.graphdef, seen.leaves)
