"""The modules named `flax.nnx...`: what they contain, and a record of what was not found.

A module here is a copy of the names of nnxlite's module of that path, so that reading a name costs what
it costs there. Writing one (a test that replaces `flax.nnx.nn.normalization._normalize`) writes it in
nnxlite's module as well, where the layers look it up. Names that nnxlite alone has are found, but a star
import leaves them out: it would hide the `filter` of Python and the reader's own `inspect`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
import typing as tp

from nnxlite.flax import _settings

ROOT = "flax.nnx"
_root: tp.Any = importlib.import_module("nnxlite")  # what all of this is about

ELSEWHERE = {
    "initializers": "nn.initializers",
    "metrics": "training.metrics",
    "optimizer": "training.optimizer",
}
"""Attributes of the root that are submodules by another path: one module by both names."""

SUBMODULES: tuple[str, ...] = ("deprecations", "ids")
"""Submodules that are made of `EXTRA` alone: `ids` for `flax.nnx.ids`."""

EXTRA: dict[str, tuple[str, str]] = {
    "": ("_private", "GRAPH"),
    "deprecations": ("_layers", "DEPRECATIONS"),
    "graph": ("_pickles", "GRAPH"),
    "graphlib": ("_pickles", "GRAPH"),
    "ids": ("_layers", "IDS"),
    "nn.linear": ("_layers", "LINEAR"),
    "nn.normalization": ("_layers", "NORMALIZATION"),
    "object": ("_private", "OBJECT"),
    "pytreelib": ("_private", "OBJECT"),
    "variablelib": ("_pickles", "VARIABLE"),
}
"""Names below `flax.nnx` that libraries reach for and nnxlite does not have otherwise.

