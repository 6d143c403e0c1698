"""One call of a function under a transform: its arguments, and what runs inside.

To JAX such a call is one of two functions of leaves: `run_out`, of all leaves of the arguments, or
`of_chosen`, of those that are differentiated.  The filtered transforms have a kind of call of their own,
with leaves of any type.
"""

from __future__ import annotations

import contextlib
import typing as tp

import jax
import jax.numpy as jnp

from nnxlite.boundary import (
    CallDef,
    Fixed,
    Inner,
    Inputs,
    Outputs,
    Partition,
    enter,
    leave,
    named_call,
    refuse_foreign_outputs,
    replay_crossing,
)
from nnxlite.transforms._arguments import (
    Statics,
    blank_statics,
    fill_statics,
    naming_arguments,
    refuse_shared_result,
    unwrapped_value,
)
from nnxlite.transforms._wrapper import Options, Unbound, inputs_in_mode, name_of

Parts = tuple[tp.Any, tp.Any, tp.Any]
"""Of a value that is differentiated: its leaves, their form (static), and what crosses as an object."""


class Traceable:
    """A function of objects as a function of leaves, for JAX to trace.

    Attributes:
        fun: the function, without the arguments that it carries.
        definition: the static side of its arguments.
        options: of the transform.
        statics: the static arguments.
        captured: whether objects that the function captured may leave it; see `leave` of the boundary.
    """

    def __init__(
        self,
        fun: tp.Callable[..., tp.Any],
        definition: CallDef,
        options: tp.Any,
        statics: Statics = (),
        captured: bool = False,
    ) -> None:
        self.fun, self.definition, self.options = fun, definition, options
        self.statics, self.captured = statics, captured

    @property
    def name(self) -> str:
        """Of the transform and its function, for messages."""
        return f"{self.options.name}({name_of(self.fun)})"

    @property
    def in_words(self) -> CallDef:
        """The arguments for messages, with the user's names for them."""
        return named_call(self.definition, self.fun)

    def enter(self, leaves: tp.Sequence[tp.Any]) -> tuple[tp.Any, Inner]:
        """The arguments `(args, kwargs)` with these leaves, and the objects that `leave` needs."""
        return enter(self.definition, leaves)

    def run(self, leaves: tp.Sequence[tp.Any]) -> tuple[Inner, tp.Any]:
        """Call the function with these leaves."""
        (args, kwargs), inner = self.enter(leaves)
        return inner, self.fun(*fill_statics(args, self.statics), **kwargs)

    def propagates_structure(self, result: tp.Any) -> bool:
        """Whether structure changes of the arguments are repeated outside."""
        return self.options.modes.updates

    def leave(self, inner: Inner, result: tp.Any) -> tp.Any:
        """What leaves the function with this result, in the form in which it crosses."""
        return self._left(inner, result).crossing()

    def _left(self, inner: Inner, result: tp.Any) -> Outputs:
        refuse_shared_result(result, self.options.name, self.options.modes.graph)
        structure = self.propagates_structure(result)
        return leave(inner, result, structure=structure, captured=self.captured)

    def outputs(self, leaves: tp.Sequence[tp.Any]) -> tuple[tp.Any, Outputs]:
        """The result of the function for these leaves, and what leaves it.

        Raises TypeError where it returned or stored something that JAX cannot return.
        """
        inner, result = self.run(leaves)
        out = self._left(inner, result)
        refuse_foreign_outputs(self.in_words, out, self.name)
        return result, out

    def run_out(self, leaves: tp.Sequence[tp.Any]) -> tp.Any:
        """The function between leaves: from those of the arguments to what leaves it; see `outputs`."""
        return self.outputs(leaves)[1].crossing()


class CallKey(tp.NamedTuple):
    """What besides the arguments' structure identifies a program.

    Attributes:
        context: what else a trace depends on; see `traced_context`.
        statics: the static arguments.
    """

    context: tp.Any
    statics: Statics


class Call(Traceable):
    """One call of a function: what JAX traces, the arguments, and the way back.

    Attributes:
        num_bound: how many arguments the function carries; they come first.
        inputs: the arguments.
        leaves: their leaves.
    """

    def __init__(
        self,
        bound: Unbound,
        inputs: Inputs,
        leaves: list[tp.Any],
        definition: CallDef,
        options: tp.Any = None,
        statics: Statics = (),
        captured: bool = False,
    ) -> None:
        super().__init__(bound.fun, definition, options, statics, captured)
        self.num_bound, self.inputs, self.leaves = len(bound.args), inputs, leaves

    @classmethod
    def under(
        cls,
        options: Options,
        bound: Unbound,
        args: tuple[tp.Any, ...],
        kwargs: dict[str, tp.Any],
        *,
        static_argnums: tuple[int, ...] = (),
        captured: bool = False,
        context: tp.Any = None,
    ) -> tp.Self:
        """A call under a transform with these options.

        Args:
            options, bound, args, kwargs: the transform, the function, and the arguments.
            static_argnums: which of the arguments are static.
            captured: see the class.
            context: what else a trace depends on, where JAX may use it again.

        Raises ValueError for a static argument that is not given, or with `graph=False` for an object
        in several places.
        """
        statics: Statics = ()
        if static_argnums:
            name = f"{options.name}({name_of(bound.fun)})"
            args, statics = blank_statics(args, static_argnums, len(bound.args), name)
        inputs = inputs_in_mode(bound, args, kwargs, options)
        definition = inputs.define(None if context is None else CallKey(context, statics))
        return cls(bound, inputs, inputs.leaves, definition, options, statics, captured)

    def leaf_text(self, leaf: int) -> str:
        """The path of a leaf, for messages."""
        return self.in_words.leaves()[leaf].text()

    def naming_arguments(self, remedy: str = "") -> contextlib.AbstractContextManager[None]:
        """A context in which JAX's errors for arguments name them."""
        return naming_arguments(self.name, self.in_words, self.inputs, remedy)

    def put_back(self, crossing: tp.Any) -> tp.Any:
        """Write what left the function into the caller's objects; returns the caller's result."""
        return replay_crossing(self.inputs, crossing)


