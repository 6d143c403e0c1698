"""The modules named `flax.nnx...`: what they contain, and a record of what was not found.

`flax.nnx` is a module with the names of nnxlite, so that reading one costs what it costs there. Names
that nnxlite alone has are found, but a star import leaves them out: it would hide the `filter` of Python
and the reader's own `inspect`. A submodule is nnxlite's own of that path: a test that replaces
`flax.nnx.nn.normalization.lax` replaces it where the layers look it up.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
import typing as tp

from nnxlite import filtered
from nnxlite.flax import _settings

ROOT = "flax.nnx"
_root: tp.Any = importlib.import_module("nnxlite")  # what all of this is about

OURS = frozenset(
    """
    ArrayRef CacheInfo Difference Explanation Frozen Identity MLP NnxError Policy RuntimeCheckError
    TraceContextError VarDefaults VariableState array_ref boundary branched_error_if cast checkpoint
    decoding distributed dtypes error_if errors explain_compiles field filtered filters flax freeze
    inspect is_array_ref lora objects serving sharding to_arrays to_refs unfreeze use_named_scopes
    """.split()
).union(vars(filtered), _root._PACKAGE_OF.keys() - {"display", "tabulate"})
"""Names of nnxlite's root that Flax does not have: found, and left out by `dir` and a star import."""

missing: dict[str, set[tuple[str, int]]] = {}
"""Names that were asked for and are not there, and the modules and lines that asked."""


def _path(name: str) -> str:
    """The part below `flax.nnx`."""
    return name[len(ROOT) + 1 :]


OWN: dict[str, str] = dict.fromkeys(("ids", "deprecations"), "flax._former")
"""Submodules of Flax that have no file of the same path here."""


@functools.cache  # a converter that replaces names asks for missing modules in each export
def _target(path: str) -> types.ModuleType | None:
    """Nnxlite's module of a path; None where there is none."""
    name = f"nnxlite.{OWN.get(path, path)}".rstrip(".")
    # `nnx.variables` is the function of that name, not the package.
    hidden = path.partition(".")[0] == "flax" or callable(vars(_root).get(path))
    if hidden or any(part.startswith("_") for part in path.split(".")):
        return None
    try:
        found = name in sys.modules or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent is not a package
        return None
    return importlib.import_module(name) if found else None


def exists(name: str) -> bool:
    """Whether there is a module of this name, which is recorded where there is none."""
    if (found := _target(_path(name))) is None:
        _record(name)
    return found is not None


def fill(module: types.ModuleType) -> None:
    """Give `flax.nnx` its names and submodules, or put nnxlite's module in the place of a submodule."""
    path = _path(module.__name__)
    target = tp.cast(types.ModuleType, _target(path))
    names = vars(target) if path else vars(module)
    if path:
        sys.modules[module.__name__] = target
    else:
        from nnxlite.flax import _pickles, _private
        from nnxlite.sharding.linen_rules import share_rules_with_linen

        _private.install()  # what classes of nnxlite need beyond names
        _pickles.install()
        share_rules_with_linen()
        _settings.follow()
        names.update(
            (name, value)
            for name, value in vars(target).items()
            if not (name.startswith("__") or name in OURS or isinstance(value, types.ModuleType))
        )
        names.update(__doc__=target.__doc__, __file__=target.__file__, __dir__=_public)
        without = {"bridge"} if sys.modules["nnxlite_flax_finder"].version() is None else set()
        names["__all__"] = [n for n in _public() if not n.startswith("_") and n not in without]
    file = "_layers" if path.startswith("nn.") else "_private"  # what libraries reach for as well
    names.update(importlib.import_module(f"nnxlite.flax.{file}").NAMES.get(path, {}))
    names.setdefault("__getattr__", functools.partial(_look_up, module.__name__))
    if not path:
        for loaded in sorted(n for n in sys.modules if n.startswith("nnxlite.")):
            below = loaded.partition(".")[2]
            if below.partition(".")[0] not in OURS and _target(below) is not None:
                importlib.import_module(f"{ROOT}.{below}")


def _public() -> list[str]:
    """The names of `flax.nnx`, with those that nnxlite imports later."""
    later = {n for n in dir(_root) if n not in OURS and not n.startswith("_")}
    return sorted(later.union(vars(sys.modules[ROOT])))


def _look_up(module: str, name: str) -> tp.Any:
    """`__getattr__` of a module: a submodule, or a name of the root.

    Flax's files import names of each other.
    """
    if not name.startswith("__"):
        below = f"{_path(module)}.{name}".lstrip(".")
        if _target(below) is not None:
            return importlib.import_module(f"{ROOT}.{below}")
        if name == "nnx":
            return sys.modules[ROOT]
        if hasattr(_root, name):
            return getattr(_root, name)
        _record(f"{module}.{name}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)


def _record(name: str) -> None:
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        "importlib" in frame.f_code.co_filename
        or frame.f_globals.get("__name__") in (__name__, "nnxlite_flax_finder")
    ):
        frame = frame.f_back
    missing.setdefault(name, set()).add((frame.f_globals.get("__name__", "?"), frame.f_lineno))


class Status:
    """What is replaced and what was missing.

    Attributes:
        replaced: names of the modules that are nnxlite, in order.
        missing: for each name that was asked for and is not there the modules and lines that asked.
    """

    def __init__(self) -> None:
        self.replaced = sorted(n for n in sys.modules if f"{n}.".startswith(f"{ROOT}."))
        self.missing = {name: sorted(places) for name, places in sorted(missing.items())}
        self.flax: str | None = sys.modules["nnxlite_flax_finder"].version()

    def __str__(self) -> str:
        rest = f"the rest is Flax {self.flax}" if self.flax else "Flax is not installed"
        lines = [f"flax.nnx is nnxlite {_root.__version__}; {rest}."]
        lines.append(f"Modules of it that were imported: {len(self.replaced)}.")
        for name, places in self.missing.items():
            where = ", ".join(f"{module} line {line}" for module, line in places)
            lines.append(f"Missing: {name}, asked for by {where}.")
        return "\n".join(lines if self.missing else [*lines, "Nothing was missing."])

    __repr__ = __str__
