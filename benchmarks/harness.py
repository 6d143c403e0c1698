"""Cases, contenders and budgets, and how they are measured. Knows nothing of what is measured."""

from __future__ import annotations

import gc
import math
import statistics
import time
import typing as tp
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class Sampler(tp.Protocol):
    """One way to do the work of a case.

    `warm` calls it until it is as fast as it gets. `sample` does the work once or more and returns
    the seconds, or whatever the case counts, of one unit of it.
    """

    def warm(self, pace: Pace) -> None: ...

    def sample(self) -> float: ...


@dataclass(frozen=True)
class Pace:
    """How long to measure: `rounds` of about `batch` seconds for each contender."""

    rounds: int = 25
    batch: float = 0.02
    warm_calls: int = 5


QUICK = Pace(rounds=5, batch=0.005, warm_calls=3)


@dataclass
class Calls:
    """`run` called in a loop, as often as fills the batch; `units` of work in each call.

    `run` waits for its own result.
    """

    run: Callable[[], object]
    units: int = 1
    count: int = field(default=1, init=False)

    def warm(self, pace: Pace) -> None:
        for _ in range(pace.warm_calls):
            self.run()
        while (spent := self._loop()) < pace.batch:
            self.count = max(2 * self.count, int(self.count * pace.batch / max(spent, 1e-9)))

    def sample(self) -> float:
        return self._loop() / (self.count * self.units)

    def _loop(self) -> float:
        run = self.run
        start = time.perf_counter()
        for _ in range(self.count):
            run()
        return time.perf_counter() - start


@dataclass
class Prepared:
    """`run` of what `prepare` returns, one call at a time, the preparation untimed.

    For what can be done only once to an object: the first call, the call after a change.
    """

    prepare: Callable[[], tp.Any]
    run: Callable[[tp.Any], object]
    units: int = 1
    count: int = field(default=1, init=False)

    def warm(self, pace: Pace) -> None:
        for _ in range(pace.warm_calls):
            spent = self._once()
        self.count = max(1, min(20, int(pace.batch / max(spent, 1e-9))))

    def sample(self) -> float:
        return statistics.median(self._once() for _ in range(self.count)) / self.units

    def _once(self) -> float:
        subject = self.prepare()
        start = time.perf_counter()
        self.run(subject)
        return time.perf_counter() - start


@dataclass
class SelfTimed:
    """`run` returns the seconds itself, for what cannot be timed from inside this process."""

    run: Callable[[], float]

    def warm(self, pace: Pace) -> None:
        self.run()

    def sample(self) -> float:
        return self.run()


@dataclass
class Once:
    """`run` returns what is counted, which is the same every time, such as a number of bytes."""

    run: Callable[[], float]
    value: float = field(default=math.nan, init=False)

    def warm(self, pace: Pace) -> None:
        self.value = self.run()

    def sample(self) -> float:
        return self.value


Unit = tp.Literal["seconds", "bytes"]

SCALES: dict[Unit, tuple[tuple[str, float], ...]] = {
    "seconds": (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)),
    "bytes": (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0)),
}


def quantity(value: float, unit: Unit) -> str:
    """Three digits and the largest fitting unit, such as `4.61 ms`."""
    scales = SCALES[unit]
    name, size = next((scale for scale in scales if value >= scale[1]), scales[-1])
    shown = value / size
    return f"{shown:.0f} {name}" if shown >= 1000 else f"{shown:.3g} {name}"


@dataclass(frozen=True)
class Budget:
    """`subject` may take `at_most` times what `of` takes, or just `at_most` where `of` is None.

    A budget of a fraction is printed the other way round: at most 1/30 is "30x faster".
    """

    at_most: float
    of: str | None = None
    subject: str = "nnxlite"

    def text(self, unit: Unit) -> str:
        """The budget in words, for a case that counts in `unit`."""
        match self.of:
            case None:
                return f"at most {quantity(self.at_most, unit)}"
            case of if self.at_most < 0.5:
                better = "faster than" if unit == "seconds" else "less than"
                return f"{1 / self.at_most:.3g}x {better} {of}"
            case of:
                return f"at most {self.at_most:.3g}x {of}"


Build = Callable[[], Sampler]


@dataclass(frozen=True)
class Case:
    """`build` returns, by name, the functions that build the contenders."""

    bench: str
    name: str
    build: Callable[[], Mapping[str, Build]]
    budgets: tuple[Budget, ...] = ()
    unit: Unit = "seconds"


CASES: list[Case] = []


def case(bench: str, name: str, *budgets: Budget, unit: Unit = "seconds"):
    """Register the decorated function as the builder of a case."""

    def register(build: Callable[[], Mapping[str, Build]]):
        CASES.append(Case(bench, name, build, budgets, unit))
        return build

    return register


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles beside it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> Spread:
        """The spread of at least two samples."""
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True)
class Result:
    """What was measured of a case, by contender; `failed` says why one has no figure."""

    case: Case
    samples: dict[str, list[float]]
    recompiled: frozenset[str]
    failed: dict[str, str]

    def figure(self, name: str) -> Spread | None:
        """What `name` takes, in the unit of the case."""
        return Spread.of(self.samples[name]) if name in self.samples else None

    def ratio(self, name: str, of: str) -> Spread | None:
        """How many times as long `name` takes as `of`, taken round by round."""
        if name not in self.samples or of not in self.samples:
            return None
        pairs = zip(self.samples[name], self.samples[of], strict=True)
        return Spread.of(mine / theirs for mine, theirs in pairs)

    def spent(self, budget: Budget) -> Spread | None:
        """The measured value that `budget` limits."""
        if budget.of is None:
            return self.figure(budget.subject)
        return self.ratio(budget.subject, budget.of)

    def met(self, budget: Budget) -> bool | None:
        """Whether the budget is kept; None where a contender has no figure."""
        spent = self.spent(budget)
        return None if spent is None else spent.median <= budget.at_most


class CompileCount:
    """Counts the programs that XLA compiles in this process."""

    def __init__(self) -> None:
        self.value = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **details: object) -> None:
        self.value += event == COMPILE_EVENT


compiles = CompileCount()


def measure(case: Case, pace: Pace) -> Result:
    """Build and warm every contender of `case`, then time them in interleaved rounds."""
    contenders: dict[str, Sampler] = {}
    failed: dict[str, str] = {}
    for name, build in case.build().items():
        try:
            contender = build()
            contender.warm(pace)
        except ModuleNotFoundError as error:
            failed[name] = f"{error.name} is not installed"
        except Exception as error:  # a contender that cannot run must not hide the others
            failed[name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        else:
            contenders[name] = contender
    samples, recompiled = interleaved(contenders, pace.rounds)
    return Result(case, samples, frozenset(recompiled), failed)


def interleaved(
    contenders: Mapping[str, Sampler], rounds: int
) -> tuple[dict[str, list[float]], set[str]]:
    """One sample of each contender in every round, and who compiled meanwhile."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    recompiled: set[str] = set()
    names = list(contenders)
    gc.collect()
    gc.freeze()  # what is there by now is not searched for garbage before every sample
    try:
        for round_number in range(rounds if names else 0):
            first = round_number % len(names)
            for name in names[first:] + names[:first]:
                before = compiles.value
                samples[name].append(sample_without_collector(contenders[name]))
                if compiles.value > before:
                    recompiled.add(name)
    finally:
        gc.unfreeze()
    return samples, recompiled


def sample_without_collector(contender: Sampler) -> float:
    """A sample that pays for no garbage but its own."""
    gc.collect()
    gc.disable()
    try:
        return contender.sample()
    finally:
        gc.enable()
