"""The time of `import` once JAX is imported, each time in a new interpreter."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.harness import Budget, SelfTimed, case

PROGRAM = """
import time
import jax
start = time.perf_counter()
import {module}
print(time.perf_counter() - start)
"""


def import_time(module: str) -> SelfTimed:
    """The seconds that `import module` takes."""

    def run() -> float:
        command = [sys.executable, "-c", PROGRAM.format(module=module)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ModuleNotFoundError(done.stderr.strip().splitlines()[-1], name=module)
        return float(done.stdout)

    return SelfTimed(run)


@case("import", "import, after jax", Budget(0.15))
def importing():
    """Optax, which a training library cannot do without, stands beside it."""
    return {
        "optax": lambda: import_time("optax"),
        "nnxlite": lambda: import_time("nnxlite"),
        "flax": lambda: import_time("flax.nnx"),
        "equinox": lambda: import_time("equinox"),
    }
