"""Metadata of Variables, and the callbacks among it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import nnxlite as nnx

ONES = jnp.ones(2)
REQUIRED = {"hijax": False, "ref": False, "eager_sharding": True}


def plus(amount, log=None):
    """A callback that adds, and says what it was given."""

    def hook(variable, value):
        if log is not None:
            log.append((type(variable).__name__, amount))
        return value + amount

    return hook


# Entries -----------------------------------------------------------------------------------------


def test_reading_entries():
    v = nnx.Param(ONES, tag="t", table=[1])
    assert v.get_metadata() == {**REQUIRED, "tag": "t", "table": [1]}
    assert v.get_metadata(exclude_required=True) == {"tag": "t", "table": [1]}
    assert v.get_metadata("tag") == v.tag == "t" and v.get_metadata("zz", 3) == 3
    assert v.has_metadata("tag") and v.has_metadata("ref") and not v.has_metadata("zz")
    v.get_metadata()["tag"] = "changed"
    assert v.tag == "t"
    v.del_metadata("tag")
    assert v.get_metadata(exclude_required=True) == {"table": [1]}


# VariableMetadata --------------------------------------------------------------------------------


def test_with_metadata_annotates_an_initializer():
    def zeros(key, shape):
        """Zeros."""
        return jnp.zeros(shape)

    init = nnx.with_metadata(
        zeros,
        on_get_value=plus(1.0),
        on_set_value=[plus(2.0), plus(3.0)],
        on_create_value=plus(10.0),
        tag="t",
    )
    assert init.__doc__ == "Zeros." and isinstance(init(0, (2,)), nnx.VariableMetadata)
    v = nnx.Param(init(0, (2,)), other=1)
    assert v.get_raw_value()[0] == 10.0 and v.value[0] == 11.0 and (v.tag, v.other) == ("t", 1)
    v.value = jnp.zeros(2)
    assert v.get_raw_value()[0] == 5.0
    entries = v.get_metadata(exclude_required=True)
    assert sorted(entries) == ["on_create_value", "on_get_value", "on_set_value", "other", "tag"]


# Callbacks ---------------------------------------------------------------------------------------


def test_raw_values_go_around_callbacks():
    v = nnx.Param(ONES, on_get_value=plus(1.0), on_set_value=plus(1.0), on_create_value=plus(0.0))
    v.set_raw_value(3 * ONES)
    assert v.raw_value[0] == 3.0
    v.raw_value = 4 * ONES
    assert v.get_raw_value()[0] == 4.0
    for new in (v.copy(), v.replace(4 * ONES), jax.tree.map(lambda x: x, v), nnx.clone(v)):
        assert new.get_raw_value()[0] == 4.0 and new.value[0] == 5.0
    w = nnx.Param(ONES, on_set_value=plus(50.0))
    w.copy_from(v)
    assert w.get_raw_value()[0] == 4.0 and w.value[0] == 5.0


def test_several_callbacks_run_in_order():
    double = lambda v, x: 2 * x
    for hooks in ((plus(1.0), double), [plus(1.0), double]):
        assert nnx.Param(1.0, on_get_value=hooks).value == 4.0
    v = nnx.Param(1.0, on_create_value=(plus(1.0), double))
    assert v.value == 4.0 and v.create_value(2.0) == 2.0


def test_callbacks_with_references():
    v = nnx.Param(ONES, ref=True, on_get_value=plus(1.0), on_set_value=plus(10.0))
    v[0] = 1.0
    assert v.get_raw_value()[...].tolist() == [11.0, 1.0] and v[0] == 12.0
    v.value = jnp.zeros(2)
    assert v.value.tolist() == [11.0, 11.0]
