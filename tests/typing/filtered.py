"""What type checkers infer of the filtered transforms and the functions on trees."""

from __future__ import annotations

import typing as tp
from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

import nnxlite as nnx

x = jnp.ones(3)
model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
Params: tp.TypeAlias = dict[str, jax.Array]
params: Params = {"w": x}


def loss(params: Params, x: jax.Array) -> jax.Array:
    return (params["w"] * x).sum()


def loss_and_name(params: Params, x: jax.Array) -> tuple[jax.Array, str]:
    return loss(params, x), "loss"


def double(x: jax.Array) -> jax.Array:
    return 2 * x


# Transforms

assert_type(nnx.filter_jit(loss)(params, x), jax.Array)
assert_type(nnx.filter_jit(donate="none")(loss_and_name)(params, x=x), tuple[jax.Array, str])
assert_type(nnx.filter_jit(loss).lower(params, x).compile()(params, x), jax.Array)
assert_type(nnx.filter_grad(loss)(params, x), Params)
assert_type(nnx.filter_grad(lambda x: x**2)(3.0), jax.Array)
assert_type(nnx.filter_grad(lambda m: m(x).sum())(model), nnx.Linear)
assert_type(nnx.filter_grad(loss_and_name, has_aux=True)(params, x), tuple[Params, str])
assert_type(nnx.filter_value_and_grad(loss)(params, x), tuple[jax.Array, Params])
assert_type(
    nnx.filter_value_and_grad(has_aux=True)(loss_and_name)(params, x),
    tuple[tuple[jax.Array, str], Params],
)
assert_type(nnx.filter_jvp(double, (x,), (x,)), tuple[jax.Array, jax.Array])
value, pull = nnx.filter_vjp(loss, params, x)
assert_type(value, jax.Array)
assert_type(pull(value), tuple[Params, jax.Array])
assert_type(nnx.filter_jacfwd(double)(x), tp.Any)
assert_type(nnx.filter_jacrev(double)(x), tp.Any)
assert_type(nnx.filter_hessian(loss)(params, x), tp.Any)
assert_type(nnx.filter_vmap(double)(x), jax.Array)
assert_type(nnx.filter_vmap(in_axes=0)(double)(x=x), jax.Array)
assert_type(nnx.filter_pmap(double)(x[:1]), jax.Array)
assert_type(nnx.filter_checkpoint(loss)(params, x), jax.Array)
assert_type(nnx.filter_eval_shape(double, x).shape, tuple[int, ...])
assert_type(nnx.filter_eval_shape(loss_and_name, params, x), tuple[jax.Array, str])
assert_type(nnx.filter_make_jaxpr(double)(x)[0], ClosedJaxpr)
assert_type(nnx.filter_closure_convert(double, x)(x), jax.Array)
assert_type(nnx.filter_shard(params, jax.devices()[0]), Params)
shape = jax.ShapeDtypeStruct((3,), jnp.float32)
assert_type(nnx.filter_pure_callback(np.sin, x, result_shape_dtypes=shape), jax.Array)


@nnx.filter_custom_jvp
def call(fn: tp.Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return fn(x)


@nnx.filter_custom_vjp
def clip(x: jax.Array, limit: float) -> jax.Array:
    return x


assert_type(call.__wrapped__(double, x), jax.Array)
clip.defvjp(lambda x, limit: (x, None), lambda residuals, grad, x, limit: grad)
assert_type(clip(x, 1.0), jax.Array)

# Trees

assert_type(nnx.filter(params, nnx.is_array), Params)
assert_type(nnx.partition(params, nnx.is_inexact_array), tuple[Params, Params])
assert_type(nnx.combine(params, params), Params)
assert_type(nnx.apply_updates(params, params), Params)
assert_type(nnx.tree_at(lambda p: p["w"], params, replace=x), Params)
assert_type(nnx.tree_at("bias", model, replace_fn=lambda bias: bias + 1), nnx.Linear)
assert_type(nnx.tree_equal(params, params), bool | jax.Array)
assert_type(nnx.tree_check(params), None)
assert_type(nnx.tree_flatten_one_level(params)[0], list[tp.Any])
assert_type(nnx.tree_inference(model), nnx.Linear)
assert_type(nnx.tree_pformat(params), str)
assert_type(nnx.tree_pprint({}), None)
assert_type(nnx.error_if(x, False, "no"), jax.Array)
assert_type(nnx.branched_error_if(x, False, 0, ["no"]), jax.Array)
assert_type(nnx.if_array(0)(x), int | None)
assert_type(nnx.is_array_like(x), bool)
assert_type(nnx.is_inexact_array_like(x), bool)


def size_of(leaf: jax.Array | str) -> int:
    return leaf.size if nnx.is_array(leaf) else 0


assert size_of(x) == 3
