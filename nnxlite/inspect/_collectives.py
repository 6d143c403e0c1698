"""`collectives`: what the devices exchange in one run of a compiled program, by kind and bytes.

XLA decides where arrays are gathered, reduced and moved, from the shardings of arguments and results, so
that a wrong sharding costs time and raises no error.  The compiled program says what it decided.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import re
import typing as tp

from nnxlite._base.text import human_bytes
from nnxlite.inspect._hlo import Array, Program, Run, is_library
from nnxlite.inspect._tabulate import printed
from nnxlite.transforms._jit import jit

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
MAX_ROWS = 40
MAX_SCOPE = 60


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled program.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
            "collective-broadcast" or "ragged-all-to-all"; asynchronous ones count as these.
        arrays: dtype and shape of the arrays, such as `("f32[128,64]",)`, before they are scattered and
            after they are gathered: XLA combines several into one operation.
        bytes: the size of these arrays: what each device has of them at the larger end of the operation.
            It is the operand of an all-reduce, of a reduce-scatter, of an all-to-all and of a permute,
            and the result of an all-gather.
        group_size: how many devices take part in each instance of the operation.
        runs: how many times it runs in one run of the program; in loops, once for each iteration.
        runs_known: False in a loop whose number of iterations the program does not tell: that loop
            counts once.
        argument: the argument that is moved, such as "model.head.kernel"; empty if a computed value is.
        operation: the operation of the traced function, in the words of XLA's `op_name`.
        source: file and line of the innermost call outside of libraries; empty if unknown.

    >>> import nnxlite as nnx
    >>> gather = nnx.Collective("all-gather", ("f32[16,8]",), 512, group_size=8, runs=3)
    >>> gather.total_bytes, gather.sent_bytes
    (1536, 1344)
    """

    kind: str
    arrays: tuple[str, ...]
    bytes: int
    group_size: int
    runs: int = 1
    runs_known: bool = True
    argument: str = ""
    operation: str = ""
    source: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes of all runs."""
        return self.bytes * self.runs

    @property
    def sent_bytes(self) -> int:
        """What a device sends in all runs if the group is a ring.

        Of n devices, each sends (n - 1) / n of the bytes, and twice that in an all-reduce, which is a
        reduce-scatter and an all-gather. A permute sends all bytes once.
        """
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.total_bytes
        ways = 2 if self.kind == "all-reduce" else 1
        return ways * self.total_bytes * (self.group_size - 1) // max(self.group_size, 1)


@dataclasses.dataclass(frozen=True)
class Collectives:
    """The collective operations of one run of a program; `print` shows a table, the largest first.

    `"all-gather" in report` tells whether there is one of a kind.

    Attributes:
        entries: the operations, those with most bytes first.

    >>> import nnxlite as nnx
    >>> report = nnx.Collectives((nnx.Collective("all-reduce", ("f32[16]",), 64, group_size=8),))
    >>> report.by_kind, report.total_bytes, "all-gather" in report
    ({'all-reduce': 64}, 64, False)
    """

    entries: tuple[Collective, ...]

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes of all runs for each kind that occurs, the largest first."""
        totals = collections.Counter[str]()
        for entry in self.entries:
            totals[entry.kind] += entry.total_bytes
        return dict(totals.most_common())

    @property
    def runs(self) -> dict[str, int]:
        """How many operations of each kind run, in the order of `by_kind`."""
        return {kind: sum(e.runs for e in self.entries if e.kind == kind) for kind in self.by_kind}

    @property
    def total_bytes(self) -> int:
        """Bytes of all runs of all operations, for each device."""
        return sum(entry.total_bytes for entry in self.entries)

    @property
    def sent_bytes(self) -> int:
        """What each device sends if every group is a ring."""
        return sum(entry.sent_bytes for entry in self.entries)

    @property
    def runs_known(self) -> bool:
        """Whether the number of iterations is known of all loops with collectives."""
        return all(entry.runs_known for entry in self.entries)

    def __contains__(self, kind: object) -> bool:
        if kind not in KINDS:
            raise ValueError(
                f"{kind!r} is not a kind of collective. The kinds are {', '.join(KINDS)}."
            )
        return any(entry.kind == kind for entry in self.entries)

    def __str__(self) -> str:
        if not self.entries:
            return "no collectives\n"
        from rich.table import Table

        table = Table()
        for title in ("collective", "runs", "bytes", "", "devices", "array", "of", "at"):
            right = title in ("runs", "bytes", "", "devices")
            table.add_column(title, justify="right" if right else "left", no_wrap=right)
        for kind, size in self.by_kind.items():
            table.add_row(kind, f"{self.runs[kind]:,}", f"{size:,}", human_bytes(size))
        table.add_section()
        least = "" if self.runs_known else "at least "
        total = f"{least}{self.total_bytes:,}"
        table.add_row("total", f"{sum(self.runs.values()):,}", total, human_bytes(self.total_bytes))
        table.add_section()
        for entry in self.entries[:MAX_ROWS]:
            table.add_row(*_cells(entry))
        if rest := self.entries[MAX_ROWS:]:
            size = sum(entry.total_bytes for entry in rest)
            runs = sum(entry.runs for entry in rest)
            table.add_row(f"{len(rest)} more", f"{runs:,}", f"{size:,}", human_bytes(size))
        return printed(table)


def _cells(entry: Collective) -> tuple[str, ...]:
    first, *others = entry.arrays or ("",)
    if others:
        same = set(others) == {first}
        first = f"{len(entry.arrays)} x {first}" if same else f"{first} and {len(others)} more"
    return (
        entry.kind,
        f"{entry.runs:,}" if entry.runs_known else f"{entry.runs:,}?",
        f"{entry.total_bytes:,}",
        human_bytes(entry.total_bytes),
        str(entry.group_size),
        _plain(first),
        _plain(entry.argument or _scope(entry.operation)),
        _plain(os.path.basename(entry.source)),
    )


