"""Faults at lines of the library and of the user's functions; see `faults.py` for the campaign."""

from __future__ import annotations

import contextlib

import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.laws import model as slow_model
from tests.laws.programs import content
from tests.reliability import faults
from tests.reliability.fault_cases import CASES

IN_SUITE = ["jit", "jit_donated", "grad", "scan"]


def assert_sound(counts, least):
    assert not counts.defects, "\n".join(first for _, first in counts.defects.values())
    assert counts.before + counts.after + counts.swallowed >= least


@pytest.mark.parametrize("name", IN_SUITE)
def test_L8_a_call_that_fails_at_any_line_leaves_all_as_before_or_all_done(name):
    counts = faults.campaign([name], 5, seed=IN_SUITE.index(name), deep_every=5)
    assert_sound(counts, 3)


def test_L8_every_line_of_a_warm_call():
    """The write-back is among them: it is done whole, or not at all."""
    counts = faults.campaign(["update"], 60, 0, wheres=["library"], every=True, deep_every=1000)
    assert_sound(counts, 60)


def edits(model):
    """Every way to edit an object, after an observer has seen it."""
    param = nnx.Param(jnp.ones(2))
    yield lambda: setattr(model, "new", param)
    yield lambda: setattr(model, "new", 1)
    yield lambda: setattr(model, "number", 2)
    yield lambda: setattr(model, "text", "b")
    yield lambda: setattr(model, "kernel", param)
    yield lambda: delattr(model, "bias")
    yield lambda: model.items.append(param)
    yield lambda: model.items.__setitem__(0, param)
    yield lambda: model.items.__delitem__(0)
    yield lambda: model.items.insert(0, param)
    yield lambda: model.items.reverse()
    yield lambda: model.table.__setitem__("b", param)
    yield lambda: model.table.__delitem__("a")
    yield lambda: model.kernel.set_metadata(tag=1)
    yield lambda: nnx.update(model, {"kernel": nnx.Param(jnp.zeros(2), tag=3)})
    yield lambda: nnx.pop(model, nnx.PathContains("items"))
    yield lambda: model.eval()


class Edited(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones(2))
        self.bias = nnx.Param(jnp.ones(2))
        self.items = nnx.List([nnx.Param(jnp.zeros(n)) for n in range(3)])
        self.table = nnx.Dict(a=nnx.Param(jnp.zeros(1)))
        self.number, self.text, self.training = 1, "a", True


NUMBER_OF_EDITS = len([*edits(None)])


@pytest.mark.parametrize("number", range(NUMBER_OF_EDITS))
def test_an_edit_that_is_interrupted_leaves_no_plan_valid(number):
    """What the library has cached of an object is never believed after an edit was begun."""
    every = faults.Lines(faults.in_library)
    model = Edited()
    nnx.split(model)
    every.run([*edits(model)][number])
    done = 0
    for at in range(1, every.count + 1):
        model = Edited()
        nnx.split(model)
        lines = faults.Lines(faults.in_library, at, faults.raising(faults.FaultInterrupt))
        with contextlib.suppress(KeyboardInterrupt):  # later runs may have fewer lines
            lines.run([*edits(model)][number])
        cached = nnx.split(model)
        by_hand = nnx.split(slow_model.copied(model))
        assert cached[0] == by_hand[0], lines.place
        leaves = [id(x) for _, x in slow_model.leaves(model)]
        assert [id(x) for _, x in nnx.to_flat_state(cached[1])] == leaves
        done += bool(lines.place)
    assert done


def changed_in_many_places(model):
    """An update with new values, metadata, paths and arrays in an object and in containers."""
    param = nnx.Param(jnp.full(2, 7.0), tag=3)
    return nnx.update(
        model,
        {
            "kernel": param,
            "bias": jnp.full(3, 5.0),  # another shape
            "new": nnx.Param(jnp.ones(1)),
            "items": {0: jnp.full(0, 1.0), 3: nnx.BatchStat(jnp.ones(3))},
            "table": {"a": jnp.full(1, 2.0), "b": param},
            "arrays": {0: jnp.full(1, 4.0), 1: {"x": jnp.full(2, 6.0)}},
            "plain": jnp.full(2, 8.0),
        },
    )


class EditedInside(Edited):
    def __init__(self):
        super().__init__()
        self.arrays = [jnp.zeros(1), {"x": jnp.zeros(2), "y": nnx.Param(jnp.zeros(2))}]
        self.plain = jnp.zeros(2)
        self.arrays.append(self.bias)


@pytest.mark.parametrize(
    "edit",
    [
        changed_in_many_places,
        lambda model: nnx.pop(model, nnx.Param),
        lambda model: nnx.pop(model, nnx.PathContains("arrays"), nnx.PathContains(0)),
    ],
)
def test_L8_update_and_pop_are_one_step(edit):
    """An interrupt at any line, also a full memory, leaves all as before or all done."""

    def form(model):
        return slow_model.canonical(model, content)

    every, after = faults.Lines(faults.in_library), EditedInside()
    before = form(after)
    every.run(lambda: edit(after))
    found = set()
    for at in range(1, every.count + 1):
        model = EditedInside()
        lines = faults.Lines(faults.in_library, at, faults.raising(faults.FaultInterrupt))
        with contextlib.suppress(KeyboardInterrupt):
            lines.run(lambda model=model: edit(model))
        assert form(model) in (before, form(after)), lines.place
        found.add(form(model) == before)
    assert found == {True, False}


def test_cases_are_what_they_seem():
    assert set(IN_SUITE) <= set(CASES) and len(CASES) >= 40
