"""Imports only point down the layers, and nothing inside imports the package root."""

from __future__ import annotations

import ast
import pathlib

import pytest

import nnxlite

ROOT = pathlib.Path(nnxlite.__file__).parent

# From the bottom to the top; a room may import from its own layer and from those below it.
LAYERS = [
    {"_jax", "_errors", "_config", "_typing", "_text", "_versions", "_statics", "_interning"},
    {"errors", "reprlib", "tracers"},
    {"_sharding_hook", "_traversals"},
    {"variables"},
    {"filters"},
    {"_state"},
    {"graph"},
    {"objects"},
    {"boundary"},
    {"transforms"},
    {"sharding", "filtered"},
    {"nn"},
    {"training", "inspect", "checkpoint"},
    {"compat", "helpers", "wrappers", "_paths"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

# The one pair that knows of each other: filters look at Variables, and Variables at nothing above.
FILES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


def room_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(path: pathlib.Path, *, lazily: bool):
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if lazily else tree.body
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    here = LEVEL[room_of(path)]
    for module, names in imports_of(path, lazily=False):
        if not module.startswith("nnxlite"):
            continue
        parts = module.split(".")
        rooms = [parts[1]] if len(parts) > 1 else names
        for room in rooms:
            assert LEVEL[room] <= here, f"{path.name} imports {module} from a layer above"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_imports_the_package_root(path):
    for module, names in imports_of(path, lazily=True):
        if module == "nnxlite":
            rooms = set(names)
            assert rooms and rooms <= LEVEL.keys(), f"{path.name} imports the package root"


def test_every_room_has_a_layer():
    assert {room_of(p) for p in FILES} <= LEVEL.keys()


def test_semi_private_jax_is_used_in_one_module_only():
    users = {
        room_of(path)
        for path in FILES
        for module, _ in imports_of(path, lazily=True)
        if module.startswith(("jax._src", "jaxlib._"))
    }
    assert users <= {"_jax"}


def test_private_names_are_left_to_those_who_subclass():
    """A module with a `_cache` or `_pad` of its own works; so does a State with such keys."""
    bases = (nnxlite.Pytree, nnxlite.State)
    classes = [c for c in vars(nnxlite).values() if isinstance(c, type) and issubclass(c, bases)]
    taken = {
        (cls.__name__, name)
        for cls in classes
        for base in cls.__mro__
        if base.__module__.startswith("nnxlite")
        for name in vars(base)
        if name.startswith("_") and not name.startswith(("__", "_nnx_", "_abc_"))
    }
    assert len(classes) > 40 and taken == {("State", "_mapping")}


def test_layers_take_no_name_that_objects_use_inside():
    core = ("nnxlite.objects", "nnxlite.graph")
    inside = {n for base in nnxlite.Module.__mro__ for n in vars(base) if n.startswith("_nnx_")}
    settings = {"_nnx_is_pytree", "_nnx_declared", "_nnx_kept"}  # each has its own
    classes = [c for c in vars(nnxlite).values() if isinstance(c, type)]
    layers = {
        base
        for cls in classes
        if issubclass(cls, nnxlite.Pytree)
        for base in cls.__mro__
        if base.__module__.startswith("nnxlite") and not base.__module__.startswith(core)
    }
    taken = {(cls.__name__, name) for cls in layers for name in inside & set(vars(cls)) - settings}
    assert len(layers) > 30 and not taken
