"""The public surface has the names, parameters, order and defaults of the reference."""

from __future__ import annotations

import inspect
import types
import typing as tp

import pytest

import nnxlite as nnx

flax_nnx = pytest.importorskip("flax.nnx")

from tests.parity.layers import OLDER, ref  # noqa: E402

# Parameters that differ on purpose.
EXTRA_ALLOWED = {"jit": {"donate"}}


def _public(module):
    return sorted(
        name
        for name in dir(module)
        if not name.startswith("_") and not isinstance(getattr(module, name), types.ModuleType)
    )


def _parameters(obj):
    try:
        signature = inspect.signature(obj)
    except (TypeError, ValueError):
        return None
    kinds = inspect.Parameter
    return [
        (p.name, p.kind is kinds.KEYWORD_ONLY)
        for p in signature.parameters.values()
        if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD) and not p.name.startswith("_")
    ], any(p.kind is kinds.VAR_KEYWORD for p in signature.parameters.values())


FUNCTIONS = [
    name
    for name in _public(flax_nnx)
    if callable(getattr(flax_nnx, name)) and not inspect.isclass(getattr(flax_nnx, name))
]
CLASSES = [name for name in _public(flax_nnx) if inspect.isclass(getattr(flax_nnx, name))]


def _check(theirs, ours, extra=frozenset()):
    wanted, got = _parameters(theirs), _parameters(ours)
    if wanted is None or got is None:
        return
    names = [name for name, _ in got[0]]
    missing = [name for name, _ in wanted[0] if name not in names]
    if got[1]:
        missing = []
    assert not missing, f"parameters missing: {missing}"
    positional = [name for name, keyword in wanted[0] if not keyword]
    ours_positional = [name for name, keyword in got[0] if not keyword]
    common = [name for name in ours_positional if name in positional]
    assert common == [name for name in positional if name in common], "order differs"


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if hasattr(nnx, n)])
def test_functions_take_the_same_parameters(name):
    _check(getattr(flax_nnx, name), getattr(nnx, name))


@pytest.mark.parametrize("name", [n for n in CLASSES if hasattr(nnx, n)])
def test_classes_are_made_with_the_same_parameters(name):
    theirs, ours = getattr(flax_nnx, name), getattr(nnx, name)
    if isinstance(ours, type):
        _check(theirs.__init__, ours.__init__)


def assert_equal_signature(mine, theirs, more=()):
    """The same parameters, kinds and defaults; `more` names further ones of ours, at the end."""
    ours = [p for p in inspect.signature(mine).parameters.values() if p.name not in more]
    for parameter, other in zip(ours, inspect.signature(theirs).parameters.values(), strict=True):
        assert (parameter.name, parameter.kind) == (other.name, other.kind)
        if parameter.default is other.default or callable(other.default):
            continue
        if isinstance(other.default, tp.Mapping):
            assert dict(parameter.default) == dict(other.default)
        else:
            assert parameter.default == other.default


LAYERS = """
BatchNorm Bidirectional Conv ConvTranspose Dropout Einsum Embed GRUCell GroupNorm InstanceNorm
LSTMCell LayerNorm Linear LinearGeneral LoRA LoRALinear MultiHeadAttention OptimizedLSTMCell PReLU
RMSNorm RNN RNNCellBase RoPE Sequential SimpleCell SpectralNorm WeightNorm
""".split()
METHODS = ("__init__", "__call__", "attend", "initialize_carry", "init_cache", "set_view")
NEWER = ("MultiHeadAttention", "RoPE", "Sequential")
"""Layers whose methods have other parameters in an older reference."""


@pytest.mark.parametrize("name", LAYERS)
def test_methods_of_layers_have_the_parameters_and_defaults_of_the_reference(name):
    if OLDER and name in NEWER:
        pytest.skip("the installed reference is older than the one we follow")
    more = ("implementation",) if name == "MultiHeadAttention" else ()
    for method in METHODS:
        theirs = getattr(getattr(ref, name), method, None)
        if theirs and (name, method) != ("RNNCellBase", "__init__"):  # which is that of `object`
            assert_equal_signature(getattr(getattr(nnx, name), method), theirs, more)


@pytest.mark.skipif(OLDER, reason="the installed reference is older than the one we follow")
def test_functions_of_attention_have_the_parameters_and_defaults_of_the_reference():
    more = {
        "dot_product_attention": ("implementation",),
        "dot_product_attention_with_rope": ("attention_fn",),
    }
    for name in (*more, "make_attention_mask", "make_causal_mask", "combine_masks"):
        assert_equal_signature(getattr(nnx, name), getattr(ref, name), more.get(name, ()))
    name = "dot_product_attention_weights"
    assert_equal_signature(getattr(nnx.nn.attention, name), getattr(ref.nn.attention, name))
