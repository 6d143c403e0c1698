"""Every random stream of a model at once: split, fork, reseed, and put back.

Under `vmap` and `scan` a stream must hold one key for each slice.  `split_rngs` and `fork_rngs`
prepare the streams of any number of objects in place and remember what they held; the backups they
return restore it, as a `with` block or a decorator does on its own.  The originals' counters stay
moved on by the one draw that made the new keys, so that nothing is ever drawn twice.

`with_rngs` is the same without mutation: it returns a copy whose streams are new.  So do the other
two in the modes `graph=False` and `graph_updates=False`.

Everything is checked before anything is drawn: a call that fails leaves every stream as it was.
"""

from __future__ import annotations

import functools
import types
import typing as tp

import jax

from nnxlite._config import Modes
from nnxlite._errors import path_text
from nnxlite.filters import Filter, to_predicate
from nnxlite.graph import Path, iter_graph, recursive_map
from nnxlite.objects._rngs._streams import (
    RngStream,
    RngValue,
    Rule,
    Splits,
    as_key,
    as_rules,
    as_splits,
    zero_counts,
)
from nnxlite.variables import MISSING

A = tp.TypeVar("A")
F = tp.TypeVar("F", bound=tp.Callable[..., tp.Any])

StreamBackup: tp.TypeAlias = tuple[RngStream, jax.Array, jax.Array]
"""A stream, and the key and count it held."""

Renew: tp.TypeAlias = tp.Callable[[RngStream], RngStream]
"""Draws from a stream and returns the stream that replaces it."""

Plan: tp.TypeAlias = tp.Callable[[Path, RngStream], Renew | None]
"""How the stream at a path is renewed; None to leave it as it is."""

Policy: tp.TypeAlias = (
    tp.Literal["scalars_only", "match_shape"]
    | tp.Callable[[Path, jax.Array, tuple[int, ...]], jax.Array]
)
"""How `reseed` treats a stream: by name, or `(path, key, shape of the old key) -> key`."""


class SplitBackups:
    """What streams held before `split_rngs` or `fork_rngs`: iterate, restore, or use in `with`.

    >>> import nnxlite as nnx
    >>> rngs = nnx.Rngs(0)
    >>> with nnx.split_rngs(rngs, splits=3):
    ...     rngs.default.key.shape
    (3,)
    >>> rngs.default.key.shape
    ()
    """

    def __init__(self, backups: tp.Iterable[StreamBackup]) -> None:
        self.backups = list(backups)

    def __iter__(self) -> tp.Iterator[StreamBackup]:
        return iter(self.backups)

    def __enter__(self) -> SplitBackups:
        return self

    def __exit__(self, *exc: tp.Any) -> None:
        restore_rngs(self.backups)

    def __repr__(self) -> str:
        return f"SplitBackups({len(self.backups)} streams)"


