"""Trains a small U-Net of windowed attention on the sphere."""

import jax
import optax
from clock import cross_entropy, report, train
from flax import nnx
from heal_swin_nnx import HealSwin, HealSwinParams

sizes = {"in_channels": 1, "out_channels": 2, "embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2)}
params = HealSwinParams(nside=8, drop_path_rate=0.0, **sizes)
model = HealSwin(params, rngs=nnx.Rngs(0))
x = jax.random.normal(jax.random.key(1), (1, params.npix, 1))
labels = (x[..., 0] > 0).astype(int)
step, losses = train(model, optax.adam(1e-3), cross_entropy, x, labels, steps=10)
report(step, losses, model(x)[0, :10])
