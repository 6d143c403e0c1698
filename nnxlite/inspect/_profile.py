"""`profile`: what a step costs, by the path of the modules: operations, bytes and measured time."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import pathlib
import re
import typing as tp
import warnings

import jax

from nnxlite._base.jax import called_programs, scope_of
from nnxlite._base.text import human_bytes
from nnxlite.inspect._calls import flops_of
from nnxlite.inspect._tabulate import printed
from nnxlite.transforms._jit import jit

OUTSIDE = "(outside of modules)"


@dataclasses.dataclass(frozen=True)
class Cost:
    """What the operations of one module cost, without the modules inside it.

    Attributes:
        flops: floating-point operations of the forward pass.
        backward_flops: those of the backward pass, repeated ones included.
        bytes: what all of them read and write, each by itself: XLA fuses many, which then need less.
        seconds: time of one run in a profiler's trace; None without one.
    """

    flops: int = 0
    backward_flops: int = 0
    bytes: int = 0
    seconds: float | None = None

    def __add__(self, other: Cost) -> Cost:
        known = [x.seconds for x in (self, other) if x.seconds is not None]
        return Cost(
            self.flops + other.flops,
            self.backward_flops + other.backward_flops,
            self.bytes + other.bytes,
            sum(known) if known else None,
        )

    def times(self, number: int) -> Cost:
        """The cost of as many runs (without a measured time)."""
        return Cost(number * self.flops, number * self.backward_flops, number * self.bytes)


Rows: tp.TypeAlias = collections.defaultdict[str, Cost]
"""Costs by module path, while they are added up."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """What a step costs by module path; `print` shows a table.

    Attributes:
        rows: the cost for each path, such as `Net/blocks/0/linear`, in the order of the calls; what no
            module did, such as the optimizer's work, is under `(outside of modules)`.
        total: the sum of all rows.
        runs: how many runs of the step the trace has, 0 without a trace.
        uncounted: names of operations whose floating-point operations XLA does not count.
    """

    rows: dict[str, Cost]
    total: Cost
    runs: int = 0
    uncounted: tuple[str, ...] = ()

    def to_depth(self, depth: int) -> Profile:
        """The profile with paths of at most `depth` names; deeper modules count towards their owner.

        Args:
            depth: the number of names, 1 for the whole model.

        Raises:
            ValueError: if `depth` is less than 1.
        """
        if depth < 1:
            raise ValueError(f"depth={depth}: expected the longest path to show, 1 name or more.")
        rows: Rows = collections.defaultdict(Cost)
        for path, cost in self.rows.items():
            rows["/".join(path.split("/")[:depth])] += cost
        return dataclasses.replace(self, rows=dict(rows))

    def __str__(self) -> str:
        from rich.table import Table

        table = Table("module", title=f"mean of {self.runs} runs" if self.runs else None)
        for name in ("FLOPs", "backward", "bytes", *(["time", ""] if self.runs else [])):
            table.add_column(name, justify="right")
        for path, cost in [*self.rows.items(), ("total", self.total)]:
            if path == "total":
                table.add_section()
            cells = [f"{cost.flops:,}", f"{cost.backward_flops:,}", human_bytes(cost.bytes)]
            if self.runs:
                time, whole = cost.seconds or 0.0, self.total.seconds or math.inf
                cells += [f"{time * 1e6:,.1f} us", f"{time / whole:.0%}"]
            table.add_row(path, *cells)
        return printed(table)


def profile(
    step: tp.Callable[..., tp.Any],
    *args: tp.Any,
    trace: str | os.PathLike[str] | None = None,
    **kwargs: tp.Any,
) -> Profile:
    """What a step costs by the path of the modules: floating-point operations, bytes, and time.

    The step is traced and not run.  Operations are counted as XLA counts them before it optimizes; the
    body of a scan as often as it runs, that of any other loop once, of a condition the costliest branch.

    Args:
        step: a function of models and arrays, jitted or not.
        args, kwargs: its arguments; arrays may be `jax.ShapeDtypeStruct`.
        trace: a folder that `jax.profiler.trace` wrote, or an `.xplane.pb` file in it, in which the
            jitted `step` runs with such arguments: adds the time of each module, a mean over all runs.
            Where XLA made one operation of several, the time counts for the module of the last.

    Returns:
        A `Profile`, with `rows` and `total`; as text, a table.

    Raises:
        TypeError: if `step` is not callable.
        FileNotFoundError: if there is no trace in the folder.
        ValueError: if the step does not run in the trace.

    >>> import nnxlite as nnx, jax
    >>> net = nnx.Sequential(nnx.Linear(2, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 1, rngs=nnx.Rngs(1)))
    >>> x = jax.ShapeDtypeStruct((5, 2), "float32")
    >>> costs = nnx.profile(lambda net, x: net(x), net, x)
    >>> print(costs)
    ┏━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━┳━━━━━━━━━━┳━━━━━━━┓
    ┃ module              ┃ FLOPs ┃ backward ┃ bytes ┃
    ┡━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━╇━━━━━━━━━━╇━━━━━━━┩
    │ Sequential/layers/0 │   200 │        0 │ 680 B │
    │ Sequential/layers/1 │    85 │        0 │ 264 B │
    ├─────────────────────┼───────┼──────────┼───────┤
    │ total               │   285 │        0 │ 944 B │
    └─────────────────────┴───────┴──────────┴───────┘
    >>> costs.rows["Sequential/layers/0"].flops
    200
    """
    if not callable(step):
        raise TypeError(
            f"profile: expected a function as step, got {type(step).__name__}. Give the arguments of "
            "the step after it: nnx.profile(step, model, optimizer, *batch)."
        )
    jitted: tp.Any = step if hasattr(step, "trace") else jit(step)
    traced = jitted.trace(*args, **kwargs)
    counter = _Counter()
    rows = counter.rows(traced.jaxpr.jaxpr, "")
    if OUTSIDE in rows:
        rows[OUTSIDE] = rows.pop(OUTSIDE)  # at the end
    runs = 0 if trace is None else _add_times(rows, traced.lower().compile(), pathlib.Path(trace))
    return Profile(dict(rows), sum(rows.values(), Cost()), runs, tuple(counter.uncounted))


# Paths -------------------------------------------------------------------------------------------

_PROGRAM = re.compile(r"\b(p?jit|shard_map)\([^()]*\)")
_TRANSFORM = re.compile(r"\b\w+\(([^()]*)\)")
_REPEATED = {"checkpoint", "rematted_computation"}
_FLOW = re.compile(r"(while|body|cond|scan|closed_call|custom_[jv]+p_call|branch_\d+_fun)$")
"""Names that XLA adds for control flow."""


def module_path(scope: str) -> str:
    """The path in a named scope, which also has transforms and what they repeat.

    >>> from nnxlite.inspect._profile import module_path
    >>> module_path("transpose(jvp(Net))/blocks/0/jvp(Net)/blocks/0/linear")
    'Net/blocks/0/linear'
    """
    scope = _PROGRAM.sub("", scope)
    while scope != (scope := _TRANSFORM.sub(r"\1", scope)):
        pass
    names = [name for name in scope.split("/") if name and name not in _REPEATED]
    if not names:
        return OUTSIDE
    last = len(names) - 1 - names[::-1].index(names[0])
    return "/".join(names[last:])


# Operations --------------------------------------------------------------------------------------


class _Counter:
    """Counts the operations of programs.

    Attributes:
        uncounted: names of primitives whose floating-point operations XLA does not count.
    """

    def __init__(self) -> None:
        self.uncounted: dict[str, None] = {}
        self._known: dict[tp.Any, int | None] = {}

    def rows(self, jaxpr: tp.Any, scope: str) -> Rows:
        """The cost of a program by module path."""
        rows: Rows = collections.defaultdict(Cost)
        for eqn in jaxpr.eqns:
            here = f"{scope}/{scope_of(eqn)}"
            parts = [self.rows(program, here) for program in called_programs(eqn)]
            if eqn.primitive.name == "cond":
                parts = [max(parts, key=_work)]
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            for path, cost in [pair for part in parts for pair in part.items()]:
                rows[path] += cost.times(times)
            if not parts:
                rows[module_path(here)] += self._cost(eqn, "transpose(" in here)
        return rows

    def _cost(self, eqn: tp.Any, backward: bool) -> Cost:
        key = (eqn.primitive.name, str(eqn.params), *[str(var.aval) for var in eqn.invars])
        if key not in self._known:
            self._known[key] = _flops(eqn)
        flops = self._known[key]
        if flops is None:
            self.uncounted[eqn.primitive.name] = None
        size = sum(map(_size, (*eqn.invars, *eqn.outvars)))
        return Cost(0, flops or 0, size) if backward else Cost(flops or 0, 0, size)


def _work(rows: Rows) -> int:
    return sum(cost.flops + cost.backward_flops + cost.bytes for cost in rows.values())


def _flops(eqn: tp.Any) -> int | None:
    """The floating-point operations of an equation, as XLA counts them; None if it cannot."""
    shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.invars]
    try:
        return flops_of(lambda *xs: eqn.primitive.bind(*xs, **eqn.params), *shapes)
    except Exception:  # it needs a mesh, or is compiled for another platform
        return None


def _size(var: tp.Any) -> int:
    dtype = getattr(var.aval, "dtype", None)
    return math.prod(var.aval.shape) * dtype.itemsize if dtype is not None else 0


# Times -------------------------------------------------------------------------------------------


def _add_times(rows: Rows, compiled: tp.Any, trace: pathlib.Path) -> int:
    """Add the mean time of each path in a profiler's trace; returns the number of runs."""
    text = compiled.as_text()
    program = re.match(r"HloModule ([^\s,]+)", text)
    name = program.group(1) if program else ""
    scopes = dict(re.findall(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*op_name="([^"]*)"', text, re.M))
    spent: dict[str, float] = collections.defaultdict(float)
    runs: set[tp.Any] = set()
    for event, stats in _events(_trace_file(trace)):
        if stats.get("hlo_module") != name:
            continue
        runs.add(stats.get("run_id"))
        operation = str(stats["hlo_op"])
        if not _FLOW.match(operation.partition(".")[0]):  # the operations in it have their own
            spent[_known_path(scopes.get(operation, ""), rows)] += event.duration_ns * 1e-9
    if not runs:
        raise ValueError(
            f"profile: the program {name!r} does not run in the trace {str(trace)!r}. Record calls of "
            "the jitted function itself, with such arguments: "
            "with jax.profiler.trace(folder): jax.block_until_ready(step(...))."
        )
    for path, seconds in spent.items():
        rows[path] += Cost(seconds=seconds / len(runs))
    return len(runs)


