"""Submodules by the reference's paths: what is found there is what the root has."""

from __future__ import annotations

import importlib
import sys
import types

import pytest

from tests.parity.layers import ref

import nnxlite as nnx  # isort: skip


def public_names() -> list[tuple[str, str]]:
    """Every (submodule, name) of the reference that is a public name of both roots."""
    found = []
    for full, module in sorted(sys.modules.items()):
        path = full.removeprefix(f"{ref.__name__}.")
        if path == full or path.startswith("bridge") or not isinstance(module, types.ModuleType):
            continue
        for name in dir(module):
            value = getattr(module, name)
            own = getattr(value, "__module__", None) == full
            if own and hasattr(nnx, name) and value is vars(ref).get(name):
                found.append((path, name))
    return found


@pytest.mark.parametrize("path, name", public_names())
def test_the_name_is_found_by_the_path(path, name):
    assert getattr(importlib.import_module(f"nnxlite.{path}"), name) is getattr(nnx, name)
    found = nnx
    for part in path.split("."):
        found = getattr(found, part)
    assert getattr(found, name) is getattr(nnx, name)
