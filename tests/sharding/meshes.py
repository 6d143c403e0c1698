"""Meshes of the eight virtual devices, and the models that the tests put on them."""

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding

import nnxlite as nnx

WIDTH, VOCABULARY = 32, 64
TOKENS = np.random.RandomState(0).randint(0, VOCABULARY, (8, 9))


def mesh_of(kind=AxisType.Auto):
    """Two by four devices, with the axes `data` and `model`."""
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)


def names_of(value):
    """The axis names by which an array (or a Variable's) is sharded; None off any mesh."""
    sharding = getattr(value, "raw_value", value).sharding
    return tuple(sharding.spec) if isinstance(sharding, NamedSharding) else None


def steps(key, shape, dtype=None, out_sharding=None):
    """An initializer that compiles nothing: the same small numbers each time."""
    numbers = np.arange(np.prod(shape), dtype=np.float32) % 7 - 3
    return jax.numpy.asarray(numbers.reshape(shape) / 10)


def linear(*names):
    """A Linear of 8 by 16 features, annotated by the names of its kernel's axes."""
    inits = {"kernel_init": steps, "bias_init": steps, "rngs": nnx.Rngs(0)}
    kernel, bias = ({"out_sharding": part} for part in (names, names[-1:]))
    return nnx.Linear(8, 16, kernel_metadata=kernel, bias_metadata=bias, **inits)


def tied():
    layer = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    return nnx.Dict(a=layer, b=nnx.Dict(inner=layer))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


class Decoder(nnx.Module):
    """Embedding, blocks, head; with dropout, so that it has random streams."""

    def __init__(self, rngs, blocks=1):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(blocks)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, tokens):
        x = self.dropout(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@nnx.jit
def build():
    model = Decoder(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def next_token_loss(model, tokens):
    # With labels in place of one-hot vectors, JAX 0.12 has no gradient on explicit axes.
    labels = nnx.one_hot(tokens[:, 1:], VOCABULARY)
    return optax.softmax_cross_entropy(model(tokens[:, :-1]), labels).mean()


def make_step():
    """A jitted training step, and a list that grows by one with each trace of it."""
    traced = []

    @nnx.jit
    def step(model, optimizer, batch):
        traced.append(1)
        loss, grads = nnx.value_and_grad(next_token_loss)(model, batch)
        optimizer.update(model, grads)
        return loss

    return step, traced