def of_chosen(
    call: Call, selected: Partition, has_aux: bool, parts: tp.Callable[[tp.Any], Parts]
) -> tp.Callable[[list[tp.Any]], tp.Any]:
    """A call as a function of the leaves that are differentiated.

    It returns the leaves of the value; and beside them their form, and what else leaves the function.

    Args:
        call: the call, of either kind.
        selected: its leaves, the differentiated ones first.
        has_aux: whether the function returns `(value, aux)`.
        parts: divides a value.
    """
    rest = selected.split(call.leaves)[1]

    def run(chosen: list[tp.Any]) -> tp.Any:
        inner, result = call.run(selected.join(chosen, rest))
        value, aux = value_and_aux(result, call.fun) if has_aux else (result, None)
        leaves, form, crossing = parts(value)
        left = call.leave(inner, (crossing, aux) if has_aux else crossing)
        return leaves, (Fixed(form), left)

    return run


def value_and_aux(result: tp.Any, fun: tp.Any) -> tuple[tp.Any, tp.Any]:
    """The result of a function with `has_aux=True`; TypeError or ValueError unless it is a pair."""
    several = isinstance(result, (tuple, list))
    if not several or len(result) != 2:
        raise (ValueError if several else TypeError)(  # as unpacking does
            f"With has_aux=True {name_of(fun)} must return a pair (value, aux), got "
            f"{type(result).__name__}{f' of {len(result)}' if several else ''}."
        )
    return result[0], result[1]


class GradLike(tp.Protocol):
    """The options of transforms that give gradients."""

    @property
    def name(self) -> str:
        """Of the transform; with "value_and_grad" in it, the value is returned, too."""
        ...

    @property
    def has_aux(self) -> bool:
        """Whether the function returns `(value, aux)`."""
        ...

    @property
    def jax_options(self) -> tuple[tuple[str, tp.Any], ...]:
        """For `jax.value_and_grad`."""
        ...


def gradients(
    call: Call,
    selected: Partition,
    options: GradLike,
    shown: tp.Callable[[list[tp.Any]], tp.Any],
    remedy: str,
) -> tp.Any:
    """The result of `grad` or `value_and_grad`, of either kind.

    Args:
        call, selected: the call, and its leaves, the differentiated ones first.
        options: of the transform.
        shown: from the gradients of leaves to what the user gets.
        remedy: what to do about a leaf without a derivative.

    Raises TypeError for such a leaf.
    """
    jax_options = dict(options.jax_options)
    if not (jax_options.get("allow_int") or jax_options.get("holomorphic")):
        _refuse_others(call, selected, options.name, remedy)
    run = of_chosen(
        call, selected, options.has_aux, lambda value: (unwrapped_value(value), None, None)
    )
    differentiated = jax.value_and_grad(run, has_aux=True, **jax_options)
    (value, (_, crossing)), grads = differentiated(selected.split(call.leaves)[0])
    left = call.put_back(crossing)
    grads = shown(grads)
    if options.name.endswith("value_and_grad"):
        return ((value, left[1]), grads) if options.has_aux else (value, grads)
    return (grads, left[1]) if options.has_aux else grads


def _refuse_others(call: Call, selected: Partition, name: str, remedy: str) -> None:
    """Raise TypeError naming the first chosen leaf that has no derivative."""
    for leaf in selected.positions[0]:
        for part in jax.tree_util.tree_leaves(call.leaves[leaf]):
            if not _inexact(part):
                dtype = getattr(part, "dtype", None)
                kind = str(dtype) if dtype is not None else f"a value of type {type(part).__name__}"
                raise TypeError(
                    f"{name} requires real- or complex-valued inputs (input dtype that is a "
                    f"sub-dtype of np.inexact), but argument '{call.leaf_text(leaf)}' is {kind}. "
                    f"Differentiate only float leaves: {remedy}."
                )


def _inexact(value: tp.Any) -> bool:
    try:
        return jnp.issubdtype(getattr(value, "dtype", None) or jax.typeof(value).dtype, jnp.inexact)
    except TypeError:
        return False
