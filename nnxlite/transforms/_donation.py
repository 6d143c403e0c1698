"""Donation: which leaves of a jitted call are donated."""

from __future__ import annotations

import contextlib
import typing as tp
import weakref

import jax

from nnxlite._base.errors import listed
from nnxlite._base.jax import Tracer, drop_hidden_frames, is_compiling
from nnxlite.boundary._body import Body
from nnxlite.boundary._call_def import CallDef, paths_of
from nnxlite.boundary._operands import Partition


class Donation(tp.NamedTuple):
    """What `donate="written"` reuses for one structure of arguments.

    Attributes:
        paths: of the donated Variables, argument first.
        bytes: the memory that is reused in each call.
    """

    paths: tuple[str, ...]
    bytes: int


R = tp.TypeVar("R")

Groups = tuple[list[tp.Any], list[tp.Any]]
"""The leaves that are kept, and those that are donated."""


Owner: tp.TypeAlias = int | str | None
"""The number or name of an argument; None for one that the function carries."""
Choice: tp.TypeAlias = tp.Callable[[tp.Sequence[str], tp.Sequence[Owner]], tp.Container[Owner]]


def owners(call: CallDef, num_bound: int) -> list[Owner]:
    """For each leaf of a call its argument."""

    def owner(by_name: int, key: tp.Any, *_: tp.Any) -> Owner:
        number = key if by_name else key - num_bound
        return number if by_name or number >= 0 else None

    paths = paths_of(call.treedef)
    return [owner(*paths[leaf.position]) for leaf in call.leaves()]


class Donor:
    """Decides which leaves a jitted function donates, once for each kind of call.

    Args:
        name: of the transform and the function.
        choose: gives the arguments to donate, from the names of those that may be given by position, and
            the arguments that have leaves (see `owners`).
        num_bound: how many arguments the function carries.
        trace: gives the traced body for some leaves, where the written ones are donated.
    """

    def __init__(
        self,
        name: str,
        choose: Choice,
        num_bound: int,
        trace: tp.Callable[..., Body | None],
    ) -> None:
        self._name = name
        self._choose = choose
        self._num_bound = num_bound
        self._trace = trace
        self._traced: tuple[CallDef, Body] | None = None
        # Not on the CallDef, which outlives functions. JAX keeps the CallDefs of the programs in its
        # cache, and a plan those of its calls: an entry is needed no longer than one of the two.
        self._partitions: weakref.WeakKeyDictionary[CallDef, Partition]
        self._partitions = weakref.WeakKeyDictionary()

    def split(self, call: CallDef, leaves: list[tp.Any]) -> Groups:
        """The leaves in the two groups.

        Raises ValueError where a buffer would be donated and used elsewhere in the first call of its
        kind; XLA refuses it in the others.
        """
        partition: Partition | None = self._partitions.get(call)
        if partition is not None:
            groups: tp.Any = partition.split(leaves)
            return groups
        body = self._trace(call, leaves)
        if body is None:
            found = owners(call, self._num_bound)
            chosen = self._choose((call.names or ())[self._num_bound :], found)
            flags = [owner in chosen for owner in found]
        else:
            written = set(body.definition.written)
            flags = [leaf.graph_leaf in written for leaf in call.leaves()]
            self._traced = (call, body)
        partition = self._partitions[call] = Partition(tuple(flags), (False, True))
        groups = partition.split(leaves)
        self.refuse_shared_buffers(call, groups)
        return groups

    def run(
        self,
        call: CallDef,
        jitted: tp.Callable[..., tp.Any],
        groups: tp.Sequence[tp.Any],
        finish: tp.Callable[[tp.Any], R],
    ) -> R:
        """Call a function that donates, and finish with what it returns.

        Raises ValueError where one buffer would be donated twice, or donated and read.
        """
        named = lambda: zip(_texts(call), self.join(call, groups))
        try:
            return run_donating(jitted, groups, finish, named)
        except (ValueError, RuntimeError):  # which of the two depends on JAX
            self.refuse_shared_buffers(call, groups)
            raise

    def join(self, call: CallDef, groups: tp.Sequence[tp.Any]) -> list[tp.Any]:
        """The inverse of `split`."""
        return self._partitions[call].join(*groups)

    def donated(self, call: CallDef) -> set[int]:
        """The graph leaves that are donated in a kind of call."""
        flags = zip(call.leaves(), self._partitions[call].labels)
        return {
            leaf.graph_leaf for leaf, donated in flags if donated and leaf.graph_leaf is not None
        }

    def take_traced(self, call: CallDef, leaves: list[tp.Any]) -> Body | None:
        """The body that was already traced, if it is for these arguments; it is used once."""
        traced, self._traced = self._traced, None
        if traced is None or traced[0] is not call or not traced[1].accepts(leaves):
            return None
        return traced[1]

    def refuse_shared_buffers(self, call: CallDef, groups: tp.Sequence[tp.Any]) -> None:
        """Raise ValueError where one buffer would be donated twice, or donated and read."""
        _, donated = self._partitions[call].positions
        find_texts = lambda: _texts(call)
        leaves = self.join(call, groups)
        refuse_shared_buffers(self._name, leaves, donated, find_texts)


def refuse_shared_buffers(
    what: object,
    leaves: tp.Sequence[tp.Any],
    donated: tp.Sequence[int],
    find_texts: tp.Callable[[], tp.Sequence[str]],
) -> None:
    """Raise ValueError where one buffer would be donated twice, or donated and read.

    Args:
        what: the function, for the message.
        leaves: of the arguments of a call.
        donated: the positions of those that are donated.
        find_texts: gives the path of each leaf, for the message.
    """
    if not (donated and is_compiling()):
        return  # nothing is donated
    first = {id(leaves[position]): position for position in reversed(donated)}
    for position, leaf in enumerate(leaves):
        donor = first.get(id(leaf), position)
        # JAX copies NumPy arrays, and equal Python scalars may be one object.
        if donor != position and isinstance(leaf, jax.Array):
            texts = find_texts()
            raise ValueError(
                f"{what}: the same array buffer is donated at {texts[donor]} and used at "
                f"{texts[position]}. A donated buffer can be used once: copy the array in one of the "
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


def _texts(call: CallDef) -> list[str]:
    """The path of each leaf, for messages."""
    return [f"'{leaf.text()}'" for leaf in call.leaves()]
