"""`generate`: new tokens after a prompt, drawn or searched for, in one compiled loop.

What a model has to do: called with tokens (batch, length), return logits (batch, length, vocabulary)
for the token after each of them.  `_decoder.py` says how it runs, `_loop.py` what is compiled.

Nothing is written to the model: caches belong to a view of it that exists while it is traced.
"""

from __future__ import annotations

import typing as tp
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from nnxlite._base.errors import short_type
from nnxlite.decoding._decoder import Setup, check_causal
from nnxlite.decoding._loop import Conversation, Generated, Request, run_compiled
from nnxlite.decoding.sampling import Sampler, SamplerFn, greedy
from nnxlite.objects._pytree import Pytree
from nnxlite.objects._rngs import Rngs, RngStream

__all__ = ["Generated", "generate"]

Prompt = jax.Array | np.ndarray | Sequence[int] | Sequence[Sequence[int]]
"""Tokens (length,) or (batch, length), or a list of lists of different lengths."""

CHUNK = 16
"""Positions of a prompt that are read at once where rows have different lengths."""


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
    beams: int | None = None,
    length_penalty: float = 0.0,
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
            with `prompt`, which may be empty, as a call on all its tokens would. A cache that is too
            short grows, which compiles again: give `max_length` for the whole conversation.
        beams: how many sequences of each prompt a beam search follows, and returns; without it tokens
            are drawn.
        length_penalty: a search compares sequences by the sum of their log probabilities over their
            length to this power: 0 prefers short sequences, 1 compares the mean.

    Warns:
        UserWarning: if a model with a cache runs without it, since nothing tells it positions; once for
            each program, if the model is not causal, or a cache gives other logits than none.

    Returns:
        New tokens, how many there are, their log probabilities (or the scores of a search) and the
        cache: a `Generated`.

    Raises:
        ValueError: for an empty prompt, one that is longer than `max_length` allows, a model that has
            no cache but should, one whose logits have another shape or are NaN, a cache of another
            model or batch, or beams with a sampler or a cache.
        TypeError: if the model is not a module, tokens are not integers, or a sampler has no key.

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
    if not isinstance(model, Pytree) or not callable(model):
        raise TypeError(f"generate takes a module that can be called, not {short_type(model)}.")
    for name, number in {"max_new": max_new, "max_length": max_length, "beams": beams}.items():
        if number is not None and not (isinstance(number, (int, np.integer)) and number >= 1):
            raise ValueError(f"generate: {name} must be a whole number from 1 up, not {number!r}.")
    if beams is not None and (sampler is not greedy or cache is not False):
        raise ValueError(
            "generate: a search with beams draws no tokens and returns no cache. Pass beams, or a "
            "sampler and a cache."
        )
    before = cache if isinstance(cache, Conversation) else None
    tokens, sizes, single = _read_prompt(prompt, lengths, before)
    longest, listed = tokens.shape[1], isinstance(prompt, (list, tuple))
    # Whether rows differ is static, so it must not depend on lengths that another call may have.
    ragged = lengths is not None or before is not None
    ragged = ragged or (listed and (max_length is not None or bool((sizes != longest).any())))
    if before is not None:
        sizes = sizes + _known(before.lengths)
        bound = before.tokens.shape[1] + longest
        longest = max(longest, bound if isinstance(sizes, Tracer) else int(sizes.max()))
    total = longest + max_new if max_length is None else max_length
    if longest + max_new > total:
        raise ValueError(
            f"generate: the prompt is longer than the cache: {longest} tokens of prompt and {max_new} "
            f"new ones make {longest + max_new}, and max_length is {max_length}. Cut the prompt, or "
            "raise max_length."
        )
    if listed:
        tokens = np.pad(tokens, ((0, 0), (0, total - max_new - tokens.shape[1])))
    if listed or before is not None:
        longest = total - max_new
    setup = Setup(
        max_new,
        total if before is None else max(total, before.tokens.shape[1]),
        use_cache,
        min(longest - 1, CHUNK) if ragged else longest - 1,
        cache is not False,
        beams or 0,
        single,
    )
    request = Request(
        tokens,
        sizes,
        sampler if isinstance(sampler, (Sampler, Pytree)) else jax.tree_util.Partial(sampler),
        _keys(sampler, rngs, len(tokens)),
        np.atleast_1d(np.asarray(stop, np.int32)),
        np.int32(pad),
        np.float32(length_penalty),
        before,
    )
    return _run(model, request, setup)


