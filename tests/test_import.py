"""`import nnxlite` is light: it starts no device and leaves heavy libraries for those who need them."""

from __future__ import annotations

import subprocess
import sys

import pytest

LATER = [
    "flax",
    "jax.experimental.pallas",
    "jax.extend",
    "libcst",
    "matplotlib",
    "nnxlite.migrate",
    "optax",
    "orbax",
    "rich",
    "sklearn",
    "treescope",
]


def after_import(program: str) -> str:
    """What a program prints in a new interpreter that has imported JAX and then this library."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys, jax; before = set(sys.modules); import nnxlite; {program}",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def test_no_device_is_started():
    """JAX refuses a number of devices once it has started."""
    assert after_import("jax.config.update('jax_num_cpu_devices', 3); print('still free')") == (
        "still free"
    )


@pytest.fixture(scope="module")
def imported() -> set[str]:
    return set(after_import("print(*sorted(set(sys.modules) - before))").split())


@pytest.mark.parametrize("library", LATER)
def test_it_is_imported_by_those_who_need_it(imported, library):
    assert library not in imported