def _plain(text: str) -> str:
    """Text that rich takes for no markup."""
    from rich.markup import escape

    return escape(text)


def _scope(operation: str) -> str:
    """An operation without the parts that say nothing about the user's function."""
    parts = re.sub(r"^jit\([^/]*\)/", "", operation).split("/")
    dull = ("while", "body", "closed_call", "eval_jaxpr", "checkpoint", "rematted_computation")
    scope = "/".join(part for part in parts if part not in dull)
    return scope if len(scope) <= MAX_SCOPE else f"{scope[: MAX_SCOPE - 3]}..."


def collectives(step: tp.Any, *args: tp.Any, **kwargs: tp.Any) -> Collectives:
    """What the devices exchange in one run of a step: kind, bytes, how often, and where it comes from.

    The step is compiled for the given arguments, and not run. Bytes are those of one device: the
    size of the larger end of each operation, which is the whole gradient for an all-reduce and the
    gathered array for an all-gather (see `Collective.bytes`), times the number of runs.

    XLA decides for the devices that it compiles for: for CPUs, the program has an all-reduce and a
    slice where that for a GPU or TPU has a reduce-scatter.

    Args:
        step: a function of `nnx.jit` or `jax.jit`; any other is compiled by `nnx.jit`. Or a stage of
            one: what `trace`, `lower` or `compile` returned.
        args, kwargs: the arguments of the step, none for a stage. They, and models among them, may be
            abstract: a `jax.ShapeDtypeStruct` with a sharding for each array.

    Returns:
        A `Collectives`, with the fields `entries`, `by_kind`, `runs` and `total_bytes`; as text, a
        table.

    Raises:
        TypeError: if `step` is neither, or a stage is given arguments.

    >>> import nnxlite as nnx, jax
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> x = jax.ShapeDtypeStruct((16, 4), "float32", sharding=NamedSharding(mesh, PartitionSpec("data")))
    >>> report = nnx.collectives(lambda x: x.sum(axis=0), x)
    >>> report.by_kind
    {'all-reduce': 16}
    >>> assert "all-gather" not in report
    """
    program = Program(_compiled(step, args, kwargs).as_text())
    opcodes = {kind + suffix for kind in KINDS for suffix in ("", "-start")}
    entries = [_entry(program, run) for run in program.runs(opcodes)]
    return Collectives(tuple(sorted(entries, key=lambda e: (-e.total_bytes, e.kind, e.source))))


def _compiled(step: tp.Any, args: tuple[tp.Any, ...], kwargs: dict[str, tp.Any]) -> tp.Any:
    """The compiled stage of a function, or of an earlier stage."""
    staged = hasattr(step, "as_text") or hasattr(step, "jaxpr")
    if staged:
        if args or kwargs:
            raise TypeError(
                f"collectives: {type(step).__name__} is a stage, which has its arguments already. Give "
                "the function to compile it for others: nnx.collectives(step, *args)."
            )
        lowered = step if hasattr(step, "as_text") else step.lower()
        return lowered.compile() if hasattr(lowered, "compile") else lowered
    if not callable(step):
        raise TypeError(
            f"collectives: expected a function as step, got {type(step).__name__}. Give its arguments "
            "after it: nnx.collectives(step, model, optimizer, *batch)."
        )
    jitted: tp.Any = step if hasattr(step, "lower") else jit(step)
    return jitted.lower(*args, **kwargs).compile()


def _entry(program: Program, run: Run) -> Collective:
    instruction = run.instruction
    kind = instruction.opcode.removesuffix("-start")
    group_size = _group_size(instruction.attributes, program.num_devices)
    computation = program.computations[run.computation]
    found = [a for x in instruction.operands if x in computation for a in computation[x].arrays]
    if kind == "all-gather":
        found = [_gathered(array, instruction.attributes, group_size) for array in found]
    return Collective(
        kind,
        tuple(map(str, found)),
        sum(array.bytes for array in found),
        group_size,
        run.times,
        run.known,
        program.argument(run),
        instruction.op_name,
        program.source(run, is_library),
    )


def _gathered(array: Array, attributes: str, group_size: int) -> Array:
    """The result of gathering an array from a group."""
    match = re.search(r"\bdimensions=\{(\d+)\}", attributes)
    axis = int(match[1]) if match else 0
    shape = (n * group_size if i == axis else n for i, n in enumerate(array.shape))
    return array._replace(shape=tuple(shape))


def _group_size(attributes: str, num_devices: int) -> int:
    """How many devices take part together.

    XLA writes groups as lists `{{0,1},{2,3}}`, as `[groups,size]<=[...]`, as axes of a mesh, or as
    `{}` for all devices; a permute has pairs of source and target.
    """
    if match := re.search(r"source_target_pairs=\{(.*?)\}\}", attributes):
        return _chain(dict(re.findall(r"\{(\d+),(\d+)", match[0])))
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return match[1].count(",") + 1
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(match[1])
    if match := re.search(r"replica_groups=mesh\[(.*?)\].*?\{(.*?)\}", attributes):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", match[1]))
        named = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", match[2])
        return math.prod(int(part or sizes[axis]) for axis, part in named)
    return num_devices


def _chain(targets: dict[str, str]) -> int:
    """How many devices a permute connects, in its longest chain or ring."""
    received = set(targets.values())
    longest, seen = 1, set[str]()
    for device in sorted(targets, key=received.__contains__):  # chains from their starts
        length = 0
        while device in targets and device not in seen:
            seen.add(device)
            device, length = targets[device], length + 1
        longest = max(longest, length + (device not in targets))
    return longest
