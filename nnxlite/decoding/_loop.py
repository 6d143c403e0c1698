"""The loop that `generate` compiles.

All rows are always at the same position: at each step, a row with prompt tokens left takes the next of
them, and any other row the token that was chosen.  So rows of different lengths need neither masks nor
shifted positions, and are independent of each other.  The positions that are prompt in every row are
read in a few large steps before the loop begins.

A token is drawn by a sampler, row by row, or a search chooses it.  Each prompt of a search has several
rows.  A step gives every row the scores of all its continuations; the best of these, over the rows of
one prompt, are the rows of the next step, and the caches move with them.  A row that has ended has one
continuation, itself, and keeps its score.  Of the rows of a prompt only the first counts at the
beginning, since all are equal.

A conversation goes on as a call on all of it would, but begins at the first position whose token some
row has not read.  Rows that had ended before have read padding since: an attention cache goes back to
that position, since entries after its index do not count; with any other cache all is read again.
"""

from __future__ import annotations

import functools
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nnxlite.decoding._decoder import BY_POSITION, Decoder, Setup
from nnxlite.decoding.sampling import Sampler
from nnxlite.transforms._jit import jit


class Conversation(tp.NamedTuple):
    """The tokens that a model has read, for `generate(..., cache=...)` to continue.

    Args:
        leaves: the arrays of the model's cache.
        tokens: prompts and new tokens, (batch, max_length) int32.
        lengths: how many tokens there are in each row, (batch,) int32.
        read: how many positions the cache has read, () int32.

    >>> import nnxlite as nnx
    >>> class Next(nnx.Module):
    ...     def __call__(self, tokens):
    ...         return nnx.one_hot(tokens + 1, 10)
    >>> first = nnx.generate(Next(), [3, 4], 2, cache=True)
    >>> first.cache.tokens.tolist(), nnx.generate(Next(), [1], 2, cache=first.cache).lists()
    ([[3, 4, 5, 6]], [2, 3])
    """

    leaves: list[jax.Array]
    tokens: jax.Array
    lengths: jax.Array
    read: jax.Array

    def __repr__(self) -> str:
        return f"Conversation({len(self.leaves)} arrays, tokens of shape {self.tokens.shape})"


class Generated(tp.NamedTuple):
    """The result of `generate`: arrays for a batch, without their first axis for a single prompt.

    With `beams`, the arrays have an axis (beams,) after that of the batch, best first.

    Args:
        tokens: the new tokens, (batch, max_new) int32; padding after the last one.
        lengths: how many there are in each row, (batch,) int32, a stop token among them.
        log_probs: the log probability of each new token, before a sampler changed the logits,
            (batch, max_new) float32; 0 for padding. None with beams.
        cache: a `Conversation`, if `generate` was to return it.
        scores: with beams, the sum of log probabilities over `length ** length_penalty`,
            (batch, beams) float32.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.Generated(jnp.array([[5, 2, 0]]), jnp.array([2])).lists()
    [[5, 2]]
    """

    tokens: jax.Array
    lengths: jax.Array
    log_probs: jax.Array | None = None
    cache: Conversation | None = None
    scores: jax.Array | None = None

    def lists(self) -> list[tp.Any]:
        """The new tokens as a list of integers for each row, or one list for a single prompt."""
        tokens, lengths = np.asarray(self.tokens), np.asarray(self.lengths)
        if tokens.ndim == 1:
            return tokens[: int(lengths)].tolist()
        return [Generated(*row).lists() for row in zip(tokens, lengths, strict=True)]


class Request(tp.NamedTuple):
    """The arrays of a call."""

    prompt: tp.Any  # (rows, length)
    lengths: tp.Any  # (rows,), of the prompt with the tokens of the conversation before it
    sampler: tp.Any  # a pytree that can be called
    keys: jax.Array | None  # (rows,)
    stop: tp.Any  # (number of stop tokens,)
    pad: tp.Any
    penalty: tp.Any  # of the length, in a search
    before: Conversation | None


class Progress(tp.NamedTuple):
    """How far a call is."""

    cache: list[jax.Array]
    position: jax.Array  # of the token that the model gets next
    tokens: jax.Array  # (rows, max_length)
    counts: jax.Array  # (rows,), of new tokens
    done: jax.Array  # (rows,)
    nan_at: jax.Array  # the position whose logits have a NaN; -1 if there is none
    logs: jax.Array  # log probabilities: of tokens (rows, max_length); in a search of rows (rows,)


