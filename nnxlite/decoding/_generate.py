"""`generate`, `generate_stream`, `beam_search`: new tokens after a prompt, in one compiled loop.

What a model has to do: called with tokens (batch, length), return logits (batch, length, vocabulary)
for the token after each of them.  `_decoder.py` says how it runs, `_loop.py` what is compiled.

Nothing is written to the model: caches belong to a view of it that exists while it is traced.
"""

from __future__ import annotations

import operator
import typing as tp
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from nnxlite._base.errors import short_type
from nnxlite.decoding._decoder import Setup, checking
from nnxlite.decoding._loop import Conversation, Request, continued, started, whole
from nnxlite.decoding.sampling import Sampler, SamplerFn, greedy
from nnxlite.objects._pytree import Pytree
from nnxlite.objects._rngs import Rngs, RngStream

__all__ = ["Beams", "Generated", "beam_search", "generate", "generate_stream"]

Prompt = jax.Array | np.ndarray | Sequence[int] | Sequence[Sequence[int]]
"""Tokens (length,) or (batch, length), or a list of lists of different lengths."""

CHUNK = 16
"""Positions of a prompt that are read at once where rows have different lengths."""


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


def cut(tokens: np.ndarray, lengths: np.ndarray) -> list[tp.Any]:
    """Each row of some tokens up to its length, as nested lists."""
    if tokens.ndim == 1:
        return tokens[: int(lengths)].tolist()
    return [cut(row, length) for row, length in zip(tokens, lengths, strict=True)]


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
    setup, request, single = prepare("generate", **locals())
    with checking(model, request.prompt, setup):
        *found, after, nan_at = whole(model, request, setup)
        check_finite(model, nan_at, setup)
    return Generated(*(x[0] if single else x for x in found), cache=after)


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
    setup, request, single = prepare("generate_stream", **locals())
    if isinstance(request.prompt, Tracer) or isinstance(request.lengths, Tracer):
        raise ValueError(
            "generate_stream hands tokens to Python, which a function under a transform cannot do. "
            "Call it outside, or use nnx.generate inside."
        )
    return _chunks(model, request, setup, chunk, single)


def _chunks(
    model: tp.Any, request: Request, setup: Setup, chunk: int, single: bool
) -> Iterator[list[tp.Any]]:
    with checking(model, request.prompt, setup):
        cache, progress = started(model, request, setup)
    starts, seen = np.asarray(request.lengths), np.zeros(len(request.lengths), int)
    while not np.asarray(progress.done).all():
        cache, progress = continued(model, cache, progress, request, chunk, setup)
        check_finite(model, progress.nan_at, setup)
        tokens, counts = np.asarray(progress.tokens), np.asarray(progress.counts)
        rows = [row[n + a : n + b] for row, n, a, b in zip(tokens, starts, seen, counts)]
        seen = counts
        if any(len(row) for row in rows):
            new = [row.tolist() for row in rows]
            yield new[0] if single else new


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
    setup, request, single = prepare("beam_search", **locals())
    with checking(model, request.prompt, setup):
        *found, _, nan_at = whole(model, request, setup)
        check_finite(model, nan_at, setup)
    of_prompts = (x.reshape(-1, beams, *x.shape[1:]) for x in found)
    return Beams(*(x[0] if single else x for x in of_prompts))


# From arguments to arrays -------------------------------------------------------------------------


def prepare(
    caller: str,
    model: tp.Any,
    prompt: Prompt,
    max_new: int,
    sampler: tp.Any = greedy,
    rngs: tp.Any = None,
    stop: tp.Any = (),
    pad: int = 0,
    lengths: tp.Any = None,
    max_length: int | None = None,
    use_cache: bool | None = None,
    cache: bool | Conversation = False,
    chunk: int = 1,
    beams: int | None = None,
    length_penalty: float = 0.0,
) -> tuple[Setup, Request, bool]:
    """The arguments of a call, checked, and whether the prompt is a single one."""
    if not isinstance(model, Pytree) or not callable(model):
        raise TypeError(f"{caller} takes a module that can be called, not {short_type(model)}.")
    whole_number(caller, "chunk", chunk)
    beams = 0 if beams is None else whole_number(caller, "beams", beams)
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
        beams,
    )
    request = Request(
        tokens,
        sizes,
        sampler if isinstance(sampler, (Sampler, Pytree)) else jax.tree_util.Partial(sampler),
        _keys(caller, sampler, rngs, batch),
        np.atleast_1d(np.asarray(stop, np.int32)),
        np.int32(pad),
        np.float32(length_penalty),
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
