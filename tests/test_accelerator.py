"""What only an accelerator can show: its kernels, its memory, and the same numbers as on the CPU.

Skipped on a CPU.  `NNXLITE_TEST_PLATFORM=cuda,cpu pytest tests/test_accelerator.py` runs it on a
GPU, and `NNXLITE_TEST_PLATFORM=any` runs on a CPU what makes sense there.
"""

import os
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx

BACKEND = jax.default_backend()
pytestmark = pytest.mark.skipif(
    BACKEND == "cpu" and os.environ.get("NNXLITE_TEST_PLATFORM") != "any",
    reason="there is no accelerator",
)
needs_cudnn = pytest.mark.skipif(BACKEND != "gpu", reason="cuDNN runs on GPUs of NVIDIA")


def assert_close(mine, theirs, rtol=1e-4, atol=1e-5):
    """The arrays of two trees agree, whatever device they are on; whole numbers exactly."""
    for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        if jnp.issubdtype(jnp.asarray(x).dtype, jnp.integer):
            np.testing.assert_array_equal(x, y)
        else:
            x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
            np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


# Attention ---------------------------------------------------------------------------------------


def attention(implementation, is_causal, mask) -> tp.Any:
    """Sum of squares of the attention, and its gradients."""
    options = {"mask": mask, "is_causal": is_causal, "implementation": implementation}

    def loss_of(query, key, value):
        y = nnx.dot_product_attention(query, key, value, **options)
        return jnp.sum(y.astype(jnp.float32) ** 2), y

    return jax.jit(jax.value_and_grad(loss_of, (0, 1, 2), has_aux=True))


def heads(length=256, key_heads=4):
    keys = jax.random.split(jax.random.key(0), 3)
    return [
        jax.random.normal(key, (2, length, number, 64), jnp.bfloat16)
        for key, number in zip(keys, (4, key_heads, key_heads))
    ]


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("kind", ["full", "causal", "mask"])
@needs_cudnn
def test_cudnn_gives_what_xla_gives(kind, key_heads):
    args = heads(key_heads=key_heads)
    mask = None
    if kind == "mask":
        mask = jax.random.bernoulli(jax.random.key(1), 0.8, (2, 1, 256, 256))
    (_, mine), grads = attention("cudnn", kind == "causal", mask)(*args)
    (_, theirs), expected = attention("xla", kind == "causal", mask)(*args)
    assert mine.dtype == theirs.dtype == jnp.bfloat16
    assert_close(mine, theirs, rtol=0.05, atol=0.02)
    for gradient, other in zip(grads, expected):
        scale = float(jnp.abs(other.astype(jnp.float32)).max())
        assert_close(gradient, other, rtol=0.05, atol=0.02 * scale)


@needs_cudnn
def test_cudnn_stores_no_logits():
    args = heads(4096)
    lowered = {name: attention(name, True, None).lower(*args) for name in ("cudnn", "xla")}
    compiled = {name: each.compile().memory_analysis() for name, each in lowered.items()}
    sizes = {name: each.temp_size_in_bytes for name, each in compiled.items()}
    assert sizes["cudnn"] < sizes["xla"] / 8, sizes


# The same numbers as on the CPU ------------------------------------------------------------------


