"""The arithmetic of every layer against NumPy, in a wide grid.

    python -m tests.numerics                    # all families of layers, the settings of the suite
    python -m tests.numerics --all --seeds 3    # a wider grid of settings, three draws of numbers
    python -m tests.numerics --family norms --only gradients

The last line counts what was compared: results in each dtype, derivatives, unusual batches.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax

from tests.numerics import checks
from tests.numerics.cases import FAMILIES


def jobs(cases, seed):
    """What is checked of the cases of one family: a name, whether in float64, and the function."""
    yield "values, float64", True, lambda: checks.values(cases, "float64", seed)
    yield "values, float32", False, lambda: checks.values(cases, "float32", seed)
    for half in checks.HALF_DTYPES:
        yield (
            f"values, {half}",
            False,
            lambda h=half: checks.values_of_half_precision(cases, h, seed),
        )
        typed = [case for case in cases if case.types]
        if typed:
            mixed = lambda h=half, c=typed: checks.values_of_half_precision(c, h, seed, mixed=True)
            yield f"values, {half} of float32", False, mixed
    yield "batches", False, lambda: checks.batches(cases, seed)
    for route in checks.ROUTES:
        gradients = lambda r=route: checks.gradients_in_double(cases, r, seed)
        yield f"gradients through {route}", True, gradients
    second = lambda: checks.gradients_in_double(cases, "a loop", seed, order=2)
    yield "gradients of second order", True, second


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="a wider grid of settings")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="how many draws of numbers")
    parser.add_argument("--family", choices=FAMILIES, action="append")
    parser.add_argument("--only", default="", help="a part of the name of a check")
    options = parser.parse_args()
    cases_run = compared = defects = 0
    start = time.perf_counter()
    for family in options.family or FAMILIES:
        everything = FAMILIES[family](options.all)
        cases_run += len(everything)
        for seed in range(options.seed, options.seed + options.seeds):
            for begin in range(0, len(everything), 80):  # programs of bounded size
                cases = everything[begin : begin + 80]
                for name, double, run in jobs(cases, seed):
                    if options.only not in name:
                        continue
                    try:
                        with jax.enable_x64(double):
                            result = run()
                    except Exception:
                        traceback.print_exc()
                        result = checks.Result(0, ["raised"])
                    compared += result.compared
                    defects += len(result.wrong)
                    for line in result.wrong:
                        print(f"{family}, seed {seed}, {name}: {line}", flush=True)
                jax.clear_caches()
    seconds = time.perf_counter() - start
    print(
        f"{cases_run} cases, {options.seeds} draws, {compared} comparisons, {defects} defects, "
        f"{seconds:.0f} s"
    )
    return bool(defects)


if __name__ == "__main__":
    sys.exit(main())
