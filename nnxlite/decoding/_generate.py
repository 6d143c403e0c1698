"""`generate`: new tokens after a prompt, in one compiled loop.

What a model has to do: called with tokens (batch, length), return logits (batch, length, vocabulary)
for the token after each of them.  `_decoder.py` says how it runs.

All rows are always at the same position: at each step of the loop, a row with prompt tokens left takes
the next of them, and any other row the token that was sampled.  So rows of different lengths need
neither masks nor shifted positions, and are independent of each other.  The positions that are prompt in
every row are read in a few large steps before the loop begins.

A conversation goes on as a call on all of it would, but begins at the first position whose token some
row has not read.  Rows that had ended before have read padding since: an attention cache goes back to
that position, since entries after its index do not count; with any other cache all is read again.

Nothing is written to the model: caches belong to a view of it that exists while it is traced.
"""

from __future__ import annotations

import operator
import typing as tp
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from nnxlite._base.errors import short_type
from nnxlite.decoding._decoder import (
    BY_POSITION,
    Decoder,
    Setup,
    check_causal,
    note_program,
    noting_programs,
)
from nnxlite.decoding.sampling import Sampler, SamplerFn, greedy
from nnxlite.objects._pytree import Pytree
from nnxlite.objects._rngs import Rngs, RngStream
from nnxlite.transforms._jit import jit

Prompt = jax.Array | np.ndarray | Sequence[int] | Sequence[Sequence[int]]
"""Tokens (length,) or (batch, length), or a list of lists of different lengths."""

CHUNK = 16
"""Positions of a prompt that are read at once where rows have different lengths."""


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


class Generated(tp.NamedTuple):
    """The result of `generate`: arrays for a batch, without their first axis for a single prompt.

    Args:
        tokens: the new tokens, (batch, max_new) int32; padding after the last one.
        lengths: how many there are in each row, (batch,) int32, a stop token among them.
        log_probs: the log probability of each new token, before a sampler changed the logits,
            (batch, max_new) float32; 0 for padding.
        cache: a `Conversation`, if `generate` was to return it.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.Generated(jnp.array([[5, 2, 0]]), jnp.array([2])).lists()
    [[5, 2]]
    """

    tokens: jax.Array
    lengths: jax.Array
    log_probs: jax.Array | None = None
    cache: Conversation | None = None

    def lists(self) -> list[tp.Any]:
        """The new tokens as a list of integers for each row, or one list for a single prompt."""
        return cut(np.asarray(self.tokens), np.asarray(self.lengths))


def cut(tokens: np.ndarray, lengths: np.ndarray) -> list[tp.Any]:
    """Each row of some tokens up to its length, as nested lists."""
    if tokens.ndim == 1:
        return tokens[: int(lengths)].tolist()
    return [cut(row, length) for row, length in zip(tokens, lengths, strict=True)]


class Request(tp.NamedTuple):
    """The arrays of a call."""

    prompt: tp.Any  # (batch, length)
    lengths: tp.Any  # (batch,)
    sampler: tp.Any  # a pytree that can be called
    keys: jax.Array | None  # (batch,)
    stop: tp.Any  # (number of stop tokens,)
    pad: tp.Any
    before: Conversation | None = None  # whose tokens the prompt begins with


class Progress(tp.NamedTuple):
    """How far a call is."""

    position: jax.Array  # of the token that the model gets next
    tokens: jax.Array  # (batch, max_length)
    counts: jax.Array  # (batch,), of new tokens
    done: jax.Array  # (batch,)
    nan_at: jax.Array  # the position whose logits have a NaN; -1 if there is none
    log_probs: jax.Array  # (batch, max_length), of the new tokens


