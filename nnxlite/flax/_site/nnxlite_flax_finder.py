"""The import finder behind `nnxlite.flax`. Uses the standard library alone, so that it costs nothing.

It answers for `flax.nnx` and what lies below it, and for `flax` where Flax is not installed. Nothing
of nnxlite is imported before a program asks for one of these.
"""

import importlib
import importlib.abc
import os
import sys
import types
from importlib.machinery import ModuleSpec

NAME = "flax.nnx"
HERE = os.path.dirname(os.path.abspath(__file__))
ONLY_NNX = (
    "Flax is not installed, so that the package `flax` has `nnx` alone, which is nnxlite: {name} "
    "needs `pip install 'flax>=0.12,<0.13'`."
)


def _is_ours(name: str) -> bool:
    return name == NAME or name.startswith(NAME + ".")


def version() -> "str | None":
    """The version of the installed Flax; None where it is not installed."""
    import importlib.metadata

    try:
        return importlib.metadata.version("flax")
    except importlib.metadata.PackageNotFoundError:
        return None


def fault() -> "str | None":
    """Why `flax.nnx` cannot be replaced in this process, in one sentence; None where it can."""
    if current() is None and any(map(_is_ours, list(sys.modules))):
        return (
            "nnxlite.flax must come before the first import of flax.nnx: start the program with "
            "`python -m nnxlite.flax`, or make `import nnxlite.flax` its first line."
        )
    found = version()
    if found is not None and found.split(".")[:2] != ["0", "12"]:
        return (
            f"nnxlite.flax stands in for flax.nnx of Flax 0.12, and Flax {found} is installed: "
            "`pip install 'flax>=0.12,<0.13'`, or remove it."
        )
    return None


class Loader(importlib.abc.Loader):
    """Makes the modules named `flax.nnx...`; `nnxlite.flax` knows what they contain."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Fill it, or put another one in its place."""
        importlib.import_module("nnxlite.flax._modules").fill(module)


class OnlyNnx(importlib.abc.Loader):
    """Makes the package `flax` where Flax is not installed."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Give it the one submodule, and a sentence for the others."""
        module.__doc__ = "Flax is not installed: `flax.nnx` is nnxlite, and there is nothing else."

        def missing(name: str) -> object:
            text = f"module 'flax' has no attribute {name!r}"
            if not name.startswith("__"):
                text = ONLY_NNX.format(name=f"flax.{name}")
            raise AttributeError(text, name=name, obj=module)

        module.__getattr__ = missing


class Finder(importlib.abc.MetaPathFinder):
    """Answers before every other finder."""

    def find_spec(
        self, name: str, path: object = None, target: "types.ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """The spec of a module that is ours, or None."""
        if _is_ours(name):
            if name == NAME and (problem := fault()):
                raise ImportError(problem, name=name)
            if not importlib.import_module("nnxlite.flax._modules").exists(name):
                if self._elsewhere(name, path, target):  # a file of Flax, or a private one
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
                return None
            return ModuleSpec(name, Loader(), origin="nnxlite", is_package=True)
        if name == "flax" and not self._elsewhere(name, None, target):
            return ModuleSpec("flax", OnlyNnx(), origin="nnxlite", is_package=True)
        if name.startswith("flax."):
            loader = getattr(getattr(sys.modules.get("flax"), "__spec__", None), "loader", None)
            if isinstance(loader, OnlyNnx):
                # Of this name, or `from flax import linen` has a sentence of its own.
                raise ModuleNotFoundError(ONLY_NNX.format(name=name), name="flax")
        return None

    def _elsewhere(self, name: str, path: object, target: "types.ModuleType | None") -> bool:
        """Whether another finder has the module, and not only a folder without code."""
        others = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
        specs = (f.find_spec(name, path, target) for f in others)  # pyright: ignore[reportArgumentType]
        return any(spec is not None and spec.loader is not None for spec in specs)


def current() -> "Finder | None":
    """The finder of this process."""
    return next((f for f in sys.meta_path if isinstance(f, Finder)), None)


def install() -> None:
    """Put the finder first in this process, and tell the processes that this one starts.

    Raises:
        ImportError: if another `flax.nnx` was imported, or Flax is not 0.12.
    """
    if current() is None:
        if problem := fault():
            raise ImportError(problem, name=NAME)
        sys.meta_path.insert(0, Finder())
    os.environ["NNXLITE_FLAX"] = "1"
    folders = [f for f in os.environ.get("PYTHONPATH", "").split(os.pathsep) if f and f != HERE]
    os.environ["PYTHONPATH"] = os.pathsep.join([HERE, *folders])


def start() -> None:
    """Install when Python starts; a fault ends the process with one sentence and status 2."""
    if current() is not None:
        return
    try:
        install()
    except ImportError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(2)
    if os.environ.get("NNXLITE_FLAX_REPORT") == str(os.getpid()):  # not in its children
        import atexit

        atexit.register(report)


def report() -> None:
    """Print what `nnxlite.flax.status()` says."""
    sys.stdout.flush()
    print(importlib.import_module("nnxlite.flax").status(), file=sys.stderr)
