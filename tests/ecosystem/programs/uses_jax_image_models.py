"""Trains a small vision transformer of the library."""

import jax
import optax
from clock import cross_entropy, report, train
from flax import nnx
from jimm import VisionTransformer

mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
jax.set_mesh(mesh)  # the library's layers are annotated for one
sizes = {"num_classes": 4, "img_size": 16, "patch_size": 8, "mlp_dim": 32, "hidden_size": 16}
model = VisionTransformer(**sizes, num_layers=6, num_heads=2, dropout_rate=0.0, rngs=nnx.Rngs(0))
images = jax.random.normal(jax.random.key(1), (2, 16, 16, 3))
labels = jax.numpy.array([0, 3])
step, losses = train(model, optax.adam(1e-3), cross_entropy, images, labels)
report(step, losses, model(images))
