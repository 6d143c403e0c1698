"""Random streams: keys, counters, lookup by name, samplers, and the functions on whole models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nnxlite as nnx
from nnxlite.objects._rngs import Samplers


def data(keys):
    return np.asarray(jax.random.key_data(keys))


def same(a, b) -> bool:
    return np.array_equal(data(a), data(b))


class Model(nnx.Module):
    """A set of streams, and a stream of its own deeper down."""

    def __init__(self):
        self.rngs = nnx.Rngs(0, params=1)
        self.inner = nnx.Dict(noise=nnx.RngStream(7, tag="default"))
        self.scale = nnx.Param(jnp.ones(2))


def test_streams_are_iterated_in_order_and_only_they_count():
    rngs = nnx.Rngs(0, params=1, noise=2)
    assert list(rngs) == ["params", "noise", "default"] and len(rngs) == 3
    assert dict(rngs.items()) == {name: rngs[name] for name in rngs}
    rngs = nnx.Rngs(0)
    rngs.size = 3
    rngs.table = jnp.ones(2)
    assert list(rngs) == ["default"] and "size" not in rngs and rngs.size == 3
    rngs.extra = nnx.RngStream(4, tag="extra")
    assert list(rngs) == ["default", "extra"]
    assert isinstance(nnx.Rngs(normal=3).normal, nnx.RngStream)  # the name of a method
    assert not hasattr(nnx.Rngs(0), "__array__")


FANS = ("glorot", "he", "kaiming", "lecun", "xavier")
INITIALIZERS = ["delta_orthogonal", "variance_scaling"]
INITIALIZERS += [f"{name}_{kind}" for name in FANS for kind in ("normal", "uniform")]


@pytest.mark.parametrize("name", INITIALIZERS)
def test_an_initializer_draws_at_each_call(name):
    arguments = (1.0, "fan_in", "normal") if name == "variance_scaling" else ()
    shape = (3, 4, 4) if name == "delta_orthogonal" else (3, 4)
    rngs, keys = nnx.Rngs(5), nnx.Rngs(5)
    initialize = getattr(rngs, name)(*arguments)
    assert rngs.default.count.value == 0
    reference = getattr(jax.nn.initializers, name)
    for _ in range(2):
        np.testing.assert_array_equal(initialize(shape), reference(*arguments)(keys(), shape))
    if name != "delta_orthogonal":  # LAPACK has no bfloat16
        assert initialize(shape, jnp.bfloat16).dtype == jnp.bfloat16
    # "xavier" is "glorot" there too
    assert f"jax.nn.initializers.{reference.__name__}" in getattr(Samplers, name).__doc__


def counts(node):
    return [x.tolist() for x in jax.tree.leaves(nnx.state(node, nnx.RngCount))]


def keys(node):
    return [data(x).tolist() for x in jax.tree.leaves(nnx.state(node, nnx.RngKey))]


def test_split_rngs_in_a_with_block_restores_also_after_an_error():
    model = Model()
    before = keys(model)
    with nnx.split_rngs(model, splits=2) as backups:
        assert len(list(backups)) == 3 and "3 streams" in repr(backups)
        assert model.rngs.default.key.value.shape == (2,)
    with pytest.raises(ZeroDivisionError), nnx.split_rngs(model, splits=2):
        1 / 0
    assert keys(model) == before and counts(model) == [2, 2, 2]


@pytest.mark.parametrize("decorator", [nnx.split_rngs(splits=2), nnx.fork_rngs(split=2)])
def test_decorators_change_the_arguments_during_the_call_only(decorator):
    model, rngs = Model(), nnx.Rngs(3)
    before = keys((model, rngs))

    @decorator
    def shapes(models, *, rngs, fail=False):
        """Its own documentation."""
        if fail:
            raise ZeroDivisionError
        return models["m"].rngs.params.key.value.shape, rngs.default.key.value.shape

    assert shapes.__name__ == "shapes" and shapes.__doc__ == "Its own documentation."
    assert shapes({"m": model}, rngs=rngs) == ((2,), (2,))
    with pytest.raises(ZeroDivisionError):
        shapes({"m": model}, rngs=rngs, fail=True)
    assert keys((model, rngs)) == before
    assert counts((model, rngs)) == [2, 2, 2, 2]


def test_shared_streams_are_changed_once_and_nothing_else():
    stream = nnx.RngStream(0, tag="a")
    with nnx.split_rngs([stream, {"b": stream}], splits=2) as backups:
        assert len(list(backups)) == 1
    assert stream.count.value == 1
    new = nnx.with_rngs(nnx.List([stream, stream]), fork=True)
    assert new[0] is new[1] and stream.count.value == 2
    assert list(nnx.split_rngs(5, splits=2)) == []
    assert list(nnx.fork_rngs({"a": jnp.ones(2)})) == []


@pytest.mark.parametrize("mode", [{"graph": False}, {"graph_updates": False}])
@pytest.mark.parametrize("change", ["split_rngs", "fork_rngs"])
def test_modes_that_copy(change, mode):
    model = Model()
    argument = {"splits": 2} if change == "split_rngs" else {"split": 2}

    @getattr(nnx, change)(**argument, **mode)
    def shape(model):
        return model.rngs.params.key.value.shape

    assert shape(model) == (2,) and counts(model) == [1, 1, 1]
    with nnx.set_graph_updates(False):
        assert getattr(nnx, change)(model, **argument) is not model


def test_with_rngs_and_fork_rngs_as_decorators():
    draw = lambda rngs: rngs()
    forked = nnx.fork_rngs(lambda rngs: (rngs(), rngs(), rngs.default.count.value))(nnx.Rngs(0))
    assert not same(*forked[:2]) and forked[2] == 2
    assert same(nnx.with_rngs(fork=True)(draw)(nnx.Rngs(0)), nnx.Rngs(0).fork()())
    assert same(nnx.with_rngs(draw)(nnx.Rngs(0)), nnx.Rngs(0)())


def test_reseed_policies():
    base = jax.random.fold_in(jax.random.key(3), 0)
    rngs, seen = nnx.Rngs(params=1).split((2, 2)), []

    def policy(path, key, shape):
        seen.append((path, data(key).tolist(), shape))
        return jax.random.key(77)

    nnx.reseed(rngs, params=3, policy=policy)
    assert seen == [(("params",), data(base).tolist(), (2, 2))]
    assert same(rngs.params.key.value, jax.random.key(77)) and rngs.params.count.value.shape == ()


@given(st.integers(0, 2**31 - 1), st.lists(st.sampled_from(["a", "b", "default"]), max_size=6))
def test_law_10_streams_are_independent_of_each_other(seed, draws):
    rngs = nnx.Rngs(seed, a=seed + 1, b=seed + 2)
    drawn = dict.fromkeys(rngs, 0)
    bases = {"default": seed, "a": seed + 1, "b": seed + 2}
    for name in draws:
        expected = jax.random.fold_in(jax.random.key(bases[name]), drawn[name])
        assert same(rngs[name](), expected)
        drawn[name] += 1


def test_split_rngs_draws_from_no_stream_where_another_one_is_broken():
    for name in ("tag", "count"):
        streams = nnx.List([nnx.RngStream(0, tag="a"), nnx.RngStream(1, tag="b")])
        delattr(streams[1], name)
        with pytest.raises(AttributeError, match=name):
            nnx.split_rngs(streams, splits=2)
        assert streams[0].count[...] == 0 and streams[0].key.shape == ()
