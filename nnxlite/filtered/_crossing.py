"""Crossing a JAX transform with leaves of any type: arrays are traced, the rest is static.

On the way in the leaves that are not traced become part of the key (`jit`) or are captured (the
others).  On the way out whatever is no array travels as static data beside the `OutDef`.
"""

from __future__ import annotations

import dataclasses
import typing as tp

import jax

from nnxlite._errors import path_text, short_type
from nnxlite._jax import is_pytree_leaf
from nnxlite.boundary import Fixed, Inner, Inputs, OutDef, Outputs, enter, leave, replay
from nnxlite.filtered._apart import Apart
from nnxlite.filtered._predicates import is_array
from nnxlite.transforms import (
    StaticArgument,
    Unbound,
    call_object,
    hidden_argument,
    rewrap,
    unbind,
    unwrapped,
    weakly,
)


def taken_apart(fun: tp.Any) -> Unbound:
    """Like `unbind`; a callable that is a pytree of another kind enters as an argument, too."""
    found = unbind(fun)
    inner, layers = unwrapped(found.fun)
    if isinstance(inner, type) or is_pytree_leaf(inner):
        return found
    return rewrap(Unbound(call_object, (inner, *found.args), found.kwargs), layers)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static side of what leaves a transform, static leaves included.

    Attributes:
        definition: see `Outputs`.
        treedef: of (result, written, fresh).
        statics: positions and values of the leaves that are no arrays.
    """

    definition: OutDef
    treedef: tp.Any
    statics: tuple[tuple[int, StaticArgument], ...]


Crossed = tuple[Fixed, list[tp.Any]]


def take_out(out: Outputs) -> Crossed:
    """What leaves a transform as static data and a list of arrays."""
    leaves, treedef = jax.tree_util.tree_flatten((out.result, out.written, out.fresh))
    statics = tuple(
        (i, hidden_argument(leaf)) for i, leaf in enumerate(leaves) if not is_array(leaf)
    )
    if statics:
        leaves = [leaf for leaf in leaves if is_array(leaf)]
    return Fixed(Shape(out.definition, treedef, statics)), leaves


def outputs_of(shape: Shape, arrays: tp.Sequence[tp.Any]) -> Outputs:
    """The inverse of `take_out`."""
    leaves = list(arrays)
    for position, box in shape.statics:
        leaves.insert(position, box.value)
    result, written, fresh = jax.tree_util.tree_unflatten(shape.treedef, leaves)
    return Outputs(shape.definition, result, written, fresh)


def put_back(inputs: Inputs, fixed: Fixed, arrays: tp.Sequence[tp.Any]) -> tp.Any:
    """Write back what left a transform; returns the caller's result."""
    return replay(inputs, outputs_of(fixed.value, arrays))


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """The static side of a tree that crosses by itself: its objects are new on the other side."""

    definition: tp.Any
    num_plain: int
    defs: tuple[tp.Any, ...]
    statics: tuple[tuple[int, StaticArgument], ...]

    def build(self, arrays: tp.Sequence[tp.Any], *, statics: bool = True) -> tp.Any:
        """The tree of its arrays; without `statics` None stands for the other leaves."""
        leaves = list(arrays)
        for position, box in self.statics:
            leaves.insert(position, box.value if statics else None)
        rest = iter(leaves[self.num_plain :])
        values = [
            jax.tree_util.tree_unflatten(d, [next(rest) for _ in range(d.num_leaves)])
            for d in self.defs
        ]
        return enter(self.definition, leaves[: self.num_plain], values)[0]

    def only(self, arrays: tp.Sequence[tp.Any]) -> tp.Any:
        """The tree of its arrays, with None at the leaves that are no arrays."""
        return self.build(arrays, statics=False)


def tree_out(tree: tp.Any, is_dynamic: tp.Callable[[tp.Any], bool] = is_array) -> Crossed:
    """A tree as static data and a list of arrays."""
    apart = Apart(tree)
    statics = tuple(
        (i, hidden_argument(x)) for i, x in enumerate(apart.leaves) if not is_dynamic(x)
    )
    arrays = [x for x in apart.leaves if is_dynamic(x)]
    definition = apart.inputs.define()
    return Fixed(TreeShape(definition, apart.num_plain, tuple(apart.defs), statics)), arrays


