"""Calls under other settings of JAX and of Python: the same results, whatever was set before.

    python -m tests.reliability.settings --only jit grad

Every case of `fault_cases.py` is called three times

* under each setting that must not change results, compared with the calls without it,
* under a setting that comes and goes, compared with the same calls by functions that are new each time:
  nothing that is cached for one setting may serve another,
* while the garbage collector runs at every allocation, and finalizers use the library meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import math
import sys
import time
import typing as tp
import weakref

import tests.conftest  # noqa: F401  # the environment, before anything imports JAX

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip

import nnxlite as nnx
from tests.reliability import faults
from tests.reliability.fault_cases import CASES, World

Setting = tp.Callable[[], contextlib.AbstractContextManager[tp.Any]]

SAME_RESULTS: dict[str, Setting] = {
    "disable_jit": jax.disable_jit,
    "checking_leaks": jax.checking_leaks,
    "debug_nans": functools.partial(jax.debug_nans, True),
    "debug_infs": functools.partial(jax.debug_infs, True),
    "enable_checks": functools.partial(jax.enable_checks, True),
    "strict_promotion": functools.partial(jax.numpy_dtype_promotion, "strict"),
    "no_implicit_transfers": functools.partial(jax.transfer_guard, "disallow"),
}
"""Settings under which a call gives the results that it gives without them."""

OTHER_RESULTS: dict[str, Setting] = {
    "x64": functools.partial(jax.enable_x64, True),
    "matmul_precision": functools.partial(jax.default_matmul_precision, "highest"),
    "rank_promotion": functools.partial(jax.numpy_rank_promotion, "raise"),
    "threefry": functools.partial(jax.threefry_partitionable, False),
    "prng": functools.partial(jax.default_prng_impl, "rbg"),
    "device": lambda: jax.default_device(jax.devices()[-1]),
}
"""Settings that programs depend on."""

CHANGES = {**SAME_RESULTS, **OTHER_RESULTS}

TRAINING = {"training_step", "training_step_donated", "optimizer_update"}
"""Cases with an optimizer: a new one whenever they are prepared."""


def applies(setting: str, name: str) -> bool:
    """Whether a case can be called under a setting."""
    if setting == "strict_promotion":  # Optax mixes dtypes
        return name not in TRAINING
    if (
        setting == "no_implicit_transfers"
    ):  # whose functions run eagerly moves numbers to the device
        return name.startswith("jit") or name in TRAINING - {"optimizer_update"}
    return True


@functools.cache
def contents_of(name: str) -> list[tp.Any]:
    """What three calls of a case lead to without any setting."""
    return faults.expected_of(name).contents


def same_results(name: str, setting: str) -> str:
    """What is wrong with the calls of a case under a setting, if anything."""
    expected = contents_of(name)
    world, call = faults.prepared(name)
    for number in range(faults.CALLS):
        with SAME_RESULTS[setting]():
            result = call()
        if wrong := _differs(world, result, expected[number]):
            return f"call {number + 1}: {wrong}"
    return ""


def comes_and_goes(name: str, setting: str) -> str:
    """What is wrong where only the second of three calls is made under a setting."""
    old, call = faults.prepared(name)
    new, _ = faults.prepared(name)
    for number in range(faults.CALLS):
        with CHANGES[setting]() if number == 1 else contextlib.nullcontext():
            result = call()
            by_new_function = CASES[name](new)()
        if wrong := _differs(old, result, faults.by_content(new, by_new_function)):
            return f"call {number + 1}: {wrong}"
    return ""


class Garbage(nnx.Module):
    """A cycle whose end uses the library, and leaves the next one."""

    ended: tp.ClassVar[int] = 0

    def __init__(self, others: tp.Sequence[tp.Any]) -> None:
        self.me = self
        self.weight = nnx.Variable(jnp.ones(2))
        self.others = weakref.WeakSet(others)
        weakref.finalize(self, Garbage.end, self.others)

    @staticmethod
    def end(others: tp.Iterable[tp.Any]) -> None:
        """Look at the objects of a call that runs now."""
        Garbage.ended += 1
        for one in list(others):
            nnx.split(one)


@contextlib.contextmanager
def collecting() -> tp.Iterator[None]:
    """The garbage collector runs at every allocation of a container."""
    gc.collect()
    gc.freeze()  # what is there already is not looked at again
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def while_collecting(name: str) -> str:
    """What is wrong where garbage is collected, and finalizers run, at every allocation of a call."""
    expected = contents_of(name)
    world, call = faults.prepared(name)
    for number in range(faults.CALLS):
        ended = Garbage.ended
        Garbage([world.model, world.stack])
        with collecting():
            result = call()
        if wrong := _differs(world, result, expected[number]):
            return f"call {number + 1}: {wrong}"
        if Garbage.ended == ended:
            return f"call {number + 1}: nothing was collected"
    return ""


def _differs(world: World, result: tp.Any, expected: tp.Any) -> str:
    found = faults.by_content(world, result)
    if not alike(found, expected):
        return faults.difference(found, expected)
    if leaves := faults.tracers_in(world):
        return f"tracers: {leaves}"
    faults.engine_agrees(world)
    return ""


def alike(one: tp.Any, two: tp.Any) -> bool:
    """Whether two contents agree; numbers may be rounded differently, as other programs give them."""
    if isinstance(one, (tuple, list)) and type(one) is type(two) and len(one) == len(two):
        return all(map(alike, one, two))
    if isinstance(one, float) and isinstance(two, float):
        return math.isclose(one, two, rel_tol=1e-5, abs_tol=1e-6)
    return one == two


def checks(names: tp.Iterable[str]) -> tp.Iterator[tuple[str, tp.Callable[[], str]]]:
    """Every check of some cases, with a name."""
    for name in names:
        for setting in SAME_RESULTS:
            if applies(setting, name):
                yield f"{name} under {setting}", functools.partial(same_results, name, setting)
        for setting in CHANGES:
            if name in TRAINING or (name, setting) == ("jit_sharded", "disable_jit"):
                continue  # without jit the results are not where the next call wants them
            if applies(setting, name):
                check = functools.partial(comes_and_goes, name, setting)
                yield f"{name} where {setting} comes and goes", check
        yield f"{name} while collecting", functools.partial(while_collecting, name)


def main() -> int:
    parser = argparse.ArgumentParser(description=tp.cast(str, __doc__).split("\n")[0])
    parser.add_argument("--only", nargs="*", default=sorted(CASES), choices=sorted(CASES))
    given = parser.parse_args()
    began, count, defects = time.perf_counter(), 0, 0
    for label, check in checks(given.only):
        try:
            wrong = check()
        except Exception as error:
            wrong = f"{type(error).__name__}: {str(error)[:300]}"
        count += 1
        if wrong:
            defects += 1
            print(f"{label}: {wrong}", flush=True)
        if count % 100 == 0:
            jax.clear_caches()
    print(f"{count} checks, {defects} defects, {time.perf_counter() - began:.0f} s")
    return bool(defects)


if __name__ == "__main__":
    sys.exit(main())
