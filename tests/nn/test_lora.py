"""LoRA and LoRALinear: what they add, what a filter finds, and messages."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import nnxlite as nnx
from tests.nn.quick import normal

NORMAL = jax.nn.initializers.normal(1.0)


def test_lora_shares_its_base():
    base = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    layer = nnx.LoRA(3, 2, 4, base_module=base, rngs=nnx.Rngs(1))
    assert layer.base_module is base
    copy = nnx.clone(layer)
    assert [p for p, _ in nnx.to_flat_state(nnx.state(copy))] == [
        ("base_module", "bias"),
        ("base_module", "kernel"),
        ("lora_a",),
        ("lora_b",),
    ]


def test_lora_passes_options_to_its_base():
    seen = {}

    def base(x, **options):
        seen.update(options)
        return x

    nnx.LoRA(3, 2, 3, base_module=base, rngs=nnx.Rngs(0))(jnp.ones((2, 3)), scale=2)
    assert seen == {"scale": 2}


def test_only_the_adaptation_is_trained():
    layer = nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0))
    x = normal(5, 3)
    grads = nnx.grad(lambda m: jnp.sum(m(x) ** 2), argnums=nnx.DiffState(0, nnx.LoRAParam))(layer)
    assert [path for path, _ in nnx.to_flat_state(grads)] == [
        ("lora", "lora_a"),
        ("lora", "lora_b"),
    ]


def test_the_matrices_may_be_of_another_kind():
    layer = nnx.LoRA(3, 2, 4, lora_param_type=nnx.Cache, a_metadata={"tag": 1}, rngs=nnx.Rngs(0))
    assert type(layer.lora_a) is type(layer.lora_b) is nnx.Cache
    assert layer.lora_a.get_metadata("tag") == 1