def generate(
    model: tp.Any,
    prompt: Prompt,
    max_new: int,
    *,
    sampler: SamplerFn = greedy,
    rngs: Rngs | RngStream | jax.Array | None = None,
    stop: int | Sequence[int] = (),
    pad: int = 0,
    lengths: jax.Array | np.ndarray | Sequence[int] | None = None,
    max_length: int | None = None,
    use_cache: bool | None = None,
    cache: bool | Conversation = False,
) -> Generated:
    """New tokens after a prompt.

    The model is called with tokens (batch, length) and returns logits (batch, length, vocabulary).  It
    runs in a view with `decode=True`, `deterministic=True` and `use_running_average=True`, with a
    cache for each `MultiHeadAttention`; any other state belongs in Variables of the kind `Cache`,
    which start from zero.  If its `__call__` has a parameter `input_positions` (or
    `positions`), it gets the positions of the tokens there, (length,) int32: a model that learned an
    embedding for each position needs it.  A model without any cache is called with the whole sequence
    in each step; so is one whose attention is not rotary and gets no positions, with a warning.

    Everything is one program, compiled once for each structure of the model, shape of the prompt and
    `max_new`.  The model is left as it was.

    Args:
        model: a module.
        prompt: tokens of one sequence (length,), of a batch (batch, length), or a list of lists of
            different lengths.  With `max_length`, lists are padded to `max_length - max_new`, so
            that prompts of any length run the same program.
        max_new: how many tokens to generate for each row, at most.
        sampler: a function of logits (vocabulary,) and a key that returns a token: `nnx.Sampler(...)`,
            by default `nnx.sampling.greedy`.  A function that is created for each call is
            compiled each time.
        rngs: a key, or streams, of which "sample" is drawn; needed unless the sampler is greedy.  An
            array of keys (batch,) has one for each row, whose tokens then depend on nothing else.
        stop: a token, or several, after which a row ends.
        pad: the token that fills the result after the end of a row.
        lengths: the lengths of the prompts, (batch,), where they are given as an array with padding
            at the end of rows.
        max_length: the length of the cache, prompt and new tokens together; no more than needed by
            default.
        use_cache: False calls the model with the whole sequence in each step, True insists on a cache.
        cache: True returns the cache, to go on with: `cache=former.cache` continues a conversation
            with `prompt`, as a call on all its tokens would. A cache that is too short grows, which
            compiles again: give `max_length` for the whole conversation.

    Warns:
        UserWarning: if a model with a cache runs without it, since nothing tells it positions; once for
            each program, if the model is not causal, or a cache gives other logits than none.

    Returns:
        New tokens, how many there are, their log probabilities and the cache: a `Generated`.

    Raises:
        ValueError: for an empty prompt, one that is longer than `max_length` allows, a sampler without
            a key, a model that has no cache but should, one whose logits have another shape or
            are NaN, or a cache of another model or batch.
        TypeError: if the model is not a module, or tokens are not integers.

    >>> import jax.numpy as jnp
    >>> import nnxlite as nnx
    >>> class Next(nnx.Module):  # after each token the next one
    ...     def __call__(self, tokens):
    ...         return nnx.one_hot(tokens + 1, 10)
    >>> nnx.generate(Next(), [3, 4], 3).lists()
    [5, 6, 7]
    >>> nnx.generate(Next(), [[3, 4], [1]], 4, stop=7).lists()
    [[5, 6, 7], [2, 3, 4, 5]]
    """
    setup, request, single = prepare(
        "generate",
        model,
        prompt,
        max_new,
        sampler,
        rngs,
        stop,
        pad,
        lengths,
        max_length,
        use_cache,
        cache,
    )
    with noting_programs() as made:
        found, nan_at = _whole(model, request, setup)
    check_finite(model, nan_at, setup)
    check_causal(model, request.prompt, setup, made)
    *arrays, after = found
    return Generated(*(x[0] if single else x for x in arrays), cache=after)


def generate_stream(
    model: tp.Any,
    prompt: Prompt,
    max_new: int,
    *,
    chunk: int = 8,
    sampler: SamplerFn = greedy,
    rngs: Rngs | RngStream | jax.Array | None = None,
    stop: int | Sequence[int] = (),
    lengths: jax.Array | np.ndarray | Sequence[int] | None = None,
    max_length: int | None = None,
    use_cache: bool | None = None,
) -> Iterator[list[tp.Any]]:
    """The tokens of `generate` while they are generated.

    Args:
        model: a module.
        prompt: as in `generate`.
        max_new: how many tokens to generate for each row, at most.
        chunk: how many positions run in one compiled call, between two looks at the tokens.
        sampler: as in `generate`.
        rngs: as in `generate`.
        stop: a token, or several, after which a row ends.
        lengths: as in `generate`.
        max_length: as in `generate`.
        use_cache: as in `generate`.

    Returns:
        An iterator over lists of new tokens, at most `chunk` each, for a single prompt; for a batch,
        over lists of such lists, one for each row, which may be empty.  Together they are what
        `generate` returns.

    Raises:
        ValueError: as `generate`, and for a `chunk` below 1; NaN logits raise when they appear.
        TypeError: as `generate`.

    >>> import nnxlite as nnx
    >>> class Next(nnx.Module):
    ...     def __call__(self, tokens):
    ...         return nnx.one_hot(tokens + 1, 10)
    >>> list(nnx.generate_stream(Next(), [3, 4], 5, chunk=2))
    [[5, 6], [7, 8], [9]]
    """
    setup, request, single = prepare(
        "generate_stream",
        *(model, prompt, max_new, sampler, rngs, stop, 0, lengths, max_length, use_cache),
    )
    chunk = whole_number("generate_stream", "chunk", chunk)
    if isinstance(request.prompt, Tracer) or isinstance(request.lengths, Tracer):
        raise ValueError(
            "generate_stream hands tokens to Python, which a function under a transform cannot do. "
            "Call it outside, or use nnx.generate inside."
        )
    return _chunks(model, request, setup, chunk, single)


