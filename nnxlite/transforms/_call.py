"""One call of a function under a transform: its arguments, and what runs inside.

A transform that runs its function once, where it is called, gives JAX `run_out` of a `Call`, a function
of leaves, and what comes back to `put_back`.  Under the filtered transforms leaves are of any type: on
the way in, those that are not traced are captured (`tracing`); on the way out, those that are not arrays
cross as static data.
"""

from __future__ import annotations

import contextlib
import typing as tp

from nnxlite.boundary._call_def import Inner, enter
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
from nnxlite.transforms._donation import Owner, owners
from nnxlite.transforms._wrapper import Options, Unbound, holds_object, inputs_in_mode, name_of


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
        options: Options,
        bound: Unbound,
        args: tuple[tp.Any, ...],
        kwargs: dict[str, tp.Any],
        *,
        static_argnums: tuple[int, ...] = (),
        captured: bool = False,
        look: bool = False,
        inside: bool = False,
    ) -> None:
        """A call under a transform with these options.

        Args:
            options, bound, args, kwargs: the transform, the function, and the arguments.
            static_argnums: which of the arguments are static.
            captured, look: see the class.
            inside: whether the leaves inside the values of Variables count, see `Inputs`.

        Raises ValueError for a static argument that is not given, or with `graph=False` for an object
        in several places.
        """
        self.fun, self.num_bound, self.options = bound.fun, len(bound.args), options
        self.captured, self.look = captured, look
        if static_argnums:
            args = boxed_arguments(args, static_argnums, self.name)
        self.inputs = inputs_in_mode(bound, args, kwargs, options, inside)
        unboxed(self.inputs)
        self.leaves, self.definition = self.inputs.leaves, self.inputs.definition

    def tracing(self, traced: tp.Iterable[tp.Any]) -> tp.Self:
        """The same call with only the leaves for which `traced` is true; the others are captured."""
        self.inputs.make_static([not flag for flag in traced])
        self.leaves, self.definition = self.inputs.leaves, self.inputs.definition
        return self

    def owners(self) -> list[Owner]:
        """For each leaf the number or name of its argument; None where the function carries it."""
        return owners(self.definition, self.num_bound)

    def arguments(self, leaves: tp.Sequence[tp.Any]) -> tuple[tp.Any, ...]:
        """The positional arguments of the caller, with other leaves; their objects are new."""
        return self.definition.build(leaves)[0][self.num_bound :]

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
        out = leave(inner, result, structure=structure, captured=self.captured)
        return out if self.options.is_array is None else out.as_arrays(self.options.is_array)

    def outputs(self, leaves: tp.Sequence[tp.Any]) -> tuple[tp.Any, Outputs]:
        """The result of the function for these leaves, and what leaves it.

        Raises TypeError where it returned or stored something that JAX cannot return.
        """
        inner, result = self.run(leaves)
        out = self.leave(inner, result)
        if self.options.is_array is None:
            refuse_foreign_outputs(self.definition, out, self.name)
        return result, out

    def run_out(self, leaves: tp.Sequence[tp.Any]) -> Outputs:
        """The function between leaves: from those of the arguments to what leaves it; see `outputs`."""
        return self.outputs(leaves)[1]
