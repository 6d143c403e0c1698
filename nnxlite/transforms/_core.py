"""What `cond`, `switch`, the loops and `scan` have in common: one call of control flow.

The bodies are traced in each call; `_programs` finds what was compiled for equal ones.
"""

from __future__ import annotations

import typing as tp

from nnxlite.boundary import (
    CallDef,
    Crossing,
    Inputs,
    refuse_non_arrays,
    replay_crossing,
)
from nnxlite.transforms._run_time_checks import checks_noted, failed_check, wait


class Core:
    """Base of control flow: some user functions, and options.

    Attributes:
        funs: the user functions.
        options: all other arguments of the transform.
        warned: random streams that the user was warned of; see `warn_of_streams`.
        name: of the transform, for messages.
    """

    def __init__(
        self,
        funs: tuple[tp.Callable[..., tp.Any], ...],
        options: tp.Any,
        warned: set[str] | None = None,
    ) -> None:
        self.name: str = options.name
        self.funs, self.options = funs, options
        self.warned = set() if warned is None else warned

    @property
    def fun(self) -> tp.Callable[..., tp.Any]:
        """The (first) user function."""
        return self.funs[0]

    def run(self, call: CallDef, leaves: list[tp.Any]) -> Crossing:
        """Apply the transform to the leaves of a call."""
        raise NotImplementedError  # pragma: no cover - abstract

    def __call__(self, inputs: Inputs) -> tp.Any:
        """Run the transform on the caller's objects and write back what it changed."""
        call, checks = inputs.define(), checks_noted()
        try:
            out = self.run(call, inputs.leaves)
            if checks_noted() != checks:
                wait(out)
        except TypeError:
            remedy = "Pass an array, or let the function capture the value."
            refuse_non_arrays(self.name, call, inputs.leaves, remedy)
            raise
        except RuntimeError as error:
            failed = failed_check(error)
            if failed is None:
                raise
            raise failed from None
        return replay_crossing(inputs, out)
