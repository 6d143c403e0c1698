"""Filters: a small algebra that selects leaves of a graph.

A *predicate* is called as `predicate(path, leaf)` and returns True or False.  A *filter* is anything
that `to_predicate` can turn into one:

* a class: leaves of that class (`OfType`);
* a string: leaves with that tag (`WithTag`);
* `...` or `True`: every leaf (`Everything`); `None` or `False`: no leaf (`Nothing`);
* a list or tuple of filters: leaves that any of them matches (`Any`);
* a predicate, such as the members of the algebra below or a function.

The members of the algebra are values: equal if they mean the same, hashable, and with a `repr` that
is their source.  Those that combine others, `Everything` and `Nothing` may be given further
attributes, such as a docstring, which equality ignores; the others are frozen.  Functions like `split`
take several filters and assign a leaf to the first that matches, so `...` makes sense only at the end;
`filters_to_predicates` checks that.
"""

from __future__ import annotations

import collections.abc as abc
import dataclasses
import types
import typing as tp

from nnxlite._base.errors import under_own_name
from nnxlite.variables._definition import FROZEN, MISSING
from nnxlite.variables._variable import Variable

PathParts: tp.TypeAlias = tuple[tp.Any, ...]
Predicate: tp.TypeAlias = abc.Callable[[PathParts, tp.Any], bool]
"""`predicate(path, leaf)`: whether the leaf at this path is selected."""

FilterLiteral: tp.TypeAlias = type | str | Predicate | bool | types.EllipsisType | None
Filter: tp.TypeAlias = FilterLiteral | tuple["Filter", ...] | list["Filter"]
"""A predicate, or what `to_predicate` turns into one."""


@dataclasses.dataclass(frozen=True)
class WithTag:
    """Leaves whose `tag` is this one, such as the counts and keys of one random stream.

    Args:
        tag: the tag.

    >>> import nnxlite as nnx
    >>> nnx.WithTag("dropout")((), nnx.Param(1.0, tag="dropout"))
    True
    """

    tag: str

    def __call__(self, path: PathParts, x: tp.Any) -> bool:
        """Whether the leaf has this tag.

        Args:
            path, x: a leaf and its path.
        """
        return bool(getattr(x, "tag", MISSING) == self.tag)

    def __repr__(self) -> str:
        return f"WithTag({self.tag!r})"


