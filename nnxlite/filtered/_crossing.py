"""Crossing a JAX transform with leaves of any type: arrays are traced, the rest is static.

Leaves are arrays, numbers, functions and so on at the ends of a pytree, and, in its graph objects, the
values of Variables and of data attributes; functions, text and other objects in their containers are
static.  A Variable (or object) with several paths is one: its value is one leaf, and the rebuilt tree
refers to it by all of these paths.  None is not a leaf.

On the way in, leaves that are not traced become part of the key (`filter_jit`) or are captured (the
other transforms).  On the way out, leaves that are not arrays cross as static data beside the `OutDef`.
"""

from __future__ import annotations

import typing as tp

from nnxlite._base.config import Modes
from nnxlite._base.errors import path_text, short_type
from nnxlite.boundary._call_def import Inner
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._leave import leave
from nnxlite.boundary._operands import Partition
from nnxlite.boundary._out import Fixed
from nnxlite.filtered._predicates import is_array
from nnxlite.transforms._call import Call
from nnxlite.transforms._wrapper import Options, unbind

IsLeaf: tp.TypeAlias = tp.Callable[[tp.Any], bool]


def leaves_of(tree: tp.Any, names: tuple[str, ...] | None = None) -> Inputs:
    """The leaves of any tree, and its `definition`; with names, one of the form `(args, kwargs)`."""
    return Inputs(tree, trees=True, names=names, inside=True)


def must_be_traced(what: str, where: str, value: tp.Any) -> TypeError:
    """The error for a leaf that must be traced and is not an array."""
    return TypeError(
        f"{what}: the leaf at '{where}' must be traced, but {short_type(value)} "
        f"{value!r} is neither an array nor a number."
    )


def refuse_writes(inner: Inner, what: str) -> None:
    """Raise ValueError where a function changed its arguments and the change would be dropped."""
    definition = leave(inner, None).definition
    if definition.written or definition.restructures:
        leaves = inner.call.graph_leaves()
        names = ", ".join(f"'{path_text(leaves[i].below)}'" for i in definition.written[:5])
        raise ValueError(
            f"{what} changes its arguments ({names or 'their structure'}), and the change cannot "
            "leave it. Return the new value instead, and write it outside."
        )


def chosen_first(chosen: tp.Iterable[tp.Any]) -> Partition:
    """Leaves divided into the chosen ones and the rest."""
    return Partition(tuple(map(bool, chosen)))


def tree_out(
    tree: tp.Any, is_dynamic: tp.Callable[[tp.Any], bool] = is_array
) -> tuple[Fixed, list[tp.Any]]:
    """A tree that crosses on its own, as a `CallDef` and a list of arrays; its objects will be new."""
    parts = leaves_of(tree)
    parts.make_static([not is_dynamic(leaf) for leaf in parts.leaves])
    return Fixed(parts.definition), parts.leaves


def filtered(name: str, run: tp.Callable[..., tp.Any] = Call, **more: tp.Any) -> Options:
    """The options of a filtered transform."""
    return Options.of(name, Modes(True, True), run, **more)._replace(is_array=is_array)


def call_of(name: str, fun: tp.Any, args: tp.Iterable[tp.Any], kwargs: dict[str, tp.Any]) -> Call:
    """A call of a function under a transform that is no wrapper."""
    return Call(filtered(name), unbind(fun, pytrees=True), tuple(args), kwargs)
