"""The harness: runs a program with either library, compares step by step, and shrinks what differs."""

import collections
import dataclasses
import functools
import typing as tp
import warnings

import nnxlite
from tests.parity.fuzz.observe import Observer, difference


@dataclasses.dataclass
class Step:
    """What one statement did: the names afterwards, or the exception that it raised."""

    text: str
    names: dict[str, tp.Any]
    ticks: list[str]
    error: BaseException | None = None


class Session:
    def __init__(self, lib, base, observer):
        self.lib = lib
        self.base = base
        self.observer = observer
        self.env = dict(base)
        self.steps: list[Step] = []

    def step(self, text):
        error = None
        ticks = self.base["TICKS"]
        ticks.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                exec(compile(text, f"<statement {len(self.steps)}>", "exec"), self.env)
            except Exception as raised:
                error = raised
                self.env[text.partition(" = ")[0]] = None
            self.env.pop("__builtins__", None)
            names = self.observer(self.lib).names(self.env, self.base)
        self.steps.append(Step(text, names, list(ticks), error))
        return self.steps[-1]


@dataclasses.dataclass
class Difference:
    """Where two runs part: the statement, the kind of difference, the place, both sides."""

    kind: str  # "value", "raises" (ours alone), "passes" (theirs alone raises), "class", "traces"
    index: int
    text: str
    where: tuple[tp.Any, ...]  # keys and indices that lead into an observation
    ours: tp.Any
    theirs: tp.Any
    program: list[str]
    mine: Step
    before: dict[str, tp.Any]  # what the reference had before this step

    def __str__(self):
        where = ".".join(map(str, self.where))
        return (
            f"{self.kind} at statement {self.index}: {self.text}\n"
            f"  where:  {where}\n  ours:   {_short(self.ours)}\n  theirs: {_short(self.theirs)}"
        )


def _short(x):
    text = f"{type(x).__name__}: {x}" if isinstance(x, BaseException) else repr(x)
    return text if len(text) < 1200 else text[:1200] + " ..."


def compare(ours, theirs, classes=True, close=lambda text: None):
    """The first difference between two runs of one program, classes of exceptions included or not.

    `close` gives for the text of a statement what compares its arrays, if not up to usual rounding.
    """
    program = [step.text for step in theirs]
    texts: set[str] = set()
    for i, (a, b) in enumerate(zip(ours, theirs)):
        before = theirs[i - 1].names if i else {}
        make = functools.partial(
            Difference, index=i, text=b.text, program=program, mine=a, before=before
        )
        if a.error is not None or b.error is not None:
            kind = "raises" if b.error is None else "passes" if a.error is None else "class"
            same = not classes or type(a.error).__name__ == type(b.error).__name__
            if kind == "class" and same:
                continue
            sides = {"ours": a.error or "no exception", "theirs": b.error or "no exception"}
            return make(kind, where=(), **sides)
        if found := difference(a.names, b.names, close=close(b.text)):
            return make("value", where=found[0], ours=found[1], theirs=found[2])
        call = b.text.split("=", 1)[-1]
        if call in texts:
            more = collections.Counter(a.ticks) - collections.Counter(b.ticks)
            if more:
                return make("traces", where=(), ours=a.ticks, theirs=b.ticks)
        texts.add(call)
    return None


class Peers:
    """This library and another, each with the names that a program may use."""

    def __init__(self, theirs, names_of, observer=Observer, goes_on=False, close=lambda text: None):
        self.libs = {"ours": nnxlite, "theirs": theirs}
        self.bases = {side: names_of(lib) for side, lib in self.libs.items()}
        self.observer = observer
        self.goes_on = goes_on
        self.close = close

    def session(self, side):
        return Session(self.libs[side], self.bases[side], self.observer)

    def run(self, side, statements):
        """The steps of a program with one of the libraries, up to an exception unless it goes on."""
        session = self.session(side)
        for text in statements:
            if session.step(text).error is not None and not self.goes_on:
                break
        return session.steps

    def compare(self, statements):
        ours, theirs = self.run("ours", statements), self.run("theirs", statements)
        return compare(ours, theirs, classes=not self.goes_on, close=self.close)

    def report(self, found):
        small = self.shrink(found)
        return "\n".join([*small.program[: small.index + 1], str(small)])

    def shrink(self, found):
        """A program with fewer statements that still differs in the same way."""
        signature = lambda d: d and (d.kind, type(d.ours).__name__, type(d.theirs).__name__)
        best = found
        for i in reversed(range(found.index)):
            program = best.program[: best.index + 1]
            smaller = self.compare(program[:i] + program[i + 1 :])
            best = smaller if signature(smaller) == signature(found) else best
        return best
