"""`error_if`: errors that depend on values, under `jit` as well."""

from __future__ import annotations

import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.errors import JaxRuntimeError

from nnxlite._base.errors import RuntimeCheckError
from nnxlite._base.jax import is_recording
from nnxlite.filtered._crossing import leaves_of
from nnxlite.filtered._predicates import is_array, is_inexact_array
from nnxlite.transforms._finish import note_check, raise_failed

T = tp.TypeVar("T")
OnError = tp.Literal["default", "raise", "breakpoint", "nan", "off"]


def _nothing() -> None:
    """What is called beside a check: an effect.

    JAX calls a program without effects in another way from the second time on, and then raises an error
    of another class (a ValueError) for a callback that fails.
    """


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
    tree = leaves_of(x)
    if on_error == "nan":
        bad = jnp.any(jnp.asarray(pred))
        return tree.definition.build(
            [jnp.where(bad, jnp.nan, y) if is_inexact_array(y) else y for y in tree.leaves]
        )

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
    if not any(map(is_array, tree.leaves)):
        raise ValueError(
            "error_if: the condition is traced, and the tree has no array to carry the check. Pass "
            "an array that is used afterwards, and use the result."
        )
    pred = jnp.any(jnp.asarray(pred))
    index = jnp.max(jnp.asarray(index))
    note_check()
    if is_recording():
        jax.debug.callback(_nothing)
    try:
        fine = jax.pure_callback(
            check, jax.ShapeDtypeStruct((), bool), pred, index, vmap_method="broadcast_all"
        )
    except JaxRuntimeError as error:  # in an eager `vmap` or `grad`
        raise_failed(error)
        raise
    carry = lambda y: jnp.where(fine, y, jnp.zeros_like(y))
    return tree.definition.build([carry(y) if is_array(y) else y for y in tree.leaves])
