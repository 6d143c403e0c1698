"""Imports only point down the layers, and nothing inside imports the package root."""

from __future__ import annotations

import ast
import inspect
import pathlib
import re

import pytest

import nnxlite

ROOT = pathlib.Path(nnxlite.__file__).parent

# From the bottom to the top; a room may import from its own layer and from those below it.
LAYERS = [
    {"_base"},
    {"errors", "reprlib", "tracers"},
    {"variables"},
    {"filters"},
    {"_state"},
    {"graph"},
    {"objects"},
    {"boundary"},
    {"transforms"},
    {"filtered"},
    {"nn"},
    {"training", "inspect", "checkpoint", "decoding", "serving", "sharding", "distributed"},
    {
        "compat",
        "helpers",
        "lora",
        "summary",
        "visualization",
        "wrappers",
        "_paths",
        "bridge",
    },
    {"migrate", "flax"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

FILES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


def room_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


LAZILY_UPWARD = {
    (
        "_base",
        "nnxlite.inspect._treescope",
    ): "treescope takes long to import, and draws few objects",
}
"""Imports inside functions that point to a layer above."""

LAZILY_BACK = {
    ("graph", "_graphdef", "_functional"): "methods of a definition that rebuild its objects",
}
"""Imports inside functions that close a circle within a package."""

ORDER = {
    "graph": """_kinds _defs _rebuild _compare _graphdef _plan _functional
        _walk _edit""",
    "boundary": "_call_def _inputs _out _leave _labels _body _context",
}
"""The files of a package, each of which imports only those before it."""


def imports_of(path: pathlib.Path):
    """Modules and names that a file imports, inside functions too, but not for types alone."""
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending += node.orelse
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, []
        else:
            pending += ast.iter_child_nodes(node)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    here = LEVEL[room_of(path)]
    for module, names in imports_of(path):
        if not module.startswith("nnxlite") or (room_of(path), module) in LAZILY_UPWARD:
            continue
        parts = module.split(".")
        rooms = [parts[1]] if len(parts) > 1 else names
        for room in rooms:
            assert LEVEL[room] <= here, f"{path.name} imports {module} from a layer above"


CORE = {"_base", "variables", "_state", "graph", "objects", "boundary", "transforms", "filtered"}
"""Rooms whose `__init__` has public names only; inside the library, names come from their files."""


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_names_come_from_where_they_are_defined(path):
    """In the core that is the file, elsewhere the package, whose `__init__` has what it offers."""
    if path.name == "__init__.py" or room_of(path) in ("_paths", "compat", "helpers"):
        return  # these collect names
    for module, names in imports_of(path):
        parts = module.split(".")
        if parts[0] != "nnxlite" or len(parts) < 2 or (room_of(path), module) in LAZILY_UPWARD:
            continue
        if parts[1] in CORE:
            files = {p.stem for p in (ROOT / parts[1]).glob("*.py")}
            assert len(parts) > 2 or set(names) <= files, f"{path.name} imports {names} of {module}"
        elif len(parts) > 2 and parts[1] != room_of(path):
            assert not parts[2].startswith("_"), f"{path.name} imports {module}"


def imports_within(package: str) -> dict[str, set[str]]:
    """For each file of a package those that it imports."""
    start = f"nnxlite.{package}."
    return {
        path.stem: {
            module.removeprefix(start).partition(".")[0]
            for module, _ in imports_of(path)
            if module.startswith(start)
        }
        for path in sorted((ROOT / package).glob("*.py"))
        if path.stem != "__init__"
    }


@pytest.mark.parametrize("package", sorted(p.parent.name for p in ROOT.glob("*/__init__.py")))
def test_files_of_a_package_do_not_import_each_other_in_a_circle(package):
    found = imports_within(package)
    for name, theirs in found.items():
        theirs -= {other for other in theirs if (package, name, other) in LAZILY_BACK}
    while found:
        free = [name for name, theirs in found.items() if not theirs & found.keys()]
        assert free, f"a circle in {package}: {found}"
        for name in free:
            del found[name]


@pytest.mark.parametrize("package", ORDER)
def test_files_of_a_package_are_in_order(package):
    order = ORDER[package].split()
    found = imports_within(package)
    assert set(order) == set(found)
    for name, theirs in found.items():
        later = set(order[order.index(name) :])
        late = {other for other in theirs & later if (package, name, other) not in LAZILY_BACK}
        assert not late, f"{package}/{name}.py imports {sorted(late)}, which come after it"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_imports_the_package_root(path):
    for module, names in imports_of(path):
        if module == "nnxlite":
            rooms = set(names)
            assert rooms and rooms <= LEVEL.keys(), f"{path.name} imports the package root"


def test_every_room_has_a_layer():
    assert {room_of(p) for p in FILES} <= LEVEL.keys()


def test_the_map_for_contributors_has_these_layers():
    page = (ROOT.parent / "docs" / "contributing.md").read_text()
    rows = re.findall(r"^\| (\d*) ?\| (`[^|]*) \|", page.partition("## The map")[2], re.MULTILINE)
    found: list[set[str]] = []
    for number, names in rows:
        if number:
            assert int(number) == len(LAYERS) - len(found)
            found.append(set())
        found[-1].update(re.findall(r"`(\w+)`", names))
    assert found == LAYERS[::-1]


def test_semi_private_jax_is_used_in_one_module_only():
    users = {
        room_of(path)
        for path in FILES
        for module, _ in imports_of(path)
        if module.startswith(("jax._src", "jaxlib._"))
    }
    assert users <= {"_base"}


def test_private_names_are_left_to_those_who_subclass():
    """A module with a `_cache` or `_pad` of its own works; so does a State with such keys."""
    bases = (nnxlite.Pytree, nnxlite.State)
    classes = [
        c for _, c in inspect.getmembers(nnxlite) if isinstance(c, type) and issubclass(c, bases)
    ]
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
    settings = {"_nnx_is_pytree", "_nnx_declared", "_nnx_definitions"}  # each has its own
    classes = [c for _, c in inspect.getmembers(nnxlite) if isinstance(c, type)]
    layers = {
        base
        for cls in classes
        if issubclass(cls, nnxlite.Pytree)
        for base in cls.__mro__
        if base.__module__.startswith("nnxlite") and not base.__module__.startswith(core)
    }
    taken = {(cls.__name__, name) for cls in layers for name in inside & set(vars(cls)) - settings}
    assert len(layers) > 30 and not taken
