"""Donation: which leaves of a jitted call are donated."""

from __future__ import annotations

import contextlib
import typing as tp

import jax

from nnxlite._base.errors import listed
from nnxlite._base.jax import Tracer, drop_hidden_frames, is_compiling
from nnxlite.boundary._call_def import CallDef, paths_of

R = tp.TypeVar("R")

Owner: tp.TypeAlias = int | str | None
"""The number or name of an argument; None for one that the function carries."""


def owners(call: CallDef, num_bound: int) -> list[Owner]:
    """For each leaf of a call its argument."""

    def owner(by_name: int, key: tp.Any, *_: tp.Any) -> Owner:
        number = key if by_name else key - num_bound
        return number if by_name or number >= 0 else None

    paths = paths_of(call.treedef)
    return [owner(*paths[leaf.position]) for leaf in call.leaves()]


def refuse_shared_buffers(
    what: object,
    call: CallDef,
    leaves: tp.Sequence[tp.Any],
    donated: tp.Sequence[int],
) -> None:
    """Raise ValueError where one buffer would be donated twice, or donated and read.

    Args:
        what: the function, for the message.
        call: the arguments.
        leaves: theirs.
        donated: the positions of those that are donated.
    """
    if not (donated and is_compiling()):
        return  # nothing is donated
    first = {id(leaves[position]): position for position in reversed(donated)}
    for position, leaf in enumerate(leaves):
        donor = first.get(id(leaf), position)
        # JAX copies NumPy arrays, and equal Python scalars may be one object.
        if donor != position and isinstance(leaf, jax.Array):
            texts = [leaf.text() for leaf in call.leaves()]
            raise ValueError(
                f"{what}: the same array buffer is donated at '{texts[donor]}' and used at "
                f"'{texts[position]}'. A donated buffer can be used once: copy the array in one of the "
                "two places (nnx.clone(model, arrays=True) copies those of an object), share one "
                "Variable between them, or do not donate."
            )


def run_donating(
    jitted: tp.Callable[..., tp.Any],
    groups: tp.Sequence[tp.Any],
    finish: tp.Callable[[tp.Any], R],
    named: tp.Callable[[], tp.Iterable[tuple[str, tp.Any]]],
) -> R:
    """Call a function of JAX that donates, and finish with what it returns.

    An interrupt that arrives while JAX runs is raised as soon as Python code runs again. By then the
    donated buffers are gone, so the outputs are written back first. If there are none, as after an
    error on the device, the exception names the arrays that are gone.

    Args:
        jitted: the function.
        groups: its arguments.
        finish: from its result to the caller's.
        named: gives the leaves of the arguments with their names, for messages.
    """
    returned: list[tp.Any] = []
    try:
        returned.extend(map(jitted, *zip(groups)))  # no Python in between
        result = finish(returned[0])
        returned.clear()
        return result
    except BaseException as error:
        if returned:
            with contextlib.suppress(Exception):  # the error itself matters more
                finish(returned[0])
        elif gone := [name for name, x in named() if _is_gone(x)]:
            error.add_note(
                f"The arrays of {listed(gone, most=1)} are gone: this call, or one before it, was to "
                "reuse their memory. Restore them, from a checkpoint for example; before a call that "
                "donates, nnx.clone(model, arrays=True) makes a copy with its own arrays. A call that "
                "does not donate leaves all objects as they were when it fails."
            )
        drop_hidden_frames(error)
        raise


def _is_gone(leaf: tp.Any) -> bool:
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    return is_array and leaf.is_deleted()
