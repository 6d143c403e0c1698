"""What type checkers infer of functions under transforms, also filtered ones, and on trees."""

from __future__ import annotations

import typing as tp
from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

import nnxlite as nnx


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2, 2, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) * self.scale

    @nnx.jit
    def compiled(self, x: jax.Array) -> jax.Array:
        return self(x)

    @nnx.jit(static_argnames="power")
    def raised(self, x: jax.Array, power: int = 2) -> jax.Array:
        return self(x) ** power

    @nnx.remat
    def checkpointed(self, x: jax.Array) -> jax.Array:
        return self(x)


block = Block(nnx.Rngs(0))
x = jnp.ones((4, 2))


def loss(model: Block, x: jax.Array) -> jax.Array:
    return model(x).sum()


def loss_and_count(model: Block, x: jax.Array) -> tuple[jax.Array, dict[str, int]]:
    return model(x).sum(), {"count": 4}


def untyped(model, x):
    return model(x).sum()


def total(x: jax.Array) -> jax.Array:
    return x.sum()


# jit

assert_type(nnx.jit(loss)(block, x), jax.Array)
assert_type(nnx.jit(loss, inline=True)(block, x=x), jax.Array)
assert_type(nnx.jit(lambda model: model)(block), tp.Any)
assert_type(nnx.jit(loss).lower(block, x).compile()(block, x), jax.Array)
assert_type(nnx.jit(loss).trace(block, x).lower().as_text(), tp.Any)
nnx.jit(loss).clear_cache()
assert_type(nnx.jit(loss).cache_info(), nnx.CacheInfo)
assert_type(nnx.filter_jit(loss).cache_info().programs, int)
with nnx.explain_compiles(False):
    assert_type(nnx.jit(loss).explain(), nnx.Explanation)
assert_type(block.compiled(x), jax.Array)
assert_type(block.raised(x, power=3), jax.Array)
assert_type(block.checkpointed(x), jax.Array)
assert_type(Block.compiled(block, x), jax.Array)
assert_type(nnx.jit(block)(x), jax.Array)
assert_type(nnx.jit(block.__call__)(x), jax.Array)


@nnx.jit
def step(model: Block, *, x: jax.Array, factor: float = 1.0) -> tuple[jax.Array, int]:
    return model(x) * factor, 1


assert_type(step(block, x=x), tuple[jax.Array, int])
assert_type(nnx.jit_partial(loss, block)(x), jax.Array)
assert_type(nnx.jit_partial(loss, block, x)(), jax.Array)
assert_type(nnx.cached_partial(nnx.jit(loss), block)(x), jax.Array)

# grad and value_and_grad

State: tp.TypeAlias = nnx.State[tp.Any, tp.Any]

assert_type(nnx.grad(loss)(block, x), State)
assert_type(nnx.grad(untyped)(block, x), State)
assert_type(nnx.grad(lambda model: model(x).sum())(block), State)
assert_type(nnx.grad(total)(x), jax.Array)
assert_type(nnx.grad(lambda x: x**2)(3.0), jax.Array)
assert_type(nnx.grad(lambda v: v.value**2)(nnx.Param(jnp.ones(()))), nnx.Param[jax.Array])
assert_type(nnx.grad(loss_and_count, has_aux=True)(block, x), tuple[State, dict[str, int]])
assert_type(nnx.value_and_grad(loss)(block, x), tuple[jax.Array, State])
assert_type(nnx.value_and_grad(lambda model: loss(model, x))(block), tuple[jax.Array, State])
assert_type(
    nnx.value_and_grad(loss_and_count, has_aux=True)(block, x),
    tuple[tuple[jax.Array, dict[str, int]], State],
)
only_scale = nnx.DiffState(0, nnx.PathContains("scale"))
assert_type(nnx.grad(loss, argnums=only_scale)(block, x), State)
assert_type(nnx.value_and_grad(loss, argnums=only_scale)(block, x), tuple[jax.Array, State])
assert_type(nnx.value_and_grad(loss, argnums=(0, 1))(block, x), tuple[jax.Array, tp.Any])
assert_type(nnx.value_and_grad(loss, graph_updates=False)(block, x), tuple[jax.Array, tp.Any])


@nnx.grad
def decorated(model: Block) -> jax.Array:
    return model(x).sum()


@nnx.value_and_grad(has_aux=True)
def decorated_with_aux(model: Block, x: jax.Array) -> tuple[jax.Array, int]:
    return model(x).sum(), 1


assert_type(decorated(block), State)
assert_type(decorated_with_aux(block, x), tuple[tuple[jax.Array, int], tp.Any])