class Call:
    """One call of a function, with the leaves of its arguments.

    Attributes:
        fun: the plain function.
        apart: its arguments `(args, kwargs)`, those it is bound to first.
        num_bound: how many of `args` the function is bound to.
    """

    def __init__(self, fun: tp.Any, args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]) -> None:
        self.fun, bound, named = taken_apart(fun)
        self.num_bound = len(bound)
        self.apart = Apart(((*bound, *args), {**named, **kwargs}))

    def without_values(self, leaves: list[tp.Any]) -> Call:
        """The same call with other leaves, which keeps neither objects nor the function alive."""
        new = Call.__new__(Call)
        find = weakly(self.fun)
        new.fun = lambda *args, **kwargs: find()(*args, **kwargs)
        new.num_bound, new.apart = self.num_bound, self.apart.without_values(leaves)
        return new

    def visible(self) -> list[bool]:
        """For each leaf whether it is the caller's argument, not something the function holds."""
        paths = self.apart.position_paths
        held = [path[0] == 0 and path[1] < self.num_bound for path in paths]
        return [not held[place.position] for place in self.apart.places]

    def run(self, leaves: tp.Sequence[tp.Any]) -> tuple[Inner, tp.Any]:
        """Call the function with other leaves in place of its own."""
        (args, kwargs), inner = self.apart.enter(leaves)
        return inner, self.fun(*args, **kwargs)

    def run_out(self, leaves: tp.Sequence[tp.Any]) -> Crossed:
        """Call the function, and take apart what it leaves."""
        inner, result = self.run(leaves)
        return take_out(leave(inner, result))

    def put_back(self, crossed: Crossed) -> tp.Any:
        """Write back what left the call; returns the caller's result."""
        return put_back(self.apart.inputs, *crossed)

    def arguments(self, answers: tp.Sequence[tp.Any]) -> tuple[tp.Any, ...]:
        """The visible positional arguments of other leaves; their graph objects are new ones."""
        return self.apart.build(answers)[0][self.num_bound :]


class Choice:
    """Some leaves among others, by position."""

    def __init__(self, mask: tp.Sequence[bool]) -> None:
        self.mask = mask

    def chosen(self, leaves: tp.Sequence[tp.Any]) -> list[tp.Any]:
        """The chosen ones."""
        return [x for x, m in zip(leaves, self.mask) if m]

    def into(self, leaves: tp.Sequence[tp.Any], new: tp.Iterable[tp.Any]) -> list[tp.Any]:
        """The leaves with new ones in place of the chosen."""
        fresh = iter(new)
        return [next(fresh) if m else x for x, m in zip(leaves, self.mask)]

    def alone(self, new: tp.Iterable[tp.Any]) -> list[tp.Any]:
        """New leaves where chosen, None elsewhere."""
        return self.into([None] * len(self.mask), new)


def refuse_writes(inner: Inner, what: str) -> None:
    """Raise ValueError where a function changed its arguments and the change would be lost."""
    definition = leave(inner, None).definition
    if definition.written or definition.graph is not None:
        paths = inner.call.leaf_paths()
        names = ", ".join(f"'{path_text(paths[i])}'" for i in definition.written[:5])
        raise ValueError(
            f"{what} changes its arguments ({names or 'their structure'}), and the change cannot "
            "leave it. Return the new value instead, and write it outside."
        )


def must_be_traced(what: str, path: tp.Any, value: tp.Any) -> TypeError:
    """The error for a leaf that was to be traced and is no array."""
    return TypeError(
        f"{what}: the leaf at '{path_text(path)}' must be traced, but {short_type(value)} "
        f"{value!r} is no array and no number."
    )


def refuse_shared_buffers(what: str, apart: Apart, donated: tp.Sequence[bool]) -> None:
    """Raise ValueError where one buffer would be donated twice, or donated and read."""
    given = {id(x) for x, d in zip(apart.leaves, donated) if d}
    places = [i for i, x in enumerate(apart.leaves) if id(x) in given]
    if len(places) == len(given):
        return
    first: dict[int, int] = {}
    for place in places:
        other = first.setdefault(id(apart.leaves[place]), place)
        if other != place:
            one, two = (path_text(apart.paths[i][1:]) for i in (other, place))
            raise ValueError(
                f"{what}: the same array buffer is donated at '{one}' and used at '{two}'. A donated "
                "buffer can be used once: copy the array in one of the two places, share one "
                "Variable between them, or do not donate."
            )
