"""Runs a program with either library, compares step by step, and shrinks what differs."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
import typing as tp
import warnings

from tests.parity.fuzz import prelude
from tests.parity.fuzz.observe import Observer, Where, difference


@dataclasses.dataclass
class Step:
    """What one statement did: the names afterwards, or the exception that ended the program."""

    text: str
    names: dict[str, tp.Any]
    ticks: list[str]
    error: BaseException | None = None


class Session:
    """A program in progress, with one library."""

    def __init__(self, lib: types.ModuleType, base: dict[str, tp.Any]):
        self.lib = lib
        self.base = base
        self.env = dict(base)
        self.steps: list[Step] = []
        self.ticks = base["TICKS"]
        self.ticks.clear()

    def step(self, text: str) -> Step:
        """Run a statement."""
        error = None
        self.ticks.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                exec(compile(text, f"<statement {len(self.steps)}>", "exec"), self.env)
            except Exception as raised:
                error = raised
            self.env.pop("__builtins__", None)
            names = Observer(self.lib).names(self.env, self.base)
        step = Step(text, names, list(self.ticks), error)
        self.steps.append(step)
        return step


def run(lib: types.ModuleType, base: dict[str, tp.Any], statements: list[str]) -> list[Step]:
    """All steps of a program, up to the first exception."""
    session = Session(lib, base)
    for text in statements:
        if session.step(text).error is not None:
            break
    return session.steps


@dataclasses.dataclass
class Difference:
    """Where two runs part: the statement, the kind of difference, the place, both sides."""

    kind: str  # "value", "raises" (ours alone), "passes" (theirs alone raises), "class", "traces"
    index: int
    text: str
    where: Where
    ours: tp.Any
    theirs: tp.Any
    program: list[str]
    mine: Step
    step: Step  # of the reference
    before: dict[str, tp.Any]  # what the reference had before this step

    def __str__(self) -> str:
        where = ".".join(map(str, self.where))
        return (
            f"{self.kind} at statement {self.index}: {self.text}\n"
            f"  where:  {where}\n  ours:   {_short(self.ours)}\n  theirs: {_short(self.theirs)}"
        )


def _short(x: tp.Any) -> str:
    text = f"{type(x).__name__}: {x}" if isinstance(x, BaseException) else repr(x)
    return text if len(text) < 1200 else text[:1200] + " ..."


def compare(ours: list[Step], theirs: list[Step]) -> Difference | None:
    """The first difference between two runs of one program."""
    program = [step.text for step in theirs]
    texts: set[str] = set()
    for i, (a, b) in enumerate(zip(ours, theirs)):
        before = theirs[i - 1].names if i else {}
        make = functools.partial(
            Difference, index=i, text=b.text, program=program, mine=a, step=b, before=before
        )
        if a.error is not None or b.error is not None:
            if b.error is None:
                return make("raises", where=(), ours=a.error, theirs="no exception")
            if a.error is None:
                return make("passes", where=(), ours="no exception", theirs=b.error)
            if type(a.error).__name__ != type(b.error).__name__:
                return make("class", where=(), ours=a.error, theirs=b.error)
            return None
        if found := difference(a.names, b.names):
            return make("value", where=found[0], ours=found[1], theirs=found[2])
        call = b.text.split("=", 1)[-1]
        if call in texts:
            more = collections.Counter(a.ticks) - collections.Counter(b.ticks)
            if more:
                return make("traces", where=(), ours=a.ticks, theirs=b.ticks)
        texts.add(call)
    return None


class Peers:
    """Both libraries, each with its own prelude."""

    def __init__(self) -> None:
        from flax import nnx as reference

        import nnxlite

        self.libs = {"ours": nnxlite, "theirs": reference}
        self.bases = {side: prelude.names_of(lib) for side, lib in self.libs.items()}

    def run(self, side: str, statements: list[str]) -> list[Step]:
        """The steps of a program with one of the libraries."""
        return run(self.libs[side], self.bases[side], statements)

    def session(self, side: str) -> Session:
        """An empty program with one of the libraries."""
        return Session(self.libs[side], self.bases[side])

    def compare(self, statements: list[str]) -> Difference | None:
        """Run a program with both libraries."""
        return compare(self.run("ours", statements), self.run("theirs", statements))

    def shrink(self, found: Difference, rounds: int = 3, budget: int = 150) -> Difference:
        """A program with fewer statements and lines that still differs in the same way."""
        signature = lambda d: (d.kind, type(d.ours).__name__, type(d.theirs).__name__)
        best, wanted = found, signature(found)

        def better(statements: list[str]) -> bool:
            nonlocal best, budget
            budget -= 1
            if budget < 0 or not statements:
                return False
            try:
                other = self.compare(statements)
            except SyntaxError:
                return False
            if other is None or signature(other) != wanted:
                return False
            best = other
            return True

        for _ in range(rounds):
            size = sum(map(len, best.program))
            better(best.program[: best.index + 1])
            for i in reversed(range(len(best.program))):
                if i < len(best.program):
                    better(best.program[:i] + best.program[i + 1 :])
            for i in reversed(range(len(best.program))):
                if i >= len(best.program):
                    continue
                for j in reversed(range(best.program[i].count("\n") + 1)):
                    lines = best.program[i].split("\n") if i < len(best.program) else []
                    if len(lines) > 1 and j < len(lines):
                        text = "\n".join(lines[:j] + lines[j + 1 :])
                        better(best.program[:i] + [text] + best.program[i + 1 :])
            if sum(map(len, best.program)) == size:
                break
        return best
