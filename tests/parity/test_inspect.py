"""The tables of the reference and ours say the same."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import nnxlite.inspect as ours_inspect
import nnxlite.nn as ours_nn
from nnxlite.objects._module import Module
from nnxlite.objects._rngs import Rngs

flax = pytest.importorskip("flax")
from flax import nnx as theirs  # noqa: E402

OPTIONS = {"console_kwargs": {"width": 200, "force_terminal": False}}


def make(module, nn, rngs):
    class Net(module):
        def __init__(self):
            self.inner = nn.Linear(3, 8, rngs=rngs)
            self.norm = nn.BatchNorm(8, rngs=rngs)
            self.drop = nn.Dropout(0.5, rngs=rngs)
            self.out = nn.Linear(8, 2, rngs=rngs)

        def __call__(self, x):
            return self.encode(x, 1.0)

        def encode(self, x, scale):
            return self.out(self.drop(self.norm(self.inner(x)))) * scale

    return Net()


@pytest.fixture
def pair():
    return make(Module, ours_nn, Rngs(0)), make(theirs.Module, theirs, theirs.Rngs(0))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"depth": 0},
        {"depth": 1},
        {"method": "encode", "scale": 2.0},
        {"table_kwargs": {"show_edge": False}, "column_kwargs": {"justify": "right"}},
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_the_same_table(pair, options):
    ours, reference = pair
    x = jnp.ones((4, 3))
    assert ours_inspect.tabulate(ours, x, **options, **OPTIONS) == theirs.tabulate(
        reference, x, **options, **OPTIONS
    )


@pytest.mark.parametrize(
    ("name", "args", "shape"),
    [
        ("Linear", (16, 4), (4, 16)),
        ("Conv", (3, 4, (3, 3)), (2, 8, 8, 3)),
        ("BatchNorm", (16,), (4, 16)),
        ("LayerNorm", (16,), (4, 16)),
        ("RMSNorm", (16,), (4, 16)),
    ],
)
def test_the_same_flops(name, args, shape):
    found = []
    for nn, tabulate, rngs in (
        (ours_nn, ours_inspect.tabulate, Rngs(0)),
        (theirs, theirs.tabulate, theirs.Rngs(0)),
    ):
        layer = getattr(nn, name)(*args, rngs=rngs)
        rows = []
        tabulate(
            layer,
            jnp.ones(shape),
            row_filter=lambda row, rows=rows: rows.append(row) or True,
            compute_flops=True,
            compute_vjp_flops=True,
        )
        found.append([(row.path, row.type.__name__, row.flops, row.vjp_flops) for row in rows])
    assert found[0] == found[1]


def test_rows_have_the_fields_of_the_reference(pair):
    fields = []
    for model, tabulate in zip(pair, (ours_inspect.tabulate, theirs.tabulate), strict=True):
        rows = []
        tabulate(
            model, jnp.ones((4, 3)), row_filter=lambda row, rows=rows: rows.append(row) or True
        )
        fields.append(set(vars(rows[0])) if hasattr(rows[0], "__dict__") else set(rows[0]._fields))
    assert fields[0] == fields[1]
