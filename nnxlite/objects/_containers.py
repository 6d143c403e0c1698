"""`List` and `Dict`: containers that are graph objects themselves, shared by reference.

Their items are attributes (under int keys in a List), with the same statuses as attributes: an item
that is data is data, the rest is static.  They are equal if their items are (a Dict also to any
other mapping); but like all graph objects they are hashed by identity, and in a graph two equal
ones are different nodes.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
import typing as tp

import jax

from nnxlite._base.interning import Writes
from nnxlite._base.text import Text, mapping_node, sequence_node
from nnxlite._state._flat import sorted_keys
from nnxlite.graph._defs import Assigned, Removed
from nnxlite.objects._fields import Tagged
from nnxlite.objects._module import CAPTURES, Module

__all__ = ["Dict", "List"]

T = tp.TypeVar("T")


def _key(other: tp.Callable[[tp.Any], tp.Any], name: tp.Any) -> tp.Any:
    """JAX's key for an item; `other` makes that for a name that is not text."""
    return jax.tree_util.GetAttrKey(name) if isinstance(name, str) else other(name)


def _position(name: str, size: int) -> int | None:
    """The position for an attribute name such as "0", or None."""
    number = int(name) if name.isdecimal() and len(name) < 10 else size
    return number if number < size and str(number) == name else None


class List(Module, tp.MutableSequence[T]):
    """A list of layers, Variables, arrays or static values.

    It has the methods of a list; a slice of it is a Python list.  An item is also an attribute, named
    by its position, so that `getattr(model.layers, "0")` follows a path like "layers.0.kernel".

    Args:
        it: the items; nothing makes an empty list.

    >>> import nnxlite as nnx
    >>> layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(3)])
    >>> len(layers), layers[-1] is layers[2]
    (3, True)
    """

    __slots__ = ()

    _nnx_key = staticmethod(functools.partial(_key, jax.tree_util.SequenceKey))

    @property  # pyright: ignore[reportGeneralTypeIssues] - that of instances, not of the class
    def __dict__(self) -> tp.Mapping[str, tp.Any]:
        """The attributes by name, as `getattr` and `setattr` take them; the items are "0", "1", ..."""
        return types.MappingProxyType({str(name): v for name, v in self._nnx_dict.items()})

    @__dict__.setter
    def __dict__(  # pyright: ignore[reportIncompatibleVariableOverride] - `vars` reads this one
        self, attributes: tp.Mapping[str, tp.Any]
    ) -> None:
        names = [(_position(str(name), len(attributes)), name) for name in attributes]
        items = {name if number is None else number: attributes[name] for number, name in names}
        object.__setattr__(self, "_nnx_dict", items)

    def __init__(self, it: tp.Iterable[T] | None = None, /) -> None:
        for number, value in enumerate(it if it is not None else ()):
            self._nnx_assign(number, value)

    def __len__(self) -> int:
        items: tp.Any = self._nnx_dict
        size = len(items)  # minus the few attributes that are not items
        while size and size - 1 not in items:
            size -= 1
        return size

    def _nnx_index(self, index: tp.SupportsIndex) -> int:
        """The position for an index, which may be negative.

        Raises:
            TypeError: if it is not an integer.
            IndexError: if it is out of range.
        """
        size = len(self)
        try:
            return range(size)[index]
        except TypeError:
            raise TypeError(
                "Invalid index type: List indices must be integers or slices, got "
                f"{type(index).__name__}."
            ) from None
        except IndexError:
            raise IndexError(
                f"Index out of bounds: {operator.index(index)} for a List of {size} items."
            ) from None

    @tp.overload
    def __getitem__(self, index: tp.SupportsIndex) -> T: ...
    @tp.overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: tp.Any) -> tp.Any:
        items: tp.Any = self._nnx_dict
        if isinstance(index, slice):
            return [items[number] for number in range(*index.indices(len(self)))]
        return items[self._nnx_index(index)]

    @tp.overload
    def __setitem__(self, index: tp.SupportsIndex, value: T) -> None: ...
    @tp.overload
    def __setitem__(self, index: slice, value: tp.Iterable[T]) -> None: ...
    def __setitem__(self, index: tp.Any, value: tp.Any) -> None:
        if isinstance(index, slice):
            items = self._nnx_items()
            items[index] = [self._nnx_tagged(v) for v in value]
            self._nnx_replace(items)
        else:
            self._nnx_assign(self._nnx_index(index), value)

    def __delitem__(self, index: tp.SupportsIndex | slice) -> None:
        items = self._nnx_items()
        del items[index if isinstance(index, slice) else self._nnx_index(index)]
        self._nnx_replace(items)

    def _nnx_items(self) -> list[Tagged]:
        """The items with their statuses."""
        return [Tagged(value, self._nnx_status[i]) for i, value in enumerate(self)]

    def _nnx_edit(self, writes: Writes, assigned: Assigned, removed: Removed = ()) -> None:
        items = [item for n, item in enumerate(self._nnx_items()) if n not in removed]
        kept = dict(enumerate(items)) if len(items) < len(self) else {}  # those after them move up
        others = [n for n in removed if not isinstance(n, int)]
        super()._nnx_edit(writes, {**kept, **assigned}, [*range(len(items), len(self)), *others])

    def _nnx_replace(self, items: list[Tagged]) -> None:
        """Replace all items by these, in one step."""
        writes = Writes()
        super()._nnx_edit(writes, dict(enumerate(items)), range(len(items), len(self)))
        writes.make()

    def _nnx_tagged(self, value: tp.Any) -> Tagged:
        """A new item with its status; raises an error, before anything changes, if it cannot be one."""
        return Tagged(*self._nnx_decided(len(self), value))

    def __iter__(self) -> tp.Iterator[T]:
        items: tp.Any = self._nnx_dict
        number = 0
        while number in items:
            yield items[number]
            number += 1

    if not tp.TYPE_CHECKING:

        def __getattr__(self, name: str) -> tp.Any:
            number = _position(name, len(self))
            if number is None:
                raise AttributeError(f"'{type(self).__name__}' object has no attribute {name!r}")
            return self[number]

        def __setattr__(self, name: str, value: tp.Any) -> None:
            number, size = _position(name, 10**9), len(self)
            if number is None:
                super().__setattr__(name, value)
            elif number <= size:
                self._nnx_assign(number, value)
            else:
                raise AttributeError(
                    f"Cannot assign the attribute {name!r} of a List of {size} items, since it would be "
                    f"an item: the next one is {str(size)!r}. Use append, or fill the List in order."
                )

    def append(self, value: T) -> None:
        """Add an item at the end.

        Args:
            value: the item.
        """
        self._nnx_assign(len(self), value)

    def insert(self, index: tp.SupportsIndex, value: T) -> None:
        """Add an item before position `index`.

        Args:
            index: the position of the new item.
            value: the item.
        """
        items = self._nnx_items()
        items.insert(operator.index(index), self._nnx_tagged(value))
        self._nnx_replace(items)

    def reverse(self) -> None:
        """Reverse the order of the items."""
        self._nnx_replace(self._nnx_items()[::-1])

    def __add__(self, other: tp.Iterable[T]) -> List[T]:
        return List([*self, *other])

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *vars(self)})

    def __hash__(self) -> int:
        return id(self) >> 4

    def __eq__(self, other: tp.Any) -> bool:
        if self is other:
            return True
        return list(self) == list(other) if isinstance(other, List) else NotImplemented

    def __nnx_text__(self) -> Text:
        return sequence_node(self, list(self))


