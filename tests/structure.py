"""How large the package is, and how much of it a reader has to know.

    python -m tests.structure

prints code lines by package (without docstrings, comments and blank lines), imports that cross a
package border, the files that one call of a jitted step runs through, and the caches.  The numbers
are for comparing one state of the repository with another; nothing here judges them.
"""

from __future__ import annotations

import ast
import collections
import pathlib
import sys
import typing as tp

ROOT = pathlib.Path(__file__).resolve().parent.parent / "nnxlite"

CACHES = (
    "cache",
    "lru_cache",
    "cached_property",
    "OrderedDict",
    "WeakKeyDictionary",
    "WeakValueDictionary",
    "WeakSet",
)
"""Names whose use is what a cache looks like; one that is a plain dict or attribute is not seen."""


def package_of(path: pathlib.Path) -> str:
    """The package under `nnxlite` that a file belongs to; a single module is its own.

    >>> package_of(ROOT / "graph" / "_plan.py"), package_of(ROOT / "_config.py")
    ('graph', '_config')
    """
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def code_lines(source: str) -> int:
    r"""Lines that hold code.

    >>> code_lines("'A docstring.'\n\n# a reason\nx = [\n    1,\n]\n")
    3
    """
    tree = ast.parse(source)
    prose: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                prose.update(range(node.lineno, tp.cast(int, node.end_lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(
        1
        for number, line in lines
        if line.strip() and not line.lstrip().startswith("#") and number not in prose
    )


class Import(tp.NamedTuple):
    """One import of one module of the package by a file of another package."""

    file: pathlib.Path
    module: str
    private: bool
    inside_function: bool


def crossing_imports(path: pathlib.Path) -> tp.Iterator[Import]:
    """Imports by which a file reaches into another package, those inside functions included."""
    tree = ast.parse(path.read_text())
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        parts = node.module.split(".")
        if parts[0] != "nnxlite" or len(parts) < 2 or parts[1] == package_of(path):
            continue
        private = any(part.startswith("_") for part in parts[2:])
        yield Import(path, node.module, private, id(node) not in top)


def cache_lines(path: pathlib.Path) -> tp.Iterator[int]:
    """Lines of a file on which a cache is made."""
    for node in ast.walk(ast.parse(path.read_text())):
        called = node.func if isinstance(node, ast.Call) else None
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        for name in (called, *decorators):
            if getattr(name, "attr", getattr(name, "id", None)) in CACHES:
                yield getattr(name, "lineno", 0)


def files_of_a_call() -> tuple[set[str], set[str]]:
    """The files that a first and a second call of one jitted training step run through."""
    import jax.numpy as jnp
    import optax

    import nnxlite as nnx

    model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.relu)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model: tp.Any, optimizer: tp.Any, x: tp.Any) -> None:
        grads = nnx.grad(lambda model: jnp.sum(model(x) ** 2))(model)
        optimizer.update(model, grads)

    def run() -> set[str]:
        seen: set[str] = set()
        sys.setprofile(lambda frame, event, arg: seen.add(frame.f_code.co_filename))
        try:
            step(model, optimizer, x)
        finally:
            sys.setprofile(None)
        return {str(pathlib.Path(f).relative_to(ROOT)) for f in seen if f.startswith(str(ROOT))}

    x = jnp.ones((1, 2))
    cold = run()
    run()  # the second call may still note what the first one wrote
    return cold, run()


def main() -> None:
    """Print the report."""
    files = sorted(ROOT.rglob("*.py"))
    by_package: collections.Counter[str] = collections.Counter()
    for path in files:
        by_package[package_of(path)] += code_lines(path.read_text())
    print(f"code lines: {by_package.total()} in {len(files)} files")
    for package, lines in by_package.most_common():
        print(f"  {lines:6} {package}")
    imports = [found for path in files for found in crossing_imports(path)]
    print(
        f"imports across packages: {len(imports)}, {sum(i.private for i in imports)} of private "
        f"modules, {sum(i.inside_function for i in imports)} inside functions"
    )
    caches = {str(p.relative_to(ROOT)): sorted(set(cache_lines(p))) for p in files}
    print(f"caches: {sum(map(len, caches.values()))}")
    for name, lines in caches.items():
        if lines:
            print(f"  {name}: {', '.join(map(str, lines))}")
    cold, warm = files_of_a_call()
    print(f"files of a jitted step: first call {len(cold)}, later {len(warm)}")
    print("  later:", ", ".join(sorted(warm)))


if __name__ == "__main__":
    main()
