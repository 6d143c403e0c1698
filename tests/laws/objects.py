"""Objects and Variables as plain Python: what a user sees of the real ones, without any engine.

`Thing` stands for an object, `Cell` for a Variable.  They are edited in the same way as the real
ones, so one program can be run on both.  `model` works on them as well.
"""

from __future__ import annotations

import typing as tp

import jax
import numpy as np

import nnxlite as nnx
from tests.laws import graphs, model

Tagged = type(nnx.data(0))


class Cell:
    """A box with a value and metadata."""

    def __init__(self, value: tp.Any, **metadata: tp.Any) -> None:
        self.value = value
        self.metadata = metadata

    def get_raw_value(self) -> tp.Any:
        return self.value

    def set_raw_value(self, value: tp.Any) -> None:
        self.value = value

    def get_value(self) -> tp.Any:
        return self._through("on_get_value", self.value)

    def set_value(self, value: tp.Any) -> None:
        self.value = self._through("on_set_value", value)

    def _through(self, name: str, value: tp.Any) -> tp.Any:
        """A value after the functions that the metadata have under a name."""
        for hook in self.metadata.get(name, ()):
            value = hook(self, value)
        return frozen(value) if isinstance(value, np.generic) else value

    def get_metadata(self) -> dict[str, tp.Any]:
        return self.metadata

    def set_metadata(self, **metadata: tp.Any) -> None:
        self.metadata = {**self.metadata, **metadata}


class Param(Cell): ...


class BatchStat(Cell): ...


class Count(Cell): ...


class Intermediate(Cell): ...


class RngKey(Cell): ...


class RngCount(Cell): ...


class Thing:
    """Named attributes, each of which is data or static since it was first assigned."""

    __slots__ = ("__dict__", "__weakref__", "_nnx_status")
    _nnx_status: dict[tp.Any, bool]

    def __new__(cls, *args: tp.Any, **kwargs: tp.Any) -> tp.Self:
        self = object.__new__(cls)
        object.__setattr__(self, "_nnx_status", {})
        return self

    def _nnx_assign(self, name: tp.Any, value: tp.Any) -> None:
        status = self._nnx_status.get(name)
        if isinstance(value, Tagged):
            status, value = value.is_data, value.value
        elif status is None or (not status and isinstance(self, Loose)):
            status = contains_data(value)
        elif not status and contains_data(value):
            raise ValueError("data in a static attribute")
        vars(self)[name] = value
        self._nnx_status[name] = status

    def __setattr__(self, name: str, value: tp.Any) -> None:
        self._nnx_assign(name, value)

    def __delattr__(self, name: str) -> None:
        del vars(self)[name], self._nnx_status[name]


class Node(Thing): ...


class Twin(Thing): ...


class Loose(Thing): ...


class Stream(Thing):
    def __init__(self, key: tp.Any, *, tag: str) -> None:
        self.tag = tag
        self.key = RngKey(key, tag=tag)
        self.count = RngCount(frozen(np.zeros(key.shape, np.uint32)), tag=tag)


class Dict(Thing):
    __setitem__ = Thing._nnx_assign
    __delitem__ = Thing.__delattr__


class List(Thing):
    def __len__(self) -> int:
        return len(vars(self))

    def append(self, value: tp.Any) -> None:
        self._nnx_assign(len(self), value)

    __setitem__ = Thing._nnx_assign

    def __delitem__(self, index: int) -> None:
        items = [(v, self._nnx_status[i]) for i, v in sorted(vars(self).items()) if i != index]
        vars(self).clear()
        self._nnx_status.clear()
        for number, (value, status) in enumerate(items):
            vars(self)[number], self._nnx_status[number] = value, status


def contains_data(value: tp.Any) -> bool:
    """Whether a value holds something that is data."""
    if model.is_reference(value) or model.is_array(value):
        return True
    if isinstance(value, (list, tuple)):
        return any(contains_data(v) for v in value)
    if isinstance(value, dict):
        return any(contains_data(v) for v in value.values())
    return isinstance(value, graphs.Box)


REAL: dict[type, type] = {
    Node: graphs.Node,
    Twin: graphs.Twin,
    Loose: graphs.Loose,
    Stream: nnx.RngStream,
    Dict: nnx.Dict,
    List: nnx.List,
    Cell: nnx.Variable,
    Param: nnx.Param,
    BatchStat: nnx.BatchStat,
    Count: graphs.Count,
    RngKey: nnx.RngKey,
    RngCount: nnx.RngCount,
    Intermediate: nnx.Intermediate,
}
"""The class that each of these stands for."""


def is_key(value: tp.Any) -> bool:
    return jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def frozen(value: tp.Any) -> tp.Any:
    """An array of the model: nobody writes into one.  Random keys are as in the library."""
    if isinstance(value, jax.Array) and is_key(value):
        return jax.random.wrap_key_data(jax.random.key_data(value))
    array = np.array(value)
    array.flags.writeable = False
    return array
