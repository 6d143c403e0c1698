"""Random streams give the reference's keys bit for bit (law L10)."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx

flax_nnx = pytest.importorskip("flax.nnx")
pytestmark = pytest.mark.filterwarnings("ignore:The 'split' argument of 'fork':DeprecationWarning")


def described(lib, node):
    """Every random Variable: path to (kind, value, metadata)."""
    out = {}
    for path, v in lib.to_flat_state(lib.state(node, lib.RngState)):
        value = v.get_value()
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(value) if is_key else value)
        metadata = {k: x for k, x in v.get_metadata().items() if k == "tag"}
        out[path] = (type(v).__name__, array.tolist(), array.dtype, metadata)
    return out


def model(lib):
    class Model(lib.Module):
        def __init__(self):
            self.rngs = lib.Rngs(0, params=1)
            self.inner = lib.List([lib.RngStream(7, tag="default"), lib.RngStream(8, tag="noise")])
            self.rngs.params()

    return Model()


def both(program):
    """What a program leaves behind in both libraries."""
    results = []
    for lib in (nnx, flax_nnx):
        node = program(lib)
        results.append(described(lib, node))
    assert results[0] == results[1]
    assert list(results[0]) == list(results[1])
    return results[0]


START = {
    "a seed": lambda lib: lib.Rngs(3),
    "names": lambda lib: lib.Rngs(0, params=1, dropout=2),
    "a mapping": lambda lib: lib.Rngs({"a": 1, "b": 2}, c=3),
    "a key": lambda lib: lib.Rngs(jax.random.key(4), noise=jax.random.key(5, impl="rbg")),
    "a legacy key": lambda lib: lib.Rngs(jax.random.PRNGKey(4)),
    "keys": lambda lib: lib.Rngs(jax.random.split(jax.random.key(0), 3)),
    "a stream": lambda lib: lib.Rngs(lib.RngStream(3, tag="x"), a=lib.RngStream(4, tag="y")),
    "a negative seed": lambda lib: lib.Rngs(-1),
    "a bool": lambda lib: lib.Rngs(True),
    "nothing": lambda lib: lib.Rngs(),
}


@pytest.mark.parametrize("name", START)
def test_starting(name):
    both(START[name])


def drawn(lib):
    rngs = lib.Rngs(0, params=1)
    for _ in range(3):
        rngs(), rngs.params(), rngs.dropout(), rngs["other"]()
    return rngs


EDITS = {
    "draws": drawn,
    "split": lambda lib: drawn(lib).split(2),
    "split by filter": lambda lib: drawn(lib).split({"params": (2, 1), ...: 3}),
    "split some": lambda lib: drawn(lib).split({"params": 2}),
    "broadcast": lambda lib: drawn(lib).broadcast((2, 1)),
    "broadcast some": lambda lib: drawn(lib).broadcast({("params", "x"): 2, ...: None}),
    "fork": lambda lib: drawn(lib).fork(),
    "a stream's fork": lambda lib: [drawn(lib).params.fork(), drawn(lib).params.broadcast(2)],
}


@pytest.mark.parametrize("name", EDITS)
def test_editing(name):
    both(EDITS[name])


def in_place(change):
    def program(lib):
        node = model(lib)
        change(lib, node)
        return node

    return program


def restored(lib, node):
    lib.restore_rngs(lib.split_rngs(node, splits=3))


def decorated(lib, node):
    seen = {}

    @lib.split_rngs(splits=2, only="params")
    def f(node):
        seen.update(described(lib, node))

    f(node)
    assert list(seen.values()).count(None) == 0


def forked_block(lib, node):
    with lib.fork_rngs(node):
        node.rngs()


WHOLE = {
    "split_rngs": lambda lib, m: lib.split_rngs(m, splits=2),
    "split_rngs with shape": lambda lib, m: lib.split_rngs(m, splits=(2, 3)),
    "split_rngs of a tag": lambda lib, m: lib.split_rngs(m, splits=2, only="params"),
    "split_rngs of a path": lambda lib, m: lib.split_rngs(
        m, splits=2, only=lib.PathContains("inner")
    ),
    "split_rngs squeezed": lambda lib, m: lib.split_rngs(m, splits=1, squeeze=True),
    "restored": restored,
    "decorated": decorated,
    "fork_rngs": lambda lib, m: lib.fork_rngs(m),
    "fork_rngs split": lambda lib, m: lib.fork_rngs(m, split=2),
    "fork_rngs by filter": lambda lib, m: lib.fork_rngs(m, split={"params": 2, "noise": (1, 2)}),
    "fork_rngs in a block": forked_block,
    "reseed": lambda lib, m: lib.reseed(m, default=5, params=jax.random.key(9)),
    "reseed shapes": lambda lib, m: (
        lib.split_rngs(m, splits=(2, 2)),
        lib.reseed(m, default=5, noise=7, policy="match_shape"),
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_models(name):
    both(in_place(WHOLE[name]))


COPIES = {
    "nothing": {},
    "split": {"split": 2},
    "split some": {"split": {"params": 2}},
    "fork": {"fork": True},
    "fork some": {"fork": ["params", "noise"]},
    "broadcast": {"broadcast": 2},
    "all three": {"split": {"params": 2}, "broadcast": {"noise": 3}, "fork": True},
    "only": {"split": 2, "only": "default"},
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("mode", [{"graph": False}, {"graph_updates": False}])
def test_with_rngs(name, mode):
    if not hasattr(flax_nnx, "with_rngs"):
        pytest.skip("newer than the installed reference")

    def program(lib):
        node = model(lib)
        new = lib.with_rngs(node, **COPIES[name], **mode)
        assert new is not node
        return lib.List([node, new]) if name == "nothing" else new

    if name == "nothing":  # the copy shares its streams' Variables with the original
        original = model(nnx)
        new = nnx.with_rngs(original, **mode)
        theirs = model(flax_nnx)
        copied = flax_nnx.with_rngs(theirs, **mode)
        assert (new.rngs.params.key is original.rngs.params.key) == (
            copied.rngs.params.key is theirs.rngs.params.key
        )
    else:
        both(program)


FILTERS = {
    "tag": lambda lib: "params",
    "state": lambda lib: lib.RngState,
    "key": lambda lib: lib.RngKey,
    "stream": lambda lib: lib.RngStream,
    "path": lambda lib: lib.PathContains("params"),
    "path of the key": lambda lib: lib.PathContains("key"),
    "not the key": lambda lib: lib.Not(lib.RngKey),
    "any": lambda lib: lib.Any("params", lib.RngKey),
    "all": lambda lib: lib.All("params", lib.RngKey),
    "a function": lambda lib: lambda path, x: len(path) == 2,
}
CHOOSING = {
    "split_rngs": lambda lib, m, f: lib.split_rngs(m, splits=2, only=f, graph_updates=False),
    "split_rngs in place": lambda lib, m, f: lib.split_rngs(m, splits=2, only=f) and m,
    "fork_rngs": lambda lib, m, f: lib.fork_rngs(m, split={f: 2}, graph_updates=False),
    "fork_rngs in place": lambda lib, m, f: lib.fork_rngs(m, split={f: 2}) and m,
    "Rngs.split": lambda lib, m, f: m.rngs.split({f: 2, ...: 3}),
    "Rngs.fork": lambda lib, m, f: m.rngs.fork(split={f: 2}),
    "Rngs.broadcast": lambda lib, m, f: m.rngs.broadcast({f: 2}),
}
COPYING = {
    "split": lambda lib, m, f: lib.with_rngs(m, split={f: 2, ...: 3}, graph_updates=False),
    "fork": lambda lib, m, f: lib.with_rngs(m, fork=f, graph_updates=False),
    "only": lambda lib, m, f: lib.with_rngs(m, fork=..., only=f, graph_updates=False),
}


@pytest.mark.parametrize("name", FILTERS)
def test_filters_see_the_same(name):
    copying = COPYING if hasattr(flax_nnx, "with_rngs") else {}
    for choose in (*CHOOSING.values(), *copying.values()):
        both(lambda lib: choose(lib, model(lib), FILTERS[name](lib)))  # noqa: B023


everything = lambda path, x: True
RULES = [
    {"split": {"params": 2}, "fork": "params"},
    {"split": {"params": 2}, "fork": ["noise", "params"]},
    {"split": {"params": 2}, "broadcast": {"params": 2}, "fork": ...},
    {"split": {"params": 2}, "broadcast": {...: 2}, "fork": "params"},
    {"split": {"params": 2, ...: 3}, "fork": ["params"]},
    {"split": {everything: 2}, "fork": everything},
    {"split": lambda lib: {lib.Everything(): 2}, "fork": "params"},
    {"split": {"params": 2}, "fork": ["noise", ...]},
    {"split": {("params", "noise"): 2, "params": 3}},
    {"split": {...: 2, "params": 3}, "fork": ...},
    {"split": {"params": 2}, "fork": True},
    {"split": 2, "broadcast": {"params": 3}},
    {"split": 2, "broadcast": 3, "fork": "noise"},
    {"split": None, "broadcast": {True: 3}, "fork": "params"},
    {"split": {"params": 2}, "fork": "params", "only": "noise"},
]


@pytest.mark.parametrize("number", range(len(RULES)))
@pytest.mark.parametrize("mode", [{"graph": False}, {"graph_updates": False}])
def test_conflicting_rules(number, mode):
    if not hasattr(flax_nnx, "with_rngs"):
        pytest.skip("newer than the installed reference")
    results = []
    for lib in (nnx, flax_nnx):
        rules = dict(RULES[number])
        if callable(rules["split"]):
            rules["split"] = rules["split"](lib)
        node = model(lib)
        before = described(lib, node)
        try:
            results.append(described(lib, lib.with_rngs(node, **rules, **mode)))
        except ValueError as error:
            results.append(str(error).split("Everything")[0].split("<function")[0].splitlines()[:2])
            assert lib is not nnx or described(lib, node) == before
    assert results[0] == results[1]


def test_samplers_and_initializers():
    ours, theirs = nnx.Rngs(5), flax_nnx.Rngs(5)
    np.testing.assert_array_equal(ours.normal((3,)), theirs.normal((3,)))
    np.testing.assert_array_equal(ours.randint((3,), 0, 9), theirs.randint((3,), 0, 9))
    np.testing.assert_array_equal(
        ours.truncated_normal(-1, 1, (3,)), theirs.truncated_normal(-1, 1, (3,))
    )
    np.testing.assert_array_equal(ours.lecun_normal()((3, 4)), theirs.lecun_normal()((3, 4)))
    np.testing.assert_array_equal(
        ours.x.he_uniform(in_axis=0, out_axis=1)((3, 4)),
        theirs.x.he_uniform(in_axis=0, out_axis=1)((3, 4)),
    )


def test_every_method_of_the_reference_is_there():
    for cls in ("Rngs", "RngStream"):
        names = {n for n in dir(getattr(flax_nnx, cls)) if not n.startswith("_")}
        missing = sorted(names - set(dir(getattr(nnx, cls))) - set(dir(flax_nnx.Pytree)))
        assert not missing


@pytest.mark.parametrize("name", ["fork_rngs", "split_rngs", "restore_rngs", "reseed", "with_rngs"])
def test_signatures(name):
    if not hasattr(flax_nnx, name):
        pytest.skip("newer than the installed reference")
    ours = inspect.signature(getattr(nnx, name)).parameters.values()
    theirs = inspect.signature(getattr(flax_nnx, name)).parameters.values()
    plain = (type(None), bool, str, int, type(...))
    kinds = [
        [(p.name, p.kind, p.default if isinstance(p.default, plain) else "given") for p in ps]
        for ps in (ours, theirs)
    ]
    assert [k[:2] for k in kinds[0]] == [k[:2] for k in kinds[1]]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda lib: lib.Rngs(params=1).dropout,
        lambda lib: lib.Rngs(params=1)["dropout"],
        lambda lib: lib.Rngs(params=1)(),
        lambda lib: lib.Rngs("x"),
        lambda lib: lib.Rngs(1.5),
        lambda lib: lib.Rngs(jnp.ones(3)),
        lambda lib: lib.Rngs(jnp.ones(3, jnp.uint32)),
        lambda lib: lib.RngStream(0, tag="a").split("a"),
        lambda lib: lib.RngStream(0, tag="a").split(2)(),
        lambda lib: lib.split_rngs(lib.Rngs(0), splits=2, squeeze=True),
        lambda lib: lib.split_rngs(lib.Rngs(0).split(2), splits=2),
        lambda lib: lib.reseed(lib.Rngs(0), default=1, policy="x"),
        lambda lib: lib.reseed(lib.Rngs(0).split(2), default=1),
        lambda lib: lib.reseed(lib.Rngs(0), default="a"),
    ],
)
def test_errors_are_of_the_same_class(wrong):
    raised = []
    for lib in (nnx, flax_nnx):
        with pytest.raises(Exception) as caught:  # the class is what is compared
            wrong(lib)
        raised.append(caught.type)
    assert raised[0] is raised[1]


def test_L10_the_same_seed_gives_the_same_parameters_and_streams():
    seen = []
    for lib in (nnx, flax_nnx):
        rngs = lib.Rngs(0, dropout=1)
        made = lib.List(
            [
                lib.Linear(3, 4, rngs=rngs),
                lib.Conv(2, 3, (2, 2), rngs=rngs),
                lib.Embed(5, 2, rngs=rngs),
                lib.BatchNorm(4, rngs=rngs),
                lib.MultiHeadAttention(2, 4, rngs=rngs, decode=False),
                lib.Dropout(0.5, rngs=rngs),
            ]
        )
        made[-1](jnp.ones((8, 4)))
        drawn = [np.asarray(rngs.normal((3,))), np.asarray(rngs.dropout.uniform((2,)))]
        params = lib.to_flat_state(lib.state(made, lib.Param))
        values = [(path, np.asarray(v.get_value())) for path, v in params]
        seen.append(([*values, *enumerate(drawn)], described(lib, made)))
    (ours, streams), (theirs, their_streams) = seen
    assert streams == their_streams
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, x), (_, y) in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=str(path))
