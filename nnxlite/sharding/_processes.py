"""Several processes: joining them, global arrays from local parts, waiting for each other.

Each process runs the same program and owns some of the devices. Which rows a process has follows from
the sharding. So it is right for meshes whose axes do not follow the order of processes, and for
processes that have the same rows.

Texts go through the key-value store of JAX's coordination service. No device takes part, so this works
in the middle of a save, in threads, and where one process fails and the others do not.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import threading
import typing as tp
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from nnxlite._base.errors import NnxError
from nnxlite._base.jax import coordination, in_cluster
from nnxlite._base.text import mesh_text

__all__ = ["ProcessError", "agreed", "barrier", "exchange", "gather", "initialize", "local_rows"]
__all__ += ["shutdown", "to_global", "to_local"]

A = tp.TypeVar("A")

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"

TIMEOUT = 600.0
"""Seconds that processes wait for each other by default."""

_USES: collections.Counter[str] = collections.Counter()
_LOCK = threading.Lock()

_SHAPES: set[tp.Any] = set()
"""What `to_global` has compared among processes: local shapes with their sharding.

Each entry saves a round trip to process 0 (about 1 ms) for a further batch of this form; processes
that make the same calls have the same entries. Bounded by clearing it when it has 1,000.
"""


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    **options: tp.Any,
) -> None:
    """Join the processes of this run, before anything uses a device.

    What is not passed is read from the environment: `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`
    and `JAX_PROCESS_ID`. Without those, JAX looks for a cluster that it knows (Slurm, Open MPI,
    Kubernetes, Cloud TPU); without one, this process is alone, and nothing happens. On CPUs, collectives
    run over Gloo.

    Args:
        coordinator_address: host and port of process 0, the same in all processes.
        num_processes: how many processes there are.
        process_id: the number of this one, from 0.
        options: those of `jax.distributed.initialize`: `local_device_ids`, `initialization_timeout`,
            `heartbeat_timeout_seconds`, `shutdown_timeout_seconds` and so on.

    Raises:
        RuntimeError: if JAX has used a device before, or this process has joined already.
        ValueError: if only a part of address, number and id is known, or one is not a number.

    >>> import nnxlite as nnx
    >>> nnx.distributed.initialize()  # alone
    >>> jax.process_count()
    1
    """
    if not getattr(jax.config, "jax_cpu_collectives_implementation", "gloo"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    given = {
        "coordinator_address": coordinator_address or os.environ.get(ADDRESS),
        "num_processes": os.environ.get(COUNT) if num_processes is None else num_processes,
        "process_id": os.environ.get(INDEX) if process_id is None else process_id,
    }
    address, count, index = given.values()
    if address is count is index is None:
        if in_cluster() or "cluster_detection_method" in options:
            jax.distributed.initialize(**options)
        return
    if address is None or not (str(count).isdecimal() and str(index).isdecimal()):
        raise ValueError(
            "nnx.distributed.initialize needs an address and two numbers, coordinator_address, "
            f"num_processes and process_id, or none of them, and has {given}. Pass them, or set "
            f"{ADDRESS}, {COUNT} and {INDEX}."
        )
    options.setdefault("cluster_detection_method", "deactivate")
    jax.distributed.initialize(address, int(count), int(index), **options)


def shutdown() -> None:
    """Leave the processes of this run; waits for the others to do so as well.

    At the end of a program that succeeds this happens by itself. Alone, it does nothing.

    >>> import nnxlite as nnx
    >>> nnx.distributed.shutdown()
    """
    jax.distributed.shutdown()


# Waiting for each other, and failing together ----------------------------------------------------


class ProcessError(NnxError, RuntimeError):
    """Something failed in another process, and therefore in all of them.

    Attributes:
        kind: the name of the class of the other process's error.

    >>> import nnxlite as nnx
    >>> issubclass(nnx.distributed.ProcessError, RuntimeError)
    True
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


def barrier(name: str, timeout: float = TIMEOUT) -> None:
    """Wait until all processes have come here.

    Args:
        name: the same in all of them; it may be used again.
        timeout: in seconds.

    Raises:
        TimeoutError: if some did not come, saying which.

    >>> import nnxlite as nnx
    >>> nnx.distributed.barrier("data is there")  # returns at once in a single process
    """
    exchange(name, "", timeout)


def exchange(name: str, text: str, timeout: float = TIMEOUT) -> list[str]:
    """The strings of all processes, in the order of their numbers; waits for all of them.

    Args:
        name: the same in all of them; it may be used again.
        text: of this process.
        timeout: in seconds.

    Raises:
        TimeoutError: if some did not come, saying which.

    >>> import nnxlite as nnx
    >>> nnx.distributed.exchange("names", "alone")
    ['alone']
    """
    client, count, index = coordination()
    if client is None:
        return [text]
    with _LOCK:
        use = _USES[name]
        _USES[name] += 1
    folder = f"nnxlite/{name}/{use}"
    client.key_value_set(f"{folder}/{index}", json.dumps(text))
    try:
        client.wait_at_barrier(folder, round(timeout * 1000))
    except Exception as error:
        try:
            there = _texts(client, folder)
        except Exception:  # the service has ended with process 0
            there = {index: text}
        absent = [number for number in range(count) if number not in there]
        shown = ", ".join(map(str, absent[:10])) + (" ..." if len(absent) > 10 else "")
        raise TimeoutError(
            f"{name}: {len(there)} of {count} processes came within {timeout:g} s"
            + (f"; not there: {shown}" if absent else "")
            + ". Each of them has to make the same calls in the same order. Look at the output of those "
            f"that are not there. ({str(error).splitlines()[0][:200]})"
        ) from None
    texts = _texts(client, folder)
    if index == 0 and use:  # all have read those of the time before
        client.key_value_delete(f"nnxlite/{name}/{use - 1}")
    return [texts[number] for number in range(count)]


