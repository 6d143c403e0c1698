"""`beam_search`: the most probable sequences that a search of limited width finds.

Each prompt has `beams` rows.  A step gives every row the scores of all its continuations; the best of
these, over the rows of one prompt, are the rows of the next step, and the caches move with them.  A row
that has ended has one continuation, itself, and keeps its score.  Of the rows of a prompt only the
first counts at the beginning, since all are equal.
"""

from __future__ import annotations

import typing as tp
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nnxlite.decoding._decoder import Decoder, Setup, check_causal, noting_programs
from nnxlite.decoding._generate import (
    Progress,
    Prompt,
    Request,
    check_finite,
    cut,
    of_new_tokens,
    prepare,
    start,
    whole_number,
)
from nnxlite.decoding.sampling import greedy
from nnxlite.transforms._jit import jit


class Beams(tp.NamedTuple):
    """The result of `beam_search`: arrays for a batch, without their first axis for a single prompt.

    Args:
        tokens: new tokens, (batch, beams, max_new) int32, best first; padding after the last one.
        lengths: how many there are, (batch, beams) int32, a stop token among them.
        scores: the sum of log probabilities, over `length ** length_penalty`, (batch, beams) float32.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.Beams(jnp.array([[5, 2, 0]]), jnp.array([2]), jnp.array([-0.5])).lists()
    [[5, 2]]
    """

    tokens: jax.Array
    lengths: jax.Array
    scores: jax.Array

    def lists(self) -> list[tp.Any]:
        """The new tokens as lists: one for each beam, in a list for each prompt of a batch."""
        return cut(np.asarray(self.tokens), np.asarray(self.lengths))


def beam_search(
    model: tp.Any,
    prompt: Prompt,
    max_new: int,
    *,
    beams: int = 4,
    length_penalty: float = 0.0,
    stop: int | Sequence[int] = (),
    pad: int = 0,
    lengths: jax.Array | np.ndarray | Sequence[int] | None = None,
    max_length: int | None = None,
    use_cache: bool | None = None,
) -> Beams:
    """The most probable continuations of a prompt, as far as a beam search finds them.

    The model runs as in `generate`, in one compiled program, with `beams` rows for each prompt.

    Args:
        model: a module.
        prompt: as in `generate`.
        max_new: how many tokens to generate, at most.
        beams: how many sequences are followed, and returned.
        length_penalty: sequences are compared by the sum of their log probabilities over their length
            to this power: 0 prefers short sequences, 1 compares the mean.
        stop: a token, or several, after which a sequence ends.
        pad: the token that fills the result after the end of a sequence.
        lengths: as in `generate`.
        max_length: as in `generate`.
        use_cache: as in `generate`.

    Returns:
        Sequences, their lengths and scores: `Beams`, best first.

    Raises:
        ValueError: as `generate`, and for `beams` below 1.
        TypeError: as `generate`.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> class Next(nnx.Module):  # the next token, or less probably the one after it
    ...     def __call__(self, tokens):
    ...         likely = tokens[..., None] * nnx.one_hot(tokens + 1, 10)
    ...         return likely + nnx.one_hot(tokens + 2, 10)
    >>> nnx.beam_search(Next(), [3], 2, beams=3).lists()
    [[4, 5], [5, 6], [4, 6]]
    """
    setup, request, single = prepare(
        "beam_search",
        *(model, prompt, max_new, greedy, None, stop, pad, lengths, max_length, use_cache),
    )
    beams = whole_number("beam_search", "beams", beams)
    with noting_programs() as made:
        found, nan_at = _search(model, request, jnp.float32(length_penalty), beams, setup)
    check_finite(model, nan_at, setup)
    check_causal(model, request.prompt, setup, made)
    return Beams(*(x[0] for x in found)) if single else found


class State(tp.NamedTuple):
    """The loop's carry."""

    cache: list[jax.Array]
    progress: Progress
    scores: jax.Array  # (batch, beams), sums of log probabilities


def _run(
    model: tp.Any, request: Request, penalty: jax.Array, beams: int, setup: Setup
) -> tuple[Beams, jax.Array]:
    """The beams, and the position whose logits have a NaN (-1 without one)."""
    batch = len(request.prompt)
    request = request._replace(
        prompt=jnp.repeat(request.prompt, beams, axis=0),
        lengths=jnp.repeat(request.lengths, beams),
    )
    decoder = Decoder(model, setup, batch * beams)
    axes = _batch_axes(model, setup, batch * beams)
    first = jnp.arange(batch)[:, None] * beams  # the first row of each prompt

    def body(state: State) -> State:
        position, tokens, counts, done, _, logs = state.progress
        logits, cache = decoder.next_logits(state.cache, tokens, position)
        size = logits.shape[-1]
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
        itself = jnp.where(jnp.arange(size) == 0, 0.0, -jnp.inf)
        log_probs = jnp.where(done[:, None], itself, log_probs).reshape(batch, beams, size)
        total = (state.scores[..., None] + log_probs).reshape(batch, beams * size)
        length = jnp.repeat((counts + ~done).reshape(batch, beams), size, axis=1)
        _, chosen = lax.top_k(total / length**penalty, beams)
        # While a prompt is read, its rows stay as they are.
        reading = (position + 1 < request.lengths).reshape(batch, beams)
        scores = jnp.where(reading, state.scores, jnp.take_along_axis(total, chosen, axis=1))
        rows = (first + jnp.where(reading, jnp.arange(beams), chosen // size)).reshape(-1)
        reading = reading.reshape(-1)
        nan = jnp.isnan(logits).any(-1) & ~reading & ~done  # before rows move: logits do not
        following = lax.dynamic_index_in_dim(tokens, position + 1, 1, keepdims=False)
        tokens, counts, done = tokens[rows], counts[rows], done[rows]
        token = jnp.where(done, request.pad, (chosen % size).reshape(-1))
        token = jnp.where(reading, following, token).astype(jnp.int32)
        counts += ~reading & ~done
        ends = jnp.isin(token, request.stop) | (counts >= setup.max_new)
        tokens = lax.dynamic_update_index_in_dim(tokens, token, position + 1, 1)
        nan_at = jnp.where(nan.any(), position + 1, -1)
        progress = Progress(position + 1, tokens, counts, done | (~reading & ends), nan_at, logs)
        moved = [x if a is None else jnp.take(x, rows, axis=a) for x, a in zip(cache, axes)]
        return State(moved, progress, scores)

    cache, progress = start(model, request, setup)
    scores = jnp.where(jnp.arange(beams) == 0, 0.0, -jnp.inf) + jnp.zeros((batch, 1))
    state = State(cache, progress, scores)
    goes_on = lambda state: ~state.progress.done.all() & (state.progress.nan_at < 0)
    _, progress, scores = lax.while_loop(goes_on, body, state)
    counts = progress.counts.reshape(batch, beams)
    tokens = of_new_tokens(progress.tokens, request, progress.counts, setup, request.pad)
    tokens = tokens.reshape(batch, beams, -1)
    return Beams(tokens, counts, scores / counts**penalty), progress.nan_at


def _batch_axes(model: tp.Any, setup: Setup, batch: int) -> list[int | None]:
    """The axis of each leaf of the cache that has a row for each sequence; None without one."""
    one, other = (
        jax.eval_shape(lambda size=size: Decoder(model, setup, size).cache)
        for size in (batch, batch + 1)
    )
    differs = lambda a, b: [axis for axis, n in enumerate(a.shape) if n != b.shape[axis]]
    return [next(iter(differs(a, b)), None) for a, b in zip(one, other, strict=True)]


_search = jit(_run, static_argnums=(3, 4))
