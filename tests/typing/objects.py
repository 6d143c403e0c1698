"""What type checkers infer of modules, containers and random streams."""

from __future__ import annotations

import typing as tp
from typing import assert_type

import jax
import jax.numpy as jnp

import nnxlite as nnx

State: tp.TypeAlias = nnx.State[tp.Any, tp.Any]

x = jnp.ones((1, 2))

assert_type(nnx.__version__, str)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.sow(nnx.Intermediate, "mean", x.mean())
        return self.linear(x)


block = Block(nnx.Rngs(0))

# Containers

blocks = nnx.List([block, Block(nnx.Rngs(1))])
assert_type(blocks, nnx.List[Block])
assert_type(blocks[0], Block)
assert_type(blocks[:1], list[Block])
assert_type(blocks.pop(), Block)
blocks.append(block)
blocks[0] = block
for item in blocks:
    assert_type(item(x), jax.Array)
heads = nnx.Dict(left=block)
assert_type(heads, nnx.Dict[Block])
assert_type(heads["left"], Block)
assert_type(nnx.Dict({"left": block}), nnx.Dict[Block])
assert_type(heads.left, tp.Any)
heads.right = block
for name, head in heads.items():
    assert_type(name, str)
    assert_type(head, Block)

# Attributes


class Scaled(nnx.Pytree):
    def __init__(self) -> None:
        self.factor = nnx.data(3.0)
        self.name = nnx.static("scaled")


assert_type(Scaled().factor, float)
assert_type(Scaled().name, str)


@nnx.dataclass
class Point(nnx.Pytree):
    x: nnx.Data[float]
    name: nnx.Static[str]
    weight: float = nnx.data(default=1.0)


assert_type(Point(1.0, name="p").x, float)
assert_type(Point(1.0, "p", weight=2.0).weight, float)


class Frozen(nnx.Module, frozen=True):
    factor: jax.Array = nnx.field(converter=jnp.asarray)


assert_type(Frozen(2.0).factor, jax.Array)


class Plain(nnx.Object):
    pass


assert isinstance(Plain(), nnx.Pytree)

# Methods of modules

assert_type(block.train(), None)
assert_type(block.eval(), None)
assert_type(block.sow(nnx.Intermediate, "seen", x), bool)
assert_type(block.perturb("x", x), jax.Array)
for _, module in block.iter_modules():
    assert_type(module, nnx.Module)
assert_type(nnx.capture(block, nnx.Intermediate)(x), tuple[jax.Array, State])
assert_type(nnx.capture(block)(x), jax.Array)

# Random streams

rngs = nnx.Rngs(0, dropout=1)
assert_type(rngs(), jax.Array)
assert_type(rngs.params(), jax.Array)
assert_type(rngs.params, nnx.RngStream)
assert_type(rngs["dropout"], nnx.RngStream)
assert_type(rngs.dropout.key, nnx.RngKey[jax.Array])
assert_type(rngs.normal((2, 3)), jax.Array)
assert_type(rngs.lecun_normal()((2, 3)), jax.Array)
assert_type(rngs.split(3), nnx.Rngs)
assert_type(rngs.fork(), nnx.Rngs)
assert_type(nnx.with_rngs(block, split=2), Block)
with nnx.split_rngs(rngs, splits=2) as backups:
    assert_type(list(backups)[0][0], nnx.RngStream)
nnx.restore_rngs(nnx.fork_rngs(rngs))
nnx.reseed(rngs, dropout=3)


@nnx.split_rngs(splits=2)
def draw(rngs: nnx.Rngs, factor: float) -> int:
    return len(rngs.params.key.shape)


assert_type(draw(rngs, 2.0), int)


@nnx.fork_rngs
def drawn(rngs: nnx.Rngs) -> jax.Array:
    return rngs.params()


assert_type(drawn(rngs), jax.Array)

# Text

assert_type(nnx.tabulate(block, x), str)
assert_type(nnx.display(), None)
differences = nnx.diff(block, Block(nnx.Rngs(1)))
assert_type(differences, nnx.Diff)
assert_type(differences.entries, tuple[nnx.Difference, ...])
assert_type(nnx.draw(block), nnx.Drawing)
assert_type(nnx.draw(block).text, str)
assert nnx.find_nan(block, x) is None
findings = nnx.check(block, None, x)
assert_type(findings, nnx.Findings)
assert_type(findings.entries, tuple[nnx.Finding, ...])
assert_type(findings.entries[0].text, str)
usage = nnx.memory(block)
assert_type(usage, nnx.Memory)
assert_type(usage.by_kind, dict[str, int])
assert_type(usage.step, nnx.StepMemory | None)