def _texts(client: tp.Any, folder: str) -> dict[int, str]:
    pairs = client.key_value_dir_get(folder)
    return {int(key.rpartition("/")[2]): json.loads(text) for key, text in pairs}


@contextlib.contextmanager
def agreed(name: str, timeout: float = TIMEOUT) -> Iterator[None]:
    """A block that succeeds in all processes, or fails in all.

    At its end they wait for each other. A process whose block raised raises that error; the others raise
    a `ProcessError` that quotes it. Nothing inside may wait for another process.

    Args:
        name: the same in all processes.
        timeout: in seconds.

    Raises:
        ProcessError: if the block failed elsewhere.
        TimeoutError: if some process did not come.

    >>> import nnxlite as nnx
    >>> with nnx.distributed.agreed("read the table"):
    ...     table = [1, 2]
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    text = "" if error is None else f"{type(error).__name__}: {str(error)[:2000]}"
    texts: list[str] = []
    try:
        texts = exchange(name, text, timeout)
    except TimeoutError:
        if error is None:
            raise
    if error is not None:
        raise error
    failed = [index for index, text in enumerate(texts) if text]
    if failed:
        more = f" (also: {', '.join(map(str, failed[1:10]))})" if failed[1:] else ""
        text = texts[failed[0]]
        raise ProcessError(
            f"{name}: process {failed[0]} failed{more}: {text}", text.partition(":")[0]
        )


# Arrays -------------------------------------------------------------------------------------------


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
    rows = NamedSharding(named.mesh, PartitionSpec(*named.spec[:1]))  # whatever the other axes do
    try:
        parts = rows.addressable_devices_indices_map((size,)).values()
    except ValueError as error:
        raise ValueError(
            f"{where}: a batch of {size} rows does not divide on the mesh {mesh_text(named.mesh)}: "
            f"{error}. Take another number of rows, or pad the last batch."
        ) from None
    return np.unique(np.concatenate([np.arange(size)[part] for part in parts]))


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
        name = f"batch{jax.tree_util.keystr(path)}"
        try:
            array = _host(leaf)
            whole = jax.make_array_from_process_local_data(named, array)
            if size is not None and whole.shape[:1] != (size,):
                rows = len(local_rows(named, size))
                raise ValueError(
                    f"a part of shape {array.shape} is one of a batch of shape {whole.shape}, and size "
                    f"is {size}: give the {rows} rows that local_rows(sharding, {size}) says."
                )
        except ValueError as error:
            problems.append(f"{name}: {error}")
            forms.append(problems[-1])
        else:
            arrays.append(whole)
            forms.append(f"{name} {array.dtype.name}{list(array.shape)} of {list(whole.shape)}")
    sides = {} if size is not None else _exchanged(where, named, forms, not problems)
    if problems:
        raise ValueError(f"{where}: {'; '.join(problems)}")
    for index, theirs in sides.items():
        for mine, other in itertools.zip_longest(forms, theirs, fillvalue="no such array"):
            if mine != other:
                raise ValueError(
                    f"{where}: the parts of a batch differ: process {jax.process_index()} has {mine}, "
                    f"process {index} has {other}. All processes have to give as many rows (see "
                    "local_rows): drop the last batch, or pad it."
                )
    return treedef.unflatten(arrays)


def _exchanged(
    where: str, sharding: NamedSharding, forms: list[str], cached: bool
) -> dict[int, list[str]]:
    """The forms of all processes, by their numbers; none where these have been compared before."""
    key = (sharding, *forms)
    if cached and key in _SHAPES:
        return {}
    try:
        texts = exchange(where, json.dumps(forms), timeout=60)
    except TimeoutError as error:
        raise TimeoutError(
            f"{where}: this process has a batch of a new shape, {', '.join(forms)}, and "
            f"not all others do. Give each batch the same number of rows in all processes. {error}"
        ) from None
    sides = dict(enumerate(map(json.loads, texts)))
    if len(_SHAPES) >= 1000:
        _SHAPES.clear()
    if all(theirs == forms for theirs in sides.values()):
        _SHAPES.add(key)
    return sides


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
    parts = {
        tuple(one.indices(size)[:2] for one, size in zip(shard.index, leaf.shape)): shard.data
        for shard in leaf.addressable_shards
    }
    if not parts:
        raise ValueError(f"{where}: no part of it is on the devices of this process.")
    numbers = [  # of the rows that this process has, along each axis
        np.unique(np.concatenate([np.arange(*spans[axis]) for spans in parts]))
        for axis in range(leaf.ndim)
    ]
    local = np.empty([len(rows) for rows in numbers], leaf.dtype)
    if local.size != sum(part.size for part in parts.values()):
        raise ValueError(
            f"{where}: what the devices of this process have of {leaf.shape} is not a "
            "rectangular block; order the mesh so that it is (jax.make_mesh does)."
        )
    for spans, part in parts.items():
        places = [np.searchsorted(rows, np.arange(*span)) for rows, span in zip(numbers, spans)]
        local[np.ix_(*places)] = part
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