assert_type(nnx.vmap(nnx.grad(total))(x), jax.Array)
assert_type(nnx.jit(nnx.value_and_grad(loss))(block, x), tuple[jax.Array, State])

# vjp and jvp

value, pull = nnx.vjp(loss, block, x)
assert_type(value, jax.Array)
assert_type(pull(value), tuple[Block, jax.Array])
value, pull, count = nnx.vjp(loss_and_count, block, x, has_aux=True)
assert_type(count, dict[str, int])
assert_type(pull(value), tuple[Block, jax.Array])
assert_type(nnx.jvp(total, (x,), (x,)), tuple[jax.Array, jax.Array])
assert_type(
    nnx.jvp(loss_and_count, (block, x), (nnx.clone(block), x), has_aux=True),
    tuple[jax.Array, jax.Array, dict[str, int]],
)


@nnx.custom_vjp
def twice(x: jax.Array) -> jax.Array:
    return 2 * x


twice.defvjp(lambda x: (twice(x), None), lambda residual, cotangents: (2 * cotangents[1],))
assert_type(twice(x), jax.Array)

# remat, vmap, pmap, shard_map, scan

assert_type(nnx.remat(loss)(block, x), jax.Array)
assert_type(nnx.remat(prevent_cse=False)(loss)(block, x=x), jax.Array)
assert_type(nnx.vmap(loss, in_axes=(None, 0))(block, x), jax.Array)
assert_type(nnx.pmap(loss, in_axes=(None, 0))(block, x[:1]), jax.Array)
mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
P = PartitionSpec
over_shards = nnx.shard_map(loss, mesh=mesh, in_specs=(P(), P("d")), out_specs=P(), check_vma=False)
assert_type(over_shards(block, x), jax.Array)


@nnx.vmap(in_axes=0, out_axes=0)
def build(key: jax.Array) -> Block:
    return Block(nnx.Rngs(key))


blocks = build(jax.random.split(jax.random.key(0), 3))
assert_type(blocks, Block)


@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
def forward(x: jax.Array, block: Block) -> jax.Array:
    return block(x)


assert_type(forward(x, blocks), jax.Array)
stacked = nnx.scan(loss, in_axes=(nnx.StateAxes({...: None}), 0), out_axes=0)
assert_type(stacked(block, x), jax.Array)

# cond, switch, loops

assert_type(nnx.cond(True, loss, loss, block, x), jax.Array)
assert_type(nnx.cond(True, lambda b: b.scale + 1, lambda b: b.scale * 2, block), jax.Array)
assert_type(nnx.switch(0, [loss, loss], block, x), jax.Array)


def below(carry: tuple[Block, jax.Array]) -> jax.Array:
    return carry[1] < 3


def advance(carry: tuple[Block, jax.Array]) -> tuple[Block, jax.Array]:
    return carry[0], carry[1] + 1


def add(i: jax.Array, carry: jax.Array) -> jax.Array:
    return carry + i


assert_type(nnx.while_loop(below, advance, (block, jnp.array(0))), tuple[Block, jax.Array])
assert_type(nnx.fori_loop(0, 3, add, jnp.array(0)), jax.Array)

# Looking at functions

assert_type(nnx.eval_shape(lambda: Block(nnx.Rngs(0))), Block)
assert_type(nnx.eval_shape(loss, block, x).shape, tuple[int, ...])
assert_type(nnx.make_jaxpr(loss)(block, x), ClosedJaxpr)
assert_type(nnx.checkify(loss)(block, x), tuple[checkify.Error, jax.Array])

# Trees of states

assert_type(nnx.to_tree(block), tp.Any)
assert_type(nnx.from_tree(nnx.to_tree(block)), tp.Any)
assert_type(nnx.prefix(block, {nnx.Param: 0}), tp.Any)
assert_type(nnx.NodeStates.from_split(*nnx.split(block)), nnx.NodeStates)
assert_type(nnx.StateAxes({nnx.Param: 0, ...: None}), nnx.StateAxes)
assert_type(nnx.StateSharding({nnx.Param: P()}), nnx.StateSharding)
assert nnx.PARTITION_NAME == "partition_name"


@nnx.transform_metadata(in_axes=0, partition="layers")
def annotated(v: nnx.Param[jax.Array], factor: float) -> jax.Array:
    return v * factor


assert_type(annotated(nnx.Param(x, sharding=("layers", None)), 2.0), jax.Array)

# Filtered transforms

vector = jnp.ones(3)
layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
Params: tp.TypeAlias = dict[str, jax.Array]
params: Params = {"w": vector}


def weighted(params: Params, vector: jax.Array) -> jax.Array:
    return (params["w"] * vector).sum()


