"""How large the package is, and how much of it a reader has to know.

    python -m tests.structure

prints code lines by package (without docstrings, comments and blank lines) and by what they are for,
imports that cross a package border, the files that one call of a jitted step runs through, and the
caches.  The numbers are for comparing one state of the repository with another; nothing here judges
them.
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

    >>> package_of(ROOT / "graph" / "_plan.py"), package_of(ROOT / "_base" / "config.py")
    ('graph', '_base')
    """
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


KINDS = ("imports", "types", "signatures", "errors", "statements")
"""What a line of code is for: `types` are overloads and the keywords in them, `errors` are raised."""


def lines_by_kind(source: str) -> collections.Counter[str]:
    r"""How many lines of code there are of each kind.

    >>> lines_by_kind("'A docstring.'\n\n# a reason\nx = [\n    1,\n]\n")
    Counter({'statements': 3})
    >>> sorted(lines_by_kind("def f(\n    x,\n):\n    raise ValueError(x)\n").items())
    [('errors', 1), ('signatures', 3)]
    """
    tree = ast.parse(source)
    kinds: dict[int, str] = {}
    prose: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                prose.update(_lines(node))
            case ast.Import() | ast.ImportFrom():
                kinds.update(dict.fromkeys(_lines(node), "imports"))
            case ast.FunctionDef() if _is_overload(node):
                kinds.update(dict.fromkeys(_lines(node), "types"))
            case ast.FunctionDef():
                head = range(_lines(node).start, node.body[0].lineno)
                kinds.update(dict.fromkeys(head, "signatures"))
            case ast.ClassDef() if any("TypedDict" in ast.unparse(base) for base in node.bases):
                kinds.update(dict.fromkeys(_lines(node), "types"))
            case ast.Raise():
                kinds.update(dict.fromkeys(_lines(node), "errors"))
    return collections.Counter(
        kinds.get(number, "statements")
        for number, line in enumerate(source.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#") and number not in prose
    )


def _lines(node: tp.Any) -> range:
    """The lines of a node, those of its decorators included."""
    first = min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
    return range(first, node.end_lineno + 1)


def _is_overload(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).endswith("overload") for decorator in node.decorator_list)


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
    by_package: collections.defaultdict[str, collections.Counter[str]]
    by_package = collections.defaultdict(collections.Counter)
    for path in files:
        by_package[package_of(path)] += lines_by_kind(path.read_text())
    whole = sum(by_package.values(), collections.Counter[str]())
    print(f"code lines: {whole.total()} in {len(files)} files")
    print("".join(f"{name:>12}" for name in ("all", *KINDS)))
    rows = sorted(by_package.items(), key=lambda row: -row[1].total())
    for package, lines in [("in all", whole), *rows]:
        counts = (lines.total(), *(lines[kind] for kind in KINDS))
        print("".join(f"{count:12}" for count in counts), f"  {package}")
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