For the path of a submodule ("" is `flax.nnx`, "nn.linear" a layer's file): the file beside this one, and
its table; imported when they are needed.
"""

OURS = frozenset(
    """
    ArrayRef Beams CacheInfo Diff Difference Drawing DynamicLossScale Explanation Exported Finding
    Findings Frozen Generated Identity Layout LossScaleState MLP Memory NnxError Placement Plan
    Policy RuntimeCheckError Sampler StaticLossScale StepMemory TraceContextError VarDefaults
    VariableState all_finite apply_updates array_ref beam_search boundary branched_error_if by_path
    cast check checkpoint combine decoding diff distributed draw dtypes error_if errors
    explain_compiles export field filter filter_checkpoint filter_closure_convert filter_custom_jvp
    filter_custom_vjp filter_eval_shape filter_grad filter_hessian filter_jacfwd filter_jacrev
    filter_jit filter_jvp filter_make_jaxpr filter_pmap filter_pure_callback filter_shard
    filter_value_and_grad filter_vjp filter_vmap filtered filters find_nan flax freeze generate
    generate_stream if_array init_sharded inspect is_array is_array_like is_array_ref
    is_inexact_array is_inexact_array_like load_exported load_safetensors lora make_mesh memory
    objects partition plan_layout remat_layers sampling save_safetensors serving shard sharding
    stack_layers to_arrays to_refs tree_at tree_check tree_equal tree_flatten_one_level
    tree_inference tree_pformat tree_pprint unfreeze unstack_layers use_named_scopes
    """.split()
)
"""Names of nnxlite's root that Flax does not have: found, and left out by `dir` and a star import."""

missing: dict[str, set[tuple[str, int]]] = {}
"""Names that were asked for and are not there, and the modules and lines that asked."""


def _path(name: str) -> str:
    """The part below `flax.nnx`."""
    return name[len(ROOT) + 1 :]


@functools.cache  # a converter that replaces names asks for missing modules in each export
def _target(path: str) -> types.ModuleType | None:
    """Nnxlite's module of a path; None where there is none."""
    name = f"nnxlite.{path}".rstrip(".")
    if any(part.startswith("_") for part in path.split(".")) or path.partition(".")[0] == "flax":
        return None
    try:
        found = name in sys.modules or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent is not a package
        return None
    return importlib.import_module(name) if found else None


def exists(name: str) -> bool:
    """Whether there is a module of this name, which is recorded where there is none."""
    found = _path(name) in SUBMODULES or _target(_path(name)) is not None
    if not found:
        _record(name)
    return found


class Alias(types.ModuleType):
    """A module named as the one of Flax."""

    def __setattr__(self, name: str, value: tp.Any) -> None:
        super().__setattr__(name, value)
        self._write(name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        written = vars(self).get("_written", {})
        if name in written:  # a replaced name that was not here before
            self._write(name, written[name])

    def __reduce__(self) -> tp.Any:  # cloudpickle, of a function that refers to it by a global
        return importlib.import_module, (self.__name__,)

    def _write(self, name: str, value: tp.Any) -> None:
        target = None if name.startswith("__") else _target(_path(self.__name__))
        if target is not None and name in vars(target):
            written = vars(self).setdefault("_written", {})
            original = written.setdefault(name, vars(target)[name])
            if not _is_nnxlite(original):
                setattr(target, name, value)

    def __dir__(self) -> list[str]:
        later = set(dir(_root)) - OURS if self.__name__ == ROOT else set()
        return sorted(vars(self).keys() | {name for name in later if not name.startswith("_")})

    def __getattr__(self, name: str) -> tp.Any:
        if name == "__all__" and self.__name__ == ROOT:
            without = {"bridge"} if sys.modules["nnxlite_flax_finder"].version() is None else set()
            return [n for n in dir(self) if not n.startswith("_") and n not in without]
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        path = _path(self.__name__)
        below = f"{path}.{name}".lstrip(".")
        if below in SUBMODULES or _target(below) is not None:
            return importlib.import_module(f"{ROOT}.{below}")
        for target in (_target(path), _root):  # Flax's files import names of each other
            if hasattr(target, name):
                return _renamed(getattr(target, name))
        if name == "nnx":
            return sys.modules[ROOT]
        _record(f"{self.__name__}.{name}")
        raise AttributeError(
            f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self
        )


def _is_nnxlite(value: tp.Any) -> bool:
    """Whether a value is a module of nnxlite, for which there is one of Flax's name."""
    return isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] == "nnxlite"


def _renamed(value: tp.Any) -> tp.Any:
    """The module of Flax's name for a module of nnxlite that another one imports; other values."""
    if _is_nnxlite(value):
        for name, module in list(sys.modules.items()):
            if module is value and _target(name.partition(".")[2]) is value:
                return importlib.import_module(f"{ROOT}.{name.partition('.')[2]}".rstrip("."))
    return value


def create(spec: tp.Any) -> types.ModuleType:
    """An empty module for a spec."""
    return Alias(spec.name)


def fill(module: types.ModuleType) -> None:
    """Give a module its names; the root brings those that nnxlite has imported along."""
    if module.__name__ == ROOT:
        from nnxlite.flax import _pickles, _private
        from nnxlite.sharding.linen_rules import share_rules_with_linen

        _private.install()  # what classes of nnxlite need beyond names
        _pickles.install()
        share_rules_with_linen()
        _settings.follow()
    path = _path(module.__name__)
    if path in ELSEWHERE:
        sys.modules[module.__name__] = importlib.import_module(f"{ROOT}.{ELSEWHERE[path]}")
        return
    target = _target(path)
    names = vars(module)
    if target is not None:
        names.update(
            (name, value)
            for name, value in vars(target).items()
            if not name.startswith("__") and (path or name not in OURS) and not _is_nnxlite(value)
        )
        names["__doc__"] = target.__doc__
        names["__file__"] = target.__file__ if hasattr(target, "__file__") else _root.__file__
    if path in EXTRA:
        beside, table = EXTRA[path]
        names.update(getattr(importlib.import_module(f"nnxlite.flax.{beside}"), table))
    if module.__name__ == ROOT:
        for loaded in sorted(n for n in sys.modules if n.startswith("nnxlite.")):
            below = loaded.partition(".")[2]
            if below.partition(".")[0] not in OURS and _target(below) is not None:
                importlib.import_module(f"{ROOT}.{below}")


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
        finder = sys.modules["nnxlite_flax_finder"]
        self.replaced = sorted(n for n, m in list(sys.modules.items()) if finder.is_alias(m))
        self.missing = {name: sorted(places) for name, places in sorted(missing.items())}
        self.flax: str | None = finder.version()

    def __str__(self) -> str:
        rest = f"the rest is Flax {self.flax}" if self.flax else "Flax is not installed"
        lines = [f"flax.nnx is nnxlite {_root.__version__}; {rest}."]
        lines.append(f"Modules of it that were imported: {len(self.replaced)}.")
        for name, places in self.missing.items():
            where = ", ".join(f"{module} line {line}" for module, line in places)
            lines.append(f"Missing: {name}, asked for by {where}.")
        return "\n".join(lines if self.missing else [*lines, "Nothing was missing."])

    __repr__ = __str__
