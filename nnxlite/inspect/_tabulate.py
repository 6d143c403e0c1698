"""`tabulate`: a model as a table, with a row for each object that is called."""

from __future__ import annotations

import io
import sys
import types
import typing as tp

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nnxlite._base.text import human_bytes, safely, short
from nnxlite.graph._walk import iter_graph
from nnxlite.inspect._calls import CallInfo, Path, field_text, is_called, layout, trace_calls
from nnxlite.objects._rngs import RngStream
from nnxlite.variables._variable import Variable

Options = tp.Mapping[str, tp.Any]
RowFilter = tp.Callable[[CallInfo], bool]
Totals = dict[str, tuple[int, int]]

_NONE: Options = types.MappingProxyType({})


def filter_rng_streams(row: CallInfo) -> bool:
    """The default `row_filter` of `tabulate`: every call but those of random streams."""
    return not issubclass(row.type, RngStream)


def tabulate(
    obj: tp.Any,
    *input_args: tp.Any,
    depth: int | None = None,
    method: str = "__call__",
    row_filter: RowFilter = filter_rng_streams,
    table_kwargs: Options = _NONE,
    column_kwargs: Options = _NONE,
    console_kwargs: Options = _NONE,
    compute_flops: bool = False,
    compute_vjp_flops: bool = False,
    **input_kwargs: tp.Any,
) -> str:
    """A table of the calls inside one call of a model, with the Variables of each callee.

    The call is traced for its shapes only, on a copy: it computes nothing and does not change the
    model.  Each row is a call of `__call__` or of a public method, the first one with inputs of this
    form: path, class, inputs, outputs, and for each kind of Variable the object's own ones, then
    the number of elements and bytes of these and all below.  Where a layer computes in another dtype
    than it stores its parameters in, there is a column for both.

    Args:
        obj: a module.
        input_args, input_kwargs: arguments of the call; arrays may be `jax.ShapeDtypeStruct`.
        depth: omit the objects whose path is longer.
        method: the method to call.
        row_filter: called with a `CallInfo`; rows for which it returns False are omitted.
        table_kwargs: options for `rich.table.Table`.
        column_kwargs: options for its `add_column`.
        console_kwargs: options for `rich.console.Console`; `force_terminal=True` adds the codes for
            colours, `width` limits the width: longer texts are folded.
        compute_flops: add a column with the floating-point operations needed for the results of each
            call, as XLA counts them before optimisation (the body of a loop once).
        compute_vjp_flops: add a column with those of the call and its gradient together.

    Returns:
        The table as text without colours.  It is as wide as its content, unless the output is a
        terminal.  A Variable that is shared counts once, in the row of the first object that has it; the
        last line has the sum of each column.

    Raises:
        ValueError: if `obj` is not a graph object, or `depth` is negative.
        AttributeError: if `obj` does not have this method.

    >>> import nnxlite as nnx, jax
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> x = jax.ShapeDtypeStruct((5, 2), "float32")
    >>> table = nnx.tabulate(model, x)
    >>> print("\\n".join(table.splitlines()[1:8]))
    ┏━━━━━━┳━━━━━━━━┳━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━┓
    ┃ path ┃ type   ┃ inputs       ┃ outputs      ┃ Param                ┃
    ┡━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━┩
    │      │ Linear │ float32[5,2] │ float32[5,3] │ bias: float32[3]     │
    │      │        │              │              │ kernel: float32[2,3] │
    │      │        │              │              │                      │
    │      │        │              │              │ 9 (36 B)             │
    """
    if depth is not None and depth < 0:
        raise ValueError(
            f"depth={depth}: expected the length of the longest path to show, 0 or more, or None."
        )
    wanted = {"flops": compute_flops, "vjp_flops": compute_vjp_flops}
    costs = [name for name, is_wanted in wanted.items() if is_wanted]
    calls = trace_calls(obj, method, input_args, input_kwargs, depth=depth, costs=costs)
    rows = [row for row in calls if row_filter(row)]
    return printed(_table(obj, rows, costs, table_kwargs, column_kwargs), console_kwargs)


# Counting ------------------------------------------------------------------------------------


class _Contents(tp.NamedTuple):
    """The Variables of an object: totals for each kind, and text lines for its own ones."""

    totals: Totals
    own: dict[str, list[str]]


def _contents(node: tp.Any, owners: tp.Mapping[int, Path], where: Path) -> _Contents:
    """What is in the object at a path; Variables owned by another object do not count."""
    totals: Totals = {}
    own: dict[str, list[str]] = {}
    nodes = list(iter_graph(node))
    inner = {path for path, value in nodes if path and is_called(value)}
    for path, variable in nodes:
        tally = variable.__nnx_text__().tally if isinstance(variable, Variable) else None
        if tally is None:
            continue
        kind, count, size = tally
        owner = owners[id(variable)]
        is_own = not any(path[:length] in inner for length in range(1, len(path)))
        if owner[: len(where)] == where:
            n, b = totals.get(kind, (0, 0))
            totals[kind] = (n + count, b + size)
        if is_own:
            line = _variable_line(path, variable)
            if owner != (*where, *path):
                line = f"{_path_text(path)}: shared with {_path_text(owner)}"
            own.setdefault(kind, []).append(line)
    return _Contents(totals, own)


