"""The tables of the reference and ours say the same."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from tests.parity.programs import Lines


def tables(lib):
    class Net(lib.Module):
        def __init__(self, rngs):
            self.inner = lib.Linear(3, 8, rngs=rngs)
            self.norm = lib.BatchNorm(8, rngs=rngs)
            self.drop = lib.Dropout(0.5, rngs=rngs)
            self.out = lib.Linear(8, 2, rngs=rngs)

        def __call__(self, x):
            return self.encode(x, 1.0)

        def encode(self, x, scale):
            return self.out(self.drop(self.norm(self.inner(x)))) * scale

    def rows(layer, shape):
        """The rows of a table, and the fields of a row."""
        seen, all_rows = [], lambda row: seen.append(row) or True
        options = {"compute_flops": True, "compute_vjp_flops": True}
        lib.tabulate(layer, jnp.ones(shape), row_filter=all_rows, **options)
        fields = sorted(vars(seen[0]) if hasattr(seen[0], "__dict__") else seen[0]._fields)
        return fields, [(row.path, row.type.__name__, row.flops, row.vjp_flops) for row in seen]

    options = {"console_kwargs": {"width": 200, "force_terminal": False}}
    table = functools.partial(lib.tabulate, Net(lib.Rngs(0)), jnp.ones((4, 3)), **options)
    return {"table": table, "rows": rows, "rngs": lib.Rngs(0)}


lines = Lines()
lines(
    "tables",
    tables,
    """
    table()
    table(depth=0)
    table(depth=1)
    table(method="encode", scale=2.0)
    table(table_kwargs={"show_edge": False}, column_kwargs={"justify": "right"})
    rows(lib.Linear(16, 4, rngs=rngs), (4, 16))
    rows(lib.Conv(3, 4, (3, 3), rngs=rngs), (2, 8, 8, 3))
    [rows(kind(16, rngs=rngs), (4, 16)) for kind in (lib.BatchNorm, lib.LayerNorm, lib.RMSNorm)]
    """,
)


test_line = lines.test()
