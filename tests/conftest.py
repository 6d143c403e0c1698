"""The test environment: one CPU pretending to be eight devices, and reproducible random examples.

With `NNXLITE_TEST_PLATFORM=cuda,cpu` the tests run on a GPU instead (many expect eight devices).

The environment variables are set before anything imports JAX, which reads them once.
"""

import ctypes
import gc
import importlib.metadata
import os
import signal
from pathlib import Path

DEVICES = 8


def xla_flags(devices: int | None = None) -> str:
    """XLA_FLAGS for a process with so many CPU devices; None leaves their number to the process."""
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
    if devices is not None:
        flags.append(f"--xla_force_host_platform_device_count={devices}")
    fast = "--xla_cpu_use_fusion_emitters=false"
    if importlib.metadata.version("jaxlib").startswith("0.10.") and fast not in flags:
        # A small program compiles in less than half of the time. Newer versions do not know the flag.
        flags.append(fast)
    return " ".join(flags)


PLATFORM = os.environ.get("NNXLITE_TEST_PLATFORM", "any")
"""What JAX_PLATFORMS is set to.  "any" is a CPU on which test_accelerator.py runs: not skipped."""

os.environ["JAX_PLATFORMS"] = "cpu" if PLATFORM == "any" else PLATFORM
# The tests compile thousands of small programs and run each once or twice.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ["XLA_FLAGS"] = xla_flags(DEVICES)
if "JAX_COMPILATION_CACHE_DIR" in os.environ:  # each worker has its own: JAX does not lock it
    os.environ["JAX_COMPILATION_CACHE_DIR"] += os.environ.get("PYTEST_XDIST_WORKER", "")

# Tracing makes many objects and little garbage: collections took a tenth of the time.
gc.set_threshold(20_000, 20, 20)

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "dev",
    max_examples=50,  # a law with more says so
    deadline=None,  # the first example compiles, the others do not
    suppress_health_check=[HealthCheck.too_slow],  # for the same reason
)
# In CI the same commit tests the same examples every time, so that a red run can be repeated.
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# Shells start what runs in the background with Ctrl-C ignored; tests send it to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

MAPS_KEPT = 20_000
"""Memory maps, of which Linux grants a process 65,530; every compiled program holds a few."""
MEMORY_KEPT = 1_200 * 2**20
"""Bytes of memory. More than half of what many compilations have freed stays with malloc."""

QUICK = frozenset(
    """
    boundary/test_aliases.py checkpoint/test_mapping.py decoding/test_sampling.py
    distributed/test_local.py filtered/test_trees.py
    graph/test_graphdef.py graph/test_plans.py inspect/test_tabulate.py
    laws/test_nothing_lost.py laws/test_order.py migrate/test_rules.py nn/test_layers.py
    numerics/test_edges.py::test_sequences_without_positions objects/test_capture.py
    objects/test_containers.py objects/test_module.py reliability/test_checks.py
    serving/test_export.py sharding/test_annotations.py sharding/test_plans.py
    test_architecture.py test_config.py test_filters.py test_names.py
    test_state.py test_text.py training/test_metrics.py checkpoint/test_patterns.py
    transforms/test_build.py transforms/test_calls.py transforms/test_partial.py
    transforms/test_trees.py variables/test_metadata.py variables/test_variable.py
    """.split()
)
"""The quick tier, `pytest -m quick`: some of every package, in less than two minutes on two cores."""

SLOW = frozenset(
    """
    checkpoint/test_pretrained.py checkpoint/test_processes.py decoding/test_generate.py
    distributed/test_processes.py flax/test_hook.py
    graph/test_scale.py nn/test_adapters.py numerics/test_values.py
    reliability/test_long_run.py reliability/test_processes.py reliability/test_settings.py
    test_docs.py test_docstrings.py::test_examples_in test_notebooks.py typing/test_types.py
    """.split()
)
"""The slow tier, with examples and benchmarks: half of the time, and left out by `python3 tests`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the quick and of the slow tier."""
    here = Path(__file__).parent
    for item in items:
        name = item.path.relative_to(here).as_posix() if item.path.is_relative_to(here) else ""
        function = f"{name}::{getattr(item, 'originalname', item.name)}"
        if {name, function} & QUICK:
            item.add_marker(pytest.mark.quick)
        if {name, function} & SLOW or name.startswith(("examples/", "benchmarks/")):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def doctest_names(doctest_namespace: dict[str, object]) -> None:
    """The names every docstring example may use (with `pytest --doctest-modules nnxlite`)."""
    doctest_namespace.update(jax=jax, jnp=jnp)


@pytest.fixture(autouse=True, scope="module")
def bounded_memory():
    """Spare the collections of a module what was there before, and drop programs that are too many.

    Many tests collect garbage, and count objects.
    """
    gc.collect()
    gc.freeze()
    yield
    spare()


def is_full() -> bool:
    """Whether this process has more memory, or more maps of it, than it should."""
    if not Path("/proc/self/statm").exists():
        return False
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    maps = Path("/proc/self/maps").read_bytes().count(b"\n")
    return pages * os.sysconf("SC_PAGE_SIZE") > MEMORY_KEPT or maps > MAPS_KEPT


def spare() -> None:
    """Give back memory that this process does not need, programs at last, where it has too much."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)
    if is_full():
        trim(0)
    if is_full():
        gc.unfreeze()
        jax.clear_caches()
        gc.collect()
        trim(0)