def weighted_and_name(params: Params, vector: jax.Array) -> tuple[jax.Array, str]:
    return weighted(params, vector), "loss"


def double(vector: jax.Array) -> jax.Array:
    return 2 * vector


assert_type(nnx.filter_jit(weighted)(params, vector), jax.Array)
assert_type(
    nnx.filter_jit(donate="none")(weighted_and_name)(params, vector=vector), tuple[jax.Array, str]
)
assert_type(nnx.filter_jit(weighted).lower(params, vector).compile()(params, vector), jax.Array)
assert_type(nnx.filter_grad(weighted)(params, vector), Params)
assert_type(nnx.filter_grad(lambda vector: vector**2)(3.0), jax.Array)
assert_type(nnx.filter_grad(lambda m: m(vector).sum())(layer), nnx.Linear)
assert_type(nnx.filter_grad(weighted_and_name, has_aux=True)(params, vector), tuple[Params, str])
assert_type(nnx.filter_value_and_grad(weighted)(params, vector), tuple[jax.Array, Params])
assert_type(
    nnx.filter_value_and_grad(has_aux=True)(weighted_and_name)(params, vector),
    tuple[tuple[jax.Array, str], Params],
)
assert_type(nnx.filter_jvp(double, (vector,), (vector,)), tuple[jax.Array, jax.Array])
total_of_weights, pull_weights = nnx.filter_vjp(weighted, params, vector)
assert_type(total_of_weights, jax.Array)
assert_type(pull_weights(total_of_weights), tuple[Params, jax.Array])
assert_type(nnx.filter_jacfwd(double)(vector), tp.Any)
assert_type(nnx.filter_jacrev(double)(vector), tp.Any)
assert_type(nnx.filter_hessian(weighted)(params, vector), tp.Any)
assert_type(nnx.filter_vmap(double)(vector), jax.Array)
assert_type(nnx.filter_vmap(in_axes=0)(double)(vector=vector), jax.Array)
assert_type(nnx.filter_pmap(double)(vector[:1]), jax.Array)
assert_type(nnx.filter_checkpoint(weighted)(params, vector), jax.Array)
assert_type(nnx.filter_eval_shape(double, vector).shape, tuple[int, ...])
assert_type(nnx.filter_eval_shape(weighted_and_name, params, vector), tuple[jax.Array, str])
assert_type(nnx.filter_make_jaxpr(double)(vector)[0], ClosedJaxpr)
assert_type(nnx.filter_closure_convert(double, vector)(vector), jax.Array)
assert_type(nnx.filter_shard(params, jax.devices()[0]), Params)
shape = jax.ShapeDtypeStruct((3,), jnp.float32)
assert_type(nnx.filter_pure_callback(np.sin, vector, result_shape_dtypes=shape), jax.Array)


@nnx.filter_custom_jvp
def call(fn: tp.Callable[[jax.Array], jax.Array], vector: jax.Array) -> jax.Array:
    return fn(vector)


@nnx.filter_custom_vjp
def clip(vector: jax.Array, limit: float) -> jax.Array:
    return vector


assert_type(call.__wrapped__(double, vector), jax.Array)
clip.defvjp(lambda vector, limit: (vector, None), lambda residuals, grad, vector, limit: grad)
assert_type(clip(vector, 1.0), jax.Array)

# Functions on trees

assert_type(nnx.filter(params, nnx.is_array), Params)
assert_type(nnx.partition(params, nnx.is_inexact_array), tuple[Params, Params])
assert_type(nnx.combine(params, params), Params)
assert_type(nnx.apply_updates(params, params), Params)
assert_type(nnx.tree_at(lambda p: p["w"], params, replace=vector), Params)
assert_type(nnx.tree_at("bias", layer, replace_fn=lambda bias: bias + 1), nnx.Linear)
assert_type(nnx.tree_equal(params, params), bool | jax.Array)
assert_type(nnx.tree_check(params), None)
assert_type(nnx.tree_flatten_one_level(params)[0], list[tp.Any])
assert_type(nnx.tree_inference(layer), nnx.Linear)
assert_type(nnx.tree_pformat(params), str)
assert_type(nnx.tree_pprint({}), None)
assert_type(nnx.error_if(vector, False, "no"), jax.Array)
assert_type(nnx.branched_error_if(vector, False, 0, ["no"]), jax.Array)
assert_type(nnx.if_array(0)(vector), int | None)
assert_type(nnx.is_array_like(vector), bool)
assert_type(nnx.is_inexact_array_like(vector), bool)


def size_of(leaf: jax.Array | str) -> int:
    return leaf.size if nnx.is_array(leaf) else 0


assert size_of(vector) == 3
