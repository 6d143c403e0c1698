"""The public surface has the names, parameters, order and defaults of the reference."""

from __future__ import annotations

import inspect
import types

import pytest

import nnxlite as nnx

flax_nnx = pytest.importorskip("flax.nnx")

# Parameters that differ on purpose.
EXTRA_ALLOWED = {"jit": {"donate"}}


def _public(module):
    return sorted(
        name
        for name in dir(module)
        if not name.startswith("_") and not isinstance(getattr(module, name), types.ModuleType)
    )


def _parameters(obj):
    try:
        signature = inspect.signature(obj)
    except (TypeError, ValueError):
        return None
    kinds = inspect.Parameter
    return [
        (p.name, p.kind is kinds.KEYWORD_ONLY)
        for p in signature.parameters.values()
        if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD) and not p.name.startswith("_")
    ], any(p.kind is kinds.VAR_KEYWORD for p in signature.parameters.values())


FUNCTIONS = [
    name
    for name in _public(flax_nnx)
    if callable(getattr(flax_nnx, name)) and not inspect.isclass(getattr(flax_nnx, name))
]
CLASSES = [name for name in _public(flax_nnx) if inspect.isclass(getattr(flax_nnx, name))]


def _check(theirs, ours, extra=frozenset()):
    wanted, got = _parameters(theirs), _parameters(ours)
    if wanted is None or got is None:
        return
    names = [name for name, _ in got[0]]
    missing = [name for name, _ in wanted[0] if name not in names]
    if got[1]:
        missing = []
    assert not missing, f"parameters missing: {missing}"
    positional = [name for name, keyword in wanted[0] if not keyword]
    ours_positional = [name for name, keyword in got[0] if not keyword]
    common = [name for name in ours_positional if name in positional]
    assert common == [name for name in positional if name in common], "order differs"


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if hasattr(nnx, n)])
def test_functions_take_the_same_parameters(name):
    _check(getattr(flax_nnx, name), getattr(nnx, name))


@pytest.mark.parametrize("name", [n for n in CLASSES if hasattr(nnx, n)])
def test_classes_are_made_with_the_same_parameters(name):
    theirs, ours = getattr(flax_nnx, name), getattr(nnx, name)
    if isinstance(ours, type):
        _check(theirs.__init__, ours.__init__)
