"""Data beside objects: everything comes back as it was saved, or is refused; nothing vanishes."""

import collections
import dataclasses
import enum
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nnxlite as nnx
from nnxlite.checkpoint import CheckpointError, MismatchError
from tests.checkpoint.models import bits, linear

checkpoint = nnx.checkpoint


Config = dataclasses.make_dataclass("Config", ["rate"])


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Registered:
    rate: float = 0.1


Mode = enum.Enum("Mode", "FAST")
Text = type("Text", (str,), {})

COMPLEX = st.complex_numbers(allow_nan=False, allow_infinity=False)
NUMBERS = st.integers() | st.floats(allow_nan=False) | COMPLEX
SIMPLE = st.none() | st.booleans() | NUMBERS | st.text(max_size=5) | st.binary(max_size=5)
KEYS = st.text(max_size=3) | st.integers(0, 3) | st.booleans() | st.none() | st.tuples(st.binary())
NAMES = st.sampled_from(["1", "None", "a.b", ""])


def containers(inner):
    lists = st.lists(inner, max_size=3)
    mappings = (st.dictionaries(keys, inner, max_size=3) for keys in (KEYS, NAMES))
    return st.one_of(lists, lists.map(tuple), *mappings)


PLAIN = st.recursive(SIMPLE, containers, max_leaves=8)


def blank(value):
    """The same structure with other values."""
    if isinstance(value, dict):
        return {key: blank(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(blank, value))
    return None if value is None else type(value)()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(["config", "history", "x"]), PLAIN, min_size=1))
def test_plain_data_comes_back_as_it_was(tmp_path, items):
    shutil.rmtree(tmp_path / "c", ignore_errors=True)
    model = linear()
    checkpoint.save(tmp_path / "c", model=model, **items)
    found = checkpoint.info(tmp_path / "c").values
    report = checkpoint.restore(tmp_path / "c", model=linear(1))
    given = checkpoint.restore(tmp_path / "c", model=linear(1), **blank(items))
    assert given.complete
    for values in (found, report.values, given.values):
        assert {*values, "model"} == {*items, "model"}
        for name, value in items.items():
            assert repr(values[name]) == repr(value)  # tells 1 from True, 0.0 from -0.0


@pytest.mark.parametrize(
    ("value", "path", "what"),
    [
        (Config(0.1), "x", "Config"),
        (Registered(), "x", "Registered"),
        ({"deep": [1, Config(0.1)]}, "x.deep.1", "Config"),
        (jax.nn.relu, "x", "custom_jvp"),
        ({"seen": {1, 2}}, "x.seen", "set"),
        (optax.adam(0.1), "x", "GradientTransformationExtraArgs"),
        (collections.Counter("ab"), "x", "Counter"),
        ([Mode.FAST], "x.0", "Mode"),
        (Text("abc"), "x", "Text"),
        (nnx.Linear, "x", "PytreeMeta"),
        (jnp.dtype("float32"), "x", "Float32DType"),
        (np.array(["a", "b"]), "x", "ndarray"),
        (np.array([None]), "x", "ndarray"),
        (np.datetime64("2026-01-01"), "x", "datetime64"),
        (object(), "x", "object"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_path(tmp_path, saved, value, path, what):
    model = linear(1)
    before = bits(model)
    manager = checkpoint.Manager(tmp_path / "run")
    for call in (
        lambda **items: checkpoint.save(tmp_path / "c", **items),
        lambda **items: manager.save(1, **items),
        lambda **items: checkpoint.restore(saved, **items),
    ):
        message = rf"'{path}' is a {what}, which a checkpoint cannot"
        with pytest.raises(CheckpointError, match=message):
            call(model=model, x=value)
    assert bits(model) == before and not (tmp_path / "c").exists() and manager.steps == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "c"
    checkpoint.save(path, model=linear())
    return path


def test_a_filter_leaves_out_what_cannot_be_stored(tmp_path):
    checkpoint.save(tmp_path / "c", only=nnx.Param, model=linear(), x={"a": len, "b": None})
    assert set(checkpoint.info(tmp_path / "c").leaves) == {"model.bias", "model.kernel"}
    items = {"x": {"f": len, "b": None}, "v": nnx.Dict(f=nnx.Variable(len)), "y": None}
    checkpoint.save(tmp_path / "d", only=nnx.Not(nnx.PathContains("f")), **items)
    assert checkpoint.info(tmp_path / "d").leaves == {"y": "plain data"}


def test_structure_of_optimizers_and_objects_is_no_plain_data(tmp_path):
    """Attributes, fields of named tuples, and what their classes set, are built by the program."""
    table = {1: len, "w": jnp.ones(2)}
    items = {
        "model": nnx.Dict(act=jax.nn.relu, none=None, table=table),
        "state": optax.chain(optax.clip(1.0), optax.adam(0.1)).init({"w": jnp.ones(2)}),
        "both": [linear(), {"n": 3}, nnx.Dropout(0.5), optax.EmptyState()],
        "average": nnx.metrics.Average(),
        "empty": nnx.state(linear(), nnx.LoRAParam),
    }
    checkpoint.save(tmp_path / "c", **items)
    assert checkpoint.restore(tmp_path / "c", **items).complete


def test_data_that_has_another_form_now_comes_back_as_it_was_saved(tmp_path):
    """A history has grown, a setting is gone; dictionaries and lists stay the caller's own."""
    saved = {"history": [1.0, 2.0], "settings": {"a": None, "b": (1,)}, "a.b": [1], "a/c": 2}
    checkpoint.save(tmp_path / "c", **saved)
    history, settings = [], collections.defaultdict(int, c=3)
    report = checkpoint.restore(tmp_path / "c", history=history, settings=settings)
    assert report.complete and dict(report.values) == saved
    assert history == saved["history"] and settings == saved["settings"]


def test_what_differs_is_named(tmp_path):
    checkpoint.save(tmp_path / "c", x=[jnp.ones(1), None, 2, "1"], y=jnp.ones(2), z=None)
    with pytest.raises(MismatchError) as caught:
        new = {"x": [jnp.ones(2), 1, "t", jnp.ones(1)], "y": {}, "z": jnp.ones(2)}
        checkpoint.restore(tmp_path / "c", **new, cast=True)
    for text in (
        "missing, 1: x.1",
        "x.0: stored float32[1], wanted float32[2]",
        "x.3: stored Python str, wanted float32[1]",
        "y: stored float32[2], wanted plain data",
        "z: stored plain data, wanted float32[2]",
        "x.2: stored Python int, wanted Python str",
    ):
        assert text in str(caught.value)


def test_former_formats_have_a_leaf_for_each_part(tmp_path):
    number = lambda n: nnx.Dict(n=nnx.Variable(n))
    checkpoint.save(tmp_path / "c", x=[number(3), 2], y=number(4))
    file = tmp_path / "c/nnxlite/metadata"
    about = json.loads(file.read_text())
    about["leaves"]["x.2"] = {"dtype": "None", "shape": [], "value": None}
    table = {"x": ["list", [[i, f"x.{i}"] for i in range(3)]]}
    file.write_text(json.dumps({**about, "format": 3, "containers": table}))
    x, y = [number(0), 0, None], number(0)
    report = checkpoint.restore(tmp_path / "c", x=x, y=y)
    assert report.complete and report.values["x"][1:] == [2, None]
    assert x[0].n.value == 3 and y.n.value == 4
