"""`import nnxlite` is light: it starts no device and leaves heavy libraries for those who need them."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import nnxlite as nnx

LATER = """
    flax jax.experimental.pallas jax.extend libcst matplotlib optax orbax rich sklearn treescope
    nnxlite.bridge nnxlite.checkpoint nnxlite.decoding nnxlite.distributed nnxlite.inspect
    nnxlite.migrate nnxlite.serving nnxlite.sharding.plans
""".split()


def printed_by(program: str) -> list[str]:
    """What a program prints in a new interpreter that has imported JAX and then this library."""
    start = "import sys, jax; before = set(sys.modules); import nnxlite\n"
    command = [sys.executable, "-c", start + program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


def test_heavy_libraries_are_left_to_those_who_need_them_and_no_device_is_started():
    # JAX refuses a number of devices once it has started.
    devices = "jax.config.update('jax_num_cpu_devices', 3); print('still free')"
    modules, free = printed_by(f"print(*sorted(set(sys.modules) - before)); {devices}")
    assert free == "still free" and "nnxlite.nn" in modules.split()
    assert [library for library in LATER if library in modules.split()] == []


def imported_for_type_checkers() -> dict[str, str]:
    """Where each name comes from that a type checker is shown, and Python finds when it is used."""
    tree = ast.parse(Path(nnx.__file__).read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    found = {}
    for node in block.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [alias.name for alias in node.names]
            if names == ["*"]:
                room = importlib.import_module(node.module)
                names = getattr(room, "__all__", vars(room))
            package = node.module.partition("._")[0]  # a star may be of a file
            found |= {name: package for name in names if not name.startswith("_")}
    return found


def test_names_imported_at_first_use_are_those_that_type_checkers_see():
    declared = imported_for_type_checkers()
    packages = dict.fromkeys((name for name in nnx._LATER if "." not in name), "nnxlite")
    later = {name: f"nnxlite.{package}" for name, package in nnx._PACKAGE_OF.items()}
    assert declared == packages | later
    for name, module in declared.items():
        if name == "bridge":
            pytest.importorskip("flax")
        found = getattr(nnx, name)
        if module == "nnxlite":
            assert found is sys.modules[f"nnxlite.{name}"]
        else:
            assert found is getattr(importlib.import_module(module), name)


def test_names_imported_at_first_use_are_found_by_every_way():
    """By `dir`, attribute, `from` and a star, each for a name that nobody has asked for before."""
    program = """
print({'tabulate', 'inspect', 'Linear'} <= set(dir(nnxlite)), nnxlite.tabulate.__module__)
from nnxlite import shard, serving; print(serving.Exported.__name__)
from nnxlite.summary import tabulate; print(tabulate is nnxlite.tabulate)
from nnxlite import *; print(callable(draw), Linear is nnxlite.Linear)
"""
    printed = printed_by(program)
    assert printed == ["True nnxlite.inspect._tabulate", "Exported", "True", "True True"]
    assert "tabulate" in dict(inspect.getmembers(nnx))