def _path_text(path: Path) -> str:
    return "/".join(map(str, path))


def _variable_line(path: Path, variable: tp.Any) -> str:
    value, *metadata = variable.__nnx_text__().entries
    line = field_text(_path_text(path), value.child)
    notes = ", ".join(f"{entry.key}={short(entry.child)}" for entry in metadata)
    return f"{line} ({notes})" if notes else line


# The table -----------------------------------------------------------------------------------


def _table(
    obj: tp.Any,
    rows: list[CallInfo],
    costs: list[str],
    table_kwargs: Options,
    column_kwargs: Options,
) -> Table:
    paths = {id(node): (path, node) for path, node in iter_graph(obj)}
    owners = {key: path for key, (path, _) in paths.items()}
    contents = {
        row.object_id: _contents(paths[row.object_id][1], owners, owners[row.object_id])
        for row in rows
    }
    totals = _contents(obj, owners, ()).totals
    kinds = sorted(totals)
    everything = (sum(n for n, _ in totals.values()), sum(b for _, b in totals.values()))
    options = {
        "title": f"{type(obj).__name__} Summary",
        "caption": Text("\nTotal Parameters: ", style="bold").append_text(_size(*everything)),
        "caption_style": "",
        "show_lines": True,
        "show_footer": True,
        **table_kwargs,
    }
    table = Table(**options)
    dtypes = {row.object_id: _dtypes(paths[row.object_id][1]) for row in rows}
    in_others = any(stored != computed for stored, computed in filter(all, dtypes.values()))
    facts = ["path", "type", *["params / compute"] * in_others, "inputs", "outputs"]
    column: Options = {"overflow": "fold", **column_kwargs}
    for name in facts:
        last = Text("Total", style="bold", justify="right") if name == facts[-1] else ""
        table.add_column(name, footer=last, **column)
    for cost in costs:  # that of the outermost call includes the others
        whole = f"{getattr(rows[0], cost):,}" if rows and not rows[0].path else ""
        table.add_column(cost, footer=Text(whole, style="bold"), **{"justify": "right", **column})
    for kind in kinds:
        table.add_column(kind, footer=_size(*totals[kind]), **column)
    for row in rows:
        cells: list[tp.Any] = [Text(_path_text(row.path)), Text(row.type.__name__)]
        cells += [Text(" / ".join(dtypes[row.object_id]).strip(" /"))] * in_others
        outputs = "" if row.outputs is None else layout(row.outputs)
        cells += [_shapes(row.inputs_repr), _shapes(outputs)]
        cells += [Text(f"{getattr(row, cost):,}") for cost in costs]
        table.add_row(*cells, *(_kind_cell(contents[row.object_id], kind) for kind in kinds))
    return table


def _dtypes(node: tp.Any) -> tuple[str, str]:
    """The names of the dtypes in which a layer stores its parameters and computes; empty if unknown."""
    given = (getattr(node, "__dict__", {}).get(name) for name in ("param_dtype", "dtype"))
    name = lambda dtype: np.dtype(dtype).name
    stored, computed = (str(safely(name, x)) if x is not None else "" for x in given)
    return stored, computed


def _kind_cell(contents: _Contents, kind: str) -> Text:
    parts = []
    if kind in contents.own:
        parts.append(_shapes("\n".join(contents.own[kind])))
    if kind in contents.totals:
        parts.append(_size(*contents.totals[kind]))
    return Text("\n\n").join(parts)


def _shapes(text: str) -> Text:
    """Text in which the dtypes before shapes are dimmed."""
    shown = Text(text)
    shown.highlight_regex(r"[\w<>]+(?=\[[\d,]*\])", "dim")
    return shown


def _size(count: int, size: int) -> Text:
    return Text(f"{count:,} ", style="bold").append(f"({human_bytes(size)})", style="bold dim")


def printed(table: Table, console_kwargs: Options = _NONE) -> str:
    """The table as text, as wide as necessary unless a terminal or the caller sets a limit."""
    defaults = {"file": io.StringIO(), "force_terminal": False, "force_jupyter": False}
    if not _is_terminal(sys.stdout):
        defaults["width"] = 10_000  # a table takes what it needs
    console = Console(**{**defaults, **console_kwargs})
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def _is_terminal(stream: tp.Any) -> bool:
    """Whether a stream is a terminal; a closed one is not."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False
