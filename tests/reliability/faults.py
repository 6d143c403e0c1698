"""Faults at every line: what a call that is interrupted leaves behind.

    python -m tests.reliability.faults --count 2000 --seed 0

An exception is raised at a line of the user's function, or of the library itself, while a call of a
transform runs: in its first call, which traces, or in a later one.  After it

* every object is exactly as it was (identity, structure, values, metadata), or exactly as after a
  call that succeeds: the library writes back all results or none,
* no object contains a tracer, and JAX is not in the middle of a trace,
* the same call gives the right results, and traces no more often than the first time.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import linecache
import os
import random
import sys
import time
import types
import typing as tp
from pathlib import Path

import jax

import nnxlite as nnx
from nnxlite._config import context_key
from nnxlite._jax import EAGER, trace_state
from tests.laws import model as slow_model
from tests.laws.programs import content
from tests.reliability.fault_cases import CASES, World, everything

LIBRARY = os.fspath(Path(nnx.__file__).parent) + os.sep
USER = os.fspath(Path(__file__).with_name("fault_cases.py"))


class Fault(Exception):
    """What is raised on purpose."""


class FaultInterrupt(KeyboardInterrupt):
    """The same, as Ctrl-C raises it."""


class FaultMemory(MemoryError):
    """The same, as a full memory raises it."""


KINDS: tuple[type[BaseException], ...] = (FaultInterrupt, Fault, FaultMemory)


# Injection ----------------------------------------------------------------------------------------


def in_library(code: types.CodeType) -> bool:
    """Whether a code object belongs to the library."""
    return code.co_filename.startswith(LIBRARY)


def in_body(code: types.CodeType) -> bool:
    """Whether a code object is a function of the user."""
    return code.co_filename == USER and code.co_name.startswith("body")


@dataclasses.dataclass
class Lines:
    """Counts the lines that run in some functions, and does something at one of them.

    Attributes:
        chosen: which functions.
        at: the number of the line at which `act` is called; the first is 1.
        act: what happens there.
        count: how many lines have run.
        place: file and line at which something happened.
    """

    chosen: tp.Callable[[types.CodeType], bool]
    at: int = 0
    act: tp.Callable[[], None] = lambda: None
    count: int = 0
    place: str = ""

    def __call__(self, frame: types.FrameType, event: str, arg: tp.Any) -> tp.Any:
        if not self.chosen(frame.f_code):
            return None
        entered: set[int] = set()

        def line(frame: types.FrameType, event: str, arg: tp.Any) -> tp.Any:
            if event == "line" and not _is_left(frame, entered):
                self.reached(frame)
            return line

        return line

    def reached(self, frame: types.FrameType) -> None:
        """Count a line, and act if it is the one."""
        self.count += 1
        if self.count == self.at or self.at < 0:
            code = frame.f_code
            name = code.co_filename.removeprefix(LIBRARY)
            self.place = f"{name}:{frame.f_lineno} {code.co_qualname}"
            self.act()

    def run(self, call: tp.Callable[[], tp.Any]) -> tp.Any:
        """Call something under observation."""
        return observed([self], call)


def observed(several: tp.Iterable[Lines], call: tp.Callable[[], tp.Any]) -> tp.Any:
    """Call something under observation; each code object belongs to the first that has chosen it."""

    def trace(frame: types.FrameType, event: str, arg: tp.Any) -> tp.Any:
        return next((line for lines in several if (line := lines(frame, event, arg))), None)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return call()
    finally:
        sys.settrace(before)


def _is_left(frame: types.FrameType, entered: set[int]) -> bool:
    """Whether a `with` block is being left at this line.

    There Python itself lets nothing be raised; an exception would leave out `__exit__`.
    """
    number = frame.f_lineno
    if not linecache.getline(frame.f_code.co_filename, number).lstrip().startswith("with "):
        return False
    if number in entered:
        entered.remove(number)
        return True
    entered.add(number)
    return False


def raising(kind: type[BaseException]) -> tp.Callable[[], None]:
    """A function that raises."""

    def act() -> None:
        raise kind("on purpose")

    return act


# What is compared ---------------------------------------------------------------------------------


def exact(world: World) -> tp.Any:
    """The objects of a world as they are: who is who, names, statuses, metadata, identity of values."""
    return slow_model.canonical([world.known, world.roots])


def by_content(world: World, result: tp.Any) -> tp.Any:
    """The same with values by content, and with a result."""
    return slow_model.canonical([world.known, world.roots, result], content)


def without_result(form: tp.Any) -> tp.Any:
    """The content of a world alone."""
    return form[2][:2]


def tracers_in(world: World) -> list[str]:
    """The leaves of a world that are tracers."""
    pending: list[tp.Any] = []
    for x in everything(world.roots):
        pending += (
            [x.get_raw_value(), x.get_metadata()] if isinstance(x, nnx.Variable) else [vars(x)]
        )
    found = []
    while pending:  # JAX would not come back from a cycle
        value = pending.pop()
        if isinstance(value, jax.core.Tracer):
            found.append(repr(value))
        elif isinstance(value, (dict, nnx.State)):
            pending += value.values()
        elif isinstance(value, (list, tuple)):
            pending += value
    return found


def living_tracers() -> list[jax.core.Tracer]:
    """All tracers of the process."""
    gc.collect()
    return [x for x in gc.get_objects() if issubclass(type(x), jax.core.Tracer)]


def engine_agrees(world: World) -> None:
    """What the library knows of the objects is what they are."""
    for root in world.roots:
        mine = [(p, id(v)) for p, v in nnx.to_flat_state(nnx.state(root))]
        slow = [(tuple(p), id(v)) for p, v in slow_model.leaves(root)]
        assert len(mine) == len(slow), f"{len(mine)} leaves, not {len(slow)}"


# One injection ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Expected:
    """What a case does where nothing fails.

    Attributes:
        contents: the content of the world and result after each of three calls.
        runs: how often the bodies have run after each.
        lines: how many lines run in each, by "user" and "library".
    """

    contents: list[tp.Any]
    runs: list[int]
    lines: list[dict[str, int]]


CALLS = 3


def prepared(name: str) -> tuple[World, tp.Callable[[], tp.Any]]:
    """A new world, and the call of a case in it."""
    world = World()
    call = CASES[name](world)
    world.known = everything(world.roots)
    return world, call


def expected_of(name: str) -> Expected:
    """What a case does where nothing fails."""
    world, call = prepared(name)
    contents, runs, lines = [], [], []
    for _ in range(CALLS):
        both = {"user": Lines(in_body), "library": Lines(in_library)}
        result = observed(both.values(), call)
        lines.append({where: counted.count for where, counted in both.items()})
        contents.append(by_content(world, result))
        runs.append(len(world.runs))
    return Expected(contents, runs, lines)


@dataclasses.dataclass
class Outcome:
    """What one injection led to.

    Attributes:
        place: where it was.
        raised: whether the caller saw the exception.
        done: whether the objects were as after the call.
        wrong: what is not as it should be, or an empty text.
    """

    place: str
    raised: bool = False
    done: bool = False
    wrong: str = ""


def inject(
    name: str,
    expected: Expected,
    where: str,
    warm: bool,
    at: int,
    kind: type[BaseException],
    deep: bool = False,
) -> Outcome:
    """Raise an exception at one line of one call of a case, and look at everything afterwards.

    Args:
        name: of the case.
        expected: what it does where nothing fails.
        where: "user" or "library".
        warm: whether to do it in the second call.
        at: the number of the line.
        kind: the exception.
        deep: whether to look for tracers in the whole process.
    """
    others = {id(x) for x in living_tracers()} if deep else set()
    world, call = prepared(name)
    number = int(warm)
    if warm:
        call()
    before, runs_before = exact(world), len(world.runs)
    content_before = by_content(world, None)
    lines = Lines(in_body if where == "user" else in_library, at, raising(kind))
    outcome = Outcome("")
    result: tp.Any = None
    try:
        result = lines.run(call)
    except BaseException as error:
        if not _is_ours(error):
            outcome.wrong = f"raised {type(error).__name__}: {error}"
        outcome.raised = True
        del error
    outcome.place = lines.place or "not reached"
    if outcome.wrong:
        return outcome
    if not lines.place and outcome.raised:
        outcome.wrong = "raised before the line was reached"
    try:
        outcome.wrong = _look(
            name,
            world,
            call,
            expected,
            number,
            before,
            content_before,
            runs_before,
            outcome,
            result,
        )
    except Exception as error:
        outcome.wrong = f"the next call: {type(error).__name__}: {str(error)[:200]}"
        if os.environ.get("FAULTS_RAISE"):
            raise
    if deep and not outcome.wrong:
        del world, call, result, before
        alive = {id(x) for x in living_tracers()} - others
        outcome.wrong = f"{len(alive)} tracers are alive" if alive else ""
    return outcome


def _is_ours(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, KINDS) or "on purpose" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _look(
    name: str,
    world: World,
    call: tp.Callable[[], tp.Any],
    expected: Expected,
    number: int,
    before: tp.Any,
    content_before: tp.Any,
    runs_before: int,
    outcome: Outcome,
    result: tp.Any,
) -> str:
    """What is wrong after a fault; and after the next calls."""
    if trace_state.value is not EAGER:
        return "JAX is still tracing"
    if context_key():
        return f"settings are left: {context_key()}"
    if found := tracers_in(world):
        return f"tracers: {found}"
    engine_agrees(world)
    if outcome.raised:
        unchanged = exact(world) == before
        if not unchanged:
            try:
                after = by_content(world, None)
            except RuntimeError as error:
                return f"a buffer is gone: {error}"
            outcome.done = without_result(after) == without_result(expected.contents[number])
            if not outcome.done and after != content_before:  # arrays may have moved to a device
                return "neither as before nor as after: " + difference(
                    without_result(after), without_result(expected.contents[number])
                )
    else:
        outcome.done = True
        if by_content(world, result) != expected.contents[number]:
            return "the exception was swallowed, and the result is wrong"
    done = number + outcome.done
    for _ in range(2):
        if done >= CALLS:
            break
        seen = len(world.runs)
        result = call()
        if by_content(world, result) != expected.contents[done]:
            return "the next call is wrong: " + difference(
                by_content(world, result), expected.contents[done]
            )
        most = expected.runs[done] - (expected.runs[done - 1] if done else 0)
        if outcome.raised and not outcome.done and not number and done == 0:
            most = expected.runs[0]
        elif outcome.done and done == 1 and number == 0:
            most += expected.runs[0]  # the result was complete, but JAX has not cached it yet
        if len(world.runs) - seen > most and done != number:
            return f"the next call traced {len(world.runs) - seen} times, not {most}"
        done += 1
    return ""


def difference(one: tp.Any, two: tp.Any, path: str = "") -> str:
    """Where two nested tuples differ first."""
    if isinstance(one, tuple) and isinstance(two, tuple) and len(one) == len(two):
        for number, (a, b) in enumerate(zip(one, two, strict=True)):
            if a != b:
                label = f"{path}.{a[0]}" if isinstance(a, tuple) and a else f"{path}.{number}"
                return difference(a, b, label[-60:])
    return f"{path}: {str(one)[:150]} != {str(two)[:150]}"


# The campaign -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Counts:
    """What a campaign did."""

    show: bool = False
    programs: int = 0
    injections: int = 0
    unreached: int = 0
    swallowed: int = 0
    before: int = 0
    after: int = 0
    defects: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)

    def add(self, name: str, label: str, outcome: Outcome) -> None:
        """Count one injection."""
        self.injections += 1
        self.unreached += outcome.place == "not reached"
        self.swallowed += not outcome.raised and outcome.place != "not reached"
        self.before += outcome.raised and not outcome.done
        self.after += outcome.raised and outcome.done
        if outcome.wrong:
            if self.show:
                print(f"{name} {label}: {outcome.place}: {outcome.wrong}", flush=True)
            key = f"{outcome.place}: {outcome.wrong[:60]}"
            count, first = self.defects.get(key, (0, ""))
            first = first or f"{name} {label}: {outcome.wrong}"
            self.defects[key] = count + 1, first

    def __str__(self) -> str:
        return (
            f"{self.programs} programs, {self.injections} faults injected: {self.before} left all "
            f"as before, {self.after} all done, {self.swallowed} handled, {self.unreached} not "
            f"reached; {len(self.defects)} defects"
        )


def campaign(
    names: tp.Sequence[str],
    count: int,
    seed: int,
    *,
    wheres: tp.Sequence[str] = ("user", "library"),
    every: bool = False,
    deep_every: int = 25,
    show: bool = False,
) -> Counts:
    """Inject faults at random lines of random cases, or at every line of some.

    Args:
        names: of cases.
        count: how many faults.
        seed: of the choices.
        wheres: whose lines.
        every: take every line, of the second calls only.
        deep_every: after how many injections the whole process is searched for tracers.
        show: whether to print progress.
    """
    choose = random.Random(seed)
    counts = Counts(show)
    known: dict[str, Expected] = {}

    def expectation(name: str) -> Expected:
        if name not in known:
            known[name] = expected_of(name)
            counts.programs += 1
        return known[name]

    def todo() -> tp.Iterator[tuple[str, str, bool, int]]:
        if every:
            for name in names:
                for where in wheres:
                    for at in range(1, expectation(name).lines[1][where] + 1):
                        yield name, where, True, at
            return
        for _ in range(count):
            name, where, warm = choose.choice(names), choose.choice(wheres), choose.random() < 0.6
            total = expectation(name).lines[warm][where]
            if not total:
                where, total = "library", expectation(name).lines[warm]["library"]
            yield name, where, warm, choose.randint(1, total)

    began = time.perf_counter()
    for number, (name, where, warm, at) in enumerate(todo()):
        if number >= count:
            break
        kind = KINDS[number % len(KINDS)]
        deep = number % deep_every == 0
        outcome = inject(name, expectation(name), where, warm, at, kind, deep)
        counts.add(name, f"{where} {'warm' if warm else 'cold'} {at} {kind.__name__}", outcome)
        if show and number % 100 == 99:
            print(f"{time.perf_counter() - began:.0f} s: {counts}", flush=True)
            jax.clear_caches()
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=sorted(CASES), choices=sorted(CASES))
    parser.add_argument("--where", nargs="*", default=["user", "library"])
    parser.add_argument("--every", action="store_true", help="every line of the second calls")
    given = parser.parse_args()
    began = time.perf_counter()
    counts = campaign(
        given.only, given.count, given.seed, wheres=given.where, every=given.every, show=True
    )
    for key, (number, first) in sorted(counts.defects.items()):
        print(f"{number:4d}x {key}\n      {first}")
    print(f"{counts}, {time.perf_counter() - began:.0f} s")
    return bool(counts.defects)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
