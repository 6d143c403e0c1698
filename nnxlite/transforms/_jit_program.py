"""The compiled side of `jit`: JAX's function, which leaves it donates, and where arrays are put.

Donation and shardings are labels of leaves. Both follow from the call (which arguments, and what the
function writes), so each is worked out once for each `CallDef`. JAX needs the shardings of outputs
together with the function, and the outputs are known only after a trace: with shardings each kind of
call has a `jax.jit` object of its own, of one and the same function, which JAX traces once.
"""

from __future__ import annotations

import contextlib
import functools
import typing as tp
import weakref

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from nnxlite._base.interning import Bounded
from nnxlite._base.jax import constrained, is_tracing
from nnxlite.boundary._body import Body, body_outputs, trace_body
from nnxlite.boundary._call_def import CallDef, Operands, Partition, describe, enter, leaf_names
from nnxlite.boundary._inputs import Inputs
from nnxlite.boundary._labels import leaf_shardings, output_settings
from nnxlite.boundary._leave import leave
from nnxlite.boundary._out import Outputs, replay, write_leaves
from nnxlite.boundary._refusals import refuse_foreign_outputs
from nnxlite.transforms._call import refuse_shared_result
from nnxlite.transforms._compiles import Traces
from nnxlite.transforms._finish import (
    R,
    checks_noted,
    has_several_cpus,
    note_check,
    owners,
    refuse_shared_buffers,
    run_donating,
    wait,
    wait_in_turn,
)
from nnxlite.transforms._mapping import marks_errors, passed_through
from nnxlite.transforms._wrapper import Transform, name_of, program_name, weakly
from nnxlite.variables._metadata import PLACEMENT

CALLS_WITH_SHARDINGS = 64

Crossing: tp.TypeAlias = tuple[tp.Any, ...]


