"""The time of `import` once JAX is imported, each time in a new interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from benchmarks.harness import Budget, SelfTimed, case

PROGRAM = """
import time
import jax
start = time.perf_counter()
import {module}
print(time.perf_counter() - start)
"""


# Installed libraries have their bytecode on disk; one in a checkout is given the same.
BYTECODE = tempfile.TemporaryDirectory(prefix="bytecode-")
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
ENVIRONMENT["PYTHONPYCACHEPREFIX"] = BYTECODE.name


def import_time(module: str) -> SelfTimed:
    """The seconds that `import module` takes, its bytecode being there."""

    def run() -> float:
        command = [sys.executable, "-c", PROGRAM.format(module=module)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
        if done.returncode:
            raise ModuleNotFoundError(done.stderr.strip().splitlines()[-1], name=module)
        return float(done.stdout)

    run()
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
