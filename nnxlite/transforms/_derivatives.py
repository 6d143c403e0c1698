"""Derivatives of a call: shared by `grad`, `vjp`, `jvp` and their filtered forms.

JAX differentiates a function of the chosen leaves alone.  What else leaves the call crosses beside its
value, and is not differentiated.
"""

from __future__ import annotations

import dataclasses
import typing as tp

import jax
import jax.numpy as jnp

from nnxlite.boundary._call_def import CallDef, enter
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._operands import Partition
from nnxlite.boundary._out import Fixed
from nnxlite.transforms._arguments import unwrapped_value
from nnxlite.transforms._call import Call
from nnxlite.transforms._tangents import Tangents, abstract, zero_tangent
from nnxlite.transforms._wrapper import name_of


class Result(tp.NamedTuple):
    """The form of a value that is differentiated; static data.

    Attributes:
        definition: its static side.
        partition: its leaves, divided into those that are differentiated and the rest.
        shapes: of the leaves that have a shape, None for the rest.
    """

    definition: CallDef
    partition: Partition
    shapes: tuple[tp.Any, ...]

    @classmethod
    def of(cls, value: tp.Any, wanted: Wanted, trees: bool) -> tuple[list[tp.Any], Result]:
        """The leaves of a value that are differentiated, and its form."""
        shown = Inputs(value, trees, inside=True)
        partition = Partition(tuple(map(bool, map(wanted, shown.leaves))))
        chosen = [
            x if isinstance(x, jax.Array) else jnp.asarray(x)
            for x in partition.split(shown.leaves)[0]
        ]
        shapes = [
            abstract(x) if hasattr(x, "dtype") else None
            for x in partition.join(chosen, partition.split(shown.leaves)[1])
        ]
        return chosen, cls(shown.definition, partition, tuple(shapes))

    def build(self, leaves: tp.Sequence[tp.Any], zeros: bool = False) -> tp.Any:
        """Tangents in this form, from those of some leaves; the rest has zeros, or None."""
        rest = map(zero_tangent, self.partition.split(self.shapes)[1]) if zeros else ()
        return enter(self.definition, self.partition.join(leaves, tuple(rest)))[0]


Wanted: tp.TypeAlias = tp.Callable[[tp.Any], tp.Any]
"""Whether a leaf of a value is differentiated."""


def of_chosen(
    call: Call, selected: Partition, has_aux: bool, wanted: Wanted | None = None
) -> tuple[tp.Callable[[list[tp.Any]], tp.Any], list[tp.Any]]:
    """A call as a function of the leaves that are differentiated, and these leaves.

    It returns the leaves of the value that are differentiated; and beside them its `Result`, and what
    else leaves the function.

    Args:
        call: the call, of either kind.
        selected: its leaves, the differentiated ones first.
        has_aux: whether the function returns `(value, aux)`.
        wanted: which leaves of the value are differentiated; None where it must be one number.
    """
    given, rest = selected.split(call.leaves)

    def run(chosen: list[tp.Any]) -> tp.Any:
        inner, result = call.run(selected.join(chosen, rest))
        value, aux = value_and_aux(result, call.fun) if has_aux else (result, None)
        if wanted is None:
            leaves, form, value = unwrapped_value(value), None, None
        else:
            leaves, form = Result.of(value, wanted, call.definition.trees)
        return leaves, (Fixed(form), call.leave(inner, (value, aux) if has_aux else value))

    return run, given


# Products with the Jacobian -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Pullback:
    """From a cotangent of a value to cotangents of the arguments, in their own forms.

    Attributes:
        definition, num_bound, selected: of the call.
        rest: the cotangents of the leaves that are not differentiated.
        result: the form of the value.
        form: what a cotangent has to be like.
    """

    definition: CallDef
    num_bound: int
    selected: Partition
    rest: tp.Sequence[tp.Any]
    result: Result
    form: Tangents

    def __call__(self, vjp: tp.Callable[..., tp.Any], cotangent: tp.Any) -> tuple[tp.Any, ...]:
        result = self.result
        given = self.form.of_leaves(result.definition, result.shapes, cotangent)
        (chosen,) = result.partition.split(given)[:1]
        shapes, _ = result.partition.split(result.shapes)
        filled = [zero_tangent(x) if t is None else t for x, t in zip(shapes, chosen)]
        (grads,) = vjp(filled)
        (args, _), _ = enter(self.definition, self.selected.join(grads, self.rest))
        return args[self.num_bound :]


