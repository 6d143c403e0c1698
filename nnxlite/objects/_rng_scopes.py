"""Functions on all random streams of a model: split, fork, reseed and restore (`nnxlite.rnglib`).

Under `vmap` and `scan` a stream must have one key for each slice.  `split_rngs` and `fork_rngs`
renew the streams of any number of objects in place.  They return backups, from which keys and counts
are restored; as a `with` block or a decorator they do so automatically.  The restored counts include
the one draw that made the new keys, so that no key is ever drawn twice.

`with_rngs` does not mutate: it returns a copy with new streams.  So do the other two with
`graph=False` or `graph_updates=False`.

Everything is checked before anything is drawn: a call that fails leaves every stream unchanged.
"""

from __future__ import annotations

import functools
import types
import typing as tp

import jax

from nnxlite._base.errors import Modes, path_text
from nnxlite.filters import Filter, to_predicate
from nnxlite.graph._rebuild import Path
from nnxlite.graph._walk import iter_graph, recursive_map
from nnxlite.objects._pytree import Pytree
from nnxlite.objects._rngs import KeylessInitializer as KeylessInitializer
from nnxlite.objects._rngs import (
    Renew,
    RngStream,
    RngValue,
    Rule,
    Splits,
    SplitSpec,
    as_key,
    as_rules,
    as_splits,
    first_rule,
    zero_counts,
)
from nnxlite.objects._rngs import Samplers as Samplers
from nnxlite.variables._definition import MISSING

__all__ = ["fork_rngs", "reseed", "restore_rngs", "split_rngs", "with_rngs"]

A = tp.TypeVar("A")
F = tp.TypeVar("F", bound=tp.Callable[..., tp.Any])

StreamBackup: tp.TypeAlias = tuple[RngStream, jax.Array, jax.Array]
"""A stream, and its previous key and count."""

Policy: tp.TypeAlias = (
    tp.Literal["scalars_only", "match_shape"]
    | tp.Callable[[Path, jax.Array, tuple[int, ...]], jax.Array]
)
"""How `reseed` makes the key of a stream: by name, or `(path, new key, old shape) -> key`."""


class SplitBackups:
    """Keys and counts of streams before `split_rngs` or `fork_rngs`, to restore or use in `with`.

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


class _Modes(tp.TypedDict, total=False):
    graph: bool | None
    graph_updates: bool | None


class _SplitOptions(_Modes, total=False):
    only: Filter
    squeeze: bool


class _ForkOptions(_Modes, total=False):
    split: SplitSpec | None


class _RenewOptions(_ForkOptions, total=False):
    fork: Filter | tp.Sequence[Filter] | None
    broadcast: SplitSpec | None
    only: Filter


@tp.overload
def split_rngs(
    node: tp.Any, /, *, splits: Splits, only: Filter = ..., squeeze: bool = False
) -> SplitBackups: ...
@tp.overload
def split_rngs(
    node: A, /, *, splits: Splits, **options: tp.Unpack[_SplitOptions]
) -> A | SplitBackups: ...
@tp.overload
def split_rngs(*, splits: Splits, **options: tp.Unpack[_SplitOptions]) -> tp.Callable[[F], F]: ...
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
    """Give each stream in `node` an array of `splits` different keys.

    Args:
        node: objects in any pytree. Without it, the result is a decorator that splits the streams
            in a function's arguments during each call.
        splits: how many keys, a number or a shape.
        only: a filter that must match key and count of a stream; other streams are not changed.
        squeeze: with `splits=1`, make one key of shape `()` instead of `(1,)`.
        graph, graph_updates: if either is False, return a copy and leave `node` unchanged.

    Returns:
        The backups: a context manager, and the argument of `restore_rngs`.

    Raises:
        ValueError: for `squeeze` with another number than 1, or a stream that already has an array
            of keys.
        TypeError: if `splits` or `only` is of another type.

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
    shape = as_splits(splits)

    def split(stream: RngStream) -> RngStream:
        new = stream.split(shape)
        return RngStream(new.key.value.reshape(()), tag=stream.tag) if squeeze else new

    rules = [Rule(only, to_predicate(only), split)]
    return _change(_by_variables(rules), node, graph, graph_updates, in_place=True)


