"""Shared by `cond`, `switch`, the loops and `scan`: one call of control flow.

The bodies are traced in each call; `_programs` finds what was compiled for equal ones.
"""

from __future__ import annotations

import typing as tp

from nnxlite._base.config import Modes
from nnxlite._base.jax import drop_hidden_frames
from nnxlite.boundary._call_def import CallDef
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._out import Outputs, replay
from nnxlite.graph._functional import build
from nnxlite.graph._plan import view
from nnxlite.transforms._arguments import naming_arguments
from nnxlite.transforms._finish import checks_noted, wait


def run_flow(
    name: str, inputs: tp.Callable[[], Inputs], run: tp.Callable[[CallDef, list[tp.Any]], Outputs]
) -> tp.Any:
    """Run control flow on the caller's objects, and write back what it changed.

    Args:
        name: of the transform.
        inputs: gives the arguments.
        run: from the static side of the arguments and their leaves to what leaves.
    """
    try:
        given = inputs()
        call, checks = given.define(), checks_noted()
        remedy = "Pass an array, or let the function capture the value."
        with naming_arguments(name, call, given, remedy):
            out = run(call, given.leaves)
            if checks_noted() != checks:
                wait(out)
        return replay(given, out)
    except Exception as error:
        drop_hidden_frames(error)
        raise


def loop_arguments(tree: tp.Any, modes: Modes) -> tp.Any:
    """The arguments of a loop: without updates, new objects with the same Variables."""
    if modes.updates:
        return tree
    seen = view(tree)
    return build(seen.graphdef, seen.leaves)
