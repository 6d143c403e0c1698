"""Where the time of a jitted call goes: the whole call, and what is done before and after the program.

The parts are timed one by one, with warm caches; within a call they follow a kernel, and take longer.
"""

from __future__ import annotations

import typing as tp

from benchmarks.dispatch import READ_MOSTLY, ROW, read_mostly_body, read_mostly_step
from benchmarks.filtered import of_variables, variables_step
from benchmarks.harness import Calls, case
from benchmarks.models import library, read_mostly


def entered(step: tp.Any, *args: tp.Any) -> tuple[tp.Any, tp.Any]:
    """The arguments of a call of a `jit`, and their static side."""
    from nnxlite._base.errors import context_key

    inputs = step._inputs(args, {})
    return inputs, inputs.define(context_key())


@case("stages", f"jit: {READ_MOSTLY} read, one written, donated")
def of_jit():
    """Entering finds the plan and reads the values; dealing sorts them by donation."""
    nnx = library("nnxlite")

    def warm():
        model = read_mostly(nnx, READ_MOSTLY)
        step = nnx.jit(read_mostly_body, donate="written")
        for _ in range(3):
            step(model, ROW)
        return model, step, *entered(step, model, ROW)

    def entering() -> Calls:
        model, step, *_ = warm()
        return Calls(lambda: entered(step, model, ROW))

    def values() -> Calls:
        model, _, inputs, _ = warm()
        return Calls(lambda: (model, inputs.plan.values()))  # a plan refers to the model weakly

    def dealing() -> Calls:
        _, step, inputs, call = warm()
        return Calls(lambda: step._compiled.groups(call, inputs.leaves))

    def leaving() -> Calls:
        model, step, inputs, call = warm()
        core = step._compiled
        out = core.jitted(*core.groups(call, inputs.leaves))
        return Calls(lambda: (model, core.finish(inputs, out)))

    return {
        "nnxlite": lambda: Calls(read_mostly_step("nnxlite", donate="written")),
        "entering": entering,
        "its values": values,
        "dealing": dealing,
        "leaving": leaving,
    }


@case("stages", "filter_jit: 72 arrays read")
def of_filter_jit():
    """Entering finds the plan and the values, and looks at the classes of the values."""
    step, model = variables_step(12)
    for _ in range(3):
        step(model)
    core = step._compiled
    inputs, call = entered(step, model)
    crossing = core.jitted(*core.groups(call, inputs.leaves))
    return {
        "nnxlite": lambda: of_variables(12),
        "entering": lambda: Calls(lambda: entered(step, model)),
        "its values": lambda: Calls(inputs.plan.values),
        "leaving": lambda: Calls(lambda: core.finish(inputs, crossing)),
    }