class JitProgram:
    """The compiled side of one function under one set of options; shared by equal wrappers.

    Args:
        transform: one of them.

    Attributes:
        jitted: the `jax.jit` object, of `Operands` and, where leaves are donated, the list of these.
        plain: whether nothing is donated, and nothing has a sharding.
        traces: the log of its traces.
    """

    def __init__(self, transform: Transform[..., tp.Any]) -> None:
        fun, options = transform.bound.fun, transform.options
        self.options = options
        self.num_bound = len(transform.bound.args)
        self.name, self.fun = name_of(fun), weakly(fun)
        self.title = f"{options.name}({self.name})"
        self.donate, self.updates = options.donate, options.modes.updates
        self.in_shardings, self.out_shardings = options.in_shardings, options.out_shardings
        self.sharded = self.in_shardings is not None or self.out_shardings is not None
        self.plain = not (self.sharded or self.donate)
        self._checks = self._in_turn = False
        # Not on the CallDef, which outlives functions. JAX keeps the CallDefs of the programs in its
        # cache, and a plan those of its calls: an entry is needed no longer than one of the two.
        self._partitions: weakref.WeakKeyDictionary[CallDef, Partition]
        self._partitions = weakref.WeakKeyDictionary()
        self._traced: tuple[CallDef, Body] | None = None
        # The programs refer to their calls, so weak keys would keep both for ever.
        self._resolved: Bounded[CallDef, tuple[list[tp.Any], list[tp.Any]]]
        self._resolved = Bounded(CALLS_WITH_SHARDINGS)
        # Each with the structure of the outputs that it has shardings for.
        self._placed: Bounded[CallDef, tuple[tp.Any, tp.Any]] = Bounded(CALLS_WITH_SHARDINGS)
        # JAX's caches keep what a traced function refers to, tracers too, until the function dies: in a
        # circle, until the next garbage collection.
        find: tp.Any = weakref.ref(self)
        run = lambda operands, *donated: find().run(operands, *donated)
        names = lambda *groups: find().named(*groups)
        program = program_name(fun)
        self._run = describe(marks_errors(run) if self.sharded else run, fun, program, names)
        self.jitted = self.make()
        self.traces = Traces(self.title, fun, program, options.max_traces)

    def make(self, **shardings: tp.Any) -> tp.Any:
        """A `jax.jit` object for this function."""
        options = {**dict(self.options.jax_options), **shardings}
        if self.donate:
            options["donate_argnums"] = 1
            options["keep_unused"] = True  # so that XLA sees all users of a donated buffer
        return jax.jit(self._run, **options)

    def named(self, operands: Operands, *donated: tp.Any) -> tp.Iterator[tuple[str, tp.Any]]:
        """The leaves that JAX is given, by name."""
        call = operands.call
        for names, group in zip(self.groups(call, leaf_names(call)), (operands, *donated)):
            yield from zip(names, group)

    def run(self, operands: Operands, *donated: list[tp.Any]) -> Outputs | Crossing:
        """What JAX traces: enter, run, leave."""
        call, leaves = operands.call, operands.leaves
        if donated:
            leaves = self._partitions[call].join(leaves, *donated)
        checks = checks_noted()
        with self.traces.recorded(call, leaves):
            out = stay_in_place(call, leaves, self._outputs(call, leaves))
        self._in_turn = has_several_cpus()
        self._checks = self._checks or checks_noted() != checks
        is_array = self.options.is_array
        out = out if is_array is None else out.as_arrays(is_array)
        return _crossing(out) if self.donate else out

    def _outputs(self, call: CallDef, leaves: list[tp.Any]) -> Outputs:
        traced, self._traced = self._traced, None
        if traced is not None and traced[0] is call and traced[1].accepts(leaves):
            return traced[1](leaves)  # it was traced to know what is donated
        tree, inner = enter(call, leaves)
        donated = self.donated(call) if self.donate else ()
        out = leave(inner, self.result(*tree), all_written=donated, structure=self.updates)
        if self.options.is_array is None:
            refuse_foreign_outputs(call, out, self.name)
        return out

    def result(self, args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]) -> tp.Any:
        """The result of the function for the rebuilt arguments of a call."""
        result = self.fun()(*args, **kwargs)
        refuse_shared_result(result, "jit", self.options.modes.graph)
        return result

    def finish(self, inputs: Inputs, out: Outputs) -> tp.Any:
        """Write back what left the function, where a check in it may fail only once that is there."""
        if self._checks and not wait(out):
            note_check()  # of the function around this one, whose trace may not run the check again
        if self._in_turn:
            wait_in_turn(out.values)
        return replay(inputs, out)

    def __call__(self, inputs: Inputs, call: CallDef) -> tp.Any:
        """Run and write back, where something is donated or has a sharding."""
        moved = self._move(call, inputs)
        groups = self.groups(call, inputs.leaves)

        def finish(out: Outputs) -> tp.Any:
            write_leaves(inputs, moved)
            return self.finish(inputs, out)

        jitted = functools.partial(self._call_placed, call) if self.sharded else self.jitted
        return self.call_jitted(jitted, call, groups, finish)

    def call_jitted(
        self,
        jitted: tp.Callable[..., tp.Any],
        call: CallDef,
        groups: tp.Sequence[tp.Any],
        finish: tp.Callable[[Outputs], R],
    ) -> R:
        """Call one of JAX's functions, and finish with what it returns."""
        if self.donate:
            texts = lambda: [f"'{leaf.text()}'" for leaf in call.leaves()]
            named = lambda: zip(texts(), self._partitions[call].join(*groups))
            try:
                whole = lambda left: finish(Outputs(*left))
                return run_donating(jitted, groups, whole, named)
            except (ValueError, RuntimeError):  # which of the two depends on JAX
                self._refuse_shared_buffers(call, self._partitions[call].join(*groups))
                raise
        return finish(jitted(*groups))

    def jits(self) -> list[tp.Any]:
        """All `jax.jit` objects."""
        return [self.jitted, *(jitted for jitted, _ in tuple(self._placed.values()))]

    def clear_cache(self) -> None:
        """Drop all compiled programs."""
        for jitted in self.jits():
            jitted.clear_cache()
        self._placed.clear()
        self._resolved.clear()

    def _cache_size(self) -> int:
        return sum(jitted._cache_size() for jitted in self.jits())

    # donated leaves ----------------------------------------------------------------------------

    def groups(self, call: CallDef, leaves: list[tp.Any]) -> tuple[tp.Any, ...]:
        """Leaves in the groups that are passed to JAX, the first as `Operands`."""
        if not self.donate:
            return (Operands(call, leaves),)
        partition = self._partitions.get(call)
        if partition is None:
            flags = tuple(self._choose_donated(call, leaves))
            partition = self._partitions[call] = Partition(flags, (False, True))
            # XLA refuses it, too, but in a first call only after JAX's warnings.
            self._refuse_shared_buffers(call, leaves)
        kept, donated = partition.split(leaves)
        return Operands(call, kept), donated

    def _refuse_shared_buffers(self, call: CallDef, leaves: list[tp.Any]) -> None:
        donated = self._partitions[call].positions[1]
        refuse_shared_buffers(self.title, call, leaves, donated)

    def _choose_donated(self, call: CallDef, leaves: list[tp.Any]) -> list[bool]:
        if self.donate == "written":
            run = lambda inner, tree: (body_outputs(inner, self.result(*tree), self.updates), None)
            body = trace_body(call, run, leaves, user=self.fun())
            self._traced = (call, body)
            written = set(body.definition.written)
            return [leaf.graph_leaf in written for leaf in call.leaves()]
        found = owners(call, self.num_bound)
        if isinstance(self.donate, str):  # of `filter_jit`
            return [owner != 0 or not self.donate.endswith("except-first") for owner in found]
        chosen = self.donate.names | self.donate.numbers
        return [owner in chosen for owner in found]

    def donated(self, call: CallDef) -> list[int]:
        """The graph leaves that are donated in a kind of call."""
        flags = zip(call.leaves(), self._partitions[call].labels)
        numbers = [leaf.graph_leaf for leaf, donated in flags if donated]
        return [number for number in numbers if number is not None]

    # shardings ---------------------------------------------------------------------------------

    def jitted_for(self, call: CallDef, groups: tp.Sequence[tp.Any]) -> tp.Any:
        """The `jax.jit` object for a call: one for all, except where shardings are given."""
        if not self.sharded:
            return self.jitted
        return (self._placed.get(call) or self._place(call, groups))[0]

    def _place(self, call: CallDef, groups: tp.Sequence[tp.Any]) -> tuple[tp.Any, tp.Any]:
        """A new one, for the outputs with the given leaves; JAX does not trace again to run it."""
        shardings: dict[str, tp.Any] = {}
        if self.in_shardings is not None:
            shardings["in_shardings"] = self.groups(call, self._shardings_in(call)[0])
        out = self.make(**shardings).trace(*groups).out_info
        shardings["out_shardings"] = self._shardings_out(call, out)
        placed = self.make(**shardings), jax.tree_util.tree_structure(out)
        self._placed[call] = placed
        return placed

    def _call_placed(self, call: CallDef, *groups: tp.Any) -> tp.Any:
        """Call the function, whose result may have another structure for other shapes of leaves."""
        jitted, leaving = self._placed.get(call) or self._place(call, groups)
        try:
            return jitted(*groups)
        except ValueError as error:
            if passed_through(error):
                raise  # by the user's function, which runs no second time
            again, other = None, leaving
            with contextlib.suppress(Exception):
                again, other = self._place(call, groups)
            if again is None or other == leaving:
                raise
            return again(*groups)

    def _shardings_in(self, call: CallDef) -> tuple[list[tp.Any], list[tp.Any]]:
        """`in_shardings` of the leaves, and of the roots."""
        return self._resolved.found(call, lambda: leaf_shardings(call, self.in_shardings))

    def _shardings_out(self, call: CallDef, left: Outputs | Crossing) -> tp.Any:
        """The shardings of the outputs; what belongs to an argument keeps the argument's."""
        out = outputs_of(left)
        leaves, roots = self._shardings_in(call)
        asked, name = self.out_shardings, "out_shardings"
        values = call.by_side(leaves)[1]
        settings = output_settings(call, out, values, roots, asked, name, None)
        found = Outputs(out.definition, settings)
        return _crossing(found) if self.donate else found

    def _move(self, call: CallDef, inputs: Inputs) -> dict[int, tp.Any]:
        """Put uncommitted arrays where `in_shardings` says.

        JAX would do this in every call, and drop the result for arrays that are only read.
        Returns the values that moved, by leaf number.
        """
        if self.in_shardings is None or is_tracing():
            return {}
        before, shardings = inputs.values, self._shardings_in(call)[0]
        moved = [_put_if_uncommitted(*pair) for pair in zip(inputs.leaves, shardings)]
        inputs.arrays, inputs.values = call.whole(moved)
        pairs = zip(before, inputs.values)
        return {leaf: new for leaf, (old, new) in enumerate(pairs) if new is not old}


def _crossing(out: Outputs) -> Crossing:
    """The outputs of a call that donates, which JAX puts together without Python; see `Fixed`."""
    return tuple(out)


def outputs_of(left: Outputs | Crossing) -> Outputs:
    """The outputs in what JAX's function gives, whether it donates or not."""
    return Outputs(*tp.cast(tp.Any, left))


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
