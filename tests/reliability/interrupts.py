"""Interrupts that arrive at any moment, as Ctrl-C does.

python -m tests.reliability.interrupts --count 2000 --seed 0
"""

from __future__ import annotations

import argparse
import functools
import random
import signal
import sys
import time
import typing as tp

import jax
import jax.numpy as jnp

import nnxlite as nnx
from tests.reliability import faults


def library_lines(call: tp.Callable[[], tp.Any]) -> int:
    """How many lines of the library a call runs."""
    lines = faults.Lines(faults.in_library)
    lines.run(call)
    return lines.count


def interrupted_at_random(
    call: tp.Callable[[], tp.Any],
    check: tp.Callable[[], None],
    count: int,
    seed: int,
) -> int:
    """Call something again and again while interrupts arrive; check after each of them.

    Returns how many interrupts there were.
    """
    choose = random.Random(seed)
    began = time.perf_counter()
    for _ in range(10):
        call()
    usual = (time.perf_counter() - began) / 10
    armed = False

    def handle(number: int, frame: tp.Any) -> None:
        if armed:
            raise KeyboardInterrupt

    former = signal.signal(signal.SIGALRM, handle)
    done = 0
    try:
        while done < count:
            try:
                armed = True
                delay = choose.uniform(0.2, 3) * usual
                signal.setitimer(
                    signal.ITIMER_REAL, delay, 1.0
                )  # a finalizer may swallow the first
                while True:
                    call()
            except KeyboardInterrupt:
                armed = False
            done += 1
            check()
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0, 0)
        signal.signal(signal.SIGALRM, former)
    return done


class Counter(nnx.Module):
    """Many Variables with the same value."""

    def __init__(self, size: int) -> None:
        self.parts = nnx.List([nnx.Param(jnp.zeros(4)) for _ in range(size)])
        self.last = nnx.Variable(jnp.zeros(4))


def values_step(model: Counter) -> None:
    for part in model.parts:
        part[...] += 1
    model.last[...] += 1


def structure_step(model: Counter) -> None:
    for number, part in enumerate(model.parts):
        model.parts[number] = nnx.Param(part.value + 1)
    model.last = nnx.Variable(model.last.value + 1)


def eager_step(model: Counter) -> None:
    values_step(model)


PROGRAMS: dict[str, tp.Callable[[], tp.Callable[[Counter], tp.Any]]] = {
    "jit": lambda: nnx.jit(values_step),
    "donated": lambda: nnx.jit(values_step, donate="written"),
    "structure": lambda: nnx.jit(structure_step),
    "structure donated": lambda: nnx.jit(structure_step, donate_argnums=0),
    "grad": lambda: nnx.grad(_loss),
    "scan": lambda: _scanned,
    "cond": lambda: lambda model: nnx.cond(True, values_step, values_step, model),
    "update": lambda: _updated,
}


def _loss(model: Counter) -> jax.Array:
    values_step(model)
    return model.last.sum()


@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
def _scan(model: Counter, x: jax.Array) -> tuple[Counter, jax.Array]:
    values_step(model)
    return model, x


def _scanned(model: Counter) -> None:
    _scan(model, jnp.zeros(1))


def _updated(model: Counter) -> None:
    nnx.update(model, jax.tree.map(lambda x: x + 1, nnx.to_pure_dict(nnx.state(model))))


def campaign(count: int, seed: int) -> tuple[int, list[str]]:
    """Interrupt every program `count` times; the number of interrupts, and the defects."""
    interrupts, defects = 0, []
    for name, make in PROGRAMS.items():
        model, step = Counter(20), make()
        step(model)

        def check(model: Counter = model, name: str = name) -> None:
            try:
                found = {float(x.value[0]) for x in [*model.parts, model.last]}
            except RuntimeError as error:
                found = {str(error)}
            if len(found) != 1 or isinstance([*found][0], str):
                raise AssertionError(f"{name}: half of a step is done: {found}")
            nnx.split(model)

        try:
            interrupts += interrupted_at_random(functools.partial(step, model), check, count, seed)
        except Exception as error:
            defects.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    return interrupts, defects


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=500, help="interrupts of each program")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.perf_counter()
    interrupts, defects = campaign(given.count, given.seed)
    for defect in defects:
        print(defect)
    seconds = time.perf_counter() - began
    print(
        f"{len(PROGRAMS)} programs, {interrupts} interrupts, {len(defects)} defects, {seconds:.0f} s"
    )
    return bool(defects)


if __name__ == "__main__":
    sys.exit(main())
