"""The files of the package, how large it is, and how much of it a reader has to know.

    python -m tests.structure

prints lines of code by package (without docstrings, comments and blank lines), the number of files and
classes, and the files that one call of a jitted step runs through.
"""

import ast
import collections
import importlib.util
import pathlib
import sys
import types

ROOT = pathlib.Path(__file__).resolve().parent.parent / "nnxlite"
FILES = sorted(ROOT.rglob("*.py"))

# The bridge needs Flax. Importing `nnxlite.flax` replaces `flax.nnx`: its tests use another process.
LEFT_OUT = {"flax"} | (set() if importlib.util.find_spec("flax") else {"bridge"})


def modules() -> list[str]:
    """The names of the modules of the package that can be imported here."""
    files = [file.relative_to(ROOT).with_suffix("").parts for file in FILES]
    names = [parts[:-1] if parts[-1] == "__init__" else parts for parts in files]
    return [".".join(("nnxlite", *name)) for name in names if not LEFT_OUT & {*name[:1]}]


def load(path: pathlib.Path) -> types.ModuleType:
    """A program that is not in a package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_lines(source: str) -> int:
    """How many lines of code there are."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(n not in prose and bool(x.partition("#")[0].strip()) for n, x in lines)


def files_of_a_call() -> tuple[set[str], set[str]]:
    """The files that a first and a second call of one jitted training step run through."""
    import jax.numpy as jnp
    import optax

    import nnxlite as nnx

    model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.relu)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
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
    rooms: collections.Counter[str] = collections.Counter()
    classes = 0
    for path in FILES:
        room, source = path.relative_to(ROOT).parts[0].removesuffix(".py"), path.read_text()
        rooms[room] += code_lines(source)
        classes += sum(isinstance(node, ast.ClassDef) for node in ast.walk(ast.parse(source)))
    print(f"lines of code: {rooms.total()} in {len(FILES)} files, with {classes} classes")
    for room, lines in rooms.most_common():
        print(f"{lines:8} {room}")
    cold, warm = files_of_a_call()
    print(f"files of a jitted step: first call {len(cold)}, later {len(warm)}")
    print("  later:", ", ".join(sorted(warm)))


if __name__ == "__main__":
    main()
