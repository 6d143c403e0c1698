"""`nnx.tracers`: the current JAX trace."""

from __future__ import annotations

from nnxlite._base.jax import describe_trace, trace_state


def current_jax_trace() -> object:
    """An object that identifies the current trace; the same one as long as the trace runs."""
    return trace_state.value


class TraceState:
    """The trace that was current when this was made.

    >>> import nnxlite as nnx, jax
    >>> outside = nnx.tracers.TraceState()
    >>> jax.eval_shape(lambda: print(outside.is_valid(), nnx.tracers.TraceState().is_valid()))
    False True
    """

    __slots__ = ("_jax_trace",)

    def __init__(self) -> None:
        self._jax_trace = current_jax_trace()

    @property
    def jax_trace(self) -> object:
        """An object that identifies the trace."""
        return self._jax_trace

    def is_valid(self) -> bool:
        """Whether the trace is the current one."""
        return self._jax_trace is trace_state.value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TraceState) and other._jax_trace is self._jax_trace

    def __hash__(self) -> int:
        return hash(id(self._jax_trace))

    def __repr__(self) -> str:
        return f"TraceState({describe_trace(self._jax_trace)})"  # type: ignore[arg-type]
