"""Errors of `vmap`, `pmap` and `shard_map`, with the user's names.

JAX's messages name positions in lists of leaves; here they become paths of arguments and results.
"""

from __future__ import annotations

import contextlib
import functools
import re
import typing as tp

import jax

from nnxlite._base.errors import listed
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._refusals import refuse_non_arrays

if tp.TYPE_CHECKING:
    from nnxlite.transforms._mapping import Program

SHOWN = 12
"""How many settings a message lists."""

T = tp.TypeVar("T")


def explained(program: Program, error: Exception, inputs: Inputs) -> Exception:
    """JAX's error for a mapped function, with the user's names for leaves.

    Args:
        program: the mapping.
        error: JAX's error.
        inputs: the arguments.
    """
    name, options, layout, axes = program.name, program.options, program.last, program.settings
    kind = TypeError if isinstance(error, TypeError) else ValueError
    remedy = "Pass an array, or let the function capture the value."
    refuse_non_arrays(name, program.call, inputs.leaves, remedy)
    arguments = [leaf.text() for leaf in program.call.leaves()]
    if options.in_name == "in_axes":
        sizes = axis_complaint(arguments, inputs.leaves, axes, options.jax_options["axis_size"])
        if sizes:
            return ValueError(f"{name}: {sizes}")
    outputs = [] if layout is None else layout.names(program.call)
    positions = () if layout is None else layout.partition.positions
    output = lambda group, number: outputs[positions[int(group)][int(number)]]
    varying = re.search(r"out_axes\[1\]\[(\d+)\]\[(\d+)\]", str(error))
    if varying is not None and layout is not None:
        return ValueError(
            f"{name}: got axis spec None but output was batched: {output(*varying.groups())} has "
            "axis None, and its value differs between the slices. Give it an axis, in out_axes, or "
            "with nnx.StateAxes in in_axes if it belongs to an argument."
        )
    text = _in_words(str(error), lambda i: repr(arguments[int(i)]), output)
    if options.out_name in text and layout is not None:
        each = [f"{output}: {axis!r}" for output, axis in zip(outputs, layout.axes)]
        what = f"{options.out_name} by output"
    else:
        each = [f"{n!r}: {axis!r}" for n, axis in zip(arguments, axes)]
        what = f"{options.in_name} by argument"
    tail = f"\n{what}: {listed(each, SHOWN)}." if each else ""
    return kind(f"{name}: {text}{tail}")


def _in_words(
    text: str, argument: tp.Callable[[str], str], output: tp.Callable[[str, str], str]
) -> str:
    """A message of JAX with the user's names in place of its own."""
    for pattern, name in (
        (r", where args\[\d\] is bound to \S+ parameter '[^']*''?,", lambda: ""),
        (r"\b(?:leaves|args\[0\])\[(\d+)\](?:\[[^]]*\])*", argument),
        (r"\bin_specs\[0\]\[(\d+)\]", lambda i: f"the spec of {argument(i)}"),
        (r"\S+\(\*args\)\[1\]\[(\d+)\]\[(\d+)\]", output),
        (r"\bout_specs\[1\](?:\[\d+\])*", lambda: "out_specs"),
    ):
        text = re.sub(pattern, functools.partial(_named, name), text)
    return text


def _named(name: tp.Callable[..., str], match: re.Match[str]) -> str:
    return name(*match.groups())


def axis_complaint(
    names: list[str],
    leaves: list[tp.Any],
    axes: tp.Sequence[tp.Any],
    size: int | None,
    size_name: str = "axis_size",
) -> str | None:
    """The problem with the sizes of mapped (or scanned) axes; None if there is none.

    Args:
        names, leaves, axes: the leaves of the arguments.
        size: the size that the user gives.
        size_name: the name of that option.
    """
    sizes: dict[int, list[str]] = {}
    verb = "scan" if size_name == "length" else "map"
    for name, leaf, axis in zip(names, leaves, axes):
        for part in jax.tree_util.tree_leaves(leaf) if isinstance(axis, int) else ():
            shape = jax.typeof(part).shape
            if not -len(shape) <= axis < len(shape):
                return (
                    f"was asked to {verb} over axis {axis} of '{name}', which implies that its rank "
                    f"should be at least {axis + 1 if axis >= 0 else -axis}, but its shape is "
                    f"{shape}. Give it another axis, or None to pass it whole."
                )
            sizes.setdefault(shape[axis], []).append(name)
    if not sizes and size is None:
        return (
            f"got no values to {verb} over and `{size_name}` not provided. Pass {size_name}, or at "
            f"least one non-None value in in_axes or {size_name}."
        )
    parts = [f"{size} at {listed(at, most=3, text=repr)}" for size, at in sizes.items()]
    if size is not None and any(other != size for other in sizes):
        return (
            f"got `{size_name}` argument of {size} which disagrees with leading axis sizes "
            f"{[*sizes]} ({', '.join(parts)}). Leave `{size_name}` out, or give arrays of that size."
        )
    if len(sizes) < 2:
        return None
    return (
        f"got inconsistent sizes for array axes to be mapped: {', '.join(parts)}. Give all the "
        "same size, or None to what is passed whole."
    )


def marks_errors(fun: tp.Callable[..., T]) -> tp.Callable[..., T]:
    """Mark what a function raises, for `passed_through`: JAX removes our frames from the traceback."""

    @functools.wraps(fun)
    def marked(*args: tp.Any, **kwargs: tp.Any) -> T:
        try:
            return fun(*args, **kwargs)
        except Exception as error:
            with contextlib.suppress(Exception):  # an exception that takes no attributes
                error._nnx_marked = True  # type: ignore[attr-defined]
            raise

    return marked


def passed_through(error: BaseException) -> bool:
    """Whether an exception was raised during a call of a function under `marks_errors`."""
    return getattr(error, "_nnx_marked", False)