@dataclasses.dataclass(frozen=True)
class PathContains:
    """Leaves with this key somewhere in their path.

    With `exact=False`, some key of the path must contain the text of `key`.

    Args:
        key: an attribute name, an index, or a dict key.
        exact: whether a key of the path must be equal to `key`, or contain it as text.

    >>> import nnxlite as nnx
    >>> nnx.PathContains("kernel")(("head", "kernel"), None)
    True
    >>> nnx.PathContains("ker")(("head", "kernel"), None)
    False
    >>> nnx.PathContains("ker", exact=False)(("head", "kernel"), None)
    True
    """

    key: tp.Any
    exact: bool = True

    def __call__(self, path: PathParts, x: tp.Any) -> bool:
        """Whether the path has this key.

        Args:
            path, x: a leaf and its path.
        """
        if self.exact:
            return self.key in path
        text = str(self.key)
        return any(text in str(part) for part in path)

    def __repr__(self) -> str:
        return f"PathContains({self.key!r}, exact={self.exact})"


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Variables that `nnx.freeze` has frozen.

    >>> import nnxlite as nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> nnx.freeze(model.kernel)
    >>> list(nnx.state(model, nnx.Frozen())), list(nnx.state(model, nnx.Not(nnx.Frozen())))
    (['kernel'], ['bias'])
    """

    def __call__(self, path: PathParts, x: tp.Any) -> bool:
        """Whether the leaf is a frozen Variable.

        Args:
            path, x: a leaf and its path.
        """
        return isinstance(x, Variable) and x.has_metadata(FROZEN)


@dataclasses.dataclass(unsafe_hash=True, init=False, repr=False)
class PathIn:
    """Leaves at one of these paths.

    >>> from nnxlite.filters import PathIn
    >>> PathIn(("head", "bias"))(("head", "bias"), None)
    True
    """

    paths: frozenset[PathParts]

    def __init__(self, *paths: PathParts) -> None:
        self.paths = frozenset(paths)

    def __call__(self, path: PathParts, x: tp.Any) -> bool:
        """Whether the path is one of these."""
        return path in self.paths

    def __repr__(self) -> str:
        return f"PathIn({', '.join(sorted(map(repr, self.paths)))})"


@dataclasses.dataclass(frozen=True)
class OfType:
    """Leaves of this class, and leaves that represent one (their `type` is a subclass of it).

    Args:
        type: a class, or a tuple of classes.

    Raises:
        TypeError: if `isinstance` does not accept `type`.

    >>> import nnxlite as nnx
    >>> nnx.OfType(nnx.Variable)((), nnx.Param(1.0)), nnx.OfType(int)((), 1)
    (True, True)
    """

    type: tp.Any

    def __post_init__(self) -> None:
        try:
            isinstance(None, self.type)
        except TypeError:
            raise TypeError(
                f"OfType needs a class (or a union or tuple of classes), got {self.type!r}."
            ) from None

    def __call__(self, path: PathParts, x: tp.Any) -> bool:
        """Whether the leaf is an instance of this class, or represents one.

        Args:
            path, x: a leaf and its path.
        """
        if isinstance(x, self.type):
            return True
        kind = getattr(x, "type", None)
        return isinstance(kind, type) and issubclass(kind, self.type)

    def __repr__(self) -> str:
        return f"OfType({self.type!r})"


@dataclasses.dataclass(unsafe_hash=True, init=False, repr=False)
class _Joined:
    """Base of the filters that combine others."""

    predicates: tuple[Predicate, ...]

    def __init_subclass__(cls) -> None:
        under_own_name(cls, "__init__")

    def __init__(self, *filters: Filter) -> None:
        self.predicates = tuple(map(to_predicate, filters))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.predicates))})"


@dataclasses.dataclass(unsafe_hash=True, init=False, repr=False)
class Any(_Joined):
    """Leaves that at least one of the filters matches (none, without filters).

    >>> import nnxlite as nnx
    >>> nnx.Any(nnx.BatchStat, nnx.Param)((), nnx.Param(1.0))
    True
    """

    def __call__(self, path: PathParts, x: tp.Any) -> bool:
        """Whether any of the filters matches.

        Args:
            path, x: a leaf and its path.
        """
        return any(predicate(path, x) for predicate in self.predicates)


@dataclasses.dataclass(unsafe_hash=True, init=False, repr=False)
class All(_Joined):
    """Leaves that all of the filters match (every leaf, without filters).

    >>> import nnxlite as nnx
    >>> nnx.All(nnx.Param, nnx.PathContains("head"))(("head", "bias"), nnx.Param(1.0))
    True
    """

    def __call__(self, path: PathParts, x: tp.Any) -> bool:
        """Whether all of the filters match.

        Args:
            path, x: a leaf and its path.
        """
        return all(predicate(path, x) for predicate in self.predicates)


@dataclasses.dataclass(unsafe_hash=True, init=False, repr=False)
class Not:
    """Leaves that the filter does not match.

    Args:
        collection_filter: the filter that must not match.

    >>> import nnxlite as nnx
    >>> nnx.Not(nnx.Param)((), nnx.BatchStat(1.0))
    True
    """

    predicate: Predicate

    def __init__(self, collection_filter: Filter, /) -> None:
        self.predicate = to_predicate(collection_filter)

    def __call__(self, path: PathParts, x: tp.Any) -> bool:
        """Whether the filter does not match.

        Args:
            path, x: a leaf and its path.
        """
        return not self.predicate(path, x)

    def __repr__(self) -> str:
        return f"Not({self.predicate!r})"


@dataclasses.dataclass(unsafe_hash=True)
class Everything:
    """Every leaf; the meaning of `...` and `True`.

    >>> import nnxlite as nnx
    >>> nnx.Everything()(("any", "path"), object())
    True
    """

    def __call__(self, path: PathParts, x: tp.Any) -> bool:
        """Always True.

        Args:
            path, x: a leaf and its path.
        """
        return True


@dataclasses.dataclass(unsafe_hash=True)
class Nothing:
    """No leaf; the meaning of `None` and `False`.

    >>> import nnxlite as nnx
    >>> nnx.Nothing()(("any", "path"), object())
    False
    """

    def __call__(self, path: PathParts, x: tp.Any) -> bool:
        """Always False.

        Args:
            path, x: a leaf and its path.
        """
        return False


_EVERYTHING = Everything()
_NOTHING = Nothing()


def to_predicate(filter: Filter) -> Predicate:
    """The predicate for a filter.

    Raises TypeError if it is not a filter.

    >>> from nnxlite.filters import to_predicate
    >>> to_predicate(["dropout", int])
    Any(WithTag('dropout'), OfType(<class 'int'>))
    """
    if isinstance(filter, type):
        return OfType(filter)
    if filter is ... or filter is True:
        return _EVERYTHING
    if filter is None or filter is False:
        return _NOTHING
    if isinstance(filter, str):
        return WithTag(filter)
    if isinstance(filter, (list, tuple)):
        return Any(*filter)
    if callable(filter):
        return filter
    raise TypeError(
        f"{filter!r} of type '{type(filter).__name__}' is not a filter. A filter is a class, a "
        "string (a tag), `...` or True (everything), None or False (nothing), a function "
        "(path, leaf) -> bool, or a list or tuple of filters (any of them)."
    )


def filters_to_predicates(filters: abc.Sequence[Filter]) -> tuple[Predicate, ...]:
    """The predicates for several filters, of which the first that matches a leaf gets it.

    Raises:
        ValueError: if `...` or `True` comes before another filter.
        TypeError: if one is not a filter.

    >>> from nnxlite.filters import filters_to_predicates
    >>> filters_to_predicates([str, ...])
    (OfType(<class 'str'>), Everything())
    """
    last = len(filters) - 1
    for i, filter in enumerate(filters):
        if (filter is ... or filter is True) and i != last:
            if any(f is not ... and f is not True for f in filters[i + 1 :]):
                raise ValueError(
                    f"`...` or `True` can only be used as the last filters, got {filter} at index "
                    f"{i} of {list(filters)}: the filters after it would never match. Move it to "
                    "the end."
                )
    return tuple([to_predicate(filter) for filter in filters])


def match_index(predicates: abc.Sequence[Predicate], path: PathParts, leaf: tp.Any) -> int | None:
    """The position of the first predicate that matches the leaf, or None.

    >>> from nnxlite.filters import filters_to_predicates, match_index
    >>> match_index(filters_to_predicates([str, int]), ("a",), 1)
    1
    """
    for index, predicate in enumerate(predicates):
        if predicate(path, leaf):
            return index
    return None