def _chunks(
    model: tp.Any, request: Request, setup: Setup, chunk: int, single: bool
) -> Iterator[list[tp.Any]]:
    with noting_programs() as made:
        cache, progress = _started(model, request, setup)
    check_causal(model, request.prompt, setup, made)
    starts, seen = np.asarray(request.lengths), np.zeros(len(request.lengths), int)
    while not np.asarray(progress.done).all():
        cache, progress = _continued(model, cache, progress, request, chunk, setup)
        check_finite(model, progress.nan_at, setup)
        tokens, counts = np.asarray(progress.tokens), np.asarray(progress.counts)
        rows = [row[n + a : n + b] for row, n, a, b in zip(tokens, starts, seen, counts)]
        seen = counts
        if any(len(row) for row in rows):
            new = [row.tolist() for row in rows]
            yield new[0] if single else new


# From arguments to arrays -------------------------------------------------------------------------


def prepare(
    caller: str,
    model: tp.Any,
    prompt: Prompt,
    max_new: int,
    sampler: tp.Any,
    rngs: tp.Any,
    stop: tp.Any,
    pad: int,
    lengths: tp.Any,
    max_length: int | None,
    use_cache: bool | None,
    cache: bool | Conversation = False,
) -> tuple[Setup, Request, bool]:
    """The arguments of a call, checked, and whether the prompt is a single one."""
    if not isinstance(model, Pytree) or not callable(model):
        raise TypeError(f"{caller} takes a module that can be called, not {short_type(model)}.")
    before = cache if isinstance(cache, Conversation) else None
    max_new = whole_number(caller, "max_new", max_new)
    room = None if max_length is None else whole_number(caller, "max_length", max_length) - max_new
    tokens, sizes, single = _read_prompt(caller, prompt, lengths)
    if before is not None:
        tokens, sizes = _joined(caller, before, tokens, sizes)
    batch, length = tokens.shape
    if room is not None and length > room:
        raise ValueError(
            f"{caller}: the prompt is longer than the cache: {length} tokens of prompt and {max_new} "
            f"new ones make {length + max_new}, and max_length is {max_length}. Cut the prompt, or "
            "raise max_length."
        )
    listed = isinstance(prompt, (list, tuple))
    if room is not None and (before is not None or listed):
        tokens = (jnp if isinstance(tokens, Tracer) else np).pad(
            tokens, ((0, 0), (0, room - length))
        )
        length = room
    # Whether rows differ is static, so it must not depend on lengths that another call may have.
    ragged = lengths is not None or before is not None
    ragged = ragged or (listed and (room is not None or bool((sizes != length).any())))
    total = length + max_new if max_length is None else max_length
    setup = Setup(
        max_new,
        total if before is None else max(total, before.tokens.shape[1]),
        use_cache,
        min(length - 1, CHUNK) if ragged else length - 1,
        cache is not False,
    )
    request = Request(
        tokens,
        sizes,
        sampler if isinstance(sampler, (Sampler, Pytree)) else jax.tree_util.Partial(sampler),
        _keys(caller, sampler, rngs, batch),
        np.atleast_1d(np.asarray(stop, np.int32)),
        np.int32(pad),
        before,
    )
    return setup, request, single


