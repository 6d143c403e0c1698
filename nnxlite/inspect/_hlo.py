"""Reading the text of an optimized XLA program: instructions, loops, and where they come from.

`compiled.as_text()` is the public form of a compiled program.  It is a list of computations, one of
them the entry; an instruction is a line `%name = type opcode(operands), attributes`.  Loops, branches
and fusions name the computations that they run.  Before the computations come tables of source
positions.
"""

from __future__ import annotations

import functools
import math
import os
import re
import typing as tp

HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
ARRAY = re.compile(r"\b([a-z]+[0-9]\w*|pred)\[([\d,<=]*)\]")
NAME = re.compile(r"%([\w.\-]+)")
CALLED = re.compile(
    r"\b(?:body|condition|calls|to_apply|true_computation|false_computation|branch_computations"
    r"|called_computations)=(\{[^}]*\}|%[\w.\-]+)"
)
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
TABLE_ROW = re.compile(r"^(\d+) (.*)$")

MOVES = frozenset(
    "bitcast convert copy copy-start copy-done dynamic-slice get-tuple-element optimization-barrier "
    "reshape slice transpose".split()
)
"""Opcodes whose result is their first operand, moved, cut or cast."""


class Array(tp.NamedTuple):
    """An array type: `f32[8,4]`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size."""
        bits = re.search(r"\d+", self.dtype)
        return math.ceil(math.prod(self.shape) * (int(bits[0]) if bits else 8) / 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Instruction(tp.NamedTuple):
    """One line of a computation."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @property
    def arrays(self) -> list[Array]:
        """The arrays of the result."""
        return [
            Array(dtype, tuple(int(n.lstrip("<=")) for n in dims.split(",") if n))
            for dtype, dims in ARRAY.findall(self.type)
        ]

    @property
    def called(self) -> list[str]:
        """The computations that it names."""
        found = CALLED.findall(self.attributes)
        return [name for part in found for name in NAME.findall(part)]

    @property
    def op_name(self) -> str:
        """The operation of the traced function that it comes from."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""


Computation = dict[str, Instruction]


class Run(tp.NamedTuple):
    """An instruction, the computations that lead to it from the entry, and how often it runs.

    `known` is False where the number of iterations of a loop around it is not in the program; such a
    loop counts once.
    """

    instruction: Instruction
    computation: str
    times: int
    known: bool


class Program:
    """A parsed program."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        self._tables: dict[str, dict[int, str]] = {}
        self._callers: dict[str, tuple[str, Instruction]] = {}
        head, *_ = text.split("\n", 1)
        found = (
            re.search(rf"\b{what}=(\d+)", head) for what in ("num_partitions", "replica_count")
        )
        self.num_devices = math.prod(int(match[1]) for match in found if match)
        self._parse(text)

    def _parse(self, text: str) -> None:
        rows: dict[int, str] = {}
        current: Computation | None = None
        for line in text.splitlines():
            if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                rows = self._tables[line] = {}
            elif current is None and (row := TABLE_ROW.match(line)):
                rows[int(row[1])] = row[2]
            elif header := HEADER.match(line):
                current = self.computations[header[2]] = {}
                if header[1]:
                    self.entry = header[2]
            elif current is not None and (parts := INSTRUCTION.match(line)):
                root, name, type_, opcode, rest = parts.groups()
                end = closing(rest)
                operands = tuple(NAME.findall(rest[:end]))
                current[name] = Instruction(name, type_, opcode, operands, rest[end:], bool(root))
        for name, computation in self.computations.items():
            for instruction in computation.values():
                for called in instruction.called:
                    self._callers[called] = name, instruction

    def runs(self, opcodes: tp.Collection[str]) -> tp.Iterator[Run]:
        """The instructions with these opcodes that a run of the program reaches, with their number."""
        pending: list[tuple[str, int, bool]] = [(self.entry, 1, True)]
        while pending:
            name, times, known = pending.pop()
            for instruction in self.computations.get(name, {}).values():
                if instruction.opcode in opcodes:
                    yield Run(instruction, name, times, known)
                elif instruction.opcode not in ("async-done", "async-update"):
                    trips, still_known = 1, known
                    if instruction.opcode == "while":
                        match = TRIPS.search(instruction.attributes)
                        trips, still_known = int(match[1]) if match else 1, known and bool(match)
                    pending += [
                        (called, times * trips, still_known) for called in instruction.called
                    ]

    # Where an instruction comes from ---------------------------------------------------------------

    def source(self, run: Run, foreign: tp.Callable[[str], bool]) -> str:
        """`file:line` of the innermost call in a file that is not `foreign`, or of the innermost call.

        What XLA inserted to move an argument has no position: it has that of the first use.
        """
        instruction: Instruction | None = run.instruction
        users = self.computations[run.computation].values()
        seen = set[str]()
        while instruction is not None and instruction.name not in seen:
            if found := list(self._stack(instruction)):
                return next((place for place in found if not foreign(place)), found[0])
            seen.add(instruction.name)
            name = instruction.name
            instruction = next((user for user in users if name in user.operands), None)
        return ""

    def _stack(self, instruction: Instruction) -> tp.Iterator[str]:
        """`file:line` of the calls that lead to it, the innermost first."""
        direct = re.search(r'source_file="([^"]*)"(?: source_line=(\d+))?', instruction.attributes)
        if direct:
            yield f"{direct[1]}:{direct[2] or 0}"
        match = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        frames = self._tables.get("StackFrames", {})
        frame = int(match[1]) if match else 0
        # Parents are counted from 0 or, in newer versions, from 1: the first frame has none.
        shift = number("parent_frame_id", frames.get(1, ""))
        while frame in frames:
            position = self._tables["FileLocations"].get(
                number("file_location_id", frames[frame]), ""
            )
            file = self._tables["FileNames"].get(number("file_name_id", position), "")
            yield f"{file.strip(chr(34))}:{number('line', position)}"
            parent = number("parent_frame_id", frames[frame]) - shift
            frame = parent if parent < frame else 0

    def argument(self, run: Run) -> str:
        """The argument of the program that an instruction moves; empty if it moves anything else."""
        found = set()
        pending = [(run.computation, name) for name in run.instruction.operands]
        seen = set(pending)
        while pending:
            computation, name = pending.pop()
            sources = self._moved(computation, name)
            if sources is None:
                return ""
            for source in sources:
                if isinstance(source, str):
                    found.add(source)
                elif source not in seen:
                    seen.add(source)
                    pending.append(source)
        return found.pop() if len(found) == 1 else ""

    def _moved(self, computation: str, name: str) -> list[tp.Any] | None:
        """What an instruction moves: names of arguments, or other instructions; None if it computes."""
        instruction = self.computations[computation].get(name)
        if instruction is None:
            return None
        operands = [(computation, operand) for operand in instruction.operands]
        match instruction.opcode:
            case "parameter":
                named = computation == self.entry and instruction.op_name
                return [named] if named else None
            case "get-tuple-element" if operands:
                return self._element(computation, instruction)
            case "fusion" if self._only_moves(instruction):
                return [x for x in operands if self._shape(*x)]
            case opcode if opcode in MOVES:
                return operands[:1]
        return None

    def _element(self, computation: str, instruction: Instruction) -> list[tp.Any] | None:
        """What an element of a tuple is: outside of a loop if it is the same in all iterations."""
        index = number("index", instruction.attributes)
        caller, loop = self._callers.get(computation, ("", None))
        body = self.computations[computation]
        owner = body[instruction.operands[0]]
        if loop is None or loop.opcode != "while" or owner.opcode != "parameter":
            return [(computation, owner.operands[index])] if owner.opcode == "tuple" else None
        last = next(x for x in body.values() if x.root)
        result = body[last.operands[index]] if last.opcode == "tuple" else last
        same = result.opcode == "get-tuple-element" and number("index", result.attributes) == index
        given = self.computations[caller][loop.operands[0]]
        if not same or result.operands != (owner.name,) or given.opcode != "tuple":
            return None
        return [(caller, given.operands[index])]

    def _only_moves(self, fusion: Instruction) -> bool:
        """Whether a fusion computes nothing but indices."""
        inside = (x for name in fusion.called for x in self.computations.get(name, {}).values())
        free = MOVES | {"parameter", "constant"}
        return all(x.opcode in free or not any(a.shape for a in x.arrays) for x in inside)

    def _shape(self, computation: str, name: str) -> bool:
        """Whether an instruction has an array of one axis or more."""
        found = self.computations[computation].get(name)
        return found is not None and any(array.shape for array in found.arrays)


def closing(text: str) -> int:
    """The index of the parenthesis that closes one opened before the text."""
    depth = 1
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.start()
    return len(text)


def number(key: str, text: str) -> int:
    """The number after `key=`; 0 if there is none."""
    match = re.search(rf"\b{key}=(\d+)", text)
    return int(match[1]) if match else 0


@functools.cache
def library_folders() -> tuple[str, ...]:
    """Where the files are that are nobody's own: this package, and what is installed."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return (here + os.sep, f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def is_library(place: str) -> bool:
    """Whether a `file:line` is in a library."""
    return any(folder in place for folder in library_folders())
