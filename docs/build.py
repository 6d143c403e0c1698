"""Check and build the site: `python docs/build.py`, from any folder.

Three steps, of which each fails with a list of what is wrong:

1. Every public name has a docstring and is on exactly one page of `docs/api`; every name there exists.
2. The Python of all pages runs, and so do the notebooks (`--no-code` leaves this out).
3. MkDocs builds the site; a broken link or anchor is an error.

The first step needs nothing but the library; the others need the extra `docs`.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import importlib
import inspect
import os
import re
import subprocess
import sys
import tempfile
import types
import typing as tp
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
API = ROOT / "docs" / "api"
NOTEBOOKS = ROOT / "docs" / "notebooks"

PACKAGE = "nnxlite"
INTERNAL = frozenset(
    "boundary filtered graph graphlib module nn object objects optimizer pytreelib rnglib "
    "statelib transforms variablelib".split()
)
"""Submodules of the engine: their names are public where a page lists them, or the package has them."""

DIRECTIVE = re.compile(rf"^::: {PACKAGE}\.([\w.]+)$", re.MULTILINE)
SUMMARIZED = re.compile(
    rf"^(?P<directive>::: {PACKAGE}\.(?P<name>[\w.]+))\n(?:\n> .*\n)?", re.MULTILINE
)
"""A directive, and the summary below it."""
ROW = re.compile(r"^\| `nnx\.([\w.]+)` \|(.*)\|$", re.MULTILINE)


# 1. The pages of the API --------------------------------------------------------------------------


class Entry(tp.NamedTuple):
    """A name on a page: from the docstring by a directive, or described in the row of a table."""

    name: str
    page: str
    cells: tuple[str, ...] | None
    """The cells of the row after the name; None for a directive."""


def entries(pages: Path = API) -> list[Entry]:
    """The names on the pages in a folder, without the name of the package."""
    out: list[Entry] = []
    for page in sorted(pages.glob("*.md")):
        text = page.read_text()
        out += [Entry(match[1], page.name, None) for match in DIRECTIVE.finditer(text)]
        for match in ROW.finditer(text):
            cells = tuple(cell.strip() for cell in match[2].split(" | "))
            out.append(Entry(match[1], page.name, cells))
    return out


def bound_names(module: types.ModuleType) -> set[str]:
    """The public names that a module defines, or re-exports: by `from a import b as b`, or by a star."""
    if "__all__" not in vars(module) and hasattr(module, "__all__"):  # the root collects them
        return set(module.__all__)
    names: set[str] = set()
    if getattr(module, "__file__", None) is None:  # made of names that others define
        return names
    for node in ast.parse(inspect.getsource(module)).body:
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.ImportFrom(module=str(of), names=[ast.alias(name="*")]):
                names |= set(getattr(importlib.import_module(of), "__all__", ()))
            case ast.ImportFrom() if node.module != "__future__":
                names |= {alias.name for alias in node.names if alias.asname == alias.name}
            case ast.Assign():
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            case _:
                pass
    return {
        name
        for name in names
        if not name.startswith("_")
        and not isinstance(getattr(module, name), types.ModuleType | tp.TypeVar)
    }


def public_names(package: types.ModuleType) -> set[str]:
    """The names that the pages have to list: those of the package, and of its submodules.

    A name of a submodule that the package itself has under a public name need not be listed again.
    """
    top = {name for name in dir(package) if not name.startswith("_")}
    at_top = {id(getattr(package, name)) for name in top}
    below: dict[int, str] = {}
    for name in sorted(top - INTERNAL):
        module = getattr(package, name)
        if isinstance(module, types.ModuleType):
            for inner in sorted(bound_names(module)):
                value = getattr(module, inner)
                if id(value) not in at_top:
                    below.setdefault(id(value), f"{name}.{inner}")
    return top | set(below.values())


def resolve(path: str, root: tp.Any) -> tp.Any:
    """The value at a dotted path below `root`; LookupError if there is none."""
    for name in path.split("."):
        if not hasattr(root, name):
            raise LookupError(path)
        root = getattr(root, name)
    return root


def imported(path: str) -> tp.Any:
    """The module or value at an absolute dotted path; LookupError if there is none."""
    try:
        return importlib.import_module(path)
    except ImportError:
        home, _, name = path.rpartition(".")
        if not home:
            raise LookupError(path) from None
        return resolve(name, imported(home))


def documented_package() -> types.ModuleType:
    """The package, with the submodule that it never imports itself."""
    importlib.import_module(f"{PACKAGE}.migrate")
    return importlib.import_module(PACKAGE)


def api_problems(pages: Path = API, package: types.ModuleType | None = None) -> list[str]:
    """What is wrong with the pages of the API, a sentence each; empty if nothing is."""
    if package is None:
        package = documented_package()
    problems: list[str] = []
    listed = entries(pages)
    found: dict[str, tp.Any] = {}
    for entry in listed:
        try:
            found[entry.name] = resolve(entry.name, package)
        except LookupError:
            problems.append(f"{entry.page}: nnx.{entry.name} does not exist")
        except ImportError:  # it needs a package that is not installed here
            continue

    for name, times in collections.Counter(entry.name for entry in listed).items():
        if times > 1:
            where = ", ".join(entry.page for entry in listed if entry.name == name)
            problems.append(f"nnx.{name} is listed {times} times: {where}")

    values = {id(value) for value in found.values()}
    for name in sorted(public_names(package) - found.keys()):
        below_the_top = "." in name
        if not (below_the_top and id(resolve(name, package)) in values):
            problems.append(f"nnx.{name} is on no page of {pages.name}")

    for entry in listed:
        if entry.name not in found:
            continue
        value = found[entry.name]
        if entry.cells is None:
            if not (callable(value) and inspect.getdoc(value)):
                problems.append(f"{entry.page}: nnx.{entry.name} has no docstring")
        elif not entry.cells[-1]:
            problems.append(f"{entry.page}: the row of nnx.{entry.name} does not say what it is")
        elif len(entry.cells) == 2:  # "the same as"
            other = entry.cells[0].strip("`")
            try:
                same = imported(other) is value
            except LookupError:
                same = False
            if not same:
                problems.append(f"{entry.page}: nnx.{entry.name} is not {other}")
    return problems


def summary(value: tp.Any) -> str:
    """The first sentence of a docstring, in one line."""
    first = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`])", first)[0]


def summarized(text: str, package: types.ModuleType | None = None) -> str:
    """The text of a page in which a quotation after each directive is the summary of that name.

    It is for readers of the source: the site shows the whole docstring instead (`docs/hooks.py`).
    """
    package = package or documented_package()

    def entry(match: re.Match[str]) -> str:
        try:
            value = resolve(match["name"], package)
        except (ImportError, LookupError):  # a package that is not installed here, or a wrong name
            return match[0]
        return f"{match['directive']}\n\n> {summary(value)}\n"

    return SUMMARIZED.sub(entry, text)


def store_summaries() -> None:
    """Write the summaries of all pages of the API."""
    for page in sorted(API.glob("*.md")):
        page.write_text(summarized(page.read_text(encoding="utf-8")), encoding="utf-8")


# 2. The code --------------------------------------------------------------------------------------


def run(*command: str | Path, env: dict[str, str] | None = None) -> None:
    """Run a command in the repository; SystemExit if it fails."""
    shown = " ".join(str(part) for part in command[1:])
    print(f"$ python {shown}", flush=True)
    code = subprocess.run(command, cwd=ROOT, env=environment() | (env or {})).returncode
    if code:
        raise SystemExit(f"docs/build.py: `python {shown}` failed with exit code {code}.")


def environment() -> dict[str, str]:
    """The variables of this process, with the library of this repository on the path of imports."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # Material prints an advertisement of its maintainers to the terminal; it is not about the build.
    return os.environ | {"PYTHONPATH": path, "NO_MKDOCS_2_WARNING": "1"}


