"""Models with all that can be in one, a training step, and the ways to save and to read."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import nnxlite as nnx


class Net(nnx.Module):
    """Layers with statistics and noise, a shared layer, a cycle, bare arrays, pytrees in Variables."""

    def __init__(self, rngs, tied=True):
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.last = self.blocks[0] if tied else nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.again = self
        self.pair = nnx.Variable({"a": jnp.ones(2), "b": [1, 2.5]})
        self.tables = {"x": jnp.ones(3), "n": 7, "name": "old"}
        self.bare = jnp.zeros(2)
        self.empty = nnx.Param(jnp.zeros((0, 3)))
        self.host = np.arange(3, dtype="float32")
        self.half = nnx.Param(jnp.ones(2, jnp.bfloat16))
        self.spin = nnx.Variable(jnp.array([1 + 2j]))
        self.flags = nnx.Variable(jnp.array([True, False]))

    def __call__(self, x):
        for block in self.blocks:
            x = self.drop(jax.nn.relu(block(x)))
        return self.last(self.norm(x))


def build(seed=0, **kwargs):
    model = Net(nnx.Rngs(seed), **kwargs)
    adam = optax.inject_hyperparams(optax.adamw)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), adam(learning_rate=optax.cosine_decay_schedule(0.1, 100))
    )
    trained = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("empty")))
    return model, nnx.Optimizer(model, tx, wrt=trained)


@nnx.jit
def step(model, optimizer, metrics, x):
    def loss_of(model):
        return jnp.mean((model(x) - jnp.sin(x)) ** 2)

    loss, grads = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, optimizer.wrt))(model)
    optimizer.update(model, grads)
    metrics.update(loss=loss)
    return loss


def batch(position):
    return jax.random.normal(jax.random.key(position), (8, 4))


def linear(seed=0, features=3, **kwargs):
    return nnx.Linear(2, features, rngs=nnx.Rngs(seed), **kwargs)


def params(**arrays):
    return nnx.Dict({name: nnx.Param(jnp.asarray(value)) for name, value in arrays.items()})


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def bits(*nodes):
    """Every leaf as bytes, by path."""
    found = {}
    for path, leaf in nnx.to_flat_state(nnx.state(list(nodes))):
        value = leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
        for keys, part in jax.tree_util.tree_leaves_with_path(value):
            if isinstance(part, jax.Array) and jnp.issubdtype(part.dtype, jax.dtypes.prng_key):
                part = jax.random.key_data(part)
            array = np.asarray(part)
            found[(*path, *map(str, keys))] = (str(array.dtype), array.tobytes())
    return found


checkpoint = nnx.checkpoint
SAVE = {
    "checkpoint": lambda folder, model, **how: checkpoint.save(folder / "c", model=model, **how),
    "safetensors": lambda folder, model, **how: nnx.save_safetensors(folder / "s", model, **how),
}
READ = {
    "checkpoint": lambda folder, model, **how: checkpoint.restore(folder / "c", model=model, **how),
    "safetensors": lambda folder, model, **how: nnx.load_safetensors(folder / "s", model, **how),
}
"""The two formats, of one object in a folder."""
