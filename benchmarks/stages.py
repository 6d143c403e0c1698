"""Where the time of a jitted call goes: the whole call, and what is done before and after the program.

The parts are timed one by one, with warm caches; within a call they follow a kernel, and take longer.
"""

from __future__ import annotations

from benchmarks.dispatch import READ_MOSTLY, ROW, read_mostly_body, read_mostly_step
from benchmarks.filtered import of_variables, variables_step
from benchmarks.harness import Calls, case
from benchmarks.models import library, read_mostly


@case("stages", f"jit: {READ_MOSTLY} read, one written, donated")
def of_jit():
    """Entering finds the plan and reads the values; dealing sorts them by donation."""
    from nnxlite.boundary import replay_crossing

    nnx = library("nnxlite")

    def warm():
        model = read_mostly(nnx, READ_MOSTLY)
        step = nnx.jit(read_mostly_body, donate="written")
        for _ in range(3):
            step(model, ROW)
        return model, step, *step._enter((model, ROW), {})

    def entering() -> Calls:
        model, step, *_ = warm()
        return Calls(lambda: step._enter((model, ROW), {}))

    def values() -> Calls:
        model, _, inputs, _ = warm()
        return Calls(lambda: (model, inputs.plan.values()))  # a plan refers to the model weakly

    def dealing() -> Calls:
        _, step, inputs, call = warm()
        return Calls(lambda: step._core.groups(call, inputs.leaves))

    def leaving() -> Calls:
        model, step, inputs, call = warm()
        core = step._core
        crossing = core.jitted(*core.groups(call, inputs.leaves))
        return Calls(lambda: (model, replay_crossing(inputs, crossing)))

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
    from nnxlite.filtered._crossing import put_back

    step, model = variables_step(12)
    for _ in range(3):
        step(model)
    inputs, _, groups = step._enter((model,), {})
    crossed = step._core.jitted(*groups)
    return {
        "nnxlite": lambda: of_variables(12),
        "entering": lambda: Calls(lambda: step._enter((model,), {})),
        "its values": lambda: Calls(inputs.plan.values),
        "leaving": lambda: Calls(lambda: put_back(inputs, crossed)),
    }
