"""Placement: where the arguments and results of a jitted function are put, if shardings are given.

JAX needs the shardings of outputs together with the function, and the outputs are known only after a
trace: so each kind of call has its own `jax.jit` object.
"""

from __future__ import annotations

import contextlib
import typing as tp

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from nnxlite._base.interning import Bounded
from nnxlite._base.jax import constrained, is_tracing
from nnxlite.boundary._call_def import CallDef
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._labels import leaf_shardings, output_settings
from nnxlite.boundary._out import Outputs
from nnxlite.transforms._mapping import passed_through
from nnxlite.variables._metadata import PLACEMENT

CALLS_PER_PLACEMENT = 64


class Placed(tp.NamedTuple):
    """What is cached for one kind of call.

    Attributes:
        jitted: the `jax.jit` object.
        leaving: the structure of the outputs that it has shardings for.
    """

    jitted: tp.Any
    leaving: tp.Any


class Placement:
    """The shardings of one jitted function.

    Args:
        make: makes a `jax.jit` object of the function, with shardings as keywords.
        groups: puts leaves into the groups that the function takes.
        in_shardings, out_shardings: as given to `jit`.
    """

    def __init__(
        self,
        make: tp.Callable[..., tp.Any],
        groups: tp.Callable[..., tuple[tp.Any, ...]],
        in_shardings: tp.Any,
        out_shardings: tp.Any,
    ) -> None:
        # Both by call, which is what they follow from; bound: CALLS_PER_PLACEMENT. The programs refer to
        # their calls, so weak keys would keep both for ever.
        self._by_call: Bounded[CallDef, Placed] = Bounded(CALLS_PER_PLACEMENT)
        self._resolved: Bounded[CallDef, tuple[list[tp.Any], list[tp.Any]]] = Bounded(
            CALLS_PER_PLACEMENT
        )
        self._make = make
        self._groups = groups
        self._in_shardings = in_shardings
        self._out_shardings = out_shardings

    def jitted_for(self, call: CallDef, groups: tp.Sequence[tp.Any]) -> tp.Any:
        """The `jax.jit` object for a call, with the shardings of its outputs."""
        return (self._by_call.get(call) or self._place(call, groups)).jitted

    def _place(self, call: CallDef, groups: tp.Sequence[tp.Any]) -> Placed:
        """A new one, for the outputs with the given leaves; JAX does not trace again to run it."""
        shardings: dict[str, tp.Any] = {}
        if self._in_shardings is not None:
            shardings["in_shardings"] = self._groups(call, self._shardings_in(call)[0])
        out = self._make(**shardings).trace(*groups).out_info
        shardings["out_shardings"] = self._shardings_out(call, out)
        placed = Placed(self._make(**shardings), jax.tree_util.tree_structure(out))
        self._by_call[call] = placed
        return placed

    def __call__(self, call: CallDef, groups: tp.Sequence[tp.Any]) -> tp.Any:
        """Call the function, whose result may have another structure for other shapes of leaves."""
        placed = self._by_call.get(call) or self._place(call, groups)
        try:
            return placed.jitted(*groups)
        except ValueError as error:
            if passed_through(error):
                raise  # by the user's function, which runs no second time
            again = None
            with contextlib.suppress(Exception):
                again = self._place(call, groups)
            if again is None or again.leaving == placed.leaving:
                raise
            return again.jitted(*groups)

    def _shardings_out(self, call: CallDef, out: tp.Any) -> tp.Any:
        """The shardings of the outputs; what belongs to an argument keeps the argument's."""
        leaves, roots = self._shardings_in(call)
        values = call.by_side(leaves)[1]
        settings = output_settings(
            call, out, values, roots, self._out_shardings, "out_shardings", None
        )
        return Outputs(out.definition, settings)

    def _shardings_in(self, call: CallDef) -> tuple[list[tp.Any], list[tp.Any]]:
        """`in_shardings` of the leaves, and of the roots."""
        known = self._resolved.get(call)
        if known is None:
            known = self._resolved[call] = leaf_shardings(call, self._in_shardings)
        return known

    def move(self, call: CallDef, inputs: Inputs) -> dict[int, tp.Any]:
        """Put uncommitted arrays where `in_shardings` says.

        JAX would do this in every call, and drop the result for arrays that are only read.
        Returns the values that moved, by leaf number.
        """
        if self._in_shardings is None or is_tracing():
            return {}
        before, shardings = inputs.values, self._shardings_in(call)[0]
        moved = [_put_if_uncommitted(*pair) for pair in zip(inputs.leaves, shardings)]
        inputs.arrays, inputs.values = call.whole(moved)
        pairs = zip(before, inputs.values)
        return {leaf: new for leaf, (old, new) in enumerate(pairs) if new is not old}

    def clear_cache(self) -> None:
        """Drop all compiled programs."""
        for placed in tuple(self._by_call.values()):
            placed.jitted.clear_cache()
        self._by_call.clear()
        self._resolved.clear()

    def cache_size(self) -> int:
        """The number of compiled programs."""
        return sum(placed.jitted._cache_size() for placed in tuple(self._by_call.values()))


def _put_if_uncommitted(value: tp.Any, sharding: tp.Any) -> tp.Any:
    if sharding is None or getattr(value, "committed", not isinstance(value, np.ndarray)):
        return value
    return jax.device_put(value, sharding)


def stay_in_place(call: CallDef, leaves: list[tp.Any], out: Outputs) -> Outputs:
    """Constrain the new values of Variables that `shard` has placed to their present shardings.

    Otherwise XLA would choose a sharding for the new value, and the next call would compile again.

    Args:
        call: the arguments.
        leaves: of the arguments.
        out: the outputs.
    """
    decoded, values, new = call.graphdef.decoded, call.whole(leaves)[1], [*out.values]
    for i, leaf in enumerate(out.definition.written, out.definition.num_arrays):
        node = decoded.leaf_nodes[leaf]
        metadata = getattr(decoded.node_defs[node], "metadata", {}) if node >= 0 else {}
        if PLACEMENT in metadata:
            new[i] = _in_place(new[i], values[leaf], metadata[PLACEMENT])
    return Outputs(out.definition, new)


def _in_place(new: tp.Any, old: tp.Any, spec: PartitionSpec) -> tp.Any:
    """A new value with the sharding of the old one, if that has this spec."""
    if not isinstance(old, jax.Array) or not isinstance(new, jax.Array):
        return new
    if new.shape != old.shape or new.ndim != len(spec):
        return new  # within a loop over layers, say, a Variable has one axis less
    mesh = jax.typeof(old).sharding.mesh
    if mesh.empty or set(mesh.axis_types) != {AxisType.Auto}:
        return new  # explicit axes keep their sharding by themselves
    try:
        sharding = NamedSharding(mesh, spec)
        sharding.shard_shape(new.shape)
    except ValueError:  # by now it is on another mesh
        return new
    return constrained(new, sharding)
