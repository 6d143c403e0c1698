"""Docstrings: their examples run as written, and those of public names are complete."""

import doctest
import importlib
import inspect
import io
import re
import typing as tp

import jax
import jax.numpy as jnp
import pytest

import nnxlite
from tests.structure import modules

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("name", modules())
def test_examples_in(name):
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False)
    report = io.StringIO()
    names = {"jax": jax, "jnp": jnp, "nnx": nnxlite}
    for example in doctest.DocTestFinder().find(module, name, extraglobs=names):
        runner.run(example, out=report.write)
    assert runner.failures == 0, report.getvalue()


# What the docstring of a public name says ---------------------------------------------------------

SUBMODULES = "checkpoint initializers spmd traversals wrappers".split()


def public_objects() -> dict[str, tp.Any]:
    """Functions and classes of the package by the name a user imports them under."""
    modules = {"": nnxlite} | {f"{name}.": getattr(nnxlite, name) for name in SUBMODULES}
    return {
        prefix + name: value
        for prefix, module in modules.items()
        for name, value in inspect.getmembers(module)
        if inspect.isclass(value) or inspect.isfunction(value)
        if not name.startswith("_") and value.__module__.startswith("nnxlite")
    }


PUBLIC = public_objects()


def is_inherited(cls: type, name: str) -> bool:
    """Whether a class has the function of a base, under its own name or not."""
    codes = [getattr(vars(kind).get(name), "__code__", None) for kind in cls.__mro__]
    return codes[0] is not None and codes[0] in codes[1:]


def methods() -> dict[str, tp.Any]:
    """Methods that these classes define themselves, by the name of the class and theirs."""
    out: dict[str, tp.Any] = {}
    for class_name, cls in PUBLIC.items():
        for name, value in vars(cls).items() if inspect.isclass(cls) else ():
            fun = inspect.unwrap(getattr(value, "__func__", value))
            own = inspect.isfunction(fun) and fun.__qualname__ == f"{cls.__qualname__}.{name}"
            own = own and not is_inherited(cls, name)
            if own and (name == "__call__" or not name.startswith("_")):
                out[f"{class_name}.{name}"] = fun
    return out


def section(text: str, *titles: str) -> str:
    """The lines of some sections of a docstring."""
    pattern = rf"^(?:{'|'.join(titles)}):\n((?:    .*\n?|\n)*)"
    return "".join(re.findall(pattern, text, re.MULTILINE))


def described(text: str) -> set[str]:
    """The parameters that a docstring describes."""
    lines = section(text, "Args", "Attributes")
    entries = re.findall(r"^    (\*{0,2}\w+(?:,\s+\*{0,2}\w+)*):", lines, re.MULTILINE)
    return set(re.findall(r"\w+", " ".join(entries)))


def parameters(value: tp.Any) -> set[str]:
    """The parameters that a user of a callable may give.

    Nothing for what users do not construct (exceptions, protocols), and for classes that take over the
    constructor of a base, which describes it.
    """
    if inspect.isclass(value):
        made_elsewhere = issubclass(value, Exception) or getattr(value, "_is_protocol", False)
        if made_elsewhere or not {"__init__", "__new__"} & vars(value).keys():
            return set()
        if is_inherited(value, "__init__"):
            return set()
    names = inspect.signature(value).parameters
    return {name for name in names if not name.startswith("_") and name not in ("self", "cls")}


ALL = PUBLIC | methods()


@pytest.mark.parametrize("value", ALL.values(), ids=ALL)
def test_every_parameter_is_described(value):
    text = inspect.getdoc(value)
    assert text
    assert parameters(value) - described(text) == set()
    listed = set(re.findall(r"^    \*{0,2}(\w+):", section(text, "Args"), re.MULTILINE))
    assert not listed or listed <= set(inspect.signature(value).parameters)


EVERYBODYS = "jit vmap scan grad state split Variable Param Rngs Module".split()


@pytest.mark.parametrize("name", PUBLIC)
def test_every_function_says_what_it_returns_and_everything_has_examples(name):
    value, text = PUBLIC[name], inspect.getdoc(PUBLIC[name]) or ""
    examples = [part for part in re.split(r"\n\n(?!>>> )", text) if ">>> " in part]
    assert len(examples) >= (2 if name in EVERYBODYS else 1)
    if not inspect.isclass(value):
        nothing = inspect.signature(value).return_annotation in ("None", "tp.NoReturn")
        assert bool(section(text, "Returns", "Yields")) is not nothing
