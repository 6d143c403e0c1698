"""One call of a function under a transform: its arguments, and what runs inside.

A transform that runs its function once, where it is called, gives JAX `run_out` of a `Call`, a function
of leaves, and what comes back to `put_back`.  The filtered transforms have a kind of call of their own,
with leaves of any type.
"""

from __future__ import annotations

import contextlib
import typing as tp

from nnxlite.boundary._call_def import CallDef, Inner, enter
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._leave import leave
from nnxlite.boundary._out import Outputs, replay
from nnxlite.boundary._refusals import refuse_foreign_outputs
from nnxlite.transforms._arguments import (
    PARTIAL,
    boxed_arguments,
    naming_arguments,
    refuse_shared_result,
    unboxed,
)
from nnxlite.transforms._wrapper import Unbound, holds_object, inputs_in_mode, name_of


class Call:
    """One call of a function: what JAX traces, the arguments, and the way back.

    Attributes:
        fun: the function, without the arguments that it carries.
        num_bound: how many arguments it carries; they come first.
        inputs: the arguments.
        leaves: their leaves.
        definition: their static side.
        options: of the transform.
        captured: whether objects that the function captured may leave it; see `leave` of the boundary.
        look: whether the arguments stay as they are: structure leaves only where objects are returned.
    """

    def __init__(
        self,
        bound: Unbound,
        inputs: Inputs,
        definition: CallDef,
        options: tp.Any = None,
        captured: bool = False,
        look: bool = False,
    ) -> None:
        self.fun, self.num_bound, self.options = bound.fun, len(bound.args), options
        self.inputs, self.leaves, self.definition = inputs, inputs.leaves, definition
        self.captured, self.look = captured, look

    @classmethod
    def under(
        cls,
        options: tp.Any,
        bound: Unbound,
        args: tuple[tp.Any, ...],
        kwargs: dict[str, tp.Any],
        *,
        static_argnums: tuple[int, ...] = (),
        captured: bool = False,
        look: bool = False,
        inside: bool = False,
    ) -> tp.Self:
        """A call under a transform with these options.

        Args:
            options, bound, args, kwargs: the transform, the function, and the arguments.
            static_argnums: which of the arguments are static.
            captured, look: see the class.
            inside: whether the leaves inside the values of Variables count, see `Inputs`.

        Raises ValueError for a static argument that is not given, or with `graph=False` for an object
        in several places.
        """
        if static_argnums:
            name = f"{options.name}({name_of(bound.fun)})"
            args = boxed_arguments(args, static_argnums, name)
        inputs = inputs_in_mode(bound, args, kwargs, options, inside)
        unboxed(inputs)
        return cls(bound, inputs, inputs.define(), options, captured, look)

    def leaf_text(self, leaf: int) -> str:
        """The path of a leaf, for messages."""
        return self.definition.leaves()[leaf].text()

    def naming_arguments(self, remedy: str = PARTIAL) -> contextlib.AbstractContextManager[None]:
        """A context in which JAX's errors for arguments name them."""
        return naming_arguments(self.name, self.definition, self.inputs, remedy)

    def put_back(self, out: Outputs) -> tp.Any:
        """Write what left the function into the caller's objects; returns the caller's result."""
        return replay(self.inputs, out)

    @property
    def name(self) -> str:
        """Of the transform and its function, for messages."""
        return f"{self.options.name}({name_of(self.fun)})"

    def enter(self, leaves: tp.Sequence[tp.Any]) -> tuple[tp.Any, Inner]:
        """The arguments `(args, kwargs)` with these leaves, and the objects that `leave` needs."""
        return enter(self.definition, leaves)

    def run(self, leaves: tp.Sequence[tp.Any]) -> tuple[Inner, tp.Any]:
        """Call the function with these leaves."""
        (args, kwargs), inner = self.enter(leaves)
        return inner, self.fun(*args, **kwargs)

    def leave(self, inner: Inner, result: tp.Any) -> Outputs:
        """What leaves the function with this result."""
        refuse_shared_result(result, self.options.name, self.options.modes.graph)
        structure = self.options.modes.updates and (not self.look or holds_object(result))
        return leave(inner, result, structure=structure, captured=self.captured)

    def outputs(self, leaves: tp.Sequence[tp.Any]) -> tuple[tp.Any, Outputs]:
        """The result of the function for these leaves, and what leaves it.

        Raises TypeError where it returned or stored something that JAX cannot return.
        """
        inner, result = self.run(leaves)
        out = self.leave(inner, result)
        refuse_foreign_outputs(self.definition, out, self.name)
        return result, out

    def run_out(self, leaves: tp.Sequence[tp.Any]) -> Outputs:
        """The function between leaves: from those of the arguments to what leaves it; see `outputs`."""
        return self.outputs(leaves)[1]
