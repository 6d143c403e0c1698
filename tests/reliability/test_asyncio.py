"""Tasks of one event loop interleave between awaits: each has the settings that it has made."""

from __future__ import annotations

import asyncio
import contextlib

import jax.numpy as jnp
import pytest

import nnxlite as nnx

mode, updates = nnx.set_graph_mode.current_value, nnx.set_graph_updates.current_value
SWITCHES = {
    "graph mode": (lambda: nnx.set_graph_mode(False), mode),
    "graph updates": (lambda: nnx.set_graph_updates(False), updates),
    "eager sharding": (lambda: nnx.use_eager_sharding(False), nnx.using_eager_sharding),
    "var defaults": (lambda: nnx.var_defaults(ref=True), lambda: not nnx.var_defaults().ref),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_setting_holds_in_its_task_alone(name):
    """Task by task, blocks that overlap without being nested."""
    scope, is_default = SWITCHES[name]

    async def seen(steps, scope):
        found = []
        with scope():
            for _ in range(steps):
                await asyncio.sleep(0)
                found.append(is_default())
        return [*found, is_default()]

    async def main():
        none = contextlib.nullcontext
        return await asyncio.gather(seen(3, scope), seen(6, none), seen(5, scope), seen(1, scope))

    assert is_default()
    inside = [[False] * steps + [True] for steps in (3, 5, 1)]
    assert asyncio.run(main()) == [inside[0], [True] * 7, inside[1], inside[2]]
    assert is_default()


def test_to_thread_takes_the_settings_along_and_brings_none_back():
    def work():
        nnx.set_graph_mode(False)
        return mode()

    async def main():
        with nnx.set_graph_mode(False):
            there = await asyncio.to_thread(mode)
        return there, await asyncio.to_thread(mode), await asyncio.to_thread(work), mode()

    assert asyncio.run(main()) == (False, True, False, True)


def test_programs_are_of_the_settings_in_which_they_were_called():
    """The same function and model, called by two tasks under different settings: two programs."""
    seen, model = [], nnx.Dict(w=nnx.Param(jnp.array(1.0)))

    @nnx.jit
    def step(model):
        seen.append(updates())
        return model.w * 2

    async def call(value):
        with nnx.set_graph_updates(value):
            for _ in range(3):
                step(model)
                await asyncio.sleep(0)

    async def main():
        await asyncio.gather(call(True), call(False), call(True))

    asyncio.run(main())
    assert seen == [True, False]


def test_one_update_context_manager_in_several_tasks():
    """The manager is entered by one task while another one is inside."""
    manager = nnx.update_context("shared")

    async def cross(number):
        with manager as context:
            context.outer_ref_outer_index = nnx.graphlib.RefMap()  # as its first step does
            for _ in range(number):
                await asyncio.sleep(0)
            assert nnx.current_update_context("shared") is context
            assert context.outer_ref_outer_index is not None

    async def main():
        await asyncio.gather(cross(1), cross(2), cross(3))

    asyncio.run(main())