def pulled_back(
    call: Call,
    selected: Partition,
    has_aux: bool,
    wanted: Wanted,
    form: Tangents,
    rest: tp.Sequence[tp.Any] = (),
    **options: tp.Any,
) -> tp.Any:
    """The result of `vjp`, of either kind: the value, its pullback, and the aux if there is one."""
    run, chosen = of_chosen(call, selected, has_aux, wanted)
    _, vjp, (fixed, crossing) = jax.vjp(run, chosen, has_aux=True, **options)
    result = call.put_back(crossing)
    form = form._replace(wanted=fixed.value.partition.labels)
    parts = (call.definition, call.num_bound, selected, rest, fixed.value, form)
    pull = jax.tree_util.Partial(Pullback(*parts), vjp)
    return (result[0], pull, result[1]) if has_aux else (result, pull)


def of_arguments(form: Tangents, call: Call, tangents: tp.Sequence[tp.Any]) -> list[tp.Any]:
    """The tangent of each leaf of a call, from those of the arguments that are given by position."""
    primals = len(call.definition.template()[0]) - call.num_bound
    if primals != len(tangents):
        raise form.error(
            f"{form.what}: {primals} primals and {len(tangents)} tangents; give one tangent, possibly "
            "None, for each primal."
        )
    tree = (*[None] * call.num_bound, *tangents), {}
    return form.of_leaves(call.definition, call.leaves, tree)


def pushed_forward(
    call: Call, tangents: list[tp.Any], has_aux: bool, wanted: Wanted, zeros: bool
) -> tp.Any:
    """The result of `jvp`, of either kind: the value, its tangent, and the aux if there is one.

    Args:
        call, has_aux, wanted: as for `of_chosen`.
        tangents: that of each leaf, None for a constant one.
        zeros: whether leaves of the value without a derivative have zeros as tangents, or None.
    """
    selected = Partition(tuple([t is not None for t in tangents]))
    run, chosen = of_chosen(call, selected, has_aux, wanted)
    chosen = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in chosen]
    along, _ = selected.split(tangents)
    _, moved, (fixed, crossing) = jax.jvp(run, (chosen,), (along,), has_aux=True)
    result = call.put_back(crossing)
    tangent = fixed.value.build(moved, zeros)
    return (result[0], tangent, result[1]) if has_aux else (result, tangent)


def value_and_aux(result: tp.Any, fun: tp.Any) -> tuple[tp.Any, tp.Any]:
    """The result of a function with `has_aux=True`; TypeError or ValueError unless it is a pair."""
    several = isinstance(result, (tuple, list))
    if not several or len(result) != 2:
        raise (ValueError if several else TypeError)(  # as unpacking does
            f"With has_aux=True {name_of(fun)} must return a pair (value, aux), got "
            f"{type(result).__name__}{f' of {len(result)}' if several else ''}."
        )
    return result[0], result[1]


def gradients(
    call: Call,
    selected: Partition,
    options: tp.Any,
    shown: tp.Callable[[list[tp.Any]], tp.Any],
    remedy: str,
) -> tp.Any:
    """The result of `grad` or `value_and_grad`, of either kind.

    Args:
        call, selected: the call, and its leaves, the differentiated ones first.
        options: of the transform, with `has_aux`, `jax_options` and a name that says what is returned.
        shown: from the gradients of leaves to what the user gets.
        remedy: what to do about a leaf without a derivative.

    Raises TypeError for such a leaf.
    """
    jax_options = dict(options.jax_options)
    if not (jax_options.get("allow_int") or jax_options.get("holomorphic")):
        _refuse_others(call, selected, options.name, remedy)
    run, chosen = of_chosen(call, selected, options.has_aux)
    differentiated = jax.value_and_grad(run, has_aux=True, **jax_options)
    (value, (_, crossing)), grads = differentiated(chosen)
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
