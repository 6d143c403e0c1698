"""Global arrays from the part that each process has, and back.

All is derived from the sharding: which rows the devices of a process have, in ascending order.  So it
is right for meshes whose axes do not follow the order of processes, and for processes that have the
same rows.
"""

from __future__ import annotations

import itertools
import json
import typing as tp

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from nnxlite._base.text import mesh_text
from nnxlite.distributed._agreeing import exchange

A = tp.TypeVar("A")
Span: tp.TypeAlias = tuple[int, int]
"""Start and stop of a part of one axis."""

_SHAPES: set[tp.Any] = set()
"""What `to_global` has compared among processes: local shapes with their sharding.

Each entry saves a round trip to process 0 (about 1 ms) for a further batch of this form; processes
that make the same calls have the same entries. Bounded by clearing it when it has 1,000.
"""


def local_rows(sharding: Sharding, size: int) -> np.ndarray:
    """Which rows of a global batch this process loads.

    Processes whose devices have the same rows, as on a mesh whose second axis goes over several
    processes, get the same ones.

    Args:
        sharding: of the batch, which divides its first axis.
        size: the number of rows of the whole batch.

    Returns:
        Row numbers, ascending, int64, of shape `(local rows,)`.

    Raises:
        ValueError: if the mesh does not divide the batch, or has no device of this process.

    >>> import nnxlite as nnx, jax
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> nnx.distributed.local_rows(NamedSharding(mesh, P("data")), 4)
    array([0, 1, 2, 3])
    """
    where = "nnx.distributed.local_rows"
    named = _named(sharding, where)
    named = NamedSharding(named.mesh, PartitionSpec(*named.spec[:1]))  # whatever the other axes do
    names = named.spec[0] if named.spec and named.spec[0] is not None else ()
    names = names if isinstance(names, tuple) else (names,)
    parts = int(np.prod([named.mesh.shape[name] for name in names]))
    if size % parts:
        raise ValueError(
            f"{where}: a batch of {size} rows does not divide into {parts} parts (spec {named.spec} on "
            f"mesh {mesh_text(named.mesh)}). Take {size - size % parts} or "
            f"{size - size % parts + parts} rows, or pad the last batch."
        )
    spans = _local_spans(named, (size,), where)[0]
    return np.concatenate([np.arange(*span) for span in spans])


def to_global(local: A, sharding: Sharding, *, size: int | None = None) -> A:
    """Global arrays of which each process gives its own part.

    In a single process this is `jax.device_put`. Without `size`, shapes are compared among processes
    when one comes for the first time; further batches of it cost no communication.

    Args:
        local: a pytree of arrays: what this process's devices have, such as the rows that `local_rows`
            says.
        sharding: of each global array.
        size: the number of rows of the whole batch. A part that does not belong to one is refused at
            once, without asking the other processes.

    Returns:
        The same tree with `jax.Array`s, of which no process has the whole.

    Raises:
        ValueError: if a part does not divide among the devices of this process, the processes have parts
            of different shapes, an array is global already, or the mesh has no device of this process.
        TimeoutError: if the shape is new here and not in all processes.

    >>> import nnxlite as nnx, jax, numpy as np
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> sharding = NamedSharding(jax.make_mesh((1,), ("data",)), P("data"))
    >>> batch = {"x": np.ones((4, 2), "float32"), "y": np.arange(4)}
    >>> nnx.distributed.to_global(batch, sharding)["x"].shape
    (4, 2)
    """
    where = "nnx.distributed.to_global"
    named = _named(sharding, where)
    pairs, treedef = jax.tree_util.tree_flatten_with_path(local)
    forms, problems, arrays = [], [], []
    for path, leaf in pairs:
        name = jax.tree_util.keystr(path)
        try:
            array = _host(leaf)
            whole = jax.make_array_from_process_local_data(named, array)
            if size is not None and whole.shape[:1] != (size,):
                rows = len(local_rows(named, size))
                raise ValueError(
                    f"a part of shape {array.shape} is one of a batch of shape {whole.shape}, and size "
                    f"is {size}: give the {rows} rows that local_rows(sharding, {size}) says."
                )
            arrays.append(whole)
            forms.append(
                f"batch{name} {array.dtype.name}{list(array.shape)} of {list(whole.shape)}"
            )
        except ValueError as error:
            problems.append(f"batch{name}: {error}")
    if size is not None and problems:
        raise ValueError(f"{where}: {'; '.join(problems)}")
    if size is None:
        _compare(where, named, forms, problems)
    return treedef.unflatten(arrays)


