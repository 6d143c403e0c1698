"""Samplers: how the next token is chosen from the logits of a model (`nnxlite.sampling`).

A sampler is a function of logits and a key: `sampler(logits, key)`, where logits are (vocabulary,)
and the result is an integer token.  `greedy` and every `Sampler` are samplers, and so is any function
of the user's.  `generate` maps it over the rows of a batch, so that each row has a key of its own.

The other functions each change logits, (..., vocabulary) float32, and compose: `temperature` divides
them, `top_k`, `top_p` and `min_p` replace those of tokens that must not be drawn by -inf.  `Sampler`
applies those that it has numbers for, in this order, and draws.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import typing as tp

import jax
import jax.numpy as jnp
from jax import lax

from nnxlite._base.jax import as_integer

Number = float | jax.Array


class SamplerFn(tp.Protocol):
    """A function that chooses a token."""

    def __call__(self, logits: jax.Array, key: tp.Any, /) -> jax.Array:
        """A token, for logits (vocabulary,) and a random key or None."""
        ...


def greedy(logits: jax.Array, key: tp.Any = None) -> jax.Array:
    """The most likely token.

    Args:
        logits: (..., vocabulary).
        key: ignored.

    Returns:
        Tokens, (...) int32.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> int(nnx.sampling.greedy(jnp.array([0.1, 2.0, 1.0])))
    1
    """
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def temperature(logits: jax.Array, temperature: Number) -> jax.Array:
    """Logits divided by a temperature: below 1 likely tokens become likelier, above 1 less so.

    Args:
        logits: (..., vocabulary).
        temperature: a positive number, or an array that broadcasts to logits.

    Returns:
        Logits of the same shape.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> nnx.sampling.temperature(jnp.array([1.0, 3.0]), 0.5).tolist()
    [2.0, 6.0]
    """
    return logits / temperature


def top_k(logits: jax.Array, k: int) -> jax.Array:
    """Logits of the `k` most likely tokens, and of those equal to the last of them.

    Args:
        logits: (..., vocabulary).
        k: a positive number; more than there are tokens leaves all.

    Returns:
        Logits of the same shape, -inf for all other tokens.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> nnx.sampling.top_k(jnp.array([1.0, 3.0, 2.0]), 2).tolist()
    [-inf, 3.0, 2.0]
    """
    best, _ = lax.top_k(logits, min(k, logits.shape[-1]))
    return jnp.where(logits < best[..., -1:], -jnp.inf, logits)


def top_p(logits: jax.Array, p: Number) -> jax.Array:
    """Logits of the most likely tokens that together have at least probability `p`.

    Nucleus sampling (Holtzman et al. 2019, https://arxiv.org/abs/1904.09751).

    Args:
        logits: (..., vocabulary).
        p: a probability; the most likely token is always left.

    Returns:
        Logits of the same shape, -inf for all other tokens.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> nnx.sampling.top_p(jnp.log(jnp.array([0.1, 0.5, 0.4])), 0.6)[0].tolist()
    -inf
    """
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probs = jax.nn.softmax(ordered.astype(jnp.float32), axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs  # the probability of the likelier tokens
    kept = (before < p).at[..., 0].set(True)
    least = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < least, -jnp.inf, logits)


def min_p(logits: jax.Array, p: Number) -> jax.Array:
    """Logits of the tokens at least `p` times as likely as the most likely one.

    Min-p sampling (Nguyen et al. 2024, https://arxiv.org/abs/2407.01082).

    Args:
        logits: (..., vocabulary).
        p: a number from 0 to 1.

    Returns:
        Logits of the same shape, -inf for all other tokens.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> nnx.sampling.min_p(jnp.array([0.0, 1.0, -9.0]), 0.1).tolist()
    [0.0, 1.0, -inf]
    """
    best = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(logits < best + jnp.log(p), -jnp.inf, logits)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampler:
    """Draws a token: `temperature`, `top_k`, `top_p` and `min_p` are applied, then one is drawn.

    All but `top_k` are operands of the program that draws: another value does not compile again.  In
    `generate` they may also be arrays with one value for each row of the batch.

    Args:
        temperature: divides the logits; 0 is `greedy`.
        top_k: draw from this many most likely tokens only; None for all.
        top_p: draw from the most likely tokens with at least this probability together.
        min_p: draw from tokens at least this many times as likely as the most likely one.

    Raises:
        ValueError: for a negative temperature, a `top_k` below 1, or a probability outside of 0..1.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> sampler = nnx.Sampler(temperature=0.7, top_k=2)
    >>> int(sampler(jnp.array([-1.0, 9.0, 0.0]), jax.random.key(0)))
    1
    """

    temperature: Number = 1.0
    top_k: int | None = dataclasses.field(default=None, metadata={"static": True})
    top_p: Number | None = None
    min_p: Number | None = None

    def __post_init__(self) -> None:
        degree, top_k, wrong = self.temperature, as_integer(self.top_k), None
        object.__setattr__(self, "top_k", top_k)
        if isinstance(degree, numbers.Real) and not 0 <= float(degree) < math.inf:
            wrong = "temperature", "a finite number from 0 up"
        if top_k is not None and not (type(top_k) is int and top_k >= 1):
            wrong = "top_k", "a whole number from 1 up, or None"
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, numbers.Real) and not 0 <= float(value) <= 1:
                wrong = name, "a number from 0 to 1, or None"
        if wrong:
            name, right = wrong
            raise ValueError(f"Sampler: {name} is {getattr(self, name)!r}; it must be {right}.")

    def __call__(self, logits: jax.Array, key: jax.Array, /) -> jax.Array:
        """Tokens drawn from logits, (...) int32.

        Args:
            logits: (..., vocabulary).
            key: a random key.
        """
        logits = logits.astype(jnp.float32)
        best = greedy(logits)
        warm = jnp.asarray(self.temperature) > 0
        logits = temperature(logits, jnp.where(warm, self.temperature, 1.0))
        changes: tp.Any = (top_k, self.top_k), (top_p, self.top_p), (min_p, self.min_p)
        for change, number in changes:
            logits = logits if number is None else change(logits, number)
        return jnp.where(warm, jax.random.categorical(key, logits), best).astype(jnp.int32)
