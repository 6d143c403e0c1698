"""Layers of the catalogue in each dtype beside the reference, and for unusual batches.

Each test goes through a family of rows with few compilations.
"""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn.catalogue import FAMILIES


def run(rows, layers, inputs, lib=nnx):
    """The calls of all rows as one program."""
    each = lib.jit(lambda *both: [row.run(x, *y) for row, x, y in zip(rows.values(), *both)])
    return each(layers, inputs)


def difference(found, expected, units=8.0):
    """What is wrong with a result, which may be so many units of rounding off where it is of size 1."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"{found.dtype}{found.shape}, not {expected.dtype}{expected.shape}"
    if not jnp.issubdtype(found.dtype, jnp.inexact):
        return None if np.array_equal(found, expected) else "other numbers"
    unit = float(jnp.finfo(found.dtype).eps) * units
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    error = np.abs(found - expected).max(initial=0) / max(np.abs(expected).max(initial=0), 1)
    return None if error <= unit else f"off by {error:.3g}, in units {error / unit:.3g}"


def numbers(lib, layer):
    """The values that a layer has after a call."""
    found = {}
    for path, leaf in lib.to_flat_state(lib.state(layer)):
        value = leaf.get_value() if isinstance(leaf, lib.Variable) else leaf
        for i, x in enumerate(jax.tree.leaves(value)):
            is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            found[*path, i] = jax.random.key_data(x) if is_key else x
    return found


OTHERWISE = re.compile("WeightNorm|SimpleCell|Bidirectional|MultiHeadAttention, decoding")
"""What the reference refuses in half precision, or widens."""
HALVES = (
    ("float16", {"param_dtype": "float16"}),
    ("bfloat16", {"param_dtype": "float32", "dtype": "bfloat16"}),
)


def cases(family):
    """Rows by name and dtype, each with the dtype of inputs and those of its layer."""
    rows = {name: row for name, row in FAMILIES[family].items() if row.peer}
    found = {(name, "float32"): (row, "float32", {}) for name, row in rows.items()}
    halves = [name for name, row in rows.items() if row.types and not OTHERWISE.search(name)]
    # XLA has no fused attention in float16 on a CPU.
    kinds = HALVES[1:] if family == "attention" else HALVES
    for name, (dtype, types) in zip(halves, itertools.cycle(kinds)):
        found[name, dtype] = rows[name], dtype, types
    return found


@pytest.mark.filterwarnings("ignore")  # of the reference
@pytest.mark.parametrize("family", FAMILIES)
def test_results_and_state_are_those_of_the_reference(family):
    from tests.parity.layers import OLDER, ref

    if OLDER:
        pytest.skip("the reference lacks some of the options")
    chosen = cases(family)
    rows = {name: row for name, (row, _, _) in chosen.items()}
    inputs = [row.arrays(dtype) for row, dtype, _ in chosen.values()]
    pairs = []
    for lib in (nnx, ref):
        layers = [row.made(lib, **types) for row, _, types in chosen.values()]
        pairs.append((run(rows, layers, inputs, lib), [numbers(lib, layer) for layer in layers]))
    (ours, left), (theirs, left_there) = pairs
    wrong = {name: difference(*both) for name, *both in zip(rows, ours, theirs)}
    for name, one, other in zip(rows, left, left_there):
        assert one.keys() == other.keys(), name
        if not name[0].startswith("WeightNorm"):  # where the reference stores the product
            wrong |= {(*name, path): difference(one[path], other[path]) for path in one}
    assert not {name: text for name, text in wrong.items() if text}


BATCHES = {  # a change of the batch, and whether it takes one without that axis
    "no example": (lambda x: x[:0], False),
    "one example": (lambda x: x[:1], False),
    "no batch axis": (lambda x: x[0], True),
    "two batch axes": (lambda x: x[None], True),
    "an empty batch axis more": (lambda x: x[None][:0], True),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_of_any_shape(family):
    """Each example has its result; without one, gradients are zero."""
    rows = {n: row for n, row in FAMILIES[family].items() if row.batched and len(row.inputs) == 1}
    rows = dict([*rows.items()][::2])
    made = lambda rows: [row.made() for row in rows.values()]
    whole = dict(zip(rows, run(rows, made(rows), [row.arrays("float32") for row in rows.values()])))
    for name, (change, without) in BATCHES.items():
        chosen = {n: row for n, row in rows.items() if row.unbatched or not without}
        inputs = [(change(row.x),) for row in chosen.values()]
        for n, y in zip(chosen, run(chosen, made(chosen), inputs)):
            assert not difference(y, change(whole[n]), 64), (name, n)
        if name == "no example":
            total = lambda layers: sum(y.sum() for y in run(chosen, layers, inputs))  # noqa: B023
            grads = nnx.jit(nnx.grad(total))(made(chosen))
            assert not any(np.any(np.asarray(g) != 0) for g in jax.tree.leaves(grads))
