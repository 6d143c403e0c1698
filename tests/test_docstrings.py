"""The examples in the package's docstrings run as written, and what is public has a docstring."""

from __future__ import annotations

import doctest
import importlib
import inspect
import io
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import nnxlite

PACKAGE = Path(nnxlite.__file__).parent
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("name", sorted(map(module_name, PACKAGE.rglob("*.py"))))
def test_examples_in(name):
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False)
    report = io.StringIO()
    names = {"jax": jax, "jnp": jnp, "nnx": nnxlite}
    for example in doctest.DocTestFinder().find(module, name, extraglobs=names):
        runner.run(example, out=report.write)
    assert runner.failures == 0, report.getvalue()


def public_objects() -> dict[str, object]:
    """Functions and classes of the package by the name a user imports them under."""
    return {
        name: value
        for name, value in vars(nnxlite).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__.split(".")[0] == "nnxlite"
    }


def test_every_public_function_and_class_has_a_docstring():
    bare = [name for name, value in public_objects().items() if not inspect.getdoc(value)]
    assert bare == []
