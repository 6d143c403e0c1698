"""Random streams: where every layer gets its keys from.

A stream is a key and a counter.  Each draw folds the counter into the key and moves the counter on,
so one seed yields an endless sequence of keys, and both numbers are Variables that cross a
transform like any other state.  `Rngs` is a set of named streams.

The distributions of `jax.random` and the initializers of `jax.nn` are methods of both, by way of
`Samplers`, a table with a row for each: a method with the same parameters except for the key, which is
drawn from the stream.  `_rng_scopes` has the functions on all streams of a model.
"""

from __future__ import annotations

import inspect
import numbers
import operator
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._base.errors import short_type
from nnxlite._base.interning import LOCK
from nnxlite.filters import Filter, Predicate, to_predicate
from nnxlite.objects._pytree import Pytree
from nnxlite.variables._kinds import RngCount, RngKey

__all__ = ["RngStream", "Rngs"]

P = tp.ParamSpec("P")
R = tp.TypeVar("R")

RngValue: tp.TypeAlias = "int | jax.Array | RngStream"
"""What a stream can start from: a seed, a key (typed or legacy), or another stream's key."""

Splits: tp.TypeAlias = "int | tuple[int, ...]"
"""How many keys to make from one: a number, or a shape."""

SplitSpec: tp.TypeAlias = "tp.Mapping[Filter, Splits | None] | Splits"
"""The same for several streams: for all of them, or by filter, of which the first match decides."""

Renew: tp.TypeAlias = "tp.Callable[[RngStream], RngStream]"
"""Draws from a stream and returns the stream that replaces it."""


class Rule(tp.NamedTuple):
    """What replaces the streams that a filter selects: a function that draws from one, or None."""

    filter: Filter
    predicate: Predicate
    renew: Renew | None


class KeylessInitializer(tp.Protocol):
    """The result of an initializer method: an initializer that draws its own key at each call."""

    def __call__(
        self, shape: tp.Sequence[int], dtype: tp.Any = ..., out_sharding: tp.Any = None
    ) -> jax.Array:
        """An array of this shape and dtype."""
        ...