@tp.overload
def fork_rngs(node: Pytree, /, *, split: SplitSpec | None = None) -> SplitBackups: ...
@tp.overload
def fork_rngs(  # pyright: ignore[reportOverlappingOverload] - a function is decorated
    node: F, /, **options: tp.Unpack[_ForkOptions]
) -> F: ...
@tp.overload
def fork_rngs(node: tp.Any = ..., /, **options: tp.Unpack[_ForkOptions]) -> tp.Any: ...
def fork_rngs(
    node: tp.Any = MISSING,
    /,
    *,
    split: SplitSpec | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """Let each stream in `node` continue from a new key, so that the old one is not drawn from.

    Args:
        node: objects in any pytree. Without it the result is a decorator, which forks the streams
            in a function's arguments during each call; it is applied if `node` is a function.
        split: how many keys each stream gets; or a mapping from filters to this, in which the
            first match decides and None means a single key. Streams that no filter selects are
            not changed.
        graph, graph_updates: if either is False, return a copy and leave `node` unchanged.

    Returns:
        The backups: a context manager, and the argument of `restore_rngs`.

    Raises:
        ValueError: if a stream that is to be forked has an array of keys.
        TypeError: if `split` is of another type.

    >>> import nnxlite as nnx
    >>> rngs = nnx.Rngs(0)
    >>> with nnx.fork_rngs(rngs):
    ...     _ = rngs(), rngs()
    >>> int(rngs.default.count.value)
    1
    """
    rules = as_rules(split, RngStream.split, RngStream.fork)
    return _change(_by_variables(rules), node, graph, graph_updates, in_place=True)


def _by_variables(rules: list[Rule]) -> tp.Callable[[Path, RngStream], Renew | None]:
    """Renews the streams of which a rule selects both the key and the count."""

    def renewal(path: Path, stream: RngStream) -> Renew | None:
        rule = first_rule(rules, {(*path, "key"): stream.key, (*path, "count"): stream.count})
        return None if rule is None else rule.renew

    return renewal


@tp.overload
def with_rngs(node: A, /, **options: tp.Unpack[_RenewOptions]) -> A: ...
@tp.overload
def with_rngs(**options: tp.Unpack[_RenewOptions]) -> tp.Callable[[F], F]: ...
def with_rngs(
    node: tp.Any = MISSING,
    /,
    *,
    split: SplitSpec | None = None,
    fork: Filter | tp.Sequence[Filter] | None = None,
    broadcast: SplitSpec | None = None,
    only: Filter = True,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> tp.Any:
    """A copy of `node` with new streams, which shares everything but the objects themselves.

    The copy has its own objects, with the Variables of the original, except those of the streams
    that were renewed. The original's streams advance by one draw.

    Args:
        node: objects in any pytree. Without it the result is a decorator, which passes a function
            such copies of its arguments; it is applied if `node` is a function.
        split: how many different keys each stream gets, or a mapping from filters to this.
        broadcast: how many equal keys each stream gets, or a mapping from filters to this.
        fork: a filter, or several, for the streams that get one new key. A stream that no rule
            selects is not renewed; if all but one of the filters that select it are `...`, the
            first of `split`, `broadcast` and `fork` decides.
        only: a filter for the streams to consider. All filters get the stream and its path.
        graph: False refuses shared objects.
        graph_updates: accepted for compatibility; has no effect.

    Returns:
        The copy, or a decorator.

    Raises:
        ValueError: if a stream that is to be renewed has an array of keys, or is selected by
            several rules other than `...` and True.
        TypeError: if a number of keys or a filter is of another type.

    >>> import nnxlite as nnx
    >>> rngs = nnx.Rngs(params=0, dropout=1)
    >>> new = nnx.with_rngs(rngs, split={"params": 4}, fork="dropout")
    >>> new.params.key.shape, new.dropout.key.shape, rngs.params.key.shape
    ((4,), (), ())
    """
    consider = to_predicate(only)
    given = () if fork is None else (fork,)
    forks: tp.Any = fork if isinstance(fork, (tuple, list)) else given
    by_name = {
        "split": as_rules(split, RngStream.split),
        "broadcast": as_rules(broadcast, RngStream.broadcast),
        "fork": [Rule(f, to_predicate(f), RngStream.fork) for f in forks],
    }

    def renewal(path: Path, stream: RngStream) -> Renew | None:
        if not consider(path, stream):
            return None
        found = {name: first_rule(rules, {path: stream}) for name, rules in by_name.items()}
        chosen = {name: rule for name, rule in found.items() if rule and rule.renew}
        if sum(rule.filter is not ... and rule.filter is not True for rule in chosen.values()) > 1:
            listed = "".join(
                f"\n  - {name} matches filter {r.filter!r}" for name, r in chosen.items()
            )
            raise ValueError(
                f"RngStream at path {path!r} matches multiple rules:{listed}\nGive each stream one of "
                "split, broadcast and fork. `...` may stand for all that no other rule matches."
            )
        return next((rule.renew for rule in chosen.values()), None)

    return _change(renewal, node, graph, graph_updates, in_place=False)


def backup_keys(node: tp.Any, /, *, graph: bool | None = None) -> list[tuple[RngStream, jax.Array]]:
    """The streams of `node`, each with its key; `restore_rngs` restores the keys from this.

    >>> import nnxlite as nnx
    >>> rngs = nnx.Rngs(0)
    >>> backups = nnx.rnglib.backup_keys(rngs)
    >>> nnx.reseed(rngs, default=1)
    >>> nnx.restore_rngs(backups)
    >>> bool((rngs.default.key.value == nnx.Rngs(0).default.key.value).all())
    True
    """
    return [(stream, stream.key.value) for _, stream in _streams(node, graph)]


def restore_rngs(backups: tp.Iterable[StreamBackup | tuple[RngStream, jax.Array]], /) -> None:
    """Restore the keys and counts of streams from `backups` (see `split_rngs`).

    For a pair (stream, key) only the key is restored.

    Args:
        backups: what `split_rngs` or `fork_rngs` returned, or pairs (stream, key).

    Raises:
        TypeError: before any change, if an item is not a (stream, key, count) triple or a pair.

    >>> import nnxlite as nnx
    >>> rngs = nnx.Rngs(0)
    >>> backups = nnx.split_rngs(rngs, splits=3)
    >>> rngs.default.key.shape
    (3,)
    >>> nnx.restore_rngs(backups)
    >>> rngs.default.key.shape
    ()
    """
    backups = list(backups)
    for item in backups:
        is_backup = isinstance(item, tuple) and len(item) in (2, 3)
        if not (is_backup and isinstance(item[0], RngStream) and isinstance(item[1], jax.Array)):
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
    """Restart streams of `node`, with keys derived from the given ones by stream tag.

    Streams with the same tag get different keys: the first, second, ... key of a stream that starts
    from the given key, in the order of `nnx.iter_graph`. Counts are reset to 0.

    Args:
        node: objects in any pytree.
        graph: False refuses shared objects.
        policy: what to do with a stream of several keys: "scalars_only" raises, "match_shape"
            splits the new key into as many, a function `(path, new key, old shape)` decides.
        **stream_keys: for each tag a seed, a key or a stream.

    Raises:
        ValueError: for another policy, a value that is not a key, or, under "scalars_only", a
            stream with an array of keys. Nothing has changed then.

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
            key, shape = source(), stream.key.value.shape
            if callable(policy):
                key = as_key(policy(path, key, shape))
            elif shape and policy == "match_shape":
                key = jax.random.split(key, shape)
            elif shape:
                raise ValueError(
                    f"Cannot reseed stream at path {path!r}: it holds an array of keys of shape "
                    f'{shape}. Pass policy="match_shape" to give each a key of its own, or a function '
                    "(path, key, shape) -> key."
                )
            renewed.append((stream, key, zero_counts(key.shape)))
    for stream, key, count in renewed:
        _write(stream, key, count)


def _streams(node: tp.Any, graph: bool | None) -> list[tuple[Path, RngStream]]:
    """Every stream in `node` once, with its path."""
    nodes = iter_graph(node, graph=graph)
    return [(path, value) for path, value in nodes if isinstance(value, RngStream)]


def _write(stream: RngStream, key: jax.Array, count: jax.Array) -> None:
    stream.key.value = key
    stream.count.value = count


def _change(
    renewal: tp.Callable[[Path, RngStream], Renew | None],
    node: tp.Any,
    graph: bool | None,
    graph_updates: bool | None,
    *,
    in_place: bool,
) -> tp.Any:
    """Renew the streams of `node`; without it, or for a function, those of a call's arguments.

    Returns the backups of a change in place, or the changed copy.
    """

    def apply(node: tp.Any) -> tp.Any:
        modes = Modes.of(graph, graph_updates)
        chosen: dict[Path, tuple[RngStream, Renew]] = {}
        for path, stream in _streams(node, modes.graph):
            renew = renewal(path, stream)
            if renew is not None:
                stream.check_scalar(f" at path {path_text(path)}")
                _ = stream.tag, stream.count.value  # what a stream lacks is noticed before a draw
                chosen[path] = stream, renew
        if not (in_place and modes.updates):
            new = lambda path, value: chosen[path][1](value) if path in chosen else value
            return recursive_map(new, node, graph=modes.graph)
        renewed = [(stream, renew(stream)) for stream, renew in chosen.values()]
        backups = SplitBackups((s, s.key.value, s.count.value) for s, _ in renewed)
        for stream, new in renewed:
            _write(stream, new.key.value, new.count.value)
        return backups

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
