"""Checksums of arrays: of one that a process has as a whole, and of one that is spread over several.

The parts of an array that was saved by four processes may be read by two.  So the second kind does
not depend on the parts: each element counts by its bits and its position, and what all parts contribute
is added.  A change of one element changes the sum always, since its factor is odd.
"""

from __future__ import annotations

import itertools
import math
import zlib

import jax
import numpy as np

CHUNK = 1 << 20
"""Elements that are summed at a time."""


def checksum(array: object) -> int:
    """CRC-32 of the elements in C order."""
    whole = np.ascontiguousarray(array)
    return zlib.crc32(whole.reshape(-1).view(np.uint8).data)


def local_sum(array: jax.Array | np.ndarray) -> int:
    """What this process contributes to the sum of an array, each element in one process; below 2**64.

    >>> import numpy as np
    >>> from nnxlite.checkpoint._checksums import local_sum
    >>> local_sum(np.array([3, 0, 1], np.int32))
    8
    """
    if isinstance(array, np.ndarray):
        return _sum(array, (0,) * array.ndim, array.shape)
    total = 0
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            starts = tuple(one.start or 0 for one in shard.index)
            total += _sum(np.asarray(shard.data), starts, array.shape)
    return total % 2**64


def _sum(part: np.ndarray, starts: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The sum of bits times (2 position + 1), for a block of an array of a shape."""
    bits = np.ascontiguousarray(part)  # which has one axis, if `part` is a scalar
    if bits.dtype.itemsize > 8:  # complex128
        bits, starts, shape = bits[..., None].view(np.uint64), (*starts, 0), (*shape, 2)
    bits = bits.view(f"u{bits.dtype.itemsize}")
    starts, shape = starts or (0,), shape or (1,)
    strides = list(itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1))[::-1]
    total = 0
    rows = max(1, CHUNK // max(1, math.prod(bits.shape[1:])))
    inner = np.zeros(1, np.uint64)
    for start, size, stride in zip(starts[1:], bits.shape[1:], strides[1:]):
        inner = np.add.outer(inner, _positions(start, size, stride)).reshape(-1)
    with np.errstate(over="ignore"):
        for first in range(0, bits.shape[0], rows):
            some = bits[first : first + rows].reshape(-1)
            outer = _positions(starts[0] + first, min(rows, bits.shape[0] - first), strides[0])
            factors = np.add.outer(outer, inner).reshape(-1) * np.uint64(2) + np.uint64(1)
            total += int(np.sum(some.astype(np.uint64) * factors, dtype=np.uint64))
    return total % 2**64


def _positions(start: int, size: int, stride: int) -> np.ndarray:
    return np.arange(start, start + size, dtype=np.uint64) * np.uint64(stride)
