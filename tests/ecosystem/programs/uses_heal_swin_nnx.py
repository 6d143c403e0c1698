"""Trains a small U-Net of windowed attention on the sphere."""

import jax
import optax
from clock import report
from flax import nnx
from heal_swin_nnx import HealSwin, HealSwinParams

params = HealSwinParams(
    nside=8,
    in_channels=1,
    out_channels=2,
    embed_dim=8,
    depths=(1, 1),
    num_heads=(1, 2),
    drop_path_rate=0.0,
)
model = HealSwin(params, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
x = jax.random.normal(jax.random.key(1), (1, params.npix, 1))
labels = (x[..., 0] > 0).astype(int)


@nnx.jit
def step(model, optimizer, x, labels):
    def loss_of(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


losses = [step(model, optimizer, x, labels) for _ in range(10)]
assert losses[-1] < losses[0]
report(lambda: step(model, optimizer, x, labels), losses, model(x)[0, :10])
