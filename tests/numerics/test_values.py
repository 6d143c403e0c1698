"""Every layer against its formula: in float64, in half precision, and for unusual batches.

Each test goes through a family of rows of the catalogue with few compilations.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.nn.catalogue import FAMILIES

every_family = pytest.mark.parametrize("family", FAMILIES)


def rows_of(family):
    return {name: row for name, row in FAMILIES[family].items() if row.formula is not None}


def difference(actual, desired, unit):
    """What is wrong with a result; NaN in what is desired stands for anything."""
    actual = np.asarray(actual, np.float64)
    if actual.shape != desired.shape:
        return f"shape {actual.shape}, not {desired.shape}"
    if not actual.size:
        return None
    size = max(np.abs(desired[~np.isnan(desired)]).max(initial=1), 1)
    error = np.abs(actual - np.where(np.isnan(desired), actual, desired)).max()
    if np.isfinite(actual).all() and error <= unit * size:
        return None
    return f"off by {error:.3g}, in units {error / unit / size:.3g}"


def run(rows, layers, inputs):
    """The calls of all rows as one program."""
    calls = [row.run for row in rows.values()]
    each = nnx.jit(lambda *both: [call(layer, *x) for call, layer, x in zip(calls, *both)])
    return each(layers, inputs)


def wrong_values(rows, dtype, mixed=False):
    """The rows with a wrong result: all in one dtype, or (mixed) parameters in float32."""
    types = {"param_dtype": "float32" if mixed else dtype}
    if mixed or dtype == "float64":  # otherwise inputs and parameters decide
        types["dtype"] = dtype
    layers = [row.made(**types) for row in rows.values()]
    inputs = [row.arrays(dtype) for row in rows.values()]
    triples = [*zip(rows.values(), layers, inputs)]
    desired = [row.computed(layer, x) for row, layer, x in triples]
    wrong = {}
    for (name, row), y, z in zip(rows.items(), run(rows, layers, inputs), desired):
        wide = dtype != "float64" and ("mixed" if mixed else "half") in row.wide
        unit = 2e-12 if dtype == "float64" else row.half * float(jnp.finfo(dtype).eps)
        wrong[name] = difference(y, z, unit)
        if y.dtype != ("float32" if wide else dtype):
            wrong[name] = f"dtype {y.dtype}"
    return {name: text for name, text in wrong.items() if text}


@every_family
def test_results_in_float64_are_those_of_the_formula(family):
    with jax.enable_x64(True):
        assert wrong_values(rows_of(family), "float64") == {}


@every_family
def test_results_in_half_precision_are_off_by_a_few_units_of_rounding(family):
    """Inputs and parameters in float16; or, of every second row, computed in bfloat16."""
    rows = [*rows_of(family).items()]
    assert wrong_values(dict(rows[::2]), "float16") == {}
    if typed := dict([(name, row) for name, row in rows if row.types][1::2]):
        assert wrong_values(typed, "bfloat16", mixed=True) == {}


BATCHES = {  # a change of the batch, and whether it takes one without that axis
    "no example": (lambda x: x[:0], False),
    "one example": (lambda x: x[:1], False),
    "no batch axis": (lambda x: x[0], True),
    "two batch axes": (lambda x: x[None], True),
    "an empty batch axis more": (lambda x: x[None][:0], True),
}


@every_family
def test_batches_of_any_shape(family):
    """Each example has its result; without one, gradients are zero."""
    rows = [(n, row) for n, row in rows_of(family).items() if row.batched and len(row.inputs) == 1]
    for name, (change, without) in BATCHES.items():
        chosen = {n: row for n, row in rows[::2] if row.unbatched or not without}
        layers = [row.made() for row in chosen.values()]
        inputs = [row.arrays("float32") for row in chosen.values()]
        triples = [*zip(chosen.values(), layers, inputs)]
        desired = [change(row.computed(layer, x)) for row, layer, x in triples]
        inputs = [(change(x),) for (x,) in inputs]
        for n, y, z in zip(chosen, run(chosen, layers, inputs), desired):
            assert not difference(y, z, 7e-6), (name, n, difference(y, z, 7e-6))
        if name == "no example":
            total = lambda layers: sum(y.sum() for y in run(chosen, layers, inputs))  # noqa: B023
            grads = nnx.jit(nnx.grad(total))(layers)
            assert not any(np.any(np.asarray(g) != 0) for g in jax.tree.leaves(grads))
