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
from nnxlite._base.jax import as_integer, is_pytree_leaf
from nnxlite.decoding._decoder import Setup, check_causal
from nnxlite.decoding._loop import Conversation, Generated, Request, run_compiled
from nnxlite.decoding.sampling import Sampler, SamplerFn, greedy
from nnxlite.objects._pytree import Pytree
from nnxlite.objects._rngs import Rngs, RngStream, as_key
from nnxlite.transforms._wrapper import unbind

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
            compiled each time.  A module, or a method of one, is read in each call, and must not
            write its Variables.
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
            each program, if the model is not causal, or a cache gives other logits than none or does
            not take several tokens at once.

    Returns:
        New tokens, how many there are, their log probabilities (or the scores of a search) and the
        cache: a `Generated`.

    Raises:
        ValueError: for an empty prompt, one that is longer than `max_length` allows, a model that has
            no cache but should, one whose logits have another shape or are NaN, a cache of another
            model or batch, or beams with a sampler or a cache.
        TypeError: if the model is not a module, tokens are not integers of 32 bits, a sampler has no
            key or returns no integer, or `cache` is anything else than described.

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
    max_new, max_length, beams = map(as_integer, (max_new, max_length, beams))
    for name, number in {"max_new": max_new, "max_length": max_length, "beams": beams}.items():
        if number is not None and not (type(number) is int and number >= 1):
            raise ValueError(f"generate: {name} must be a whole number from 1 up, not {number!r}.")
    if beams is not None and (sampler is not greedy or cache is not False):
        raise ValueError(
            "generate: a search with beams draws no tokens and returns no cache. Pass beams, or a "
            "sampler and a cache."
        )
    if not isinstance(cache, (bool, Conversation)):
        raise TypeError(
            f"generate: cache is {short_type(cache)}; it must be True, False, or the `cache` in the "
            "result of a call with cache=True."
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
    chunk = min(longest - 1, CHUNK) if ragged else longest - 1
    size = total if before is None else max(total, before.tokens.shape[1])
    setup = Setup(max_new, size, use_cache, chunk, cache is not False, beams or 0, single)
    stops, filler = _integers("stop", stop).reshape(-1), _integers("pad", pad).reshape(())
    penalty = jnp.asarray(length_penalty, jnp.float32)
    keys, drawn = _keys(sampler, rngs, len(tokens)), _operands(sampler)
    request = Request(tokens, sizes, drawn, keys, stops, filler, penalty, before)
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
        rows = [_integers("the prompt", row) for row in ([prompt] if single else prompt)]
        lengths = [len(row) for row in rows] if lengths is None else lengths
        longest = max(len(row) for row in rows)
        tokens: tp.Any = np.stack([np.pad(row, (0, longest - len(row))) for row in rows])
    else:
        tokens = _integers("the prompt", prompt)
        tokens = tokens[None] if single else tokens
    least = 1 if before is None else 0
    if tokens.ndim != 2 or not len(tokens) or tokens.shape[1] < least:
        raise ValueError(
            "generate: a prompt is (length,) or (batch, length), with at least one token; got shape "
            f"{tokens.shape[single:]}."
        )
    batch, longest = tokens.shape
    if before is not None and len(before.lengths) != batch:
        raise ValueError(
            f"generate: the cache is of a batch of {len(before.lengths)} rows, and the prompt has "
            f"{batch}. Go on with all rows of a batch."
        )
    lengths = _known(_integers("lengths", [longest] * batch if lengths is None else lengths))
    within = isinstance(lengths, Tracer) or np.all((lengths >= least) & (lengths <= longest))
    if lengths.shape != (batch,) or not within:
        raise ValueError(
            f"generate: lengths must be {batch} integers, one for each row of the prompt, from {least} "
            f"to {longest}; got {lengths}."
        )
    return tokens, lengths, single


def _integers(name: str, given: tp.Any) -> tp.Any:
    """Whole numbers as int32; TypeError for others, and for those that this would change."""
    x = given if isinstance(given, jax.Array) else np.asarray(given)
    narrows = x.dtype != np.int32 and not isinstance(x, Tracer)
    if x.size and (x.dtype.kind not in "iu" or (narrows and (x != x.astype(np.int32)).any())):
        raise TypeError(f"generate: {name} must be integers of 32 bits, not {given!r:.60}.")
    return x.astype(np.int32)


def _operands(sampler: tp.Any) -> tp.Any:
    """A sampler as a pytree: its objects, or that of a bound method, are operands of the program."""
    parts = unbind(sampler, pytrees=True)
    ours = isinstance(sampler, Sampler) and not is_pytree_leaf(sampler)
    return sampler if ours else jax.tree_util.Partial(parts.fun, *parts.args, **parts.kwargs)


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
    rngs = as_key(rngs)
    if rngs.shape not in ((), (batch,)):
        raise ValueError(
            f"generate: rngs must be one key, or one for each of {batch} rows; got {rngs.shape}."
        )
    return rngs if rngs.shape else jax.random.split(rngs, batch)
