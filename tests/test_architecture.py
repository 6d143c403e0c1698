"""Imports only point down the layers, and nothing inside imports the package root."""

import ast
import functools
import inspect
import pathlib
import re

import pytest

import nnxlite
from tests import structure
from tests.structure import ROOT

MAP = (ROOT.parent / "docs" / "contributing.md").read_text().partition("## The map")[2]
ROWS = re.findall(r"^\| (\d*) ?\| (`[^|]*) \|", MAP, re.MULTILINE)


def levels() -> dict[str, int]:
    """The layer of each room; a room may import from its own layer and from those below it."""
    found, level = {}, 0
    for number, names in ROWS:
        level = int(number or level)  # a layer of several rows has its number in the first
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names), level)
    return found


LEVEL = levels()
FILES = [path for path in structure.FILES if path != ROOT / "__init__.py"]
every_file = pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))


def room_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


LAZILY_UPWARD = {
    # treescope takes long to import, and draws few objects
    ("_base", "nnxlite.inspect._treescope"),
}
"""Imports inside functions that point to a layer above."""

LAZILY_BACK = {
    # methods of a definition that rebuild its objects
    ("graph", "_graphdef", "_functional"),
}
"""Imports inside functions that close a circle within a package."""

ORDER = {
    "graph": """_kinds _defs _rebuild _compare _graphdef _plan _functional
        _walk _edit""",
    "boundary": "_call_def _inputs _out _leave _labels _body _context",
}
"""The files of a package, each of which imports only those before it."""


@functools.cache
def imports_of(path: pathlib.Path) -> list[tuple[str, list[str]]]:
    """Modules and names that a file imports, inside functions too, but not for types alone."""
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    found = []
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending += node.orelse
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, [alias.name for alias in node.names]))
        elif isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
        else:
            pending += ast.iter_child_nodes(node)
    return found


def imports_of_ours(path: pathlib.Path) -> list[tuple[str, list[str]]]:
    """Those from this package, without the exceptions above."""
    pairs = [pair for pair in imports_of(path) if (room_of(path), pair[0]) not in LAZILY_UPWARD]
    return [(module, names) for module, names in pairs if module.split(".")[0] == "nnxlite"]


@every_file
def test_imports_point_down_and_never_to_the_package_root(path):
    for module, names in imports_of_ours(path):
        rooms = module.split(".")[1:2] or names
        assert rooms and set(rooms) <= LEVEL.keys(), f"{path.name} imports the package root"
        above = [room for room in rooms if LEVEL[room] > LEVEL[room_of(path)]]
        assert not above, f"{path.name} imports {module} from a layer above"


CORE = {"_base", "variables", "_state", "graph", "objects", "boundary", "transforms", "filtered"}
"""Rooms whose `__init__` has public names only; inside the library, names come from their files."""


@every_file
def test_names_come_from_where_they_are_defined(path):
    """In the core that is the file, elsewhere the package, whose `__init__` has what it offers."""
    if path.name == "__init__.py" or room_of(path) in ("_paths", "compat", "helpers"):
        return  # these collect names
    for module, names in imports_of_ours(path):
        _, *rooms = module.split(".")
        if rooms and rooms[0] in CORE:
            files = {p.stem for p in (ROOT / rooms[0]).glob("*.py")}
            assert len(rooms) > 1 or set(names) <= files, f"{path.name} imports {names} of {module}"
        elif len(rooms) > 1 and rooms[0] != room_of(path):
            assert not rooms[1].startswith("_"), f"{path.name} imports {module}"


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


def test_a_file_is_read_in_one_sitting():
    files = [*structure.FILES, *(ROOT.parent / "tests").rglob("*.py")]
    lines = {path: path.read_text().count("\n") for path in files}
    assert {path: count for path, count in lines.items() if count > 600} == {}


def test_every_room_is_on_the_map_and_one_of_them_uses_private_names_of_jax():
    numbers = [int(number) for number, _ in ROWS if number]
    assert numbers == list(range(len(numbers), 0, -1))
    assert LEVEL.keys() == {room_of(path) for path in FILES}
    users = {
        room_of(path)
        for path in FILES
        for module, _ in imports_of(path)
        if module.startswith(("jax._src", "jaxlib._"))
    }
    assert users <= {"_base"}


def classes_of(*bases: type) -> set[type]:
    """The public classes of these kinds, and all those of the package that they derive from."""
    public = [c for _, c in inspect.getmembers(nnxlite, inspect.isclass) if issubclass(c, bases)]
    return {b for c in public for b in c.__mro__ if b.__module__.startswith("nnxlite")}


def test_private_names_are_left_to_those_who_subclass():
    """A module with a `_cache` or `_pad` of its own works; so does a State with such keys."""
    ours = ("__", "_nnx_", "_abc_")
    classes = classes_of(nnxlite.Pytree, nnxlite.State)
    private = {(c.__name__, name) for c in classes for name in vars(c) if name.startswith("_")}
    assert len(classes) > 40
    assert {pair for pair in private if not pair[1].startswith(ours)} == {("State", "_mapping")}


def test_layers_take_no_name_that_objects_use_inside():
    inside = {n for base in nnxlite.Module.__mro__ for n in vars(base) if n.startswith("_nnx_")}
    inside -= {"_nnx_is_pytree", "_nnx_declared", "_nnx_definitions"}  # each class has its own
    core = ("nnxlite.objects", "nnxlite.graph")
    layers = {c for c in classes_of(nnxlite.Pytree) if not c.__module__.startswith(core)}
    assert len(layers) > 30
    assert [(cls.__name__, name) for cls in layers for name in inside & set(vars(cls))] == []
