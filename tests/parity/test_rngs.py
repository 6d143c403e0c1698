"""Random streams give the reference's keys bit for bit (law L10)."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.parity.layers import ref
from tests.parity.programs import Lines, compare

pytestmark = pytest.mark.filterwarnings("ignore:The 'split' argument of 'fork':DeprecationWarning")

lines = Lines()


def streams(lib):
    class Model(lib.Module):
        def __init__(self):
            self.rngs = lib.Rngs(0, params=1)
            self.inner = lib.List([lib.RngStream(7, tag="default"), lib.RngStream(8, tag="noise")])
            self.rngs.params()

    drawn = lib.Rngs(0, params=1)
    for _ in range(3):
        drawn(), drawn.params(), drawn.dropout(), drawn["other"]()
    more = {"Path": lib.PathContains, "key": jax.random.key, "everything": lambda path, x: True}
    return {"drawn": drawn, "m": Model(), "stream": lib.RngStream(3, tag="x"), **more}


lines(
    "streams",
    streams,
    """
    lib.Rngs(3)
    lib.Rngs(0, params=1, dropout=2)
    lib.Rngs({'a': 1, 'b': 2}, c=3)
    lib.Rngs(key(4), noise=jax.random.key(5, impl='rbg'))
    lib.Rngs(jax.random.PRNGKey(4))
    lib.Rngs(jax.random.split(key(0), 3))
    lib.Rngs(stream, a=lib.RngStream(4, tag='y'))
    lib.Rngs(-1)
    lib.Rngs(True)
    lib.Rngs()
    drawn.split(2)
    drawn.split({'params': (2, 1), ...: 3})
    drawn.split({'params': 2})
    drawn.broadcast((2, 1))
    drawn.broadcast({('params', 'x'): 2, ...: None})
    [drawn.params.fork(), drawn.params.broadcast(2)]
    lib.split_rngs(m, splits=2); m.eval()
    lib.split_rngs(m, splits=(2, 3)); m.eval()
    lib.split_rngs(m, splits=2, only=Path('inner')); m.eval()
    lib.split_rngs(m, splits=1, squeeze=True); m.eval()
    lib.restore_rngs(lib.split_rngs(m, splits=3))
    lib.split_rngs(splits=2, only='params')(lambda m: lib.clone(m))(m)
    lib.fork_rngs(m, split={'params': 2, 'noise': (1, 2)}); m.eval()
    lib.reseed(m, default=5, params=key(9))
    lib.split_rngs(m, splits=(2, 2)); lib.reseed(m, default=5, noise=7, policy='match_shape')
    [drawn.normal((3,)), drawn.randint((3,), 0, 9), drawn.truncated_normal(-1, 1, (3,))]
    [drawn.lecun_normal()((3, 4)), drawn.x.he_uniform(in_axis=0, out_axis=1)((3, 4))]
    lib.Rngs(1.5)
    """,
)
FILTERS = """'params' lib.RngState lib.RngKey lib.RngStream Path('params') Path('key') lib.Not(lib.RngKey)
    lib.Any('params',lib.RngKey) lib.All('params',lib.RngKey) (lambda*a:len(a[0])==2)""".split()
CHOOSING = [
    "lib.split_rngs(m, splits=2, only={f}, graph_updates=False)",
    "lib.split_rngs(m, splits=2, only={f}); m.eval()",
    "lib.fork_rngs(m, split={{{f}: 2}}, graph_updates=False)",
    "lib.fork_rngs(m, split={{{f}: 2}}); m.eval()",
    "m.rngs.split({{{f}: 2, ...: 3}})",
    "m.rngs.fork(split={{{f}: 2}})",
    "m.rngs.broadcast({{{f}: 2}})",
    "lib.with_rngs(m, split={{{f}: 2, ...: 3}}, graph_updates=False)  # newer",
    "lib.with_rngs(m, fork={f}, graph_updates=False)  # newer",
    "lib.with_rngs(m, fork=..., only={f}, graph_updates=False)  # newer",
]
chosen = itertools.product(CHOOSING, FILTERS)
lines("filters", streams, "\n".join(line.format(f=f) for line, f in chosen))
RULES = """
    split=2
    split={'params': 2}
    fork=True
    fork=['params', 'noise']
    broadcast=2
    split={'params': 2}, broadcast={'noise': 3}, fork=True
    split=2, only='default'
    split={'params': 2}, fork='params'
    split={'params': 2}, fork=['noise', 'params']
    split={'params': 2}, broadcast={'params': 2}, fork=...
    split={'params': 2}, broadcast={...: 2}, fork='params'
    split={'params': 2, ...: 3}, fork=['params']
    split={everything: 2}, fork=everything
    split={lib.Everything(): 2}, fork='params'
    split={'params': 2}, fork=['noise', ...]
    split={('params', 'noise'): 2, 'params': 3}
    split={...: 2, 'params': 3}, fork=...
    split={'params': 2}, fork=True
    split=2, broadcast={'params': 3}
    split=2, broadcast=3, fork='noise'
    split=None, broadcast={True: 3}, fork='params'
    split={'params': 2}, fork='params', only='noise'
"""
for rule in RULES.strip().splitlines():
    lines("rules", streams, f"lib.with_rngs(m, {rule.strip()}, **mode)  # newer", "plain", "tree")


test_line = lines.test()


def test_every_method_of_the_reference_is_there():
    for cls in ("Rngs", "RngStream"):
        names = {n for n in dir(getattr(ref, cls)) if not n.startswith("_")}
        missing = sorted(names - set(dir(getattr(nnx, cls))) - set(dir(ref.Pytree)))
        assert not missing


def test_L10_the_same_seed_gives_the_same_parameters_and_streams():
    def run(lib):
        rngs = lib.Rngs(0, dropout=1)
        layers = [
            lib.Linear(3, 4, rngs=rngs),
            lib.Conv(2, 3, (2, 2), rngs=rngs),
            lib.Embed(5, 2, rngs=rngs),
            lib.BatchNorm(4, rngs=rngs),
            lib.MultiHeadAttention(2, 4, rngs=rngs, decode=False),
            lib.Dropout(0.5, rngs=rngs),
        ]
        layers[-1](jnp.ones((8, 4)))
        return lib.List(layers), rngs.normal((3,)), rngs.dropout.uniform((2,))

    compare(run, close=lambda a, b: a.dtype == b.dtype and np.array_equal(a, b))
