"""What a call may have to wait for: checks at run time (`error_if`), and programs in flight.

A callback of the compiled program checks the condition.  Where a callback raises, JAX raises an error of
its own class, whose text has that of the callback at its end; and it may do so later, when results are
read.  The transforms raise the user's error in its place.  A function that contains a check waits for
its results before it writes anything back: a failed call changes nothing.
"""

from __future__ import annotations

import itertools
import threading
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.errors import JaxRuntimeError

from nnxlite._base.errors import RuntimeCheckError
from nnxlite._base.jax import ARRAYS, is_concrete, is_recording
from nnxlite.boundary._inputs import Inputs

__all__ = ["branched_error_if", "error_if"]

T = tp.TypeVar("T")
OnError = tp.Literal["default", "raise", "breakpoint", "nan", "off"]


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


def error_if(x: T, pred: tp.Any, msg: str, *, on_error: OnError = "default") -> T:
    """The tree itself, with a check: an error when it is computed and a condition is true.

    The error is a `RuntimeCheckError` with this message: at once in eager code, and by the call in which
    the condition is true under a transform of this library. A function under JAX's own `jax.jit` raises
    JAX's `jax.errors.JaxRuntimeError`, of which `RuntimeCheckError` is one, with the message at its end.

    Args:
        x: any pytree, or a graph object. Its arrays carry the check, so use the returned tree.
        pred: the condition, one bool or an array of them, of which any is enough.
        msg: the message.
        on_error: `"raise"` (as `"default"`); `"breakpoint"` opens a debugger; `"nan"` gives NaN for
            floating-point arrays instead; `"off"` checks nothing.

    Returns:
        `x`, with the check in its arrays.

    Raises:
        ValueError: for a tree without arrays when the condition is traced.
        RuntimeCheckError: where the condition is true.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.error_if(jnp.array(1.0), False, "never")
    Array(1., dtype=float32, weak_type=True)
    """
    return branched_error_if(x, pred, 0, [msg], on_error=on_error)


def branched_error_if(
    x: T,
    pred: tp.Any,
    index: tp.Any,
    msgs: tp.Sequence[str],
    *,
    on_error: OnError = "default",
) -> T:
    """Like `error_if`, with the message chosen by an index, which may be traced.

    Args:
        x: any pytree, or a graph object. Its arrays carry the check, so use the returned tree.
        pred: the condition, one bool or an array of them, of which any is enough.
        index: number of the message; the largest, where it is an array.
        msgs: the messages.
        on_error: as for `error_if`.

    Returns:
        `x`, with the check in its arrays.

    Raises:
        RuntimeCheckError: where the condition is true.
        ValueError: for a tree without arrays when the condition is traced.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.branched_error_if(1.0, jnp.array(True), 1, ["first", "second"])
    Traceback (most recent call last):
    nnxlite._base.errors.RuntimeCheckError: second
    """
    if on_error not in tp.get_args(OnError):
        raise ValueError(f"on_error={on_error!r}; it must be one of {tp.get_args(OnError)}.")
    if on_error == "off":
        return x
    tree = Inputs(x, trees=True, inside=True)

    def changed(change: tp.Callable[[tp.Any], tp.Any]) -> T:
        new = [change(leaf) if isinstance(leaf, ARRAYS) else leaf for leaf in tree.leaves]
        return tree.definition.build(new)

    if on_error == "nan":
        bad = jnp.any(jnp.asarray(pred))
        is_inexact = lambda y: jnp.issubdtype(y.dtype, jnp.inexact)
        return changed(lambda y: jnp.where(bad, jnp.nan, y) if is_inexact(y) else y)

    def check(pred: tp.Any, index: tp.Any) -> tp.Any:
        if np.any(pred):
            chosen = np.broadcast_to(index, np.shape(pred))[np.asarray(pred, bool)]
            if on_error == "breakpoint":
                breakpoint()
            raise RuntimeCheckError(msgs[int(np.max(chosen))])
        return np.ones(np.shape(pred), bool)

    if not isinstance(pred, Tracer) and not isinstance(index, Tracer):
        check(np.asarray(pred), np.asarray(index))
        return x
    if not any(isinstance(leaf, ARRAYS) for leaf in tree.leaves):
        raise ValueError(
            "error_if: the condition is traced, and the tree has no array to carry the check. Pass "
            "an array that is used afterwards, and use the result."
        )
    pred = jnp.any(jnp.asarray(pred))
    index = jnp.max(jnp.asarray(index))
    note_check()
    if is_recording():
        # An effect: JAX calls a program without effects in another way from the second time on, and then
        # raises an error of another class (a ValueError) for a callback that fails.
        jax.debug.callback(lambda: None)
    try:
        fine = jax.pure_callback(
            check, jax.ShapeDtypeStruct((), bool), pred, index, vmap_method="broadcast_all"
        )
    except JaxRuntimeError as error:  # in an eager `vmap` or `grad`
        raise_failed(error)
        raise
    return changed(lambda y: jnp.where(fine, y, jnp.zeros_like(y)))


# Programs in flight -------------------------------------------------------------------------------
#
# On several CPU devices a call waits before there are too many.
#
# XLA runs the parts of a program, one for each device, on a pool of threads, and the parts meet in
# collectives. JAX starts a program without waiting for the one before. On a few cores with many virtual
# devices (`--xla_force_host_platform_device_count`) the parts of a few dozen programs then occupy the
# pool, a part that the others wait for gets no thread, and XLA ends the process after 40 seconds. It
# happens to loops that do not read their results, in plain JAX as well.
#
# Whether a process can have such programs is decided when a function is traced: elsewhere nothing is
# looked at in a call.

MOST_IN_FLIGHT = 4
"""How many programs are started on several CPU devices before one is waited for."""

_started = itertools.count(1)  # of the whole process, whose programs share the threads


def has_several_cpus() -> bool:
    """Whether this process has several CPU devices, real or virtual."""
    try:
        return jax.local_device_count("cpu") > 1
    except RuntimeError:  # no such backend
        return False


def wait_in_turn(outputs: tp.Iterable[tp.Any]) -> None:
    """Wait for each fourth program whose outputs are on several CPU devices.

    Args:
        outputs: of the program that was just started.
    """
    # One after the other: the first that is concrete decides.
    for leaf in itertools.chain.from_iterable(map(jax.tree_util.tree_leaves, outputs)):
        if is_concrete(leaf):
            devices = leaf.sharding.device_set
            if len(devices) > 1 and next(iter(devices)).platform == "cpu":
                if next(_started) % MOST_IN_FLIGHT == 0:
                    jax.block_until_ready(leaf)  # a program's outputs are ready together
            return