def _sampler(
    draw: tp.Callable[tp.Concatenate[tp.Any, P], R],
) -> tp.Callable[tp.Concatenate[tp.Any, P], R]:
    """A method that calls `draw` with the next key."""

    def method(self: tp.Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return draw(self(), *args, **kwargs)

    summary = (inspect.getdoc(draw) or "").partition("\n\n")[0]
    doc = f"{summary}\n\nThe same as `jax.random.{draw.__name__}`, with the next key."
    return _described(method, draw, doc, without=1)


def _initializer(
    factory: tp.Callable[P, jax.nn.initializers.Initializer],
) -> tp.Callable[tp.Concatenate[tp.Any, P], KeylessInitializer]:
    """A method that makes an initializer and supplies its key."""

    def method(self: tp.Any, *args: P.args, **kwargs: P.kwargs) -> KeylessInitializer:
        initialize: tp.Any = factory(*args, **kwargs)
        return lambda *args, **kwargs: initialize(self(), *args, **kwargs)

    doc = (
        f"The initializer `jax.nn.initializers.{factory.__name__}`, without the key argument.\n\n"
        "Returns a function of `(shape, dtype)`; each call draws the next key."
    )
    return _described(method, factory, doc, without=0)


def _described(method: tp.Any, source: tp.Any, doc: str, without: int) -> tp.Any:
    """Give a generated method its name, docstring and signature: `source` less its first parameters."""
    parameters = [*inspect.signature(source).parameters.values()][without:]
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = inspect.Signature([own, *parameters])
    method.__name__, method.__qualname__ = source.__name__, f"Samplers.{source.__name__}"
    method.__doc__ = doc
    return method


class Samplers:
    """Base of `RngStream` and `Rngs`: the random functions as methods, without the key argument.

    >>> import nnxlite as nnx
    >>> rngs = nnx.Rngs(0, noise=1)
    >>> rngs.normal((2, 3)).shape, rngs.noise.bernoulli(0.5, (4,)).dtype
    ((2, 3), dtype('bool'))
    >>> kernel_init = rngs.lecun_normal()
    >>> kernel_init((3, 5)).shape
    (3, 5)
    """

    __slots__ = ()

    ball = _sampler(jax.random.ball)
    bernoulli = _sampler(jax.random.bernoulli)
    beta = _sampler(jax.random.beta)
    binomial = _sampler(jax.random.binomial)
    bits = _sampler(jax.random.bits)
    categorical = _sampler(jax.random.categorical)
    cauchy = _sampler(jax.random.cauchy)
    chisquare = _sampler(jax.random.chisquare)
    choice = _sampler(jax.random.choice)
    dirichlet = _sampler(jax.random.dirichlet)
    double_sided_maxwell = _sampler(jax.random.double_sided_maxwell)
    exponential = _sampler(jax.random.exponential)
    f = _sampler(jax.random.f)
    gamma = _sampler(jax.random.gamma)
    generalized_normal = _sampler(jax.random.generalized_normal)
    geometric = _sampler(jax.random.geometric)
    gumbel = _sampler(jax.random.gumbel)
    laplace = _sampler(jax.random.laplace)
    loggamma = _sampler(jax.random.loggamma)
    logistic = _sampler(jax.random.logistic)
    lognormal = _sampler(jax.random.lognormal)
    maxwell = _sampler(jax.random.maxwell)
    multinomial = _sampler(jax.random.multinomial)
    multivariate_normal = _sampler(jax.random.multivariate_normal)
    normal = _sampler(jax.random.normal)
    orthogonal = _sampler(jax.random.orthogonal)
    pareto = _sampler(jax.random.pareto)
    permutation = _sampler(jax.random.permutation)
    poisson = _sampler(jax.random.poisson)
    rademacher = _sampler(jax.random.rademacher)
    randint = _sampler(jax.random.randint)
    rayleigh = _sampler(jax.random.rayleigh)
    t = _sampler(jax.random.t)
    triangular = _sampler(jax.random.triangular)
    truncated_normal = _sampler(jax.random.truncated_normal)
    uniform = _sampler(jax.random.uniform)
    wald = _sampler(jax.random.wald)
    weibull_min = _sampler(jax.random.weibull_min)

    delta_orthogonal = _initializer(jax.nn.initializers.delta_orthogonal)
    glorot_normal = _initializer(jax.nn.initializers.glorot_normal)
    glorot_uniform = _initializer(jax.nn.initializers.glorot_uniform)
    he_normal = _initializer(jax.nn.initializers.he_normal)
    he_uniform = _initializer(jax.nn.initializers.he_uniform)
    kaiming_normal = he_normal
    kaiming_uniform = he_uniform
    lecun_normal = _initializer(jax.nn.initializers.lecun_normal)
    lecun_uniform = _initializer(jax.nn.initializers.lecun_uniform)
    variance_scaling = _initializer(jax.nn.initializers.variance_scaling)
    xavier_normal = glorot_normal
    xavier_uniform = glorot_uniform


@jax.jit
def _draw(key: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Key number `count`, and the next count; compiled, so that it is one dispatch and not a dozen."""
    return jax.random.fold_in(key, count), count + 1


zero_counts = jax.jit(lambda shape: jnp.zeros(shape, jnp.uint32), static_argnums=0)
"""Initial counts of a shape."""


class RngStream(Samplers, Pytree):
    """A key and a counter: each call returns a new key and increments the counter.

    Args:
        key: a seed, a typed key (`jax.random.key`), a legacy uint32 key, or another stream, whose
            key is used (from count 0). May be an array of keys, for use under `vmap`.
        tag: the name of the stream; metadata `tag` of its two Variables.

    Attributes:
        key: `RngKey`, the key from which all keys of the stream are made.
        count: `RngCount`, uint32, how many keys were drawn; has the shape of the key.

    Raises:
        ValueError: if `key` is none of these.

    >>> import nnxlite as nnx, jax
    >>> stream = nnx.RngStream(0, tag="noise")
    >>> bool(stream() == jax.random.fold_in(jax.random.key(0), 0)), int(stream.count.value)
    (True, 1)
    """

    tag: str
    key: RngKey[jax.Array]
    count: RngCount[jax.Array]

    def __init__(self, key: RngValue, *, tag: str) -> None:
        key = as_key(key)
        self.tag = tag
        self.key = RngKey(key, tag=tag)
        self.count = RngCount(zero_counts(key.shape), tag=tag)

    def __call__(self) -> jax.Array:
        """The next key of the stream (typed, shape `()`); threads that draw at once get different keys.

        Raises ValueError if the stream has an array of keys.
        """
        count = self.count
        while True:
            before = count._box.value
            try:
                key, next_count = _draw(self.key.value, count.value)
            except ValueError:
                self.check_scalar()
                raise
            with LOCK:
                if count._box.value is before:  # else another thread has drawn this key
                    count.set_value(next_count)
                    return key

    def split(self, k: Splits) -> RngStream:
        """A stream of `k` different keys (`k` a number or a shape), made from the next key.

        Args:
            k: how many keys: a number or a shape.

        >>> import nnxlite as nnx
        >>> nnx.RngStream(0, tag="params").split((2, 3)).key.shape
        (2, 3)
        """
        k = as_splits(k)
        return RngStream(jax.random.split(self(), k), tag=self.tag)

    def broadcast(self, k: Splits) -> RngStream:
        """A stream of `k` equal keys (`k` a number or a shape), all the next key.

        Args:
            k: how many keys: a number or a shape.
        """
        k = as_splits(k)
        return RngStream(jnp.broadcast_to(self(), k), tag=self.tag)

    def fork(self, *, split: Splits | None = None) -> RngStream:
        """A new stream that starts from the next key; with `split`, `self.split(split)`.

        Args:
            split: how many keys, or None for one.
        """
        return RngStream(self(), tag=self.tag) if split is None else self.split(split)

    def check_scalar(self, where: str = "") -> None:
        """Raise ValueError, which names the remedy, if the stream has an array of keys.

        Args:
            where: words for the message, such as the path of the stream.
        """
        shape = self.key.value.shape
        if shape:
            raise ValueError(
                f"RngStream {self.tag!r}{where} holds an array of keys of shape {shape}, and a key "
                "can only be drawn from a single one. Draw inside nnx.vmap or nnx.scan over the "
                "keys, or go back to the single key with nnx.restore_rngs (or by leaving the "
                "`with nnx.split_rngs(...)` block)."
            )


class Rngs(Samplers, Pytree):
    """Named random streams; for a missing name the stream `default` is used.

    Args:
        default: the seed or key of the stream `default` (see `RngStream`), or a mapping from names
            to such values.
        **rngs: further streams by name.

    Raises:
        ValueError: if a value is neither a seed, a key nor a stream.
        AttributeError, KeyError: when asked for a missing stream, without a `default`.

    `rngs()` draws from `default`; `rngs.dropout()` from the stream `dropout`; samplers and
    initializers are methods (see `Samplers`). Names can also be looked up with `rngs["dropout"]`.
    `in`, `iter`, `len` and `items` are about the streams that exist, without this fallback.

    >>> import nnxlite as nnx
    >>> rngs = nnx.Rngs(0, dropout=1)
    >>> list(rngs), "params" in rngs, rngs.params is rngs.default
    (['dropout', 'default'], False, True)

    Each draw gives another key; samplers draw from the stream that they belong to:

    >>> import jax
    >>> bool(jax.random.key_data(rngs()).tolist() == jax.random.key_data(rngs()).tolist())
    False
    >>> rngs.normal((2, 3)).shape, rngs.dropout.bernoulli(0.5, (4,)).dtype
    ((2, 3), dtype('bool'))
    """

    def __init__(
        self, default: RngValue | tp.Mapping[str, RngValue] | None = None, **rngs: RngValue
    ) -> None:
        if isinstance(default, tp.Mapping):
            rngs = {**default, **rngs}
        elif default is not None:
            rngs["default"] = default
        for name, value in rngs.items():
            setattr(self, name, RngStream(value, tag=name))

    def __call__(self) -> jax.Array:
        """The next key of the stream `default`."""
        return self.default()

    def __getattr__(self, name: str) -> RngStream:
        # Called only for an attribute that does not exist; private names are never streams.
        default = None if name.startswith("_") else vars(self).get("default")
        if isinstance(default, RngStream):
            return default
        raise AttributeError(self._nnx_no_stream(name), name=name, obj=self)

    def __getitem__(self, name: str) -> RngStream:
        """The stream of this name, else `default`; KeyError if there is neither."""
        for candidate in (name, "default"):
            stream = vars(self).get(candidate)
            if isinstance(stream, RngStream):
                return stream
        raise KeyError(self._nnx_no_stream(name))

    def __contains__(self, name: tp.Any) -> bool:
        return isinstance(vars(self).get(name), RngStream)

    def __iter__(self) -> tp.Iterator[str]:
        """The names of the streams, in the order they were given, `default` last."""
        return (name for name, _ in self.items())

    def __len__(self) -> int:
        return sum(1 for _ in self.items())

    def items(self) -> tp.Iterator[tuple[str, RngStream]]:
        """The streams with their names."""
        for name, value in list(vars(self).items()):
            if isinstance(value, RngStream):
                yield name, value

    def split(self, k: SplitSpec) -> Rngs:
        """New streams with `k` different keys each (see `RngStream.split`).

        With a mapping from filters to numbers, the first filter that matches the stream decides
        (by tag or class: paths begin at the stream); a stream without a match (or with None) keeps
        its key, and restarts at count 0.

        Args:
            k: how many keys each stream gets, or a mapping from filters to this.

        >>> import nnxlite as nnx
        >>> rngs = nnx.Rngs(0, dropout=1).split({"dropout": 5})
        >>> rngs.dropout.key.shape, rngs.default.key.shape
        ((5,), ())
        """
        return self._nnx_renewed(as_rules(k, RngStream.split))

    def broadcast(self, k: SplitSpec | None) -> Rngs:
        """New streams with `k` equal keys each (see `RngStream.broadcast`).

        `k` may be a mapping, as in `split`; None keeps every key, and restarts at count 0.

        Args:
            k: how many keys each stream gets, or a mapping from filters to this.
        """
        return self._nnx_renewed(as_rules(k, RngStream.broadcast))

    def fork(self, /, *, split: SplitSpec | None = None) -> Rngs:
        """Independent streams that start from the next keys; those that `split` selects are split.

        Args:
            split: how many keys each stream gets, or a mapping from filters to this; None for one
                each.

        >>> import nnxlite as nnx
        >>> rngs = nnx.Rngs(0, dropout=1).fork(split={"dropout": 5})
        >>> rngs.dropout.key.shape, rngs.default.key.shape
        ((5,), ())
        """
        rest = Rule(..., to_predicate(...), RngStream.fork)
        return self._nnx_renewed([*as_rules(split, RngStream.split, RngStream.fork), rest])

    def _nnx_renewed(self, rules: list[Rule]) -> Rngs:
        """New streams by the first rule that matches."""
        renewals: dict[str, Renew] = {}
        for name, stream in self.items():
            rule = first_rule(rules, {(): stream})
            if rule is not None and rule.renew is not None:
                stream.check_scalar()
                renewals[name] = rule.renew
        keep: Renew = lambda stream: stream
        return Rngs({n: renewals.get(n, keep)(stream) for n, stream in self.items()})

    def _nnx_no_stream(self, name: str) -> str:
        existing = ", ".join(repr(n) for n in self) or "none"
        return (
            f"No RngStream named {name!r} found in Rngs; its streams: {existing}. Create it with "
            f"nnx.Rngs({name}=seed), or give a default stream: nnx.Rngs(seed)."
        )


def as_key(value: tp.Any) -> jax.Array:
    """A typed key from a seed, a typed or legacy key, or a stream."""
    if isinstance(value, jax.Array):
        dtype = value.dtype
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return value
        if dtype == jnp.uint32 and value.ndim:
            try:
                return jax.random.wrap_key_data(value)
            except TypeError as error:
                raise TypeError(
                    f"A uint32 array of shape {value.shape} is not a key of the default generator "
                    f"{jax.random.key_impl(jax.random.key(0))!r}. Make a typed key instead: "
                    "jax.random.key(seed, impl=...) or jax.random.wrap_key_data(data, impl=...)."
                ) from error
    elif isinstance(value, numbers.Integral):
        return jax.random.key(operator.index(value))
    elif isinstance(value, RngStream):
        return value.key.value
    shown = short_type(value) if isinstance(value, (jax.Array, np.ndarray)) else repr(value)
    raise ValueError(
        f"Invalid rng value: {shown:.200}, expected an integer seed, a key from jax.random.key, a "
        "legacy uint32 key from jax.random.PRNGKey, or an RngStream. For a seed in an array, traced or "
        "not, pass jax.random.key(seed)."
    )


def as_splits(k: tp.Any) -> tuple[int, ...]:
    """A number of keys or a shape, as a shape."""
    try:
        numbers_of_keys = k if isinstance(k, (tuple, list)) else (k,)
        shape = tuple(map(operator.index, numbers_of_keys))
    except TypeError:
        raise TypeError(
            f"The number of keys must be an int or a tuple of ints, got {k!r}."
        ) from None
    if any(n < 0 for n in shape):
        raise ValueError(f"The number of keys cannot be negative, got {k!r}.")
    return shape


def as_rules(
    spec: SplitSpec | None,
    renew: tp.Callable[[RngStream, tuple[int, ...]], RngStream],
    unsplit: Renew | None = None,
) -> list[Rule]:
    """The rules for streams, in order; `unsplit` replaces a stream whose number of keys is None."""
    pairs = spec.items() if isinstance(spec, tp.Mapping) else [(..., spec)]

    def renewal(k: Splits) -> Renew:
        splits = as_splits(k)
        return lambda stream: renew(stream, splits)

    return [Rule(f, to_predicate(f), unsplit if k is None else renewal(k)) for f, k in pairs]


def first_rule(rules: list[Rule], values: dict[tuple[tp.Any, ...], tp.Any]) -> Rule | None:
    """The first of some rules whose filter selects all of these values, given by path."""
    for rule in rules:
        if all(rule.predicate(path, value) for path, value in values.items()):
            return rule
    return None
