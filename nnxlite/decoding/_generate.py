"""`generate`: new tokens after a prompt, in one compiled loop.

What a model has to do: called with tokens (batch, length), return logits (batch, length, vocabulary)
for the token after each of them.  There are two ways to run it.

- With a cache: the model is viewed with `decode=True`, `batch_size` and `max_length`, for which
  `MultiHeadAttention` allocates a `Cache`.  A call then gets only the next tokens, and what `Cache`
  Variables contain is carried from one call to the next.  They are zero at first.
- Without one: if there is no `Cache` after that, each step calls the model on the whole sequence,
  padded to its final length, and reads the logits of one position.  The model must be causal.

All rows are always at the same position: at each step of the loop, a row with prompt tokens left takes
the next of them, and any other row the token that was sampled.  So rows of different lengths need
neither masks nor shifted positions, and are independent of each other.  The positions that are prompt in
every row are read in a few large steps before the loop begins.

Nothing is written to the model: caches belong to a view of it that exists while it is traced.

Both ways are right for a causal model alone, whose logits do not depend on later tokens.  When a
program has been compiled, a short call on whole sequences is compared with how it runs the model.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import operator
import typing as tp
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from nnxlite._base.errors import short_type, warn_user
from nnxlite._state._flat import to_flat_state
from nnxlite.decoding.sampling import Sampler, SamplerFn, greedy
from nnxlite.filters import Nothing
from nnxlite.graph._functional import clone, merge, split
from nnxlite.graph._walk import iter_graph
from nnxlite.nn.multi_head_attention import MultiHeadAttention, takes_positions
from nnxlite.objects._pytree import Pytree
from nnxlite.objects._rngs import Rngs, RngStream
from nnxlite.objects._views import view
from nnxlite.transforms._jit import jit
from nnxlite.variables._kinds import Cache

Prompt = jax.Array | np.ndarray | Sequence[int] | Sequence[Sequence[int]]
"""Tokens (length,) or (batch, length), or a list of lists of different lengths."""

POSITIONS = ("input_positions", "positions")
"""Parameters of a model by which it gets the positions of its tokens, (length,) int32."""

CHUNK = 16
"""Positions of a prompt that are read at once where rows have different lengths."""

PROBE = 4
"""Tokens of the call by which a new program is checked."""

PADDING = 3
"""Tokens after these, where a model runs without a cache."""

TOLERANCE = 0.02
"""The difference of logits that rounding may make, as a part of the largest one."""


class Generated(tp.NamedTuple):
    """What `generate` returns: arrays for a batch, without their first axis for a single prompt.

    Args:
        tokens: the new tokens, (batch, max_new) int32; padding after the last one.
        lengths: how many there are in each row, (batch,) int32, a stop token among them.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.Generated(jnp.array([[5, 2, 0]]), jnp.array([2])).lists()
    [[5, 2]]
    """

    tokens: jax.Array
    lengths: jax.Array

    def lists(self) -> list[tp.Any]:
        """The new tokens as a list of integers for each row, or one list for a single prompt."""
        return cut(np.asarray(self.tokens), np.asarray(self.lengths))


def cut(tokens: np.ndarray, lengths: np.ndarray) -> list[tp.Any]:
    """Each row of some tokens up to its length, as nested lists."""
    if tokens.ndim == 1:
        return tokens[: int(lengths)].tolist()
    return [cut(row, length) for row, length in zip(tokens, lengths, strict=True)]


class Setup(tp.NamedTuple):
    """The static side of a call."""

    max_new: int
    max_length: int
    use_cache: bool | None
    chunk: int  # how many positions of the prompt are read at once


class Request(tp.NamedTuple):
    """The arrays of a call."""

    prompt: tp.Any  # (batch, length)
    lengths: tp.Any  # (batch,)
    sampler: tp.Any  # a pytree that can be called
    keys: jax.Array | None  # (batch,)
    stop: tp.Any  # (number of stop tokens,)
    pad: tp.Any


class Progress(tp.NamedTuple):
    """How far a call is."""

    position: jax.Array  # of the token that the model gets next
    tokens: jax.Array  # (batch, max_length)
    counts: jax.Array  # (batch,), of new tokens
    done: jax.Array  # (batch,)
    nan_at: jax.Array  # the position whose logits have a NaN; -1 if there is none


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

    Warns:
        UserWarning: if a model with a cache runs without it, since nothing tells it positions; once for
            each program, if the model is not causal, or a cache gives other logits than none.

    Returns:
        New tokens and how many there are: a `Generated`.

    Raises:
        ValueError: for an empty prompt, one that is longer than `max_length` allows, a sampler without
            a key, a model that has no cache but should, or one whose logits have another shape or
            are NaN.
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
        "generate", model, prompt, max_new, sampler, rngs, stop, pad, lengths, max_length, use_cache
    )
    with noting_programs() as made:
        tokens, counts, nan_at = _whole(model, request, setup)
    check_finite(model, nan_at, setup)
    check_causal(model, request, setup, made)
    return Generated(tokens[0], counts[0]) if single else Generated(tokens, counts)


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
    check_causal(model, request, setup, made)
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
) -> tuple[Setup, Request, bool]:
    """The arguments of a call, checked, and whether the prompt is a single one."""
    if not isinstance(model, Pytree) or not callable(model):
        raise TypeError(f"{caller} takes a module that can be called, not {short_type(model)}.")
    max_new = whole_number(caller, "max_new", max_new)
    room = None if max_length is None else whole_number(caller, "max_length", max_length) - max_new
    tokens, sizes, single = _read_prompt(caller, prompt, lengths, room)
    batch, length = tokens.shape
    if room is not None and length > room:
        raise ValueError(
            f"{caller}: the prompt is longer than the cache: {length} tokens of prompt and {max_new} "
            f"new ones make {length + max_new}, and max_length is {max_length}. Cut the prompt, or "
            "raise max_length."
        )
    if not callable(sampler):
        raise TypeError(f"{caller}: the sampler must be callable, not {short_type(sampler)}.")
    keys = _keys(caller, sampler, rngs, batch)
    chunk = length - 1 if sizes is None else min(length - 1, CHUNK)
    setup = Setup(max_new, length + max_new if max_length is None else max_length, use_cache, chunk)
    stops = np.atleast_1d(np.asarray(stop, np.int32))
    request = Request(
        tokens,
        np.full(batch, length, np.int32) if sizes is None else sizes,
        sampler if isinstance(sampler, (Sampler, Pytree)) else jax.tree_util.Partial(sampler),
        keys,
        stops,
        np.int32(pad),
    )
    return setup, request, single


def _read_prompt(
    caller: str, prompt: tp.Any, lengths: tp.Any, room: int | None
) -> tuple[tp.Any, tp.Any, bool]:
    """Tokens (batch, length), their lengths if they may differ, and whether it is a single prompt."""
    if isinstance(prompt, (list, tuple)):
        if not prompt:
            raise ValueError(f"{caller} needs a prompt of at least one token; got an empty list.")
        single = all(np.ndim(row) == 0 for row in prompt)
        rows = [np.asarray(row) for row in ([prompt] if single else prompt)]
        if any(row.ndim != 1 for row in rows):
            raise ValueError(f"{caller}: a prompt is a list of tokens, or a list of such lists.")
        sizes = np.array([len(row) for row in rows], np.int32)
        if lengths is not None:
            raise ValueError(f"{caller}: lengths go with an array; a list has lengths of its own.")
        _check_tokens(caller, *(row for row in rows if len(row)))
        length = int(sizes.max()) if room is None else max(room, int(sizes.max()))
        tokens = np.zeros((len(rows), length), np.int32)
        for padded, row in zip(tokens, rows, strict=True):
            padded[: len(row)] = row
        lengths = None if (sizes == length).all() and room is None else sizes
    else:
        tokens = prompt if isinstance(prompt, jax.Array) else np.asarray(prompt)
        _check_tokens(caller, tokens)
        if tokens.ndim not in (1, 2) or 0 in tokens.shape:
            raise ValueError(
                f"{caller}: a prompt is an array (length,) or (batch, length) with at least one "
                f"token; got shape {tokens.shape}."
            )
        single = tokens.ndim == 1
        tokens = tokens.reshape(-1, tokens.shape[-1]).astype(np.int32)
    if lengths is not None:
        lengths = lengths if isinstance(lengths, jax.Array) else np.asarray(lengths)
        if lengths.shape != tokens.shape[:1] or lengths.dtype.kind not in "iu":
            raise ValueError(
                f"{caller}: lengths must be {tokens.shape[0]} integers, one for each row of the "
                f"prompt; got {lengths.dtype}{list(lengths.shape)}."
            )
        if not isinstance(lengths, Tracer):
            wrong = [int(n) for n in lengths if not 1 <= n <= tokens.shape[1]]
            if wrong:
                raise ValueError(
                    f"{caller}: each prompt needs from 1 to {tokens.shape[1]} tokens; the lengths "
                    f"include {wrong[0]}."
                )
        lengths = lengths.astype(np.int32)
    return tokens, lengths, single


def _check_tokens(caller: str, *arrays: tp.Any) -> None:
    for array in arrays:
        if array.dtype.kind not in "iu":
            raise TypeError(f"{caller}: tokens are integers; the prompt has dtype {array.dtype}.")


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


_made: contextvars.ContextVar[list[bool] | None] = contextvars.ContextVar("_made", default=None)


@contextlib.contextmanager
def noting_programs() -> Iterator[list[bool]]:
    """A list to which each program that is traced in this block adds whether it uses a cache."""
    made: list[bool] = []
    token = _made.set(made)
    try:
        yield made
    finally:
        _made.reset(token)


def check_causal(model: tp.Any, request: Request, setup: Setup, made: list[bool]) -> None:
    """Warn where new programs do not give the logits of a call on a whole sequence."""
    if not made or isinstance(request.prompt, Tracer):
        return
    length = min(PROBE, setup.max_length - 1)
    tokens = np.tile(np.array([0, 1], np.int32), (len(request.prompt), PROBE))[:, :length]
    try:
        tokens[:, :1] = np.asarray(request.prompt[:, :1])
        wrong = bool(_differs(model, jnp.asarray(tokens), setup._replace(use_cache=made[0])))
    except Exception:  # a call of this length is more than the model has to support
        return
    if wrong:
        way = "in steps with a cache" if made[0] else "with padding after them"
        name = type(model).__name__
        warn_user(
            f"{name} gives other logits for tokens {way} than in a call on these tokens alone, so that "
            "what is generated depends on the way. A position may depend on later tokens: use attention "
            "with is_causal=True or a causal mask, convolutions with padding='CAUSAL'. Otherwise the "
            f"positions or caches of {name} are wrong; see docs/generating.md."
        )


def _differs_in_a_call(model: tp.Any, tokens: jax.Array, setup: Setup) -> jax.Array:
    """Whether the logits of tokens differ from those of a call on them alone, in that setup."""
    batch, length = tokens.shape
    alone, _ = Decoder(model, setup._replace(use_cache=False), batch)([], tokens, 0)
    decoder = Decoder(model, setup, batch)
    if not setup.use_cache:
        after = min(PADDING, setup.max_length - length)
        tokens = jnp.pad(tokens, ((0, 0), (0, after)))
    logits = decoder(decoder.cache, tokens, 0)[0][:, :length]
    epsilon = jnp.finfo(logits.dtype).eps if jnp.issubdtype(logits.dtype, jnp.floating) else 0
    alone, logits = alone.astype(jnp.float32), logits.astype(jnp.float32)
    finite = jnp.isfinite(alone) & jnp.isfinite(logits)
    largest = jnp.where(finite, jnp.abs(alone), 0).max()
    difference = jnp.where(finite, jnp.abs(alone - logits), 0).max()
    return difference > max(TOLERANCE, 64 * float(epsilon)) * largest


class Decoder:
    """A model in the modes of decoding, as a function of what its cache contains.

    Attributes:
        cache: the leaves of its empty cache; none if it runs without one.
    """

    def __init__(self, model: tp.Any, setup: Setup, batch: int) -> None:
        modes: dict[str, tp.Any] = {"deterministic": True, "use_running_average": True}
        sizes: dict[str, tp.Any] = {"batch_size": batch, "max_length": setup.max_length}
        self.name = type(model).__name__
        names = inspect.signature(model).parameters
        self.positions = next((name for name in POSITIONS if name in names), None)
        cache: tp.Any = None
        if setup.use_cache is not False:
            viewed = view(model, decode=True, **modes, **sizes, raise_if_not_found=False)
            self._widen_caches(viewed, batch)
            self.graphdef, cache, self.rest = split(viewed, Cache, ...)
            if setup.use_cache and not cache:
                raise ValueError(
                    f"{self.name} has no cache for use_cache=True: in a view with decode=True, "
                    "batch_size and max_length it has no Variable of the kind nnx.Cache."
                )
            if (
                setup.use_cache is None
                and self.positions is None
                and _lacks_positions(viewed, cache)
            ):
                warn_user(
                    f"{self.name} runs without a cache: with one, nothing tells it the positions of its "
                    "tokens. Give its __call__ a parameter input_positions, or pass use_cache=True if "
                    "it needs no positions."
                )
                cache = None
        if not cache:
            viewed = view(model, decode=False, **modes, raise_if_not_found=False)
            self.graphdef, cache, self.rest = split(viewed, Nothing(), ...)
        leaves, self.structure = jax.tree.flatten(cache)
        self.cache = [jnp.zeros_like(leaf) for leaf in leaves]

    def __call__(
        self, cache: list[jax.Array], tokens: jax.Array, first: tp.Any
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Logits (batch, length, vocabulary) of tokens from position `first` on, and the new cache."""
        state = jax.tree.unflatten(self.structure, cache)
        model = merge(self.graphdef, state, self.rest, copy=True)
        logits = self._called(model, tokens, first)
        shape = getattr(logits, "shape", None)
        if shape is None or len(shape) != 3 or shape[:2] != tokens.shape:
            got = short_type(logits) if shape is None else f"shape {shape}"
            raise ValueError(
                f"{self.name} must return logits (batch, length, vocabulary) for tokens of shape "
                f"{tokens.shape}; it returned {got}."
            )
        if cache:
            cache = jax.tree.leaves(split(model, Cache, ...)[1])
        return logits, cache

    def _called(self, model: tp.Any, tokens: jax.Array, first: tp.Any) -> tp.Any:
        """What a model returns for tokens from position `first` on."""
        named = {}
        if self.positions is not None:
            named[self.positions] = first + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        return model(tokens, **named)

    def _widen_caches(self, model: tp.Any, batch: int) -> None:
        """Give a cache the dtype of the keys where the inputs of a layer promote its parameters.

        An abstract call shows that dtype.
        """
        if not any(
            layer.dtype is None and _is_narrow(layer.cached_key) for layer in _cached(model)
        ):
            return
        seen: dict[int, tp.Any] = {}

        def call(tokens: jax.Array) -> None:
            copy = clone(model)
            for index, layer in enumerate(_cached(copy)):
                layer.attention_fn = _noting(layer.attention_fn, seen, index)
            self._called(copy, tokens, 0)

        jax.eval_shape(call, jax.ShapeDtypeStruct((batch, 1), jnp.int32))
        for index, layer in enumerate(_cached(model)):
            for name in ("cached_key", "cached_value"):
                former = getattr(layer, name)
                dtype = jnp.promote_types(former.dtype, seen.get(index, former.dtype))
                if dtype != former.dtype:
                    setattr(layer, name, Cache(jnp.zeros(former.shape, dtype)))

    def next_logits(
        self, cache: list[jax.Array], tokens: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Logits (batch, vocabulary) for the token after a position, and the new cache."""
        if not self.cache:
            logits, _ = self(cache, tokens, jnp.int32(0))
            return lax.dynamic_index_in_dim(logits, position, 1, keepdims=False), cache
        token = lax.dynamic_slice_in_dim(tokens, position, 1, axis=1)
        logits, cache = self(cache, token, position)
        return logits[:, 0], cache


def _cached(model: tp.Any) -> list[MultiHeadAttention]:
    """The attention layers of a model that have a cache."""
    layers = [x for _, x in iter_graph(model) if isinstance(x, MultiHeadAttention)]
    return [layer for layer in layers if layer.cached_key is not None]


def _is_narrow(cache: Cache[jax.Array] | None) -> bool:
    return cache is not None and cache.dtype.itemsize < 4


def _noting(fun: tp.Callable[..., tp.Any], seen: dict[int, tp.Any], index: int) -> tp.Any:
    """An attention function that notes the dtype of its keys."""

    @functools.wraps(fun)
    def attend(query: tp.Any, key: tp.Any, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
        seen[index] = key.dtype
        return fun(query, key, *args, **kwargs)

    return attend


def _lacks_positions(model: tp.Any, cache: tp.Any) -> bool:
    """Whether a model has attention that ignores positions, and no other state that could count them."""
    names = {path[-1] for path, _ in to_flat_state(cache)}
    return names <= {"cached_key", "cached_value", "cache_index"} and any(
        not takes_positions(layer.attention_fn) for layer in _cached(model)
    )


def start(model: tp.Any, request: Request, setup: Setup) -> tuple[list[jax.Array], Progress]:
    """Read the positions that are prompt in every row, except the last one, into the cache."""
    batch, length = request.prompt.shape
    decoder = Decoder(model, setup, batch)
    made = _made.get()
    if made is not None:
        made.append(bool(decoder.cache))
    common = jnp.min(request.lengths) - 1
    cache, position = decoder.cache, common
    if cache and setup.chunk:
        size = setup.chunk
        reads = common // size

        def read(i: jax.Array, cache: list[jax.Array]) -> list[jax.Array]:
            tokens = lax.dynamic_slice_in_dim(request.prompt, i * size, size, axis=1)
            return decoder(cache, tokens, i * size)[1]

        cache = lax.fori_loop(0, reads, read, cache)
        position = reads * size
    tokens = jnp.pad(request.prompt, ((0, 0), (0, setup.max_length - length)))
    none = jnp.zeros(batch, jnp.int32)
    return cache, Progress(position, tokens, none, none > 0, jnp.int32(-1))


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
        cache, (position, tokens, counts, done, _) = carry
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
        return cache, Progress(position + 1, tokens, counts, done, nan_at)

    def goes_on(carry: tuple[list[jax.Array], Progress]) -> jax.Array:
        progress = carry[1]
        return (progress.position < until) & ~progress.done.all() & (progress.nan_at < 0)

    return lax.while_loop(goes_on, body, (cache, progress))


def _run(model: tp.Any, request: Request, setup: Setup) -> tuple[jax.Array, jax.Array, jax.Array]:
    """New tokens (batch, max_new), their numbers, and the position of NaN."""
    cache, progress = start(model, request, setup)
    _, progress = _advance(model, cache, progress, request, setup.max_length, setup)
    return new_tokens(request, progress, setup), progress.counts, progress.nan_at


def new_tokens(request: Request, progress: Progress, setup: Setup) -> jax.Array:
    """The new tokens of each row, (rows, max_new), with padding after the last one."""
    new = jnp.arange(setup.max_new)
    places = jnp.minimum(request.lengths[:, None] + new, setup.max_length - 1)
    tokens = jnp.take_along_axis(progress.tokens, places, axis=1)
    return jnp.where(new < progress.counts[:, None], tokens, request.pad)


_whole = jit(_run, static_argnums=2)
_differs = jit(_differs_in_a_call, static_argnums=2)
_started = jit(start, static_argnums=2)
_continued = jit(_advance, static_argnums=5, donate_argnums=1)
