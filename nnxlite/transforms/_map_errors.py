"""Errors of `vmap`, `pmap` and `shard_map`, with the user's names.

JAX's messages name positions in lists of leaves; here they become paths of arguments and results.
"""

from __future__ import annotations

import contextlib
import functools
import re
import typing as tp

import jax
import numpy as np

from nnxlite._base.errors import listed
from nnxlite.boundary._call_def import CallDef
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._labels import Layout, output_names
from nnxlite.boundary._refusals import refuse_non_arrays

SHOWN = 12
"""How many settings a message lists."""

T = tp.TypeVar("T")


class MapNames:
    """Names of the leaves of arguments and outputs.

    Args:
        call: the arguments.
        layout: of the outputs, if it is known.
    """

    def __init__(self, call: CallDef, layout: Layout | None) -> None:
        self.call = call
        self.layout = layout
        self.arguments = [leaf.text() for leaf in call.leaves()]

    @functools.cached_property
    def outputs(self) -> list[str]:
        """The names of the outputs, in the order of the layout; empty if that is not known."""
        if self.layout is None:
            return []
        return output_names(self.call, self.layout.definition)

    def output(self, group: int, number: int) -> str:
        """The name of an output, by group and number in it."""
        partition = tp.cast(Layout, self.layout).division.partition
        return self.outputs[partition.positions[group][number]]


def explained(
    name: str,
    in_name: str,
    out_name: str,
    error: Exception,
    axes: list[tp.Any],
    names: MapNames,
    inputs: Inputs,
) -> Exception:
    """JAX's error for a mapped function, with the user's names for leaves.

    Args:
        name: of the mapped function.
        in_name, out_name: the parameters that have the settings of arguments and results.
        error: JAX's error.
        axes: the setting of each leaf of the arguments.
        names, inputs: the leaves.
    """
    kind = TypeError if isinstance(error, TypeError) else ValueError
    if kind is TypeError:
        remedy = "Pass an array, or let the function capture the value."
        refuse_non_arrays(name, names.call, inputs.leaves, remedy)
    sizes = axis_complaint(names.arguments, inputs.leaves, axes)
    if sizes:
        return ValueError(f"{name}: {sizes}")
    varying = re.search(r"out_axes\[1\]\[(\d+)\]\[(\d+)\]", str(error))
    if varying is not None and names.outputs:
        output = names.output(int(varying[1]), int(varying[2]))
        return ValueError(
            f"{name}: got axis spec None but output was batched: {output} has axis None, and its "
            "value differs between the slices. Give it an axis, in out_axes, or with nnx.StateAxes "
            "in in_axes if it belongs to an argument."
        )
    text = _in_words(str(error), names)
    if out_name in text and names.outputs:
        settings = tp.cast(Layout, names.layout).division.partition.labels
        each = [f"{output}: {setting!r}" for output, setting in zip(names.outputs, settings)]
        what = f"{out_name} by output"
    else:
        each = [f"{n!r}: {setting!r}" for n, setting in zip(names.arguments, axes)]
        what = f"{in_name} by argument"
    tail = f"\n{what}: {listed(each, SHOWN)}." if each else ""
    return kind(f"{name}: {text}{tail}")


def _in_words(text: str, names: MapNames) -> str:
    """A message of JAX with the user's names in place of its own."""
    argument = lambda i: repr(names.arguments[int(i)])
    output = lambda group, i: names.output(int(group), int(i))
    for pattern, name in (
        (r", where args\[\d\] is bound to \S+ parameter '[^']*''?,", ""),
        (r"\b(?:leaves|args\[0\])\[(\d+)\](?:\[[^]]*\])*", argument),
        (r"\bin_specs\[0\]\[(\d+)\]", lambda i: f"the spec of {argument(i)}"),
        (r"\S+\(\*args\)\[1\]\[(\d+)\]\[(\d+)\]", output),
        (r"\bout_specs\[1\](?:\[\d+\])*", "out_specs"),
    ):
        put = name if isinstance(name, str) else functools.partial(_named, name)
        text = re.sub(pattern, put, text)
    return text


def _named(name: tp.Callable[..., str], match: re.Match[str]) -> str:
    return name(*match.groups())


def axis_complaint(
    names: list[str], leaves: list[tp.Any], axes: list[tp.Any], axis_size: int | None = None
) -> str | None:
    """The problem with the sizes of mapped axes; None if there is none.

    Args:
        names, leaves, axes: the leaves of the arguments.
        axis_size: the size that the user gives.
    """
    sizes: dict[int, list[str]] = {} if axis_size is None else {axis_size: ["axis_size"]}
    for name, leaf, axis in zip(names, leaves, axes):
        for part in jax.tree_util.tree_leaves(leaf) if isinstance(axis, int) else ():
            shape = np.shape(part)
            if not -len(shape) <= axis < len(shape):
                return (
                    f"was asked to map over axis {axis} of '{name}', which implies that its rank "
                    f"should be at least {axis + 1 if axis >= 0 else -axis}, but its shape is "
                    f"{shape}. Give it another axis, or None to pass it whole."
                )
            sizes.setdefault(shape[axis], []).append(name)
    if len(sizes) < 2:
        return None
    parts = [f"{size} at {listed(at, most=3, text=repr)}" for size, at in sizes.items()]
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