def _read_prompt(caller: str, prompt: tp.Any, lengths: tp.Any) -> tuple[tp.Any, tp.Any, bool]:
    """Tokens (batch, length), their lengths (batch,), and whether it is a single prompt."""
    listed = isinstance(prompt, (list, tuple))
    single = not any(map(np.ndim, prompt)) if listed else np.ndim(prompt) == 1
    if listed and all(np.ndim(row) < 2 for row in prompt):
        rows = [prompt] if single else prompt
        sizes = np.array([len(row) for row in rows], np.int32)
        lengths = sizes if lengths is None else lengths
        kind = np.result_type(np.int8, *(np.asarray(row) for row in rows if len(row)))
        tokens: tp.Any = np.zeros((len(rows), int(sizes.max())), kind)
        for padded, row in zip(tokens, rows, strict=True):
            padded[: len(row)] = row
    else:
        tokens = prompt if isinstance(prompt, jax.Array) else np.asarray(prompt)
        tokens = tokens[None] if single else tokens
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(
            f"{caller}: a prompt is (length,) or (batch, length), with at least one token; got shape "
            f"{tokens.shape[single:]}."
        )
    if tokens.dtype.kind not in "iu":
        raise TypeError(f"{caller}: tokens are integers; the prompt has dtype {tokens.dtype}.")
    batch, longest = tokens.shape
    if lengths is None:
        lengths = np.full(batch, longest, np.int32)
    lengths = lengths if isinstance(lengths, jax.Array) else np.asarray(lengths)
    known = not isinstance(lengths, Tracer)
    if lengths.shape != (batch,) or (known and not ((lengths >= 1) & (lengths <= longest)).all()):
        raise ValueError(
            f"{caller}: lengths must be {batch} integers, one for each row of the prompt, from 1 to "
            f"{longest}; got {lengths if known else lengths.shape}."
        )
    return tokens.astype(np.int32), lengths.astype(np.int32), single


def _joined(
    caller: str, before: Conversation, tokens: tp.Any, sizes: tp.Any
) -> tuple[tp.Any, tp.Any]:
    """The tokens of a conversation with new ones after those of each row, and their lengths."""
    if len(before.lengths) != len(tokens):
        raise ValueError(
            f"{caller}: the cache is of a batch of {len(before.lengths)} rows, and the prompt has "
            f"{len(tokens)}. Go on with all rows of a batch."
        )
    known = not any(isinstance(x, Tracer) for x in (*before, tokens, sizes))
    xp: tp.Any = np if known else jnp
    old, starts = xp.asarray(before.tokens), xp.asarray(before.lengths)
    places = xp.arange(old.shape[1] + tokens.shape[1])
    new = xp.clip(places - starts[:, None], 0, tokens.shape[1] - 1)
    old = xp.pad(old, ((0, 0), (0, tokens.shape[1])))
    joined = xp.where(
        places < starts[:, None], old, xp.take_along_axis(xp.asarray(tokens), new, axis=1)
    )
    sizes = starts + sizes
    return (joined[:, : int(sizes.max())] if known else joined), sizes


