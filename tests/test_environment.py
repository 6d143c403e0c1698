"""The harsh test environment is really in force (see conftest.py and pyproject.toml)."""

from __future__ import annotations

import warnings
from pathlib import Path

import jax
import pytest

from tests.conftest import QUICK, SLOW


def test_eight_virtual_cpu_devices():
    assert [d.platform for d in jax.devices()] == ["cpu"] * 8


def test_warnings_are_errors():
    with pytest.raises(UserWarning, match="raised"):
        warnings.warn("raised, not printed", UserWarning, stacklevel=1)


def test_double_precision_is_off():
    assert not jax.config.jax_enable_x64


def test_tiers_are_of_files_and_the_quick_one_has_one_of_every_package():
    here = Path(__file__).parent
    assert [name for name in QUICK | SLOW if not (here / name).is_file()] == []
    packages = {path.parent.name for path in here.glob("*/test_*.py")}
    covered = {name.partition("/")[0] for name in QUICK}
    assert packages - covered <= {"benchmarks", "examples", "flax", "parity", "typing"}
