"""Operands: the leaves of a call as JAX sees them, with the names that the user knows.

`Operands` is one pytree: its leaves are those of a call, its structure is the `CallDef`, by which JAX
caches what it compiles.  JAX's messages, jaxprs and HLO take the names of arguments from the signature
of the function that is traced.  `describe` gives that function a signature that names each leaf as the
user would write it (`model.l1.kernel`, `batch['x']`), and the source of the user's function.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing as tp
import weakref

import jax

from nnxlite.boundary._call_def import ArgumentLeaf, CallDef


class Operands:
    """Leaves of a call: all of them, or the first of several groups."""

    __slots__ = ("call", "leaves")

    def __init__(self, call: CallDef, leaves: list[tp.Any]) -> None:
        self.call = call
        self.leaves = leaves

    def __iter__(self) -> tp.Iterator[tp.Any]:
        return iter(self.leaves)


jax.tree_util.register_pytree_node(
    Operands,
    lambda operands: (operands.leaves, operands.call),
    lambda call, leaves: Operands(call, [*leaves]),
)


def leaf_names(call: CallDef, leaves: tp.Iterable[ArgumentLeaf] | None = None) -> list[str]:
    """The names of the leaves of a call `(args, kwargs)`: `model.layers[0].kernel`, `args[1]`.

    Args:
        call: the arguments.
        leaves: which of their leaves; by default those that cross.
    """
    keys = [path[2:] for path, _ in jax.tree_util.tree_leaves_with_path(call.template())]
    arguments = [path[0] for path in call.paths()]
    starts = [name + jax.tree_util.keystr(inside) for name, inside in zip(arguments, keys)]
    end = lambda leaf: "".join([*map(_step, leaf.below), *(f"[{key!r}]" for key in leaf.inside)])
    return [
        starts[leaf.position] + end(leaf) for leaf in (call.leaves() if leaves is None else leaves)
    ]


def _step(name: tp.Any) -> str:
    return f".{name}" if isinstance(name, str) and name.isidentifier() else f"[{name!r}]"


def parameters_of(fun: tp.Any) -> list[inspect.Parameter] | None:
    """The parameters of a function; None where it has no signature."""
    try:
        return [*inspect.signature(fun).parameters.values()]
    except (TypeError, ValueError):
        return None


def names_by_position(parameters: tp.Iterable[inspect.Parameter]) -> list[str]:
    """The names of the parameters that may be given by position."""
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def parameter_names(fun: tp.Any) -> tuple[str, ...]:
    """The names of the parameters of a function that may be given by position."""
    if type(fun) is types.FunctionType and not fun.__dict__:  # no `__wrapped__`, `__signature__`
        return fun.__code__.co_varnames[: fun.__code__.co_argcount]
    return tuple(names_by_position(parameters_of(fun) or ()))


class _Signature(inspect.Signature):
    """A signature that gives the leaves of arguments names of their own.

    JAX caches the signature of a function under a weak reference to the function. So the signature does
    not refer to the names, which lead to the function: it asks the function for them.
    """

    fun: tp.Callable[[], tp.Any]

    def bind(self, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        return types.SimpleNamespace(arguments=dict(self.fun().names(*args, **kwargs)))


def describe(
    run: tp.Callable[..., tp.Any],
    fun: tp.Any,
    name: str,
    names: tp.Callable[..., tp.Iterable[tuple[str, tp.Any]]] | None = None,
) -> tp.Callable[..., tp.Any]:
    """`run` as a function that JAX's messages call by the name and source of the user's function.

    Args:
        run: the function for JAX to trace; if it refers to `fun` weakly, so does the result.
        fun: the user's function.
        name: of the program, for JAX.
        names: from the arguments of `run` to pairs of a name and a leaf.
    """

    def described(*args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        return run(*args, **kwargs)

    described.__name__ = described.__qualname__ = name
    signature = inspect.signature(run, follow_wrapped=False)
    if names is not None:
        signature = _Signature([*signature.parameters.values()])
        signature.fun = weakref.ref(described)
        described.names = names  # type: ignore[attr-defined]
    described.__signature__ = signature  # type: ignore[attr-defined]
    inner = fun
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = inspect.unwrap(inner)
    if not hasattr(inner, "__code__"):
        inner = vars(type(inner)).get("__call__")
    if hasattr(inner, "__code__"):
        # The source location alone: it does not keep the function alive.
        shown = getattr(inner, "__name__", type(inner).__name__)
        source = {"__name__": shown, "__code__": tp.cast(tp.Any, inner).__code__}
        described.__wrapped__ = types.SimpleNamespace(**source)  # type: ignore[attr-defined]
    return described


# Partitions -----------------------------------------------------------------------------------------
#
# Partition: the leaves of a call divided into groups, and joined again.
#
# Each transform treats leaves in different ways: differentiated or not, mapped along an axis, carried,
# constant, donated.  It gives every leaf a label, and passes JAX one list for each label.


@dataclasses.dataclass(frozen=True)
class Partition:
    """A division of leaves into groups; static and comparable.

    `join(*split(leaves))` gives the same leaves.

    Attributes:
        labels: the group of each leaf.
        order: the groups, in the order in which `split` gives them.

    >>> from nnxlite.boundary import Partition
    >>> partition = Partition(("carry", "constant", "carry"), ("constant", "carry"))
    >>> partition.split([1, 2, 3])
    ([2], [1, 3])
    >>> partition.join([2], [1, 3])
    [1, 2, 3]
    """

    labels: tuple[tp.Any, ...]
    order: tuple[tp.Any, ...] = (True, False)
    positions: tuple[list[int], ...] = dataclasses.field(init=False, repr=False, compare=False)
    """The positions of the leaves of each group."""

    def __post_init__(self) -> None:
        positions: tuple[list[int], ...] = tuple([] for _ in self.order)
        for position, label in enumerate(self.labels):
            positions[self.order.index(label)].append(position)
        object.__setattr__(self, "positions", positions)

    def split(self, leaves: tp.Sequence[tp.Any]) -> tuple[list[tp.Any], ...]:
        """The leaves of each group."""
        return tuple([leaves[i] for i in positions] for positions in self.positions)

    def join(self, *groups: tp.Sequence[tp.Any]) -> list[tp.Any]:
        """The leaves in their own order, from the groups."""
        leaves: list[tp.Any] = [None] * len(self.labels)
        for positions, group in zip(self.positions, groups):
            put(leaves, positions, group)
        return leaves


def put(leaves: list[tp.Any], positions: tp.Iterable[int], values: tp.Iterable[tp.Any]) -> None:
    """Store values at some positions of a list."""
    for position, value in zip(positions, values):
        leaves[position] = value


def replaced(
    leaves: tp.Sequence[tp.Any], positions: tp.Iterable[int], values: tp.Iterable[tp.Any]
) -> list[tp.Any]:
    """A list with other values at some positions."""
    out = [*leaves]
    put(out, positions, values)
    return out
