"""Crossing a JAX transform with leaves of any type: arrays are traced, the rest is static.

On the way in, leaves that are not traced become part of the key (`filter_jit`) or are captured (the
other transforms).  On the way out, leaves that are not arrays cross as static data beside the `OutDef`.
"""

from __future__ import annotations

import dataclasses
import typing as tp

import jax

from nnxlite import transforms
from nnxlite._jax import is_pytree_leaf
from nnxlite._typing import P, R
from nnxlite.boundary import (
    Division,
    Fixed,
    Inner,
    Inputs,
    Layout,
    Outputs,
    Partition,
    leave,
    paths_of,
    replay,
    unpack,
)
from nnxlite.filtered._leaves import Form, Leaves, leaves_of
from nnxlite.filtered._predicates import is_array
from nnxlite.transforms import (
    Transform,
    Unbound,
    boxed,
    call_object,
    rewrap,
    unbind,
    unwrapped,
)


def chosen_first(chosen: tp.Iterable[tp.Any]) -> Partition:
    """Leaves divided into the chosen ones and the rest."""
    return Partition(tuple(map(bool, chosen)))


# Out ----------------------------------------------------------------------------------------------


def divide(
    leaves: tp.Sequence[tp.Any], partition: Partition
) -> tuple[Division, list[list[tp.Any]]]:
    """The static leaves, which are the last group, and the other groups."""
    *groups, statics = partition.split(leaves)
    return Division(partition, tuple(map(boxed, statics))), groups


Crossed = tuple[Fixed, list[tp.Any]]


def take_out(out: Outputs) -> Crossed:
    """The outputs of a transform as static data and a list of arrays."""
    leaves, treedef = jax.tree_util.tree_flatten((out.result, out.written, out.fresh))
    division, (arrays,) = divide(leaves, chosen_first(map(is_array, leaves)))
    return Fixed(Layout(out.definition, treedef, division)), arrays


def put_back(inputs: Inputs, crossed: Crossed) -> tp.Any:
    """Write the outputs of a transform back; returns the caller's result."""
    return replay(inputs, unpack(crossed[0].value, crossed[1:]))


@dataclasses.dataclass(frozen=True)
class TreeForm:
    """The static side of a tree that crosses on its own: its objects are new on the other side."""

    form: Form
    division: Division

    def build(self, arrays: tp.Sequence[tp.Any]) -> tp.Any:
        """The tree of its arrays and static leaves."""
        return self.form.build(self.division.join(arrays))

    def only(self, arrays: tp.Sequence[tp.Any]) -> tp.Any:
        """The tree of its arrays, with None at the other leaves."""
        return self.form.build(self.division.partition.join(arrays))


def tree_out(tree: tp.Any, is_dynamic: tp.Callable[[tp.Any], bool] = is_array) -> Crossed:
    """A tree as static data (a `TreeForm`) and a list of arrays."""
    parts = leaves_of(tree)
    division, (arrays,) = divide(parts.leaves, chosen_first(map(is_dynamic, parts.leaves)))
    return Fixed(TreeForm(parts.form, division)), arrays


# Calls --------------------------------------------------------------------------------------------


class Call(transforms.Call, Leaves):
    """One call of a function with leaves of any type: arrays cross, all else is static or captured."""

    def __init__(self, bound: Unbound, inputs: Inputs) -> None:
        Leaves.__init__(self, inputs)
        transforms.Call.__init__(self, bound, inputs, self.leaves, self.form.call)

    @classmethod
    def of(cls, fun: tp.Any, args: tp.Iterable[tp.Any], kwargs: dict[str, tp.Any]) -> Call:
        """A call of a function with these arguments, after those that it carries."""
        bound = unbound(fun)
        return cls(bound, inputs_of_call(bound, args, kwargs))

    def owners(self) -> list[int | str | None]:
        """For each leaf the number or name of its argument; None where the function carries it."""

        def owner(by_name: int, key: tp.Any, *_: tp.Any) -> tp.Any:
            number = key if by_name else key - self.num_bound
            return number if by_name or number >= 0 else None

        paths = paths_of(self.form.treedef)
        return [owner(*paths[place.position]) for place in self.form.places]

    def leaf_text(self, leaf: int) -> str:
        """The same of a leaf by number."""
        return self.form.places[leaf].text()

    def enter(self, leaves: tp.Sequence[tp.Any]) -> tuple[tp.Any, Inner]:
        """The arguments `(args, kwargs)` with other leaves, and the objects that `leave` needs."""
        return self.form.enter(leaves)

    def leave(self, inner: Inner, result: tp.Any) -> Crossed:
        """What leaves the function with this result, as static data and arrays."""
        return take_out(leave(inner, result))

    def run_out(self, leaves: tp.Sequence[tp.Any]) -> Crossed:
        """The function between leaves: from those of the arguments to what leaves it."""
        return self.leave(*self.run(leaves))

    def put_back(self, crossing: Crossed) -> tp.Any:
        """Write what left the function into the caller's objects; returns the caller's result."""
        return put_back(self.inputs, crossing)

    def arguments(self, leaves: tp.Sequence[tp.Any]) -> tuple[tp.Any, ...]:
        """The positional arguments of the caller, with other leaves; their objects are new."""
        return self.form.build(leaves)[0][self.num_bound :]


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
    return Inputs.of_call(tuple(args), kwargs, bound.names, trees=True)


def unbound(fun: tp.Any) -> Unbound:
    """Like `unbind`, but a callable pytree of another library becomes an argument, too."""
    parts = unbind(fun)
    inner, layers = unwrapped(parts.fun)
    if isinstance(inner, type) or is_pytree_leaf(inner):
        return parts
    return rewrap(Unbound(call_object, (inner, *parts.args), parts.kwargs), layers)