def _drawn(logits: jax.Array, progress: Progress, request: Request) -> tuple[jax.Array, jax.Array]:
    """Tokens of the sampler, and the log probabilities with theirs."""
    sampler, keys = request.sampler, request.keys
    keys = None if keys is None else jax.vmap(jax.random.fold_in)(keys, progress.counts)
    # A Sampler may have a number for each row; any other sampler is the same for all.
    numbers = sampler if isinstance(sampler, Sampler) else None
    axes = jax.tree.map(lambda x: 0 if np.ndim(x) else None, numbers)
    sample = jax.vmap(lambda own, *args: (own or sampler)(*args), (axes, 0, 0))
    token = sample(numbers, logits, keys)
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    log_prob = chosen - jax.nn.logsumexp(logits, axis=1)
    return token, lax.dynamic_update_index_in_dim(progress.logs, log_prob, progress.position + 1, 1)


def _searched(
    logits: jax.Array, progress: Progress, request: Request, beams: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A token for each row, the rows to go on with, and their scores: the best of each prompt."""
    rows, size = logits.shape
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    itself = jnp.where(jnp.arange(size) == 0, 0.0, -jnp.inf)
    log_probs = jnp.where(progress.done[:, None], itself, log_probs)
    total = (progress.logs[:, None] + log_probs).reshape(-1, beams * size)
    length = jnp.repeat((progress.counts + ~progress.done).reshape(-1, beams), size, axis=1)
    _, chosen = lax.top_k(total / length**request.penalty, beams)
    scores = jnp.take_along_axis(total, chosen, axis=1).reshape(-1)
    first = jnp.arange(rows) // beams * beams  # the first row of each prompt
    token, best = chosen.reshape(-1) % size, first + chosen.reshape(-1) // size
    # While a prompt is read, its rows stay as they are.
    reading = progress.position + 1 < request.lengths
    best = jnp.where(reading, jnp.arange(rows), best)
    return token.astype(jnp.int32), best, jnp.where(reading, progress.logs, scores)


def _start(decoder: Decoder, request: Request, setup: Setup) -> Progress:
    """Read the positions that are prompt in every row, except the last one, into the cache."""
    tokens = _known_tokens(request, setup)
    rows, size = len(tokens), setup.chunk
    common = jnp.min(request.lengths) - 1
    cache, position = decoder.cache, common
    if cache and size:
        first: tp.Any = 0
        if request.before is not None:
            cache, first = _resumed(decoder, request.before)
        reads = (common - first) // size

        def read(i: jax.Array, cache: list[jax.Array]) -> list[jax.Array]:
            part = lax.dynamic_slice_in_dim(tokens, first + i * size, size, axis=1)
            return decoder(cache, part, first + i * size)[1]

        cache = lax.fori_loop(0, reads, read, cache)
        position = first + reads * size
    none = jnp.zeros(rows, jnp.int32)
    logs = jnp.zeros(tokens.shape, jnp.float32)
    if setup.beams:
        logs = jnp.where(jnp.arange(rows) % setup.beams == 0, 0.0, -jnp.inf)
    return Progress(cache, position, tokens, none, none > 0, jnp.int32(-1), logs)


def _known_tokens(request: Request, setup: Setup) -> jax.Array:
    """The tokens of the conversation with the prompt after those of each row, (rows, max_length)."""
    padded = lambda x: jnp.pad(x, ((0, 0), (0, setup.max_length - x.shape[1])))
    prompt, before = padded(request.prompt), request.before
    if before is None:
        return prompt
    after = jnp.arange(setup.max_length) - before.lengths[:, None]  # the position in the prompt
    new = jnp.take_along_axis(prompt, jnp.maximum(after, 0), axis=1)
    return jnp.where(after < 0, padded(before.tokens), new)


def _resumed(decoder: Decoder, before: Conversation) -> tuple[list[jax.Array], jax.Array]:
    """The cache of a conversation in the size of this call, and the first position that it lacks."""
    fits = len(before.leaves) == len(decoder.cache) and all(
        old.ndim == new.ndim and all(a <= b for a, b in zip(old.shape, new.shape))
        for old, new in zip(before.leaves, decoder.cache)
    )
    if not fits:
        raise ValueError(
            f"generate: the cache is not one of {decoder.name}: it has arrays "
            f"{[x.shape for x in before.leaves]}, and the model has {[x.shape for x in decoder.cache]}."
        )
    cache = [
        lax.dynamic_update_slice(new, old.astype(new.dtype), (0,) * new.ndim)
        for old, new in zip(before.leaves, decoder.cache)
    ]
    first = jnp.min(before.lengths) - 1
    if set(decoder.names) <= BY_POSITION:
        pairs = zip(decoder.names, cache)
        return [jnp.full_like(x, first) if n == "cache_index" else x for n, x in pairs], first
    right = before.read == first
    cache = [jnp.where(right, old, new) for old, new in zip(cache, decoder.cache)]
    return cache, jnp.where(right, first, 0)


def _step(
    decoder: Decoder, request: Request, setup: Setup, axes: list[int | None], progress: Progress
) -> Progress:
    """One position of all rows; `axes` of the cache are those of the rows of a search."""
    cache, position, tokens, counts, done, _, logs = progress
    logits, cache = decoder.next_logits(cache, tokens, position)
    reading = position + 1 < request.lengths
    nan = jnp.isnan(logits).any(-1) & ~reading & ~done  # before rows move: logits do not
    following = lax.dynamic_index_in_dim(tokens, position + 1, 1, keepdims=False)
    if setup.beams:
        token, rows, logs = _searched(logits, progress, request, setup.beams)
        tokens, counts, done = tokens[rows], counts[rows], done[rows]
        cache = [x if a is None else jnp.take(x, rows, axis=a) for x, a in zip(cache, axes)]
    else:
        token, logs = _drawn(logits, progress, request)
    token = jnp.where(reading, following, jnp.where(done, request.pad, token)).astype(jnp.int32)
    counts += ~reading & ~done
    done |= ~reading & (jnp.isin(token, request.stop) | (counts >= setup.max_new))
    tokens = lax.dynamic_update_index_in_dim(tokens, token, position + 1, 1)
    nan_at = jnp.where(nan.any(), position + 1, -1)
    return Progress(cache, position + 1, tokens, counts, done, nan_at, logs)


def _run(model: tp.Any, request: Request, setup: Setup) -> tuple[Generated, jax.Array, jax.Array]:
    """The results, the position of NaN (-1 without), and whether the model ran with a cache."""
    axes: list[int | None] = []
    if setup.beams:
        repeat = lambda x: jnp.repeat(x, setup.beams, axis=0)
        request = request._replace(prompt=repeat(request.prompt), lengths=repeat(request.lengths))
        axes = _row_axes(model, setup, len(request.prompt))
    decoder = Decoder(model, setup, len(request.prompt))
    progress = lax.while_loop(
        lambda progress: ~progress.done.all() & (progress.nan_at < 0),
        functools.partial(_step, decoder, request, setup, axes),
        _start(decoder, request, setup),
    )
    cache, position, tokens, counts, _, nan_at, logs = progress
    after = Conversation(cache, tokens, request.lengths + counts, position) if setup.keep else None
    new = jnp.arange(setup.max_new)
    at = jnp.minimum(request.lengths[:, None] + new, setup.max_length - 1)
    of_new = lambda x, pad: jnp.where(
        new < counts[:, None], jnp.take_along_axis(x, at, axis=1), pad
    )

    def shaped(x: jax.Array) -> jax.Array:
        x = x.reshape(-1, setup.beams, *x.shape[1:]) if setup.beams else x
        return x[0] if setup.single else x

    logs = logs / counts**request.penalty if setup.beams else of_new(logs, 0)
    tokens, lengths, logs = map(shaped, (of_new(tokens, request.pad), counts, logs))
    log_probs, scores = (None, logs) if setup.beams else (logs, None)
    return Generated(tokens, lengths, log_probs, after, scores), nan_at, jnp.array(bool(cache))


def _row_axes(model: tp.Any, setup: Setup, rows: int) -> list[int | None]:
    """The axis of each leaf of the cache that has an entry for each row; None without one."""
    sizes = [jax.eval_shape(lambda n=n: Decoder(model, setup, n).cache) for n in (rows, rows + 1)]
    differs = lambda a, b: next((i for i, n in enumerate(a.shape) if n != b.shape[i]), None)
    return [differs(a, b) for a, b in zip(*sizes, strict=True)]


run_compiled = jit(_run, static_argnums=2)
