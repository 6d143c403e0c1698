"""The test environment: one CPU pretending to be eight devices, and reproducible random examples.

The environment variables are set before anything imports JAX, which reads them once.
"""

from __future__ import annotations

import os
from pathlib import Path

DEVICES = 8

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        *(f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f),
        f"--xla_force_host_platform_device_count={DEVICES}",
    ]
)

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "dev",
    deadline=None,  # the first example compiles, the others do not
    suppress_health_check=[HealthCheck.too_slow],  # for the same reason
)
# In CI the same commit tests the same examples every time, so that a red run can be repeated.
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# Every compiled program holds a few memory maps; Linux grants a process 65,530 of them.
MAPS_KEPT = 20_000


@pytest.fixture(autouse=True)
def doctest_names(doctest_namespace: dict[str, object]) -> None:
    """The names every docstring example may use (with `pytest --doctest-modules nnxlite`)."""
    doctest_namespace.update(jax=jax, jnp=jnp)


@pytest.fixture(autouse=True, scope="module")
def bounded_memory_maps():
    """Drop the compiled programs after a module where a long run has gathered too many."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAPS_KEPT:
        jax.clear_caches()
