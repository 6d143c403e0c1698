"""Names that programs import: what they mean, and what is said of those that are left out."""

import importlib
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx

PATHS = {
    "errors": "FlaxError TraceContextError",
    "filterlib": "Key",
    "graph": "ApplyCaller Key Leaf Node UpdateContextManager jax_to_nnx_path",
    "helpers": "ApplyCaller M has_keyword_arg",
    "module": "Key M ModuleMeta",
    "object": "Object ObjectMeta Pytree PytreeMeta data dataclass static",
    "proxy_caller": "ApplyCaller",
    "reprlib": "Attr Object Representable get_repr",
    "rnglib": "Key",
    "statelib": "K Key V",
    "tracers": "TraceState current_jax_trace",
    "variablelib": "A V",
    "wrappers": "Functional M functional",
}


@pytest.mark.parametrize("path", PATHS)
def test_names_of_submodules(path):
    module = importlib.import_module(f"nnxlite.{path}")
    assert getattr(nnx, path) is module
    assert [name for name in PATHS[path].split() if not hasattr(module, name)] == []


def test_type_variables_metaclasses_and_misspelt_names():
    assert (nnx.A.__name__, nnx.M.__name__) == ("A", "M")
    assert nnx.object.ObjectMeta is nnx.module.ModuleMeta is type(nnx.Module)
    with pytest.raises(AttributeError, match="module 'nnxlite' has no attribute 'brigde'"):
        nnx.brigde


def test_a_text_form_needs_its_method():
    with pytest.raises(NotImplementedError, match="Representable needs a method __nnx_repr__"):
        repr(nnx.reprlib.Representable())


def test_trace_states():
    outside = nnx.tracers.TraceState()
    seen = []

    def look():
        inside = nnx.tracers.TraceState()
        seen.append(inside)
        assert not outside.is_valid() and inside.is_valid() and inside != outside

    jax.make_jaxpr(look)()
    assert outside.is_valid() and not seen[0].is_valid()
    assert outside == nnx.tracers.TraceState() and hash(outside) == hash(nnx.tracers.TraceState())
    assert outside.jax_trace is nnx.tracers.current_jax_trace() and "eager" in repr(outside)


def test_functional_modules():
    layer = nnx.wrappers.functional(nnx.Linear)(2, 3)
    with pytest.raises(ValueError, match=r"Linear: call init\(rngs=...\) before apply"):
        layer.apply({})
    state = layer.init(rngs=nnx.Rngs(0))
    y, (graphdef, _) = layer.apply(state)(jnp.ones((1, 2)))
    expected = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    assert jnp.array_equal(y, expected(jnp.ones((1, 2))))
    assert graphdef == layer.graphdef == nnx.graphdef(expected)


def test_helpers():
    assert nnx.helpers.has_keyword_arg(lambda a, *, b: 1, "b")
    assert not nnx.helpers.has_keyword_arg(lambda a, /, **b: 1, "a")
    pairs = jax.tree_util.tree_leaves_with_path(nnx.state(nnx.Dict(a=nnx.List([nnx.Param(1)]))))
    assert nnx.graph.jax_to_nnx_path(pairs[0][0]) == ("a", 0, "value")


class Foreign(Exception):
    """Stands for the class of the reference."""

    def __init__(self, one):
        raise AssertionError("its own __init__ must not run")


def write_from_inside():
    held = nnx.Dict(a=1)
    jax.make_jaxpr(lambda: setattr(held, "a", 2))()


def test_exceptions_are_caught_by_the_name_of_the_reference(monkeypatch):
    monkeypatch.delitem(sys.modules, "flax.errors", raising=False)
    with pytest.raises(nnx.TraceContextError) as alone:
        write_from_inside()
    assert type(alone.value) is nnx.TraceContextError
    module = types.SimpleNamespace(TraceContextError=Foreign)
    monkeypatch.setitem(sys.modules, "flax.errors", module)
    for caught in (Foreign, nnx.TraceContextError, nnx.errors.FlaxError):
        with pytest.raises(caught) as both:
            write_from_inside()
        error = both.value
        assert isinstance(error, nnx.TraceContextError) and str(error) == str(alone.value)
        assert (error.owner, error.attribute) == ("Dict", "a")


def test_exceptions_beside_the_reference():
    errors = pytest.importorskip("flax.errors")
    for caught in (errors.TraceContextError, errors.FlaxError, nnx.NnxError):
        with pytest.raises(caught, match="Cannot mutate 'Dict'"):
            write_from_inside()
