"""The harsh test environment is really in force (see conftest.py and pyproject.toml)."""

from __future__ import annotations

import warnings

import jax
import pytest


def test_eight_virtual_cpu_devices():
    assert [d.platform for d in jax.devices()] == ["cpu"] * 8


def test_warnings_are_errors():
    with pytest.raises(UserWarning, match="raised"):
        warnings.warn("raised, not printed", UserWarning, stacklevel=1)


def test_double_precision_is_off():
    assert not jax.config.jax_enable_x64
