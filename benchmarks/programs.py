"""Whole programs of usual size, for `benchmarks.throughput`: a transformer and a residual network.

Each is written once for nnxlite and flax, and once in plain JAX with parameters in a dictionary, by
the paths that the modules give them.  All compute in bfloat16 with parameters in float32, and start
from the same values, which come from NumPy: nothing is drawn on the device.
"""

from __future__ import annotations

import functools
import typing as tp
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax

Values = dict[str, tp.Any]
"""Arrays by path, such as `layers.0.up.kernel`."""

HALF = jnp.bfloat16


def modules(nnx: tp.Any, build: tp.Callable[[], tp.Any], values: Values) -> tp.Any:
    """What `build` returns, built without arrays and filled with copies of `values`."""
    graphdef, state = nnx.split(nnx.eval_shape(build))
    flat = [
        (path, variable.replace(jnp.array(values[".".join(map(str, path))])))
        for path, variable in nnx.to_flat_state(state)
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def initial(nnx: tp.Any, build: tp.Callable[[], tp.Any]) -> Values:
    """Initial values for what `build` returns: kernels and embeddings are random, others constant."""
    generator = np.random.default_rng(0)
    values: Values = {}
    for path, variable in nnx.to_flat_state(nnx.state(nnx.eval_shape(build))):
        shape, name = variable.shape, path[-1]
        if name in ("kernel", "embedding"):
            size = np.sqrt(np.prod(shape[:-1])) if len(shape) == 4 else 50.0
            values[".".join(map(str, path))] = generator.standard_normal(shape, np.float32) / size
        else:
            constant = np.ones if name in ("scale", "var") else np.zeros
            values[".".join(map(str, path))] = constant(shape, np.float32)
    return values


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean, in float32."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# A transformer -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Of a decoder-only transformer with tied embeddings; `length` counts the tokens of a row."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 32_000
    length: int = 1024


def transformer(nnx: tp.Any, sizes: Sizes, **attention: tp.Any) -> tp.Any:
    """The modules; `attention` are further arguments of the attention layers."""
    width, linear = sizes.width, functools.partial(nnx.Linear, dtype=HALF)
    norm = functools.partial(nnx.LayerNorm, dtype=HALF)

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.before = norm(width, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                sizes.heads,
                width,
                dtype=HALF,
                decode=False,
                keep_rngs=False,
                rngs=rngs,
                **attention,
            )
            self.between = norm(width, rngs=rngs)
            self.up = linear(width, 4 * width, rngs=rngs)
            self.down = linear(4 * width, width, rngs=rngs)

        def __call__(self, x):
            x = x + self.attention(self.before(x), is_causal=not self.attention.decode)
            return x + self.down(nnx.gelu(self.up(self.between(x))))

    class Transformer(nnx.Module):
        def __init__(self, rngs):
            self.tokens = nnx.Embed(sizes.vocabulary, width, dtype=HALF, rngs=rngs)
            self.positions = nnx.Embed(sizes.length, width, dtype=HALF, rngs=rngs)
            self.layers = nnx.List([Block(rngs) for _ in range(sizes.layers)])
            self.norm = norm(width, rngs=rngs)

        def __call__(self, tokens, input_positions=None):
            if input_positions is None:
                input_positions = jnp.arange(tokens.shape[1])
            x = self.tokens(tokens) + self.positions(input_positions)
            for layer in self.layers:
                x = layer(x)
            return self.tokens.attend(self.norm(x))

    return Transformer(nnx.Rngs(0))


def train_step(nnx: tp.Any, loss_of: tp.Callable[..., jax.Array]) -> tp.Callable[..., jax.Array]:
    """`step(model, optimizer, *batch)`, which returns the loss; a new function each time."""

    def step(model, optimizer, *batch):
        loss, grads = nnx.value_and_grad(lambda model: loss_of(model(batch[0]), batch[-1]))(model)
        optimizer.update(model, grads)
        return loss

    return step


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The loss of predicting each token from those before it."""
    return cross_entropy(logits[:, :-1], tokens[:, 1:])


def decode_step(model: tp.Any, token: jax.Array, position: jax.Array) -> tuple[jax.Array, ...]:
    """The likeliest next tokens (batch,), their log probabilities, and the next position."""
    logits = model(token[:, None], position[None])[:, 0]
    return (*chosen(logits), position + 1)


def chosen(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The likeliest tokens (batch,) and their log probabilities."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return logits.argmax(-1).astype(jnp.int32), log_probs.max(-1)


def dense(p: Values, name: str, x: jax.Array, axes: int = 1) -> jax.Array:
    """The linear layer `name` over the last `axes` axes."""
    kernel, bias = p[f"{name}.kernel"].astype(HALF), p[f"{name}.bias"].astype(HALF)
    return jnp.tensordot(x, kernel, axes) + bias


def layer_norm(p: Values, name: str, x: jax.Array) -> jax.Array:
    """The layer norm `name`; its statistics are float32."""
    x = x.astype(jnp.float32)
    mean = x.mean(-1, keepdims=True)
    var = jnp.maximum((x * x).mean(-1, keepdims=True) - mean * mean, 0)
    y = (x - mean) * (jax.lax.rsqrt(var + 1e-6) * p[f"{name}.scale"]) + p[f"{name}.bias"]
    return y.astype(HALF)


def plain_transformer(
    p: Values,
    tokens: jax.Array,
    positions: jax.Array,
    attend: tp.Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array],
    layers: int,
) -> jax.Array:
    """The logits; `attend(layer, query, key, value)` is the attention."""
    embedding = p["tokens.embedding"].astype(HALF)
    x = embedding[tokens] + p["positions.embedding"].astype(HALF)[positions]
    for i in range(layers):
        name = f"layers.{i}"
        y = layer_norm(p, f"{name}.before", x)
        heads = [dense(p, f"{name}.attention.{part}", y) for part in ("query", "key", "value")]
        x = x + dense(p, f"{name}.attention.out", attend(i, *heads), 2)
        y = layer_norm(p, f"{name}.between", x)
        x = x + dense(p, f"{name}.down", jax.nn.gelu(dense(p, f"{name}.up", y)))
    return layer_norm(p, "norm", x) @ embedding.T


def plain_logits(p: Values, tokens: jax.Array, layers: int) -> jax.Array:
    """The logits of whole sequences."""
    attend = lambda i, *heads: jax.nn.dot_product_attention(*heads, is_causal=True)
    return plain_transformer(p, tokens, jnp.arange(tokens.shape[1]), attend, layers)


Cached = list[tuple[jax.Array, jax.Array]]


def plain_cache(sizes: Sizes, batch: int, length: int) -> Cached:
    """Empty keys and values of each layer."""
    shape = batch, length, sizes.heads, sizes.width // sizes.heads
    return [(jnp.zeros(shape, HALF), jnp.zeros(shape, HALF)) for _ in range(sizes.layers)]


def plain_decode_step(
    p: Values, cache: Cached, token: jax.Array, position: jax.Array
) -> tuple[Cached, jax.Array, jax.Array, jax.Array]:
    """The new cache, and what `decode_step` returns."""
    new: Cached = []
    mask = (jnp.arange(cache[0][0].shape[1]) <= position)[None, None, None]

    def attend(i, query, key, value):
        start = 0, position, 0, 0
        pair = zip(cache[i], (key, value))
        keys, values = (jax.lax.dynamic_update_slice(old, x, start) for old, x in pair)
        new.append((keys, values))
        return jax.nn.dot_product_attention(query, keys, values, mask=mask)

    logits = plain_transformer(p, token[:, None], position[None], attend, len(cache))[:, 0]
    return new, *chosen(logits), position + 1


def equinox_transformer(eqx: tp.Any, sizes: Sizes, p: Values) -> tp.Any:
    """An Equinox module for one row of tokens, with the values of `p`."""
    width = sizes.width
    key = jax.random.key(0)  # all values are replaced

    def linear(inputs, outputs):
        return eqx.nn.Linear(inputs, outputs, key=key)

    class Block(eqx.Module):
        before: tp.Any
        attention: tp.Any
        between: tp.Any
        up: tp.Any
        down: tp.Any

        def __init__(self):
            self.before, self.between = eqx.nn.LayerNorm(width, 1e-6), eqx.nn.LayerNorm(width, 1e-6)
            biases = dict.fromkeys(["use_query_bias", "use_key_bias", "use_value_bias"], True)
            self.attention = eqx.nn.MultiheadAttention(
                sizes.heads, width, use_output_bias=True, key=key, **biases
            )
            self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

        def __call__(self, x, mask):
            y = jax.vmap(self.before)(x)
            x = x + self.attention(y, y, y, mask=mask)
            y = jax.vmap(self.up)(jax.vmap(self.between)(x))
            return x + jax.vmap(self.down)(jax.nn.gelu(y))

    class Transformer(eqx.Module):
        tokens: tp.Any
        positions: tp.Any
        layers: list
        norm: tp.Any

        def __init__(self):
            self.tokens = eqx.nn.Embedding(sizes.vocabulary, width, key=key)
            self.positions = eqx.nn.Embedding(sizes.length, width, key=key)
            self.layers = [Block() for _ in range(sizes.layers)]
            self.norm = eqx.nn.LayerNorm(width, 1e-6)

        def __call__(self, tokens):
            length = len(tokens)
            mask = jnp.tril(jnp.ones((length, length), bool))
            x = jax.vmap(self.tokens)(tokens) + self.positions.weight[:length]
            for layer in self.layers:
                x = layer(x, mask)
            return jax.vmap(self.norm)(x) @ self.tokens.weight.T

    names = {x: f"{x}_proj" for x in ("query", "key", "value")} | {"out": "output_proj"}
    names |= dict.fromkeys(["kernel", "scale", "embedding"], "weight")
    named: Values = {}
    for path, array in p.items():
        parts = [f"[{x}]" if x.isdigit() else f".{names.get(x, x)}" for x in path.split(".")]
        named["".join(parts)] = array, path.endswith("kernel")

    def value(path, leaf):
        if not hasattr(leaf, "shape"):
            return leaf
        array, turned = named[jax.tree_util.keystr(path)]
        shape = leaf.shape[::-1] if turned else leaf.shape  # a weight is (outputs, inputs)
        return jnp.array(array.reshape(shape).T if turned else array.reshape(shape))

    return jax.tree_util.tree_map_with_path(value, eqx.filter_eval_shape(Transformer))


# A residual network ------------------------------------------------------------------------------

Stages = tuple[int, ...]


def residual(nnx: tp.Any, widths: Stages, blocks: int) -> tp.Any:
    """A convolution, `blocks` residual blocks of each width, the mean of all pixels, ten logits."""

    def conv(inputs, outputs, stride, rngs):
        return nnx.Conv(
            inputs, outputs, (3, 3), stride, padding="SAME", use_bias=False, dtype=HALF, rngs=rngs
        )

    def norm(features, rngs):
        return nnx.BatchNorm(
            features, use_running_average=False, momentum=0.9, dtype=HALF, rngs=rngs
        )

    class Block(nnx.Module):
        def __init__(self, inputs, outputs, rngs):
            stride = 1 if inputs == outputs else 2
            self.first, self.first_norm = conv(inputs, outputs, stride, rngs), norm(outputs, rngs)
            self.second, self.second_norm = conv(outputs, outputs, 1, rngs), norm(outputs, rngs)
            self.short = nnx.data(conv(inputs, outputs, 2, rngs) if stride > 1 else None)

        def __call__(self, x):
            y = nnx.relu(self.first_norm(self.first(x)))
            y = self.second_norm(self.second(y))
            return nnx.relu(y + (x if self.short is None else self.short(x)))

    class Residual(nnx.Module):
        def __init__(self, rngs):
            inputs = widths[0], *(width for width in widths for _ in range(blocks))
            self.stem, self.norm = conv(3, widths[0], 1, rngs), norm(widths[0], rngs)
            self.blocks = nnx.List([Block(*pair, rngs) for pair in zip(inputs, inputs[1:])])
            self.head = nnx.Linear(widths[-1], 10, dtype=HALF, rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.norm(self.stem(x)))
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean((1, 2)))

    return Residual(nnx.Rngs(0))


def plain_residual(p: Values, x: jax.Array) -> tuple[jax.Array, Values]:
    """Logits, and the new running statistics."""
    new: Values = {}

    def conv(name, x, stride=1):
        kernel = p[f"{name}.kernel"].astype(HALF)
        layout = "NHWC", "HWIO", "NHWC"
        return jax.lax.conv_general_dilated(
            x.astype(HALF), kernel, (stride, stride), "SAME", dimension_numbers=layout
        )

    def norm(name, x):
        x = x.astype(jnp.float32)
        mean = x.mean((0, 1, 2))
        var = jnp.maximum((x * x).mean((0, 1, 2)) - mean * mean, 0)
        for part, now in (("mean", mean), ("var", var)):
            new[f"{name}.{part}"] = 0.9 * p[f"{name}.{part}"] + 0.1 * now
        y = (x - mean) * (jax.lax.rsqrt(var + 1e-5) * p[f"{name}.scale"]) + p[f"{name}.bias"]
        return y.astype(HALF)

    x = jax.nn.relu(norm("norm", conv("stem", x)))
    i = 0
    while (name := f"blocks.{i}") + ".first.kernel" in p:
        stride = 2 if f"{name}.short.kernel" in p else 1
        y = jax.nn.relu(norm(f"{name}.first_norm", conv(f"{name}.first", x, stride)))
        y = norm(f"{name}.second_norm", conv(f"{name}.second", y))
        x = jax.nn.relu(y + (conv(f"{name}.short", x, 2) if stride > 1 else x))
        i += 1
    return dense(p, "head", x.mean((1, 2))), new
