"""Around the run of a program: what is donated, run-time checks, and how many programs are in flight.

What `error_if` and the transforms agree on: the error of a condition, and who waits for it.

Under a transform the condition is checked by a callback of the compiled program.  Where a callback
raises, JAX raises an error of its own class, whose text has that of the callback at its end; and it may
do so later, when results are read.  The transforms raise the user's error in its place.  A function that
contains a check waits for its results before it writes anything back: a failed call changes nothing.

Programs in flight on several CPU devices: a call waits before there are too many.

XLA runs the parts of a program, one for each device, on a pool of threads, and the parts meet in
collectives. JAX starts a program without waiting for the one before. On a few cores with many virtual
devices (`--xla_force_host_platform_device_count`) the parts of a few dozen programs then occupy the
pool, a part that the others wait for gets no thread, and XLA ends the process after 40 seconds. It
happens to loops that do not read their results, in plain JAX as well.

Whether a process can have such programs is decided when a function is traced: elsewhere nothing is
looked at in a call.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import typing as tp

import jax
from jax.errors import JaxRuntimeError
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from nnxlite._base.errors import RuntimeCheckError, listed
from nnxlite._base.jax import Tracer, constrained, drop_hidden_frames, is_compiling
from nnxlite.boundary._call_def import CallDef, paths_of
from nnxlite.boundary._out import Outputs
from nnxlite.variables._definition import PLACEMENT

R = tp.TypeVar("R")

Owner: tp.TypeAlias = int | str | None
"""The number or name of an argument; None for one that the function carries."""


def owners(call: CallDef, num_bound: int) -> list[Owner]:
    """For each leaf of a call its argument."""

    def owner(by_name: int, key: tp.Any, *_: tp.Any) -> Owner:
        number = key if by_name else key - num_bound
        return number if by_name or number >= 0 else None

    paths = paths_of(call.treedef)
    return [owner(*paths[leaf.position]) for leaf in call.leaves()]


def refuse_shared_buffers(
    what: object,
    call: CallDef,
    leaves: tp.Sequence[tp.Any],
    donated: tp.Sequence[int],
) -> None:
    """Raise ValueError where one buffer would be donated twice, or donated and read.

    Args:
        what: the function, for the message.
        call: the arguments.
        leaves: theirs.
        donated: the positions of those that are donated.
    """
    if not (donated and is_compiling()):
        return  # nothing is donated
    first = {id(leaves[position]): position for position in reversed(donated)}
    for position, leaf in enumerate(leaves):
        donor = first.get(id(leaf), position)
        # JAX copies NumPy arrays, and equal Python scalars may be one object.
        if donor != position and isinstance(leaf, jax.Array):
            texts = [leaf.text() for leaf in call.leaves()]
            raise ValueError(
                f"{what}: the same array buffer is donated at '{texts[donor]}' and used at "
                f"'{texts[position]}'. A donated buffer can be used once: copy the array in one of the "
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


class _Noted(threading.local):
    """How many checks were traced in a thread."""

    count = 0


_noted = _Noted()


def note_check() -> None:
    """Note that a check is part of the function that is being traced."""
    _noted.count += 1


def checks_noted() -> int:
    """How many checks have been traced in this thread; more at the end of a trace than before it mean
    that the function has one.
    """
    return _noted.count


def wait(results: tp.Any) -> bool:
    """Wait for results, so that a failed check raises now; False where they are traced."""
    leaves = jax.tree_util.tree_leaves(results)
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        return False
    jax.block_until_ready(leaves)
    return True


def raise_failed(error: RuntimeError) -> None:
    """Raise the error of a condition that was true in place of JAX's; returns for any other error."""
    if isinstance(error, RuntimeCheckError):
        raise error from None
    if isinstance(error, JaxRuntimeError):
        _, found, message = str(error).partition(f"\n{RuntimeCheckError.__name__}: ")
        if found:
            raise RuntimeCheckError(message) from None


# Shardings that stay --------------------------------------------------------------------------------


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


# Programs in flight -------------------------------------------------------------------------------

MOST_IN_FLIGHT = 4
"""How many programs are started on several CPU devices before one is waited for."""

_started = itertools.count(1)  # of the whole process, whose programs share the threads


def has_several_cpus() -> bool:
    """Whether this process has several CPU devices, real or virtual."""
    try:
        return jax.local_device_count("cpu") > 1
    except RuntimeError:  # no such backend
        return False


def wait_in_turn(outputs: tp.Any) -> None:
    """Wait for each fourth program whose outputs are on several CPU devices.

    Args:
        outputs: of the program that was just started.
    """
    for leaf in jax.tree_util.tree_leaves(outputs):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            devices = leaf.sharding.device_set
            if len(devices) > 1 and next(iter(devices)).platform == "cpu":
                if next(_started) % MOST_IN_FLIGHT == 0:
                    jax.block_until_ready(leaf)  # a program's outputs are ready together
            return
