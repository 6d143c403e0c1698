"""The files of this directory describe programs that run, and cover every public name.

What they say of types is checked by pyright and mypy, see `.ci/run`.
"""

from __future__ import annotations

import inspect
import re
import runpy
import types
from pathlib import Path

import pytest

import nnxlite as nnx
from nnxlite.nn.recurrent import Keywords
from nnxlite.transforms import _wrapper as signatures

HERE = Path(__file__).parent
FILES = sorted(path for path in HERE.glob("*.py") if not path.name.startswith("test_"))

PUBLIC = {
    name: value
    for name, value in inspect.getmembers(nnx)
    if not name.startswith("_") and not isinstance(value, types.ModuleType)
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_runs(path):
    runpy.run_path(str(path))


def test_every_public_name_has_a_type():
    text = "".join(path.read_text() for path in FILES)
    used = set(re.findall(r"\bnnx\.(\w+)", text))
    assert PUBLIC.keys() - used == {"A", "M"}  # type variables


# Anything can be passed to them, or they are not called: annotations, a protocol, a dict, ...
ANY_ARGUMENTS = {"Data", "Static", "Initializer", "Dict", "Identity", "TraceContextError"}
# Type variables, exceptions (with any arguments, or unknown to Python), a string, an alias.
NO_SIGNATURE = {"A", "M", "RuntimeCheckError", "NnxError", "PARTITION_NAME", "PureState"}


def shown(value):
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):
        return None


def test_signatures_show_the_parameters():
    signatures = {name: shown(value) for name, value in PUBLIC.items()}
    assert {name for name, text in signatures.items() if text is None} <= NO_SIGNATURE
    bare = re.compile(r"\(\*args(: [^,]*)?, \*\*kwargs(: [^,]*)?\)( -> .*)?")
    anything = {name for name, text in signatures.items() if text and bare.fullmatch(text)}
    assert anything - NO_SIGNATURE == ANY_ARGUMENTS


def test_signature_of_a_class_is_that_of_its_constructor():
    class Mine(nnx.Module):
        def __init__(self, size: int, *, rngs: nnx.Rngs):
            pass

    class Frozen(nnx.Module, frozen=True):
        size: int

    assert shown(Mine) == "(size: 'int', *, rngs: 'nnx.Rngs')"
    assert list(inspect.signature(Frozen).parameters) == ["size"]
    first = [*inspect.signature(nnx.Linear).parameters][:3]
    assert first == ["in_features", "out_features", "use_bias"]


def test_signature_of_a_transformed_function_is_its_own():
    def fun(model, x: int, *, factor: float = 1.0): ...

    names = "jit vmap pmap scan remat grad value_and_grad custom_vjp checkify make_jaxpr capture"
    filtered = "jit vmap pmap grad checkpoint custom_jvp make_jaxpr"
    names = [*names.split(), *(f"filter_{name}" for name in filtered.split())]
    options = nnx.jit(static_argnames="factor"), nnx.split_rngs(splits=2)
    options += (nnx.transform_metadata(partition="a"),)
    for transform in (*(getattr(nnx, name) for name in names), *options):
        assert shown(transform(fun)) == "(model, x: 'int', *, factor: 'float' = 1.0)"
        assert transform(fun).__name__ == "fun"


KEYWORDS = {
    nnx.jit: signatures.JitKeywords,
    nnx.jit_partial: signatures.JitKeywords,
    nnx.make_jaxpr: signatures.JaxprKeywords,
    nnx.while_loop: signatures.ModeKeywords,
}


@pytest.mark.parametrize("transform", KEYWORDS, ids=lambda f: f.__name__)
def test_options_of_overloads_are_those_of_the_transform(transform):
    parameters = inspect.signature(transform).parameters.values()
    named = {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY}
    options = KEYWORDS[transform].__annotations__
    assert {name: x.__forward_arg__ for name, x in options.items()} == named


def test_options_of_grad_and_of_a_call_of_recurrent_layers():
    for layer in (nnx.RNN, nnx.Bidirectional):
        names = inspect.signature(layer.__call__).parameters.keys()
        assert names - {"self", "inputs", "return_carry"} == Keywords.__annotations__.keys()
    named = inspect.signature(nnx.grad).parameters.keys() - {"f"}
    assert named == signatures.GradKeywords.__annotations__.keys()
    assert named - {"has_aux"} == signatures.FirstGradKeywords.__annotations__.keys()
