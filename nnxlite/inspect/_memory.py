"""`memory`: the bytes of a model and its optimizer by kind and by device, and the peak of a step."""

from __future__ import annotations

import dataclasses
import math
import typing as tp

import jax
import numpy as np
from rich.table import Table

from nnxlite._base.jax import is_concrete
from nnxlite._base.text import counted_as, human_bytes, is_array
from nnxlite._state._flat import content
from nnxlite.graph._plan import view
from nnxlite.inspect._tabulate import printed
from nnxlite.training import OptState
from nnxlite.transforms._jit import jit
from nnxlite.variables._variable import Variable

__all__ = ["Memory", "StepMemory", "memory"]

OPTIMIZER = "optimizer state"
ARRAYS = "other arrays"


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """The memory that one call of a compiled step needs on a device, in bytes.

    Attributes:
        arguments: all that goes in: model, optimizer, batch.
        outputs: all that comes out.
        aliased: the part of the outputs that reuses the memory of donated arguments.
        temporary: intermediate results.
        code: the program.
        peak: what must be available: arguments, outputs that are not aliased, and intermediate results.

    >>> import nnxlite as nnx
    >>> step = nnx.StepMemory(arguments=8, outputs=8, aliased=8, temporary=4, code=0, peak=12)
    >>> step.peak
    12
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int
    code: int
    peak: int


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of arrays; `print` shows a table.

    Attributes:
        by_kind: bytes for each kind of Variable, such as `Param`; those of optimizers are together as
            `optimizer state`, and arrays outside of Variables as `other arrays`.
        by_device: bytes for each device, such as `cpu:0`; a replicated array counts on each.  Arrays of
            NumPy are on `host`; traced and abstract arrays are `not allocated`.
        total: the sum of `by_kind`.
        step: of the compiled step, or None if none was given.

    >>> import nnxlite as nnx
    >>> memory = nnx.memory(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    >>> memory.by_kind, memory.total
    ({'Param': 36}, 36)
    """

    by_kind: dict[str, int]
    by_device: dict[str, int]
    total: int
    step: StepMemory | None = None

    def __str__(self) -> str:
        table = Table("memory")
        table.add_column("bytes", justify="right")
        table.add_column("", justify="right")
        step = {} if self.step is None else dataclasses.asdict(self.step)
        total = {"total": self.total}
        sections = ("", self.by_kind), ("", total), ("on ", self.by_device), ("step: ", step)
        for prefix, rows in sections:
            for name, size in rows.items():
                table.add_row(f"{prefix}{name}", f"{size:,}", human_bytes(size))
            table.add_section()
        return printed(table)


def memory(
    model: tp.Any,
    optimizer: tp.Any = None,
    step: tp.Callable[..., tp.Any] | None = None,
    *args: tp.Any,
    **kwargs: tp.Any,
) -> Memory:
    """The bytes of a model and an optimizer, by kind and by device, and the peak of a compiled step.

    What is shared, between the two as well, counts once.

    Args:
        model: a module, or any pytree of arrays; arrays may be abstract.
        optimizer: an optimizer, or None.
        step: a function, jitted or not, that is compiled for `step(model, optimizer, *args, **kwargs)`
            (without the optimizer if there is none), and not run.
        args, kwargs: further arguments of the step; arrays may be `jax.ShapeDtypeStruct`.

    Returns:
        A `Memory`, with the fields `by_kind`, `by_device`, `total` and `step`; as text, a table.

    Raises:
        TypeError: if `step` is not callable.

    >>> import nnxlite as nnx, optax
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> used = nnx.memory(model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param))
    >>> used.by_kind
    {'Param': 36, 'optimizer state': 80}
    >>> print(used)
    ┏━━━━━━━━━━━━━━━━━┳━━━━━━━┳━━━━━━━┓
    ┃ memory          ┃ bytes ┃       ┃
    ┡━━━━━━━━━━━━━━━━━╇━━━━━━━╇━━━━━━━┩
    │ Param           │    36 │  36 B │
    │ optimizer state │    80 │  80 B │
    ├─────────────────┼───────┼───────┤
    │ total           │   116 │ 116 B │
    ├─────────────────┼───────┼───────┤
    │ on cpu:0        │   116 │ 116 B │
    └─────────────────┴───────┴───────┘
    """
    if step is not None and not callable(step):
        raise TypeError(
            f"memory: expected a function as step, got {type(step).__name__}. Give the arguments of the "
            "step after it: nnx.memory(model, optimizer, step, *batch)."
        )
    owners = (model,) if optimizer is None else (model, optimizer)
    by_kind: dict[str, int] = {}
    by_device: dict[str, int] = {}
    seen: dict[int, tp.Any] = {}
    for kind, array in _arrays(owners):
        if id(array) in seen:
            continue
        seen[id(array)] = array
        size = math.prod(array.shape) * array.dtype.itemsize
        by_kind[kind] = by_kind.get(kind, 0) + size
        for place, part in _places(array, size):
            by_device[place] = by_device.get(place, 0) + part
    needed = None if step is None else _step_memory(step, (*owners, *args), kwargs)
    return Memory(by_kind, by_device, sum(by_kind.values()), needed)


def _arrays(owners: tuple[tp.Any, ...]) -> tp.Iterator[tuple[str, tp.Any]]:
    """Every array with its kind, Variables once each."""
    for leaf in view(owners).leaves:
        kind = ARRAYS
        if isinstance(leaf, Variable):
            kind = OPTIMIZER if isinstance(leaf, OptState) else counted_as(type(leaf))
        for array in jax.tree_util.tree_leaves(content(leaf)):
            if is_array(array):
                yield kind, array


def _places(array: tp.Any, size: int) -> list[tuple[str, int]]:
    """The devices of an array, with the bytes on each."""
    if isinstance(array, np.ndarray):
        return [("host", size)]
    if not is_concrete(array):
        return [("not allocated", size)]
    if array.is_deleted():
        return [("deleted", size)]
    shape = array.sharding.shard_shape(array.shape)
    part = math.prod(shape) * array.dtype.itemsize
    devices = sorted(array.sharding.device_set, key=lambda device: device.id)
    return [(f"{device.platform}:{device.id}", part) for device in devices]


def _step_memory(step: tp.Any, args: tuple[tp.Any, ...], kwargs: tp.Any) -> StepMemory:
    jitted = step if hasattr(step, "lower") else jit(step)
    found = jitted.lower(*args, **kwargs).compile().memory_analysis()
    names = ("argument", "output", "alias", "temp", "generated_code")
    given, out, alias, temp, code = (getattr(found, f"{name}_size_in_bytes", 0) for name in names)
    return StepMemory(given, out, alias, temp, code, given + out - alias + temp)
