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

from nnxlite import transforms
from nnxlite._base.errors import path_text, short_type
from nnxlite._base.jax import is_pytree_leaf
from nnxlite._base.typing import P, R
from nnxlite.boundary._call_def import Inner
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._leave import leave
from nnxlite.boundary._operands import Partition
from nnxlite.boundary._out import Fixed, Outputs
from nnxlite.filtered._predicates import is_array
from nnxlite.transforms._donation import owners
from nnxlite.transforms._wrapper import (
    Transform,
    Unbound,
    call_object,
    rewrap,
    unbind,
    unwrapped,
)

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


class Call(transforms.Call):
    """One call of a function with leaves of any type: arrays cross, all else is static or captured."""

    def __init__(self, bound: Unbound, inputs: Inputs) -> None:
        super().__init__(bound, inputs, inputs.definition)

    @classmethod
    def of(cls, fun: tp.Any, args: tp.Iterable[tp.Any], kwargs: dict[str, tp.Any]) -> Call:
        """A call of a function with these arguments, after those that it carries."""
        bound = unbound(fun)
        return cls(bound, inputs_of_call(bound, args, kwargs))

    def tracing(self, traced: tp.Iterable[tp.Any]) -> Call:
        """The same call with only the leaves for which `traced` is true; the others are captured."""
        self.inputs.make_static([not flag for flag in traced])
        self.leaves, self.definition = self.inputs.leaves, self.inputs.definition
        return self

    def owners(self) -> list[int | str | None]:
        """For each leaf the number or name of its argument; None where the function carries it."""
        return owners(self.definition, self.num_bound)

    def variables(self) -> list[tp.Any]:
        """What Variable filters see of each leaf."""
        return self.inputs.variables()

    def leave(self, inner: Inner, result: tp.Any) -> Outputs:
        """What leaves the function with this result, as static data and arrays."""
        return leave(inner, result).as_arrays(is_array)

    def run_out(self, leaves: tp.Sequence[tp.Any]) -> Outputs:
        """The function between leaves: from those of the arguments to what leaves it."""
        return self.leave(*self.run(leaves))

    def arguments(self, leaves: tp.Sequence[tp.Any]) -> tuple[tp.Any, ...]:
        """The positional arguments of the caller, with other leaves; their objects are new."""
        return self.definition.build(leaves)[0][self.num_bound :]


class Filtered(Transform[P, R]):
    """Base of the functions that the filtered transforms return."""

    @staticmethod
    def _unbound(fun: tp.Any) -> Unbound:
        return unbound(fun)

    def call(self, args: tp.Iterable[tp.Any], kwargs: dict[str, tp.Any]) -> Call:
        """A call with these arguments, after those that the function carries."""
        return Call(self.bound, inputs_of_call(self.bound, args, kwargs))


def inputs_of_call(bound: Unbound, args: tp.Iterable[tp.Any], kwargs: dict[str, tp.Any]) -> Inputs:
    """The arguments of a call, after those that the function carries."""
    if bound.args or bound.kwargs:
        args, kwargs = (*bound.args, *args), {**bound.kwargs, **kwargs}
    return Inputs.of_call(tuple(args), kwargs, bound.names, trees=True, inside=True)


def unbound(fun: tp.Any) -> Unbound:
    """Like `unbind`, but a callable pytree of another library becomes an argument, too."""
    parts = unbind(fun)
    inner, layers = unwrapped(parts.fun)
    if isinstance(inner, type) or is_pytree_leaf(inner):
        return parts
    return rewrap(Unbound(call_object, (inner, *parts.args), parts.kwargs), layers)