def _run(model: tp.Any, request: Request, setup: Setup) -> Generated:
    """The results of the program, which is checked where it is new."""
    traces = run_compiled.cache_info().traces
    found, nan_at, cached = run_compiled(model, request, setup)
    if isinstance(nan_at, Tracer):  # under a transform no value is known
        return found
    if int(nan_at) >= 0:
        raise ValueError(
            f"{type(model).__name__} gave logits that are NaN for the token at position {int(nan_at)} "
            f"of {setup.max_length}. A table of positions or a cache that is shorter gives NaN past its "
            "end; nnx.find_nan(model, tokens) finds other causes."
        )
    if run_compiled.cache_info().traces > traces:
        way = setup._replace(use_cache=bool(cached), keep=False, beams=0)
        check_causal(model, request.prompt, way)
    return found


def _known(value: tp.Any) -> tp.Any:
    """An array of NumPy, unless the value is traced."""
    return value if isinstance(value, Tracer) else np.asarray(value)


def _read_prompt(
    prompt: tp.Any, lengths: tp.Any, before: Conversation | None
) -> tuple[tp.Any, tp.Any, bool]:
    """Tokens (batch, length), their lengths (batch,), and whether it is a single prompt."""
    listed = isinstance(prompt, (list, tuple))
    single = not any(map(np.ndim, prompt)) if listed else np.ndim(prompt) == 1
    if listed and all(np.ndim(row) < 2 for row in prompt):
        prompts = [prompt] if single else prompt
        rows = [np.asarray(row, None if len(row) else int) for row in prompts]
        lengths = [len(row) for row in rows] if lengths is None else lengths
        longest = max(len(row) for row in rows)
        tokens: tp.Any = np.stack([np.pad(row, (0, longest - len(row))) for row in rows])
    else:
        tokens = prompt if isinstance(prompt, jax.Array) else np.asarray(prompt)
        tokens = tokens[None] if single else tokens
    least = 1 if before is None else 0
    if tokens.ndim != 2 or not len(tokens) or tokens.shape[1] < least:
        raise ValueError(
            "generate: a prompt is (length,) or (batch, length), with at least one token; got shape "
            f"{tokens.shape[single:]}."
        )
    if tokens.dtype.kind not in "iu":
        raise TypeError(f"generate: tokens are integers; the prompt has dtype {tokens.dtype}.")
    batch, longest = tokens.shape
    if before is not None and len(before.lengths) != batch:
        raise ValueError(
            f"generate: the cache is of a batch of {len(before.lengths)} rows, and the prompt has "
            f"{batch}. Go on with all rows of a batch."
        )
    lengths = _known(np.full(batch, longest) if lengths is None else lengths)
    known = not isinstance(lengths, Tracer)
    if lengths.shape != (batch,) or (
        known and not np.all((lengths >= least) & (lengths <= longest))
    ):
        raise ValueError(
            f"generate: lengths must be {batch} integers, one for each row of the prompt, from {least} "
            f"to {longest}; got {lengths if known else lengths.shape}."
        )
    return tokens.astype(np.int32), lengths.astype(np.int32), single


def _keys(sampler: tp.Any, rngs: tp.Any, batch: int) -> jax.Array | None:
    """A key for each row; None for a sampler that needs none."""
    if sampler is greedy:
        return None
    if isinstance(rngs, (Rngs, RngStream)):
        rngs = rngs.sample() if isinstance(rngs, Rngs) else rngs()
    if not isinstance(rngs, jax.Array):
        raise TypeError(
            "generate: the sampler needs a random key. Pass rngs=nnx.Rngs(0), a stream or keys; rngs "
            f"is {short_type(rngs)}."
        )
    if not jnp.issubdtype(rngs.dtype, jax.dtypes.prng_key):
        rngs = jax.random.wrap_key_data(rngs)
    if rngs.shape not in ((), (batch,)):
        raise ValueError(
            f"generate: rngs must be one key, or one for each of {batch} rows; got {rngs.shape}."
        )
    return rngs if rngs.shape else jax.random.split(rngs, batch)
