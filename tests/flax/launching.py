"""Programs in processes of their own: what `nnxlite.flax` replaces stays replaced."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITE = str(ROOT / "nnxlite" / "flax" / "_site")


def python(
    *arguments: str, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a process without the hook."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("NNXLITE_FLAX", "FLAX_"))}
    env |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=env, input=stdin
    )


def printed(*arguments: str, stdin: str = "", **environment: str) -> list[str]:
    """The lines that a program prints, which must end well."""
    done = python(*arguments, stdin=stdin, **environment)
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()
