"""A model as `generate` runs it: in the modes of decoding, with a cache or without.

- With a cache: the model is viewed with `decode=True`, `batch_size` and `max_length`, for which
  `MultiHeadAttention` allocates a `Cache`.  A call then gets only the next tokens, and what `Cache`
  Variables contain is carried from one call to the next.  They are zero at first.
- Without one: if the model has no `Cache` after that, each step calls the model on the whole sequence,
  padded to its final length, and reads the logits of one position.  The model must be causal.

Both ways are right for a causal model alone, whose logits do not depend on later tokens.  When a
program has been compiled, a short call on whole sequences is compared with how it runs the model.
"""

from __future__ import annotations

import inspect
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nnxlite._base.errors import short_type, warn_user
from nnxlite._state._flat import to_flat_state
from nnxlite.filters import Nothing
from nnxlite.graph._functional import merge, split
from nnxlite.graph._walk import iter_graph
from nnxlite.nn.multi_head_attention import MultiHeadAttention, takes_positions
from nnxlite.objects._capture import view
from nnxlite.transforms._jit import jit
from nnxlite.variables._kinds import Cache

POSITIONS = ("input_positions", "positions")
"""Parameters of a model by which it gets the positions of its tokens, (length,) int32."""

PROBE = 4
"""Tokens of the call by which a new program is checked."""

PADDING = 3
"""Tokens after these, where a model runs without a cache."""

BY_POSITION = {"cached_key", "cached_value", "cache_index"}
"""Names of what attention caches: entries after an index, which do not count."""

TOLERANCE, COARSE = 0.02, 0.5
"""The difference that rounding may make in logits of 32 bits and of 16, as a part of the largest one."""


class Setup(tp.NamedTuple):
    """The static side of a call."""

    max_new: int
    max_length: int
    use_cache: bool | None
    chunk: int  # how many positions of the prompt are read at once
    keep: bool  # whether the cache is returned
    beams: int  # how many rows each prompt has in a search; 0 without one
    single: bool  # whether the prompt is one sequence, so that the results have no axis for a batch


def check_causal(model: tp.Any, prompt: tp.Any, setup: Setup) -> None:
    """Warn if a model gives other logits in this setup than in a single call."""
    length = min(PROBE, setup.max_length - 1)
    tokens = np.tile(np.array([0, 1], np.int32), (len(prompt), PROBE))[:, :length]
    try:
        tokens[:, :1] = np.asarray(prompt[:, :1])
        wrong = bool(_differs(model, jnp.asarray(tokens), setup))
    except Exception:  # a call of this length is more than the model has to support
        return
    if wrong:
        way = "in steps with a cache" if setup.use_cache else "with padding after them"
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
    after = 0 if setup.use_cache else min(PADDING, setup.max_length - length)
    tokens = jnp.pad(tokens, ((0, 0), (0, after)))
    try:
        logits = decoder(decoder.cache, tokens, 0)[0][:, :length]
    except Exception as error:
        if setup.use_cache:  # short prompts come as single tokens, long ones fail
            warn_user(
                f"{decoder.name} cannot read {length} tokens at once with a cache, so that single ones "
                f"may see others than without one; a mask has to cover the cache. {error}"
            )
        raise
    tolerance = TOLERANCE if logits.dtype.itemsize >= 4 else COARSE
    finite = lambda x: jnp.nan_to_num(x.astype(jnp.float32), posinf=0, neginf=0)
    alone, logits = finite(alone), finite(logits)
    return jnp.abs(alone - logits).max() > tolerance * jnp.abs(alone).max()


class Decoder:
    """A model in the modes of decoding, as a function of what its cache contains.

    Attributes:
        cache: the leaves of its empty cache; none if it runs without one.
        names: of the Variables that have them.
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
            self.graphdef, cache, self.rest = split(viewed, Cache, ...)
            if setup.use_cache and not cache:
                raise ValueError(
                    f"{self.name} has no cache for use_cache=True: in a view with decode=True, "
                    "batch_size and max_length it has no Variable of the kind nnx.Cache."
                )
            if not (setup.use_cache or self.positions) and _needs_positions(viewed, cache):
                warn_user(
                    f"{self.name} runs without a cache: with one, nothing tells it the positions of its "
                    "tokens. Give its __call__ a parameter input_positions, or pass use_cache=True if "
                    "it needs no positions."
                )
                cache = None
        if not cache:
            viewed = view(model, decode=False, **modes, raise_if_not_found=False)
            self.graphdef, cache, self.rest = split(viewed, Nothing(), ...)
        self.names = _names(cache)
        leaves, self.structure = jax.tree.flatten(cache)
        self.cache = [jnp.zeros_like(leaf) for leaf in leaves]

    def __call__(
        self, cache: list[jax.Array], tokens: jax.Array, first: tp.Any
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Logits (batch, length, vocabulary) of tokens from position `first` on, and the new cache."""
        state = jax.tree.unflatten(self.structure, cache)
        model = merge(self.graphdef, state, self.rest, copy=True)
        steps = first + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        logits = model(tokens, **({} if self.positions is None else {self.positions: steps}))
        shape = getattr(logits, "shape", ())
        if len(shape) != 3 or shape[:2] != tokens.shape:
            raise ValueError(
                f"{self.name} must return logits (batch, length, vocabulary) for tokens of shape "
                f"{tokens.shape}; it returned {short_type(logits)}."
            )
        if cache:
            cache = jax.tree.leaves(split(model, Cache, ...)[1])
        return logits, cache

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


def _names(cache: tp.Any) -> list[tp.Any]:
    """The name of the Variable of each leaf."""
    return [path[-1] for path, leaf in to_flat_state(cache) for _ in jax.tree.leaves(leaf)]


def _needs_positions(model: tp.Any, cache: tp.Any) -> bool:
    """Whether a model has attention that ignores positions, and no other state that could count them."""
    layers = (x for _, x in iter_graph(model) if isinstance(x, MultiHeadAttention))
    ignored = (not takes_positions(x.attention_fn) for x in layers if x.cached_key is not None)
    return set(_names(cache)) <= BY_POSITION and any(ignored)


_differs = jit(_differs_in_a_call, static_argnums=2)