class Language(nnx.Module):
    """A small language model with learned positions."""

    def __init__(self, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(50, 32, rngs=rngs)
        self.positions = nnx.Embed(64, 32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.head = nnx.Linear(32, 50, rngs=rngs)

    def __call__(self, tokens, input_positions=None):
        if input_positions is None:
            input_positions = jnp.arange(tokens.shape[1])
        x = self.tokens(tokens) + self.positions(input_positions)
        return self.head(self.norm(x + self.attention(x, is_causal=True)))


def images(rngs: nnx.Rngs):
    """A convolution, batch statistics, dropout."""
    conv, norm = nnx.Conv(3, 8, (3, 3), rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
    dropout, head = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(8, 5, rngs=rngs)
    return nnx.Sequential(conv, norm, nnx.relu, dropout, lambda x: x.mean((1, 2)), head)


def train_step(model, optimizer, x, y):
    def loss_of(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def generated():
    out = nnx.generate(Language(nnx.Rngs(0)), [[3, 1, 4], [1, 5]], 24)
    return out.tokens, out.log_probs


def initial():
    return nnx.to_pure_dict(nnx.state(images(nnx.Rngs(0)), nnx.Param))


def trained():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 8, 8, 3)).astype(np.float32), rng.integers(0, 5, 16)
    model = images(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    step = nnx.jit(train_step)
    losses = [float(step(model, optimizer, x, y)) for _ in range(3)]
    assert losses[2] < losses[0]
    return losses, nnx.to_pure_dict(nnx.state(model, (nnx.Param, nnx.BatchStat)))


def streams():
    rngs = nnx.Rngs(0, dropout=1)
    keys = [jax.random.key_data(rngs.params()), jax.random.key_data(rngs.fork().dropout())]
    return *keys, rngs.dropout.bits((33,)), rngs.uniform((33,)).view(jnp.uint32)


RUNS = [(generated, 1e-3, 1e-5), (initial, 1e-6, 1e-6), (trained, 1e-3, 1e-4), (streams, 0, 0)]


@pytest.mark.parametrize("run, rtol, atol", RUNS, ids=[run.__name__ for run, *_ in RUNS])
def test_numbers_are_those_of_the_cpu(run, rtol, atol):
    with jax.default_matmul_precision("highest"):
        mine = jax.tree.map(np.asarray, run())
        with jax.default_device(jax.devices("cpu")[0]):
            assert_close(mine, run(), rtol, atol)


# Memory and devices ------------------------------------------------------------------------------


def stack(width=64, depth=2):
    model = nnx.MLP(width, width, width=width, depth=depth, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def regress(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - jnp.sin(x)) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def test_a_step_that_donates_what_it_writes_reuses_memory():
    device = jax.devices()[0]
    objects = stack(64 if BACKEND == "cpu" else 8192, depth=3)
    x = jnp.ones((2, objects[0].layers[0].in_features))
    step = nnx.jit(regress, donate="written")
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(objects)))
    old = objects[0].layers[0].kernel.value
    for _ in range(3):
        jax.block_until_ready(step(*objects, x))
    assert old.is_deleted()
    temporary = step.lower(*objects, x).compile().memory_analysis().temp_size_in_bytes
    assert temporary < size / 2  # the gradients are a third
    if device.memory_stats() is not None:
        # A peak counts from the start of the process, so what is there besides is counted along.
        before = device.memory_stats()["bytes_in_use"]
        jax.block_until_ready(step(*objects, x))
        assert device.memory_stats()["bytes_in_use"] - before < size / 100


@pytest.mark.parametrize("plan", ["data", "fsdp"])
def test_a_sharded_step_gives_what_one_device_gives(plan):
    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        alone, sharded = stack(), stack()
        layout = nnx.shard(sharded, nnx.make_mesh(data=-1), plan)
        step = nnx.jit(regress)
        for _ in range(3):
            assert_close(step(*sharded, layout.put(x)), step(*alone, x))
    assert_close(nnx.to_pure_dict(nnx.state(sharded[0])), nnx.to_pure_dict(nnx.state(alone[0])))
    assert sharded[0].layers[0].kernel.value.sharding.device_set == set(jax.devices())


def test_checkpoints_come_back_with_value_and_device(tmp_path):
    saved, other = stack(), stack()
    nnx.jit(regress)(*saved, jnp.ones((2, 64)))
    device = jax.devices()[-1]
    for _, variable in nnx.iter_graph(other[0]):
        if isinstance(variable, nnx.Param):
            variable.value = jax.device_put(variable.value, device)
    nnx.checkpoint.save(tmp_path / "all", model=saved[0], optimizer=saved[1])
    nnx.checkpoint.restore(tmp_path / "all", model=other[0], optimizer=other[1])
    assert not nnx.diff(saved, other)
    assert other[0].layers[0].kernel.value.devices() == {device}

    nnx.save_safetensors(tmp_path / "model.safetensors", saved[0])
    again, _ = stack()
    nnx.load_safetensors(tmp_path / "model.safetensors", again)
    assert not nnx.diff(saved[0], again)
    assert again.layers[0].kernel.value.devices() == {jax.devices()[0]}


def test_an_optimizer_waits_in_the_memory_of_the_host():
    x, step = jnp.ones((2, 64)), nnx.jit(regress)
    (model, optimizer), expected = stack(), stack()
    assert_close(step(model, optimizer, x), step(*expected, x))

    def moved(kind):
        """Moves the optimizer to another memory of its device."""
        put = lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind(kind))
        nnx.update(optimizer, jax.tree.map(put, nnx.state(optimizer)))
        return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(nnx.state(optimizer))}

    device = jax.devices()[0].default_memory().kind
    assert moved("pinned_host") == {"pinned_host"}
    assert moved(device) == {device}
    assert_close(step(model, optimizer, x), step(*expected, x))
    assert_close(nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(expected[0])))