class Dict(Module, tp.MutableMapping[str, T]):
    """A dict of layers, Variables, arrays or static values; items are attributes as well.

    It has the methods of a dict. In a transform, and after one has taken it, a loop over it goes in the
    order of the names, so that the same code computes the same outside.

    Args:
        args: a mapping, or an iterable of (key, value) pairs.
        kwargs: further items by name.

    >>> import nnxlite as nnx
    >>> heads = nnx.Dict(left=nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    >>> heads["left"] is heads.left
    True
    """

    __slots__ = ()

    _nnx_key = staticmethod(functools.partial(_key, jax.tree_util.DictKey))

    @tp.overload
    def __init__(self, /, **kwargs: T) -> None: ...
    @tp.overload
    def __init__(
        self, mapping: tp.Mapping[str, T] | tp.Iterable[tuple[str, T]], /, **kwargs: T
    ) -> None: ...
    def __init__(self, *args: tp.Any, **kwargs: tp.Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self._nnx_assign(key, value)

    def __getitem__(self, key: str) -> T:
        try:
            return self._nnx_dict[key]
        except KeyError:
            raise KeyError(f"{key!r} is not in the Dict; it has {list(self)}.") from None

    def __setitem__(self, key: str, value: T) -> None:
        self._nnx_assign(key, value)

    def __delitem__(self, key: str) -> None:
        self[key]
        self._nnx_discard(key)

    def __iter__(self) -> tp.Iterator[str]:
        items = self._nnx_dict
        return iter([k for k in items if k != CAPTURES] if CAPTURES in items else items)

    def __len__(self) -> int:
        return len(self._nnx_dict) - (CAPTURES in self._nnx_dict)

    def _nnx_sort(self) -> None:
        items = self._nnx_dict
        if [*items] != (names := sorted_keys(items)):
            # At once, since other threads may read.
            object.__setattr__(self, "_nnx_dict", {name: items[name] for name in names})

    def __getattr__(self, name: str) -> tp.Any:
        raise AttributeError(
            f"'{type(self).__name__}' object has no attribute {name!r}, and no item of that name"
        )

    if tp.TYPE_CHECKING:  # any attribute is an item

        def __setattr__(self, name: str, value: tp.Any) -> None: ...

        def __delattr__(self, name: str) -> None: ...

    def __dir__(self) -> list[str]:
        return sorted(name for name in super().__dir__() if isinstance(name, str))

    def __hash__(self) -> int:
        return id(self) >> 4

    def __nnx_text__(self) -> Text:
        return dataclasses.replace(mapping_node(self, self._nnx_dict), owner=type(self))