def split_rngs(
    node: tp.Any = MISSING,
    /,
    *,
    splits: Splits,
    only: Filter = ...,
    squeeze: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """Give the streams in `node` an array of `splits` different keys each.

    Args:
        node: objects in any pytree. Without it, a decorator is returned that splits the streams
            in a function's arguments during each call.
        splits: how many keys, a number or a shape.
        only: a filter of key and count; other streams are left alone.
        squeeze: with `splits=1`, make one key of shape `()` instead of `(1,)`.
        graph, graph_updates: False for either returns a copy and leaves `node` itself in place.

    Returns the backups: a context manager, and the argument of `restore_rngs`.

    Raises:
        ValueError: when `squeeze` comes with another number than 1, or a stream holds an array of
            keys already.
        TypeError: when `splits` or `only` is not what it should be.

    >>> import nnxlite as nnx, jax
    >>> rngs = nnx.Rngs(params=0, dropout=1)
    >>> @nnx.split_rngs(splits=4, only="params")
    ... def shapes(rngs):
    ...     return rngs.params.key.shape, rngs.dropout.key.shape
    >>> shapes(rngs), rngs.params.key.shape
    (((4,), ()), ())
    """
    if squeeze and splits != 1:
        raise ValueError(f"squeeze=True is only supported for splits=1, got splits={splits!r}.")
    shape = () if squeeze else as_splits(splits)
    number = as_splits(splits)
    rule = Rule(only, to_predicate(only), number)

    def renew(stream: RngStream) -> RngStream:
        keys = jax.random.split(stream(), number)
        return RngStream(keys.reshape(shape) if squeeze else keys, tag=stream.tag)

    def plan(path: Path, stream: RngStream) -> Renew | None:
        return renew if rule.selects_variables(path, stream) else None

    return _change(plan, node, graph, graph_updates, in_place=True)


def fork_rngs(
    node: tp.Any = MISSING,
    /,
    *,
    split: tp.Mapping[Filter, Splits | None] | Splits | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """Let the streams in `node` go on from a key of their own, so that draws do not touch the old.

    Args:
        node: objects in any pytree. Without it (or with a plain function) a decorator is returned,
            or applied, that forks the streams in the function's arguments during each call.
        split: how many keys each stream gets; or a mapping from filters to that, in which the
            first match decides and None means one single key. Streams that no filter selects are
            left alone.
        graph, graph_updates: False for either returns a copy and leaves `node` itself in place.

    Returns the backups: a context manager, and the argument of `restore_rngs`.

    Raises:
        ValueError: when a stream that is to be forked holds an array of keys.
        TypeError: when `split` is not what it should be.

    >>> import nnxlite as nnx
    >>> rngs = nnx.Rngs(0)
    >>> with nnx.fork_rngs(rngs):
    ...     _ = rngs(), rngs()
    >>> int(rngs.default.count.value)
    1
    """
    rules = as_rules({...: None} if split is None else split)

    def plan(path: Path, stream: RngStream) -> Renew | None:
        rule = next((rule for rule in rules if rule.selects_variables(path, stream)), None)
        return None if rule is None else functools.partial(RngStream.fork, split=rule.splits)

    return _change(plan, node, graph, graph_updates, in_place=True)


def with_rngs(
    node: tp.Any = MISSING,
    /,
    *,
    split: tp.Mapping[Filter, Splits] | Splits | None = None,
    fork: Filter | tp.Sequence[Filter] | None = None,
    broadcast: tp.Mapping[Filter, Splits] | Splits | None = None,
    only: Filter = True,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """A copy of `node` whose streams are new; everything but the objects themselves is shared.

    The copy has its own objects, and the very Variables of the original save those of the streams
    that were renewed. The original's streams move on by one draw.

    Args:
        node: objects in any pytree. Without it (or with a plain function) a decorator is returned,
            or applied, that hands the function such copies of its arguments.
        split: how many different keys each stream gets, or a mapping from filters to that.
        broadcast: how many equal keys each stream gets, or a mapping from filters to that.
        fork: a filter, or several, for the streams that get one new key. A stream that no rule
            selects is kept; where the others are `...`, the first of `split`, `broadcast` and
            `fork` that selects it decides.
        only: a filter for the streams to consider at all. All filters see the stream and its path.
        graph: False refuses shared objects.
        graph_updates: accepted for compatibility; both values mean the same here.

    Raises:
        ValueError: when a stream that is to be renewed holds an array of keys, or several rules
            select it (`...` and True aside).
        TypeError: when a number of keys or a filter is not what it should be.

    >>> import nnxlite as nnx
    >>> rngs = nnx.Rngs(params=0, dropout=1)
    >>> new = nnx.with_rngs(rngs, split={"params": 4}, fork="dropout")
    >>> new.params.key.shape, new.dropout.key.shape, rngs.params.key.shape
    ((4,), (), ())
    """
    consider = to_predicate(only)
    several = isinstance(fork, (tuple, list))
    forks = fork if several else () if fork is None else (fork,)
    by_name = {
        "split": as_rules(split),
        "broadcast": as_rules(broadcast),
        "fork": [Rule(f, to_predicate(f), ()) for f in tp.cast(tp.Sequence[Filter], forks)],
    }

    def plan(path: Path, stream: RngStream) -> Renew | None:
        if not consider(path, stream):
            return None
        chosen: dict[str, Rule] = {}
        for name, rules in by_name.items():
            rule = next((rule for rule in rules if rule.predicate(path, stream)), None)
            if rule is not None and rule.splits is not None:
                chosen[name] = rule
        _refuse_conflict(path, chosen)
        for name, rule in chosen.items():
            if name == "fork":
                return RngStream.fork
            return functools.partial(getattr(RngStream, name), k=rule.splits)
        return None

    return _change(plan, node, graph, graph_updates, in_place=False)


def _refuse_conflict(path: Path, chosen: dict[str, Rule]) -> None:
    """Raise ValueError where several rules select a stream, those for everything aside."""
    if sum(rule.filter is not ... and rule.filter is not True for rule in chosen.values()) > 1:
        listed = "".join(f"\n  - {name} matches filter {r.filter!r}" for name, r in chosen.items())
        raise ValueError(
            f"RngStream at path {path!r} matches multiple rules:{listed}\nGive each stream one of "
            "split, broadcast and fork. `...` may stand for all that no other rule matches."
        )


def backup_keys(node: tp.Any, /, *, graph: bool | None = None) -> list[tuple[RngStream, jax.Array]]:
    """The streams of `node`, each with its key: what `restore_rngs` takes to bring the keys back.

    >>> import nnxlite as nnx
    >>> rngs = nnx.Rngs(0)
    >>> backups = nnx.rnglib.backup_keys(rngs)
    >>> nnx.reseed(rngs, default=1)
    >>> nnx.restore_rngs(backups)
    >>> bool((rngs.default.key.value == nnx.Rngs(0).default.key.value).all())
    True
    """
    streams = (x for _, x in iter_graph(node, graph=graph) if isinstance(x, RngStream))
    return [(stream, stream.key.value) for stream in streams]


def restore_rngs(backups: tp.Iterable[StreamBackup | tuple[RngStream, jax.Array]], /) -> None:
    """Give streams back the key and count recorded in `backups` (see `split_rngs`).

    A pair (stream, key) brings the key back and leaves the count.

    Raises TypeError, before any change, when an item is not a (stream, key, count) triple or a pair.
    """
    backups = list(backups)
    for item in backups:
        fits = isinstance(item, tuple) and len(item) in (2, 3) and isinstance(item[0], RngStream)
        if not (fits and isinstance(item[1], jax.Array)):
            raise TypeError(
                "restore_rngs takes what split_rngs or fork_rngs returned, an iterable of "
                f"(stream, key, count) triples; got an item of type {type(item).__name__}."
            )
    for stream, key, *count in backups:
        _write(stream, key, count[0] if count else stream.count.value)


def reseed(
    node: tp.Any,
    /,
    *,
    graph: bool | None = None,
    policy: Policy = "scalars_only",
    **stream_keys: RngValue,
) -> None:
    """Start streams of `node` again, from keys derived from the given ones by stream tag.

    Streams with the same tag get different keys: the first, the second, ... draw from a stream
    that begins with the given key, in the order of `nnx.iter_graph`. Counts go back to 0.

    Args:
        node: objects in any pytree.
        graph: False refuses shared objects.
        policy: what to do with a stream of several keys: "scalars_only" raises, "match_shape"
            splits the new key into as many, a function `(path, new key, old shape)` decides.
        **stream_keys: for each tag a seed, a key or a stream.

    Raises:
        ValueError: for another policy, a value that is no key, or, under "scalars_only", a stream
            that holds an array of keys. Nothing has changed then.

    >>> import nnxlite as nnx
    >>> rngs = nnx.Rngs(0, dropout=1)
    >>> first = rngs.dropout.normal()
    >>> nnx.reseed(rngs, dropout=7)
    >>> int(rngs.dropout.count.value), bool(rngs.dropout.normal() == first)
    (0, False)
    """
    if not callable(policy) and policy not in ("scalars_only", "match_shape"):
        raise ValueError(
            f'policy must be "scalars_only", "match_shape" or a callable, got {policy!r}.'
        )
    sources = {tag: RngStream(value, tag=tag) for tag, value in stream_keys.items()}
    renewed: list[StreamBackup] = []
    for path, stream in _streams(node, graph):
        source = sources.get(stream.tag)
        if source is not None:
            source.check_scalar(" given to nnx.reseed")
            key = _reseeded(path, source(), stream.key.value.shape, policy)
            renewed.append((stream, key, zero_counts(key.shape)))
    for stream, key, count in renewed:
        _write(stream, key, count)


def _reseeded(path: Path, key: jax.Array, shape: tuple[int, ...], policy: Policy) -> jax.Array:
    if callable(policy):
        return as_key(policy(path, key, shape))
    if not shape:
        return key
    if policy == "match_shape":
        return jax.random.split(key, shape)
    raise ValueError(
        f"Cannot reseed stream at path {path!r}: it holds an array of keys of shape "
        f'{shape}. Pass policy="match_shape" to give each a key of its own, or a function '
        "(path, key, shape) -> key."
    )


def _streams(node: tp.Any, graph: bool | None) -> list[tuple[Path, RngStream]]:
    """Every stream in `node` once, with its path."""
    found = iter_graph(node, graph=graph)
    return [(tuple(path), value) for path, value in found if isinstance(value, RngStream)]


def _write(stream: RngStream, key: jax.Array, count: jax.Array) -> None:
    stream.key.value = key
    stream.count.value = count


def _change(
    plan: Plan,
    node: tp.Any,
    graph: bool | None,
    graph_updates: bool | None,
    *,
    in_place: bool,
) -> tp.Any:
    """Renew the streams of `node`; without it, or for a function, those of a call's arguments."""
    apply = functools.partial(_apply, plan, graph, graph_updates, in_place)

    def decorate(fun: F) -> F:
        @functools.wraps(fun)
        def wrapper(*args: tp.Any, **kwargs: tp.Any) -> tp.Any:
            applied = apply((args, kwargs))
            if isinstance(applied, SplitBackups):
                with applied:
                    return fun(*args, **kwargs)
            args, kwargs = applied
            return fun(*args, **kwargs)

        return tp.cast(F, wrapper)

    if node is MISSING:
        return decorate
    return decorate(node) if isinstance(node, types.FunctionType) else apply(node)


def _apply(
    plan: Plan, graph: bool | None, graph_updates: bool | None, in_place: bool, node: tp.Any
) -> tp.Any:
    """The backups of a change in place, or the changed copy."""
    graph, updates = Modes.of(graph, graph_updates)
    chosen: dict[Path, tuple[RngStream, Renew]] = {}
    for path, stream in _streams(node, graph):
        renew = plan(path, stream)
        if renew is not None:
            stream.check_scalar(f" at path {path_text(path)}")
            chosen[path] = stream, renew
    if not (in_place and updates):

        def renewed_in_copy(path: Path, value: tp.Any) -> tp.Any:
            return chosen[path][1](value) if path in chosen else value

        return recursive_map(renewed_in_copy, node, graph=graph)
    renewed = [(stream, renew(stream)) for stream, renew in chosen.values()]
    backups = SplitBackups((s, s.key.value, s.count.value) for s, _ in renewed)
    for stream, new in renewed:
        _write(stream, new.key.value, new.count.value)
    return backups
