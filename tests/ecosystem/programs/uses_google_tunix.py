"""Fine-tunes a small Llama of the package by its trainer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from clock import report
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.sft import peft_trainer, utils

sizes = {"num_layers": 2, "vocab_size": 32, "embed_dim": 16, "hidden_dim": 32}
heads = {"num_heads": 2, "head_dim": 8, "num_kv_heads": 2}
config = llama.ModelConfig(**sizes, **heads, rope_theta=10_000, norm_eps=1e-5)
jax.set_mesh(jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2))
model = llama.Llama3(config, rngs=nnx.Rngs(0))
tokens = np.asarray(jax.random.randint(jax.random.key(1), (2, 12), 1, 32))
batch = peft_trainer.TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens, bool))


def inputs(batch):
    mask = batch.input_tokens != 0
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": utils.build_positions_from_mask(mask),
        "attention_mask": utils.make_causal_attn_mask(mask),
    }


settings = peft_trainer.TrainingConfig(eval_every_n_steps=1000, max_steps=30)
trainer = peft_trainer.PeftTrainer(model, optax.adamw(1e-3), settings)
trainer = trainer.with_gen_model_input_fn(inputs)
train_step, _ = trainer.jit_train_and_eval_step()
losses = [train_step(batch)[0] for _ in range(20)]
assert losses[-1] < losses[0]
report(lambda: train_step(batch)[0], losses, jnp.sum(model.lm_head.w[...]))
