"""Derivatives of a call: shared by `grad`, `vjp`, `jvp` and their filtered forms.

JAX differentiates a function of the chosen leaves alone.  What else leaves the call crosses beside its
value, and is not differentiated.
"""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp

from nnxlite.boundary import Fixed, Partition
from nnxlite.transforms._arguments import unwrapped_value
from nnxlite.transforms._call import Call
from nnxlite.transforms._wrapper import name_of

Parts = tuple[tp.Any, tp.Any, tp.Any]
"""Of a value that is differentiated: its leaves, their form (static), and what crosses as an object."""


def of_chosen(
    call: Call, selected: Partition, has_aux: bool, parts: tp.Callable[[tp.Any], Parts]
) -> tuple[tp.Callable[[list[tp.Any]], tp.Any], list[tp.Any]]:
    """A call as a function of the leaves that are differentiated, and these leaves.

    It returns the leaves of the value; and beside them their form, and what else leaves the function.

    Args:
        call: the call, of either kind.
        selected: its leaves, the differentiated ones first.
        has_aux: whether the function returns `(value, aux)`.
        parts: divides a value.
    """
    given, rest = selected.split(call.leaves)

    def run(chosen: list[tp.Any]) -> tp.Any:
        inner, result = call.run(selected.join(chosen, rest))
        value, aux = value_and_aux(result, call.fun) if has_aux else (result, None)
        leaves, form, crossing = parts(value)
        left = call.leave(inner, (crossing, aux) if has_aux else crossing)
        return leaves, (Fixed(form), left)

    return run, given


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
    parts = lambda value: (unwrapped_value(value), None, None)
    run, chosen = of_chosen(call, selected, options.has_aux, parts)
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
