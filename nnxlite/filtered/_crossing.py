"""Crossing a JAX transform with leaves of any type: arrays are traced, the rest is static.

On the way in, leaves that are not traced become part of the key (`filter_jit`) or are captured (the
other transforms).  On the way out, leaves that are not arrays cross as static data beside the `OutDef`.
"""

from __future__ import annotations

import typing as tp

from nnxlite import transforms
from nnxlite._jax import is_pytree_leaf
from nnxlite._typing import P, R
from nnxlite.boundary import (
    Crossing,
    Division,
    Fixed,
    Inner,
    Inputs,
    Partition,
    leave,
)
from nnxlite.filtered._leaves import leaves_of
from nnxlite.filtered._predicates import is_array
from nnxlite.transforms import (
    Transform,
    Unbound,
    boxed,
    call_object,
    owners,
    rewrap,
    unbind,
    unwrapped,
)


def chosen_first(chosen: tp.Iterable[tp.Any]) -> Partition:
    """Leaves divided into the chosen ones and the rest."""
    return Partition(tuple(map(bool, chosen)))


def divide(
    leaves: tp.Sequence[tp.Any], partition: Partition
) -> tuple[Division, list[list[tp.Any]]]:
    """The static leaves, which are the last group, and the other groups."""
    *groups, statics = partition.split(leaves)
    return Division(partition, tuple(map(boxed, statics))), groups


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

    def leave(self, inner: Inner, result: tp.Any) -> Crossing:
        """What leaves the function with this result, as static data and arrays."""
        return leave(inner, result).crossing(is_array)

    def run_out(self, leaves: tp.Sequence[tp.Any]) -> Crossing:
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
