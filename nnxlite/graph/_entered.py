"""The objects that were built inside the traces that are running: they are the models whose parts run.

A transform builds new objects from its arguments, and `merge` builds them under JAX's own transforms.
The outermost of them give a layer its path, for named scopes and for messages.  They are noted by the
trace, weakly: nothing here keeps an object, a tracer or a trace alive, and no frame is read.
"""

from __future__ import annotations

import threading
import typing as tp
import weakref

from nnxlite._jax import EAGER, TraceRef, trace_state
from nnxlite.graph._kinds import GraphNode


class _Entered(threading.local):
    """For each running trace of a thread, outermost first, the objects that were built in it."""

    def __init__(self) -> None:
        self.by_trace: list[tuple[TraceRef, weakref.WeakValueDictionary[int, tp.Any]]] = []


_entered = _Entered()


def note_entered(roots: tp.Iterable[tp.Any]) -> None:
    """Note objects that were built in the running trace; nothing outside of traces."""
    trace = trace_state.value
    if trace is EAGER:
        return
    by_trace = _entered.by_trace
    if not by_trace or by_trace[-1][0] is not trace:
        by_trace[:] = [pair for pair in by_trace if pair[0]() is not None and pair[0] is not trace]
        by_trace.append((trace, weakref.WeakValueDictionary()))
    objects = by_trace[-1][1]
    for root in roots:
        if isinstance(root, GraphNode):
            objects[id(root)] = root


def entered_objects() -> list[tp.Any]:
    """The objects built in the traces that are running, outermost trace first."""
    return [
        value
        for trace, objects in _entered.by_trace
        if trace() is not None
        for value in [*objects.values()]
    ]
