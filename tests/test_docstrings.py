"""Docstrings: their examples run as written, and those of public names are complete."""

from __future__ import annotations

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


def is_ours(value: tp.Any) -> bool:
    return getattr(value, "__module__", "").split(".")[0] == "nnxlite"


def public_objects() -> dict[str, tp.Any]:
    """Functions and classes of the package by the name a user imports them under."""
    modules = {"": nnxlite} | {f"{name}.": getattr(nnxlite, name) for name in SUBMODULES}
    return {
        prefix + name: value
        for prefix, module in modules.items()
        for name, value in inspect.getmembers(module)
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and is_ours(value)
    }


def is_inherited(cls: type, name: str) -> bool:
    """Whether a class has the function of a base, under its own name or not."""
    codes = [getattr(vars(kind).get(name), "__code__", None) for kind in cls.__mro__]
    return codes[0] is not None and codes[0] in codes[1:]


def methods() -> dict[str, tp.Any]:
    """Methods that these classes define themselves, by the name of the class and theirs."""
    out: dict[str, tp.Any] = {}
    for class_name, cls in public_objects().items():
        for name, value in vars(cls).items() if inspect.isclass(cls) else ():
            fun = inspect.unwrap(getattr(value, "__func__", value))
            own = inspect.isfunction(fun) and fun.__qualname__ == f"{cls.__qualname__}.{name}"
            own = own and not is_inherited(cls, name)
            if own and (name == "__call__" or not name.startswith("_")):
                out[f"{class_name}.{name}"] = fun
    return out


def section(text: str, *titles: str) -> str:
    """The lines of some sections of a docstring."""
    return "".join(
        match[1]
        for title in titles
        for match in re.finditer(rf"^{title}:\n((?:    .*\n?|\n)*)", text, re.MULTILINE)
    )


def described(text: str) -> set[str]:
    """The parameters that a docstring describes."""
    entries = re.findall(
        r"^    (\*{0,2}\w+(?:,\s+\*{0,2}\w+)*):", section(text, "Args", "Attributes"), re.MULTILINE
    )
    return {name for entry in entries for name in re.findall(r"\w+", entry)}


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


def every(kind: dict[str, tp.Any]) -> tp.Any:
    return pytest.mark.parametrize("value", kind.values(), ids=kind)


@every(public_objects() | methods())
def test_every_parameter_is_described(value):
    text = inspect.getdoc(value)
    assert text
    assert parameters(value) - described(text) == set()
    listed = set(re.findall(r"^    \*{0,2}(\w+):", section(text, "Args"), re.MULTILINE))
    if listed:
        assert listed - set(inspect.signature(value).parameters) == set()


@every({name: value for name, value in public_objects().items() if not inspect.isclass(value)})
def test_every_function_says_what_it_returns(value):
    nothing = inspect.signature(value).return_annotation in ("None", "tp.NoReturn")
    text = tp.cast(str, inspect.getdoc(value))
    assert bool(section(text, "Returns", "Yields")) is not nothing


@every(public_objects())
def test_every_function_and_class_has_an_example(value):
    assert ">>> " in tp.cast(str, inspect.getdoc(value))


@pytest.mark.parametrize(
    "name", "jit vmap scan grad state split Variable Param Rngs Module".split()
)
def test_what_everybody_uses_has_several_examples(name):
    parts = re.split(r"\n\n(?!>>> )", tp.cast(str, inspect.getdoc(getattr(nnxlite, name))))
    assert sum(">>> " in part for part in parts) >= 2
