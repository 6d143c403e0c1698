"""`filter_jit`: compile a function of anything; arrays are traced, all else is static."""

from __future__ import annotations

import contextlib
import typing as tp
import warnings

from nnxlite._base.jax import as_integer
from nnxlite._base.typing import P, R
from nnxlite.boundary._inputs import Inputs
from nnxlite.filtered._specs import (
    are_arrays,
    filtered,
    only_arrays,
)
from nnxlite.transforms._call import Selection
from nnxlite.transforms._jit import JitWrapped, Lowered, run_jit
from nnxlite.transforms._wrapper import decorated, inputs_in_mode
from nnxlite.variables._definition import MISSING

Donate = tp.Literal["all", "all-except-first", "warn", "warn-except-first", "none"]


@contextlib.contextmanager
def without_warnings(donate: str) -> tp.Iterator[None]:
    """Suppress JAX's warnings about buffers that are not reused, unless `donate=` asks for them."""
    if not donate.startswith("all"):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        yield


class FilterJit(JitWrapped[P, R]):
    """A compiled function, as `filter_jit` returns it: `jit` whose leaves may be static."""

    def _inputs(self, args: tp.Any, kwargs: tp.Any) -> Inputs:
        inputs = inputs_in_mode(self.bound, args, kwargs, self.options)
        # Training loops pass arrays only: no leaf needs a check of its own. That is 1.4x of `jax.jit`
        # for 72 arrays, and would be 2.3x (benchmarks/filtered.py).
        leaves = inputs.leaves
        if not only_arrays(leaves):
            inputs.make_static([not traced for traced in are_arrays(leaves)], self)
        return inputs

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered[R]:
        """Lower the function for these arguments, without running it."""
        with without_warnings(self.options.donate):
            return super().lower(*args, **kwargs)


def _run(jitted: FilterJit[..., tp.Any], args: tp.Any, kwargs: tp.Any) -> tp.Any:
    with without_warnings(jitted.options.donate):
        return run_jit(jitted, args, kwargs)


_NOT_TAKEN = (
    *("static_argnums", "static_argnames", "donate_argnums", "donate_argnames"),
    *("default", "fn", "args", "kwargs", "out"),
)
"""Options of `jax.jit`, and of early versions of Equinox, that say which arguments are static."""


@tp.overload
def filter_jit(fun: tp.Callable[P, R], **options: tp.Any) -> FilterJit[P, R]: ...
@tp.overload
def filter_jit(
    **options: tp.Any,
) -> tp.Callable[[tp.Callable[P, R]], FilterJit[P, R]]: ...
def filter_jit(
    fun: tp.Any = MISSING,
    *,
    donate: Donate = "none",
    max_traces: int | None = None,
    **jitkwargs: tp.Any,
) -> tp.Any:
    """Compile a function of any pytrees: arrays are traced, everything else is static.

    Arguments and results may be any pytrees and graph objects, with leaves of any type. What the
    function writes into objects stays there, as with `nnx.jit`. Equal static leaves compile once.

    Args:
        fun: the function; a bound method or callable object enters with its arrays traced. Without
            it a decorator is returned.
        donate: the arguments whose arrays the call may reuse: `"all"`, `"all-except-first"`, `"none"`;
            with `"warn"` and `"warn-except-first"` JAX warns of those it could not use.
        max_traces: how many times the function may be traced; one more raises RuntimeError with the
            reason.
        jitkwargs: as for `jax.jit`.

    Returns:
        A function of the same arguments, compiled for each structure of them; its methods `lower`,
        `explain`, `cache_info` and `clear_cache` are those of `nnx.jit`.

    Raises:
        ValueError: for a static leaf that is unhashable, and for options that say which arguments are
            static: pass `jnp.asarray(number)` to trace a number.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> @nnx.filter_jit
    ... def power(x, n, name):
    ...     return {name: x**n}
    >>> power(jnp.array(3.0), 2, "square")
    {'square': Array(9., dtype=float32, weak_type=True)}
    """
    for name in _NOT_TAKEN:
        if name in jitkwargs:
            raise ValueError(
                f"filter_jit takes no {name}=: arrays are traced, and all other leaves are static. "
                "Pass jnp.asarray(number) to trace a number, and use donate= to donate."
            )
    if not (isinstance(donate, str) and donate in tp.get_args(Donate)):
        raise ValueError(f"filter_jit: donate={donate!r}; it must be one of {tp.get_args(Donate)}.")
    donated = "" if donate == "none" else donate
    more = {
        "static": Selection(),
        "donate": donated,
        "in_shardings": None,
        "out_shardings": None,
        "jax_options": tuple(jitkwargs.items()),
        "max_traces": as_integer(max_traces),
    }
    run = _run if donated else run_jit
    return decorated(FilterJit, fun, filtered("filter_jit", run, **more))
