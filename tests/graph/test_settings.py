"""Static attributes that can be edited and have no hash: dataclasses of settings and the like."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx

ONE = jnp.ones(2)


@dataclasses.dataclass
class Settings:
    scale: float = 2.0
    sizes: list[int] = dataclasses.field(default_factory=lambda: [1, 2])
    inner: object = None
    note: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(slots=True)
class Slotted:
    scale: float = 2.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    sizes: list[int]
    scale: float = 2.0


class Compared:
    """Something with `==` and no hash."""

    def __init__(self, scale=2.0):
        self.scale = scale

    def __eq__(self, other):
        return isinstance(other, Compared) and self.scale == other.scale

    __hash__ = None


@dataclasses.dataclass(unsafe_hash=True)
class Hashed:
    scale: float = 2.0
    inner: object = None


@dataclasses.dataclass(frozen=True)
class Around:
    inner: Hashed = dataclasses.field(default_factory=Hashed)

    @property
    def scale(self):
        return self.inner.scale


class ComparedWithHash(Compared):
    def __hash__(self):
        return hash(self.scale)


class Table(dict):
    scale = 2.0


class Secret:
    """Does not tell what it holds."""

    scale = 2.0
    __hash__ = None

    def __eq__(self, other):
        return self is other

    def __reduce_ex__(self, protocol):
        raise RuntimeError("no")


class Model(nnx.Module):
    def __init__(self, settings):
        self.settings = settings
        self.weight = nnx.Param(ONE)
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        return self.weight * x * self.settings.scale


def cyclic():
    settings = Settings()
    settings.inner = [settings]
    return settings


MAKERS = {
    "dataclass": Settings,
    "slots": Slotted,
    "frozen with a list": lambda: Frozen([1]),
    "==": Compared,
    "hashed": Hashed,
    "hashed far inside": lambda: Settings(inner={Hashed(): (1, Hashed(inner=Hashed()))}),
    "frozen around hashed": Around,
    "== with a hash": ComparedWithHash,
    "namespace": lambda: types.SimpleNamespace(scale=2.0, more={"a": [1]}),
    "arguments": lambda: argparse.Namespace(scale=2.0),
    "dict": lambda: Table(a=[1]),
    "nested": lambda: Settings(inner=(Settings(), {"a": Compared()}, np.arange(3))),
    "cyclic": cyclic,
}
every_kind = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@every_kind
def test_taken_apart_and_compared(make):
    settings = make()
    model, equal = Model(settings), Model(make())
    for _ in range(3):
        graphdef, state = nnx.split(model)
        assert graphdef == nnx.graphdef(equal) and hash(graphdef) == hash(nnx.graphdef(equal))
        assert nnx.merge(graphdef, state).settings is settings
    assert nnx.clone(model).settings is settings
    assert graphdef != nnx.graphdef(Model(Settings(scale=3.0)))
    assert jax.tree.structure(model) == jax.tree.structure(equal)


@pytest.mark.parametrize(
    "make", [Settings, Slotted, Compared, lambda: MAKERS["namespace"](), Hashed, ComparedWithHash]
)
def test_an_edit_is_noticed(make):
    traces = []

    @nnx.jit
    def call(model):
        traces.append(1)
        return model(1.0)

    model = Model(make())
    before = nnx.graphdef(model)
    for scale, count in [(2.0, 1), (5.0, 2), (2.0, 2), (5.0, 2), (7.0, 3)]:
        model.settings.scale = scale
        np.testing.assert_array_equal(call(model), scale * ONE)
        assert len(traces) == count
        assert (nnx.graphdef(model) == before) is (scale == 2.0)


def test_an_edit_far_inside_is_noticed():
    settings = Settings(inner={"a": [Settings()]})
    call = nnx.jit(lambda model: model.settings.inner["a"][0].sizes[0] * model(1.0))
    for size in (1, 10):
        settings.inner["a"][0].sizes[0] = size
        np.testing.assert_array_equal(call(Model(settings)), 2 * size * ONE)


@pytest.mark.parametrize("make", [Hashed, Around, ComparedWithHash])
@pytest.mark.parametrize("edited", [0, 1, 2])
def test_an_edit_of_what_has_a_hash_is_seen_in_its_own_models(make, edited):
    inside = (lambda part: (1, part)) if make is Hashed or edited == 1 else lambda part: part
    part = lambda settings: settings[1] if type(settings) is tuple else settings
    call = nnx.jit(lambda model: part(model.settings).scale * model.weight)
    read = nnx.jit(lambda model: part(model.weight.get_metadata("note")).scale * model.weight)
    models = [Model(inside(make())) for _ in range(2)]
    for model in models:
        model.weight.set_metadata(note=inside(make()))
    models.append(nnx.merge(*nnx.split(models[1])))
    for notes, run in [
        ([part(model.settings) for model in models], call),
        ([part(model.weight.get_metadata("note")) for model in models], read),
    ]:
        settings = notes[edited]
        settings = settings.inner if make is Around else settings
        if edited != 0:
            run(models[0])
        settings.scale = 5.0
        for model, note in zip(models, notes):
            np.testing.assert_array_equal(run(model), note.scale * ONE)
        assert [note.scale for note in notes].count(5.0) == (1 if edited == 0 else 2)


def test_fields_that_do_not_count_do_not_count():
    assert nnx.graphdef(Model(Settings(note="a"))) == nnx.graphdef(Model(Settings(note="b")))
    assert nnx.graphdef(Model(Settings(scale=1))) != nnx.graphdef(Model(Settings(scale=1.0)))


def test_shared_settings_are_looked_at_once(monkeypatch):
    seen = []

    class Watched(Compared):
        def __getstate__(self):
            seen.append(1)
            return vars(self)

    settings = Watched()
    model = nnx.List([Model(settings) for _ in range(50)])
    call = nnx.jit(lambda model: model[0](1.0))
    for _ in range(3):
        call(model)
    seen.clear()
    call(model)
    assert len(seen) == 1


def test_slices_count_by_content():
    """They have a hash from Python 3.12 on."""
    traces = []

    @nnx.jit
    def picked(model):
        traces.append(1)
        return model.weight[model.settings]

    for where in (slice(1, None), slice(1, None), slice(0, 1)):
        np.testing.assert_array_equal(picked(Model(where)), ONE[where])
    assert len(traces) == 2
    assert nnx.graphdef(Model((slice(1), 2))) != nnx.graphdef(Model((slice(1.0), 2)))


@pytest.mark.filterwarnings("ignore:.*neither an nnx.Module")
def test_arrays_and_secrets_count_by_identity():
    def same(one, other):
        return nnx.graphdef(Model(one)) == nnx.graphdef(Model(other))

    small, large, array, secret = np.arange(10), np.arange(2000), jnp.arange(3), Secret()
    assert same(Settings(inner=array), Settings(inner=array))
    assert not same(Settings(inner=array), Settings(inner=jnp.arange(3)))
    assert same(Settings(inner=small), Settings(inner=small.copy()))
    assert same(Settings(inner=large), Settings(inner=large))
    assert not same(Settings(inner=large), Settings(inner=large.copy()))
    assert same(secret, secret) and not same(secret, Secret())
    np.testing.assert_array_equal(nnx.jit(lambda m: m(1.0))(Model(secret)), 2 * ONE)
    holder = types.SimpleNamespace(lock=threading.Lock(), scale=2.0)  # a lock has a hash of its own
    assert same(holder, copy.copy(holder))