def run_code() -> None:
    """Run the Python of all pages, and the notebooks."""
    tests = [ROOT / "tests" / name for name in ("test_docs.py", "test_notebooks.py")]
    run(sys.executable, "-m", "pytest", "-q", *filter(Path.exists, tests))


def executed(path: Path, folder: Path) -> tp.Any:
    """A notebook that has been run from top to bottom in a folder, with what it printed.

    It runs on the CPU with eight virtual devices, as the pages do, and without a network.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=environment() | settings)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times, which differ in each run
    return notebook


def store_notebooks() -> None:
    """Run each notebook and store it with what it printed."""
    import nbformat

    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        print(path.relative_to(ROOT), flush=True)
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(path, Path(folder)), path)


def store_outputs(paths: list[Path]) -> None:
    """Run pages, on the CPU with eight virtual devices, and store in them what they print."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    pages = importlib.import_module("pages")  # beside this file
    for path in paths:
        print(path, flush=True)
        path = path.resolve()
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            path.write_text(pages.stored(path), encoding="utf-8")


# 3. The site --------------------------------------------------------------------------------------


def mkdocs(command: str, *options: str | Path) -> None:
    """Run a command of MkDocs with the configuration of the repository."""
    run(sys.executable, "-m", "mkdocs", command, "-f", ROOT / ".mkdocs.yml", *options)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="docs/build.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--no-code", action="store_true", help="do not run pages and notebooks")
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="the folder of the site")
    parser.add_argument("--serve", action="store_true", help="show the site at a local address")
    parser.add_argument(
        "--notebooks",
        action="store_true",
        help="run the notebooks, store what they print, and do nothing else",
    )
    parser.add_argument(
        "--outputs",
        type=Path,
        nargs="+",
        metavar="PAGE",
        help="run these pages, store what they print, and do nothing else",
    )
    parser.add_argument(
        "--summaries",
        action="store_true",
        help="write the summary of each name in docs/api, and do nothing else",
    )
    options = parser.parse_args(arguments)
    if options.summaries:
        return store_summaries()
    if options.outputs:
        return store_outputs(options.outputs)
    if options.notebooks:
        return store_notebooks()
    if options.serve:
        return mkdocs("serve", "--livereload", "--no-strict")  # what is unfinished is shown, too
    problems = api_problems()
    if problems:
        raise SystemExit("docs/build.py:\n  " + "\n  ".join(problems))
    print(f"{len(entries())} public names on the pages of {API.relative_to(ROOT)}", flush=True)
    if not options.no_code:
        run_code()
    mkdocs("build", "--strict", "--site-dir", options.out.resolve())
    print(f"The site: {options.out.resolve() / 'index.html'}")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT)]  # the library of this repository
    main()
