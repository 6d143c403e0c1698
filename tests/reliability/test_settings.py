"""Settings of JAX, the garbage collector and dying objects; see `settings.py` for the campaign."""

from __future__ import annotations

import gc
import weakref

import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.reliability import settings
from tests.reliability.fault_cases import CASES

STRUCTURE = ["jit", "grad"]


@pytest.mark.parametrize("setting", settings.SAME_RESULTS)
def test_a_setting_that_changes_no_results_changes_none(setting):
    assert settings.same_results("jit", setting) == ""


def test_without_jit_nothing_is_donated():
    """An array may be in two places then, as the function itself may have put it there."""
    assert settings.same_results("jit_donate_argnums", "disable_jit") == ""


@pytest.mark.parametrize("setting", settings.OTHER_RESULTS)
def test_nothing_cached_under_one_setting_serves_another(setting):
    assert settings.comes_and_goes("jit", setting) == ""


def test_the_comparison_notices_what_is_cached_for_another_setting(monkeypatch):
    """The check itself: a function that goes on as it was first called is found."""

    def kept(world):
        first = []

        def call():
            first.append(CASES["jit_values"](world)()) if not first else None
            return first[0]

        return call

    monkeypatch.setitem(CASES, "kept", kept)
    assert "call 2" in settings.comes_and_goes("kept", "x64")


@pytest.mark.parametrize("name", STRUCTURE)
def test_garbage_is_collected_at_every_allocation(name):
    assert settings.while_collecting(name) == ""


@pytest.mark.parametrize("donate", [{}, {"donate": "written"}])
def test_what_a_call_drops_dies_and_the_rest_is_right(donate):
    """Finalizers of what dies during the write-back use and edit the objects that are written."""
    seen = []

    def end(model):
        nnx.split(model)
        model.ended = nnx.Variable(jnp.int32(len(seen)))
        seen.append(float(model.kept[...]))

    @nnx.jit(**donate)
    def step(model):
        model.kept[...] += 1
        for name in ("part", "table"):
            delattr(model, name)
        model.items.pop()
        model.part = nnx.Dict(weight=nnx.Param(model.kept[...] * 2))

    model = nnx.Dict(kept=nnx.Variable(jnp.zeros(())))
    died = []
    for number in range(3):
        model.part = nnx.Dict(weight=nnx.Param(jnp.ones(2)))
        model.part.me = model.part
        model.table = nnx.Dict(a=nnx.Param(jnp.ones(2)))
        model.items = nnx.List([nnx.Variable(jnp.ones(1)), nnx.Variable(jnp.ones(1))])
        for dying in (model.part, model.table, model.table.a, model.items[1]):
            weakref.finalize(dying, end, model)
            died.append(weakref.ref(dying))
        del dying
        step(model)
        gc.collect()
        assert not any(ref() for ref in died) and len(seen) == len(died) == 4 * (number + 1)
        assert float(model.kept[...]) == number + 1 and len(model.items) == 1
        assert float(model.part.weight[...]) == 2 * (number + 1)
        assert not hasattr(model, "table") and int(model.ended[...]) == len(seen) - 1
    assert set(seen) <= {0.0, 1.0, 2.0, 3.0}


def test_an_argument_of_which_nobody_else_knows_lives_until_the_call_ends():
    ended = []

    class Part(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones(2))
            weakref.finalize(self, ended.append, True)

    holder = [Part()]

    @nnx.jit
    def step(part):
        holder.clear()
        gc.collect()
        assert not ended
        part.weight[...] += 1
        part.more = nnx.Variable(part.weight[...])
        return part

    result = step(holder[0])
    assert not ended and float(result.more[0]) == 2
    del result
    gc.collect()
    assert ended == [True]