def whole_number(caller: str, name: str, value: tp.Any) -> int:
    """An argument as an int from 1 up, or ValueError."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{caller}: {name} must be a whole number from 1 up, not {value!r}.")
    return number


def _keys(caller: str, sampler: tp.Any, rngs: tp.Any, batch: int) -> jax.Array | None:
    """A key for each row; None without any."""
    if sampler is greedy:
        return None
    if rngs is None:
        raise ValueError(
            f"{caller}: the sampler needs a random key. Pass rngs=nnx.Rngs(0), or a key."
        )
    if isinstance(rngs, Rngs):
        rngs = rngs.sample()
    elif isinstance(rngs, RngStream):
        rngs = rngs()
    if not isinstance(rngs, jax.Array):
        raise TypeError(
            f"{caller}: rngs must be an Rngs, a stream or keys, not {short_type(rngs)}."
        )
    if not jnp.issubdtype(rngs.dtype, jax.dtypes.prng_key):
        rngs = jax.random.wrap_key_data(rngs)
    if rngs.shape == ():
        return jax.random.split(rngs, batch)
    if rngs.shape != (batch,):
        raise ValueError(
            f"{caller}: rngs must be one key, or one for each of {batch} rows; got {rngs.shape}."
        )
    return rngs


def check_finite(model: tp.Any, nan_at: jax.Array, setup: Setup) -> None:
    """Refuse NaN logits (ValueError) where the position is known."""
    if not isinstance(nan_at, Tracer) and int(nan_at) >= 0:
        raise ValueError(
            f"{type(model).__name__} gave logits that are NaN for the token at position {int(nan_at)} "
            f"of {setup.max_length}. A table of positions or a cache that is shorter gives NaN past its "
            "end; nnx.find_nan(model, tokens) finds other causes."
        )


# What is compiled ---------------------------------------------------------------------------------


def start(model: tp.Any, request: Request, setup: Setup) -> tuple[list[jax.Array], Progress]:
    """Read the positions that are prompt in every row, except the last one, into the cache."""
    batch, length = request.prompt.shape
    decoder = Decoder(model, setup, batch)
    note_program(uses_cache=bool(decoder.cache))
    common = jnp.min(request.lengths) - 1
    cache, position = decoder.cache, common
    if cache and setup.chunk:
        first: tp.Any = 0
        if request.before is not None:
            cache, first = _resumed(decoder, request.before)
        size = setup.chunk
        reads = (common - first) // size

        def read(i: jax.Array, cache: list[jax.Array]) -> list[jax.Array]:
            tokens = lax.dynamic_slice_in_dim(request.prompt, first + i * size, size, axis=1)
            return decoder(cache, tokens, first + i * size)[1]

        cache = lax.fori_loop(0, reads, read, cache)
        position = first + reads * size
    tokens = jnp.pad(request.prompt, ((0, 0), (0, setup.max_length - length)))
    none = jnp.zeros(batch, jnp.int32)
    logs = jnp.zeros(tokens.shape, jnp.float32)
    return cache, Progress(position, tokens, none, none > 0, jnp.int32(-1), logs)


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


def _advance(
    model: tp.Any,
    cache: list[jax.Array],
    progress: Progress,
    request: Request,
    steps: tp.Any,
    setup: Setup,
) -> tuple[list[jax.Array], Progress]:
    """Run this many positions, or fewer if all rows are done."""
    decoder = Decoder(model, setup, len(request.prompt))
    sampler, lengths, keys = request.sampler, request.lengths, request.keys
    axes = jax.tree.map(lambda x: 0 if np.ndim(x) else None, sampler)
    sample = jax.vmap(lambda sampler, logits, key: sampler(logits, key), (axes, 0, 0))
    until = progress.position + steps

    def body(carry: tuple[list[jax.Array], Progress]) -> tuple[list[jax.Array], Progress]:
        cache, (position, tokens, counts, done, _, logs) = carry
        logits, cache = decoder.next_logits(cache, tokens, position)
        row_keys = None if keys is None else jax.vmap(jax.random.fold_in)(keys, counts)
        sampled = sample(sampler, logits, row_keys).astype(jnp.int32)
        following = lax.dynamic_index_in_dim(tokens, position + 1, 1, keepdims=False)
        reading = position + 1 < lengths
        token = jnp.where(reading, following, jnp.where(done, request.pad, sampled))
        counts += ~reading & ~done
        nan = jnp.isnan(logits).any(-1) & ~reading & ~done
        done |= ~reading & (jnp.isin(token, request.stop) | (counts >= setup.max_new))
        tokens = lax.dynamic_update_index_in_dim(tokens, token, position + 1, 1)
        nan_at = jnp.where(nan.any(), position + 1, -1)
        logits = logits.astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
        log_prob = chosen - jax.nn.logsumexp(logits, axis=1)
        logs = lax.dynamic_update_index_in_dim(logs, log_prob, position + 1, 1)
        return cache, Progress(position + 1, tokens, counts, done, nan_at, logs)

    def goes_on(carry: tuple[list[jax.Array], Progress]) -> jax.Array:
        progress = carry[1]
        return (progress.position < until) & ~progress.done.all() & (progress.nan_at < 0)

    return lax.while_loop(goes_on, body, (cache, progress))


def _run(
    model: tp.Any, request: Request, setup: Setup
) -> tuple[tuple[jax.Array, jax.Array, jax.Array, Conversation | None], jax.Array]:
    """What `Generated` has, and the position of NaN."""
    cache, progress = start(model, request, setup)
    cache, progress = _advance(model, cache, progress, request, setup.max_length, setup)
    counts = progress.counts
    after = Conversation(cache, progress.tokens, request.lengths + counts, progress.position)
    tokens = of_new_tokens(progress.tokens, request, counts, setup, request.pad)
    logs = of_new_tokens(progress.log_probs, request, counts, setup, 0)
    return (tokens, counts, logs, after if setup.keep else None), progress.nan_at


def of_new_tokens(
    rows: jax.Array, request: Request, counts: jax.Array, setup: Setup, pad: tp.Any
) -> jax.Array:
    """The entries of the new tokens of each row, (rows, max_new), with padding after the last one."""
    new = jnp.arange(setup.max_new)
    places = jnp.minimum(request.lengths[:, None] + new, setup.max_length - 1)
    return jnp.where(new < counts[:, None], jnp.take_along_axis(rows, places, axis=1), pad)


_whole = jit(_run, static_argnums=2)
_started = jit(start, static_argnums=2)
_continued = jit(_advance, static_argnums=5, donate_argnums=1)
