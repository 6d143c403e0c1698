"""Tasks of one event loop interleave between awaits: each has the settings that it has made."""

from __future__ import annotations

import asyncio
import contextlib
import typing as tp

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx

SWITCHES: dict[str, tuple[tp.Callable[[], tp.Any], tp.Callable[[], bool], bool]] = {
    "graph mode": (lambda: nnx.set_graph_mode(False), nnx.set_graph_mode.current_value, True),
    "graph updates": (
        lambda: nnx.set_graph_updates(False),
        nnx.set_graph_updates.current_value,
        True,
    ),
    "eager sharding": (lambda: nnx.use_eager_sharding(False), nnx.using_eager_sharding, True),
    "var defaults": (lambda: nnx.var_defaults(ref=True), lambda: not nnx.var_defaults().ref, True),
}


class Model(nnx.Module):
    def __init__(self, value: float) -> None:
        self.w = nnx.Param(jnp.array(value))
        self.tied = self.w

    def __call__(self, x: tp.Any) -> tp.Any:
        return x * self.w


@pytest.mark.parametrize("name", SWITCHES)
def test_a_setting_holds_in_its_task_alone(name):
    """Task by task, blocks that overlap without being nested."""
    scope, is_default, default = SWITCHES[name]

    async def inside(steps: int) -> list[bool]:
        seen = []
        with scope():
            for _ in range(steps):
                await asyncio.sleep(0)
                seen.append(is_default())
        return [*seen, is_default()]

    async def outside(steps: int) -> list[bool]:
        seen = []
        for _ in range(steps):
            seen.append(is_default())
            await asyncio.sleep(0)
        return seen

    async def main() -> list[list[bool]]:
        return await asyncio.gather(inside(3), outside(6), inside(5), inside(1))

    first, second, third, fourth = asyncio.run(main())
    assert first == [not default] * 3 + [default]
    assert second == [default] * 6
    assert third == [not default] * 5 + [default]
    assert fourth == [not default, default]
    assert is_default() is default


def test_to_thread_takes_the_settings_along_and_brings_none_back():
    current = nnx.set_graph_mode.current_value

    def work():
        nnx.set_graph_mode(False)
        return current()

    async def main():
        with nnx.set_graph_mode(False):
            there = await asyncio.to_thread(current)
        return there, await asyncio.to_thread(current), await asyncio.to_thread(work), current()

    assert asyncio.run(main()) == (False, True, False, True)


def test_programs_are_of_the_settings_in_which_they_were_called():
    """The same function and model, called by two tasks under different settings: two programs."""
    seen: list[bool] = []

    @nnx.jit
    def step(model: Model) -> jax.Array:
        seen.append(nnx.set_graph_updates.current_value())
        return model(1.0)

    async def call(value: bool) -> None:
        with nnx.set_graph_updates(value):
            for _ in range(3):
                step(model)
                await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(call(True), call(False), call(True))

    model = Model(1.0)
    asyncio.run(main())
    assert seen == [True, False]


def test_one_update_context_manager_in_several_tasks():
    """The manager is entered by one task while another one is inside."""
    manager = nnx.update_context("shared")

    async def cross(number: int) -> None:
        with manager as context:
            context.outer_ref_outer_index = nnx.graphlib.RefMap()  # as its first step does
            for _ in range(number):
                await asyncio.sleep(0)
            assert nnx.current_update_context("shared") is context
            assert context.outer_ref_outer_index is not None

    async def main() -> None:
        await asyncio.gather(cross(1), cross(2), cross(3))

    asyncio.run(main())


def test_a_cancelled_task_leaves_no_setting():
    async def waits() -> None:
        with nnx.set_graph_mode(False), nnx.explain_compiles(show=lambda text: None):
            await asyncio.sleep(3600)

    async def main() -> None:
        task = asyncio.create_task(waits())
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert nnx.set_graph_mode.current_value()

    asyncio.run(main())