def _trace_file(trace: pathlib.Path) -> str:
    """The newest trace in a folder."""
    if trace.is_file():
        return str(trace)
    found = sorted(trace.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise FileNotFoundError(
            f"profile: there is no trace (*.xplane.pb) in {str(trace)!r}. Write one: "
            "with jax.profiler.trace(folder): jax.block_until_ready(step(...))."
        )
    return str(found[-1])


def _events(file: str) -> list[tuple[tp.Any, dict[str, tp.Any]]]:
    """The operations of programs in a trace."""
    data = jax.profiler.ProfileData.from_file(file)
    events = (event for plane in data.planes for line in plane.lines for event in line.events)
    with warnings.catch_warnings():  # Python warns of JAX's own types; as an error that is fatal
        warnings.simplefilter("ignore", DeprecationWarning)
        found = [(event, dict(event.stats)) for event in events]
    return [(event, stats) for event, stats in found if "hlo_op" in stats]


def _known_path(op_name: str, rows: tp.Container[str]) -> str:
    """The row for the name of an operation: scopes, control flow between them, and the primitive."""
    scope, _, _ = op_name.rpartition("/")
    for names in (scope, "/".join(n for n in scope.split("/") if not _FLOW.match(n))):
        path = module_path(names)
        if path in rows:
            return path
    return OUTSIDE