def _compare(where: str, sharding: NamedSharding, forms: list[str], problems: list[str]) -> None:
    """Whether all processes have parts of the same arrays; ValueError in all of them if not."""
    key = (sharding, *forms)
    if not problems and key in _SHAPES:
        return
    sides = _exchanged(where, forms, problems)
    if problems:
        raise ValueError(f"{where}: {'; '.join(problems)}")
    for index, theirs in enumerate(sides):
        if theirs != forms:
            ours = jax.process_index()
            pairs = itertools.zip_longest(forms, theirs, fillvalue="no such array")
            mine, other = next(pair for pair in pairs if pair[0] != pair[1])
            raise ValueError(
                f"{where}: the parts of a batch differ: process {ours} has {mine}, process {index} has "
                f"{other}. All processes have to give as many rows (see local_rows): drop the last "
                "batch, or pad it."
            )
    if len(_SHAPES) >= 1000:
        _SHAPES.clear()
    _SHAPES.add(key)


def _exchanged(where: str, forms: list[str], problems: list[str]) -> list[list[str]]:
    """The forms of all processes; ValueError if another one has problems, and this one has none."""
    try:
        texts = exchange(where, json.dumps([problems, forms]), timeout=60)
    except TimeoutError as error:
        raise TimeoutError(
            f"{where}: this process has a batch of a new shape, {', '.join(problems or forms)}, and "
            f"not all others do. Give each batch the same number of rows in all processes. {error}"
        ) from None
    found = []
    for index, text in enumerate(texts):
        theirs, forms_of = json.loads(text)
        if theirs and not problems:
            raise ValueError(f"{where}: process {index} has no valid part: {'; '.join(theirs)}")
        found.append(forms_of)
    return found


def _host(leaf: tp.Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise ValueError("this array is global already; pass the part of this process.")
    array = np.asarray(leaf)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def to_local(tree: A) -> A:
    """The part of each array that the devices of this process have: the inverse of `to_global`.

    Args:
        tree: a pytree of arrays, also objects' states; a replicated array gives the whole.

    Returns:
        The same tree with NumPy arrays.

    Raises:
        ValueError: for an array of which this process has nothing, or no rectangular part.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.distributed.to_local({"loss": jnp.arange(2)})
    {'loss': array([0, 1], dtype=int32)}
    """
    return jax.tree_util.tree_map_with_path(_local_part, tree)


def _local_part(path: tp.Any, leaf: tp.Any) -> tp.Any:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return np.asarray(leaf)
    where = f"nnx.distributed.to_local: array{jax.tree_util.keystr(path)}"
    spans = _local_spans(leaf.sharding, leaf.shape, where)
    local = np.empty([sum(b - a for a, b in mine) for mine in spans], leaf.dtype)
    for shard in leaf.addressable_shards:
        index = []
        for mine, size, one in zip(spans, leaf.shape, shard.index):
            start, stop, _ = one.indices(size)
            first = sum(b - a for a, b in mine if b <= start)
            index.append(slice(first, first + stop - start))
        local[tuple(index)] = shard.data
    return local


def gather(tree: A) -> A:
    """The whole of each array, in every process. All processes have to call it.

    Args:
        tree: a pytree of arrays, global or not.

    Returns:
        The same tree with NumPy arrays. What was not global is as it was in this process.

    >>> import nnxlite as nnx, jax.numpy as jnp
    >>> nnx.distributed.gather(jnp.arange(3))
    array([0, 1, 2], dtype=int32)
    """

    def whole(leaf: tp.Any) -> tp.Any:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            if leaf.is_fully_replicated:
                return np.asarray(leaf.addressable_data(0))
            from jax.experimental import multihost_utils

            return multihost_utils.process_allgather(leaf, tiled=True)
        return np.asarray(leaf)

    return jax.tree.map(whole, tree)


# Shardings -----------------------------------------------------------------------------------------


def _named(sharding: tp.Any, where: str) -> NamedSharding:
    if not isinstance(sharding, NamedSharding):
        raise TypeError(
            f"{where}: sharding is a {type(sharding).__name__}; pass a NamedSharding(mesh, spec)."
        )
    if not sharding.addressable_devices:
        raise ValueError(
            f"{where}: the mesh {mesh_text(sharding.mesh)} has no device of process "
            f"{jax.process_index()}. Make it of jax.devices(), not of jax.local_devices() of another "
            "process."
        )
    return sharding


def _local_spans(sharding: Sharding, shape: tuple[int, ...], where: str) -> list[list[Span]]:
    """For each axis the parts that this process has, ascending; ValueError unless they form a box."""
    if isinstance(sharding, NamedSharding):  # an array may have fewer axes than the spec
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[: len(shape)]))
    found = {
        tuple(one.indices(size)[:2] for one, size in zip(index, shape))
        for index in sharding.addressable_devices_indices_map(shape).values()
        if index is not None
    }
    if not found:
        raise ValueError(f"{where}: no part of it is on the devices of this process.")
    spans = [sorted({index[axis] for index in found}) for axis in range(len(shape))]
    if np.prod([len(mine) for mine in spans]) != len(found):
        raise ValueError(
            f"{where}: what the devices of this process have of {shape} is no "
            "rectangular block; order the mesh so that it is (jax.make_mesh does)."
        )
    return spans
