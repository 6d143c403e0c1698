"""Random programs by batches of seeds, each batch one test."""

from __future__ import annotations

import os
import typing as tp

import jax

BATCH = 10


def batches(programs: int) -> range:
    """The first seed of each batch; `NNXLITE_FUZZ` and `NNXLITE_FUZZ_FIRST` give number and start."""
    first = int(os.environ.get("NNXLITE_FUZZ_FIRST", "0"))
    return range(first, first + int(os.environ.get("NNXLITE_FUZZ", programs)), BATCH)


def differences(start: int, differ: tp.Callable[[int], str | None]) -> str:
    """What differs in the programs of a batch, by seed; compiled programs are dropped after it."""
    found = {seed: differ(seed) for seed in range(start, start + BATCH)}
    jax.clear_caches()
    return "\n\n".join(f"seed {seed}:\n{text}" for seed, text in found.items() if text)
