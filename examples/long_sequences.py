"""Train one transformer on long sequences in three ways: whole, along a ring, and in stages.

On one device, attention needs a weight for each pair of positions. With `_ring_attention.py` the
sequence is divided between the devices, and keys and values go round. With `_pipeline.py` the layers are
divided, and the batch goes through in parts. The mesh decides. One CPU is divided into eight devices.

    python examples/long_sequences.py            # about four minutes on two CPU cores
    python examples/long_sequences.py --quick    # a shorter run

Result: the first losses agree within 1e-3, and at least 99 % of the repeated symbols are right. A step
along the ring of eight devices needs less than a tenth of the memory for each (`long_sequences.png`).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import curves, options
from _pipeline import pipeline
from _ring_attention import ring_attention

import nnxlite as nnx

SYMBOLS, WIDTH, LAYERS = 16, 32, 4


class Block(nnx.Module):
    """Attention with rotary positions and a feed-forward network, each after a normalization."""

    def __init__(self, rngs: nnx.Rngs):
        rotary = functools.partial(
            nnx.dot_product_attention_with_rope, rope=nnx.RoPE(), attention_fn=ring_attention
        )
        self.norm1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(4, WIDTH, attention_fn=rotary, decode=False, rngs=rngs)
        self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.mlp = nnx.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, activation=nnx.gelu, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attend(self.norm1(x), is_causal=True)
        return x + self.mlp(self.norm2(x))


class Decoder(nnx.Module):
    """Stacked blocks between an embedding and a linear layer; the gradient computes them again."""

    def __init__(self, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(SYMBOLS, WIDTH, rngs=rngs)
        self.blocks = nnx.vmap(Block)(rngs.fork(split=LAYERS))
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, SYMBOLS, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        body = nnx.remat(lambda block, x: block(x))
        x = pipeline(body, self.blocks, self.tokens(tokens), microbatches=4)
        return self.head(self.norm(x))


@nnx.jit(donate="written")
def train_step(model: Decoder, optimizer: nnx.Optimizer, tokens) -> tuple[jax.Array, jax.Array]:
    """The loss and accuracy of the second half of each sequence, which repeats the first."""
    targets = jnp.roll(tokens, -1, axis=1)  # the last one begins the sequence again
    repeats = jnp.arange(tokens.shape[1]) >= tokens.shape[1] // 2 - 1

    def loss_fn(model):
        logits = model(tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean(where=repeats), (logits.argmax(-1) == targets).mean(where=repeats)

    (loss, accuracy), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    return loss, accuracy


def main() -> None:
    run = options(__doc__)
    jax.config.update("jax_num_cpu_devices", 8)  # means nothing where there are GPUs or TPUs
    steps, rows, length = (3, 8, 64) if run.quick else (200, 16, 128)
    lengths = [256] if run.quick else [256, 512, 1024, 2048, 4096]
    one, ring = nnx.make_mesh(data=1, devices=jax.devices()[:1]), nnx.make_mesh(sequence=-1)
    stages = nnx.make_mesh(data=-1, stage=LAYERS)
    ways = {  # how the batch and the parameters are divided
        "one device": (jax.NamedSharding(one, jax.P()), {}),
        "ring": (jax.NamedSharding(ring, jax.P(None, "sequence")), {}),
        "stages": (jax.NamedSharding(stages, jax.P("data")), {"*.blocks.**": ("stage",)}),
    }
    memory, losses = {}, {}
    for name, (sharding, rules) in ways.items():
        model = Decoder(nnx.Rngs(0))
        schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, min(30, steps // 2), steps)
        optimizer = nnx.Optimizer(model, optax.adam(schedule), wrt=nnx.Param)
        layout = nnx.shard((model, optimizer), sharding.mesh, rules)
        draw, losses[name], memory[name] = np.random.default_rng(0), [], []
        with jax.set_mesh(sharding.mesh):
            for step in nnx.training.loop(steps):
                half = draw.integers(0, SYMBOLS, (rows, length // 2), dtype=np.int32)
                tokens = jax.device_put(np.concatenate([half, half], axis=1), sharding)
                loss, right = train_step(model, optimizer, tokens)
                losses[name].append(float(loss))  # virtual devices share threads: wait for it
                step.log(loss=loss)
            for size in lengths:  # compiled, and not run
                tokens = jax.ShapeDtypeStruct((8, size), jnp.int32, sharding=sharding)
                used = nnx.memory(model, optimizer, train_step, tokens).step.temporary
                memory[name].append((size, used / 1e6))
        apart = max(abs(a - b) for a, b in zip(losses[name][:5], losses["one device"]))
        print(
            f"{name}: {layout.bytes_per_device / 1e3:.0f} kB a device, loss {loss:.4f}, at first"
            f" {apart:.0e} apart; {right:.1%} right; {size} positions need {used / 1e6:.1f} MB"
        )
        assert apart < 1e-3
    curves(run.out / "long_sequences.png", memory, "positions", "MB", xscale="log", yscale="log")
    share = memory["ring"][-1][1] / memory["one device"][-1][1]
    print(f"along the ring, a step needs {100 * share:.0f} % of the memory")


if __name__ == "__main__":
    main()
