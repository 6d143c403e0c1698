"""Calls that both type checkers refuse; nothing of it runs.

A comment that ignores no error is an error itself, so that each line here is one.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

import jax

import nnxlite as nnx


def loss(model: nnx.Linear, x: jax.Array) -> jax.Array:
    return model(x).sum()


def pair(model: nnx.Linear, x: jax.Array) -> tuple[jax.Array, int]:
    return model(x).sum(), 1


class Block(nnx.Module):
    @nnx.jit
    def compiled(self, x: jax.Array) -> jax.Array:
        return x


def mistakes(model: nnx.Linear, block: Block, x: jax.Array) -> None:
    nnx.jit(loss)(model, "x")  # type: ignore[arg-type]
    nnx.jit(loss)(model)  # type: ignore[call-arg]
    nnx.jit(loss)(model, x, x)  # type: ignore[call-arg]
    nnx.jit(loss)(model, y=x)  # type: ignore[call-arg]
    nnx.jit(loss, donated=1)  # type: ignore[call-overload]
    block.compiled("x")  # type: ignore[arg-type]
    nnx.vmap(loss)(model)  # type: ignore[call-arg]
    nnx.remat(loss)(model, 1)  # type: ignore[arg-type]
    nnx.scan(loss)(x, x)  # type: ignore[arg-type]
    nnx.checkify(loss)(model)  # type: ignore[call-arg]
    nnx.jit_partial(loss, model)("x")  # type: ignore[arg-type]
    nnx.filter_jit(loss)(model, "x")  # type: ignore[arg-type]
    nnx.filter_vmap(loss)(model)  # type: ignore[call-arg]

    nnx.grad(loss)("model", x)  # type: ignore[call-overload]
    nnx.grad(loss)(model, "x")  # type: ignore[call-overload]
    nnx.value_and_grad(loss)(model)  # type: ignore[call-overload]
    nnx.grad(loss, argnum=0)  # type: ignore[call-overload]
    (value, count), grads = nnx.value_and_grad(pair)(model, x)

    nnx.cond(True, loss, loss, model)  # type: ignore[arg-type]
    nnx.vjp(loss, model)  # type: ignore[arg-type]

    nnx.List([model]).append(x)  # type: ignore[arg-type]
    nnx.Linear(2, "3", rngs=nnx.Rngs(0))  # type: ignore[arg-type]
    nnx.Linear(2, 3)  # type: ignore[call-arg]
    model.bias.sum()  # type: ignore[union-attr]
    model.kernel.value = "x"  # type: ignore[assignment]
