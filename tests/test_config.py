"""Settings: their switches, and the environment variables they start from."""

from __future__ import annotations

import pytest

import nnxlite as nnx
from nnxlite._base.errors import (
    EAGER_SHARDING,
    GRAPH_MODE,
    GRAPH_UPDATES,
    NAMED_SCOPES,
    flag_from_environment,
)

NAME = "NNXLITE_TEST_FLAG"


@pytest.mark.parametrize(
    ("text", "meant"),
    [("1", True), (" True ", True), ("on", True), ("0", False), ("NO", False), ("off", False)],
)
def test_flags_of_the_environment(monkeypatch, text, meant):
    monkeypatch.setenv(NAME, text)
    assert flag_from_environment(NAME, not meant) is meant
    monkeypatch.delenv(NAME)
    assert flag_from_environment(NAME, meant) is meant


def test_a_flag_that_is_none(monkeypatch):
    monkeypatch.setenv(NAME, "maybe")
    with pytest.raises(ValueError, match=f"Environment variable {NAME} must be .* got 'maybe'"):
        flag_from_environment(NAME, True)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("set_graph_mode", GRAPH_MODE),
        ("set_graph_updates", GRAPH_UPDATES),
        ("use_eager_sharding", EAGER_SHARDING),
        ("use_named_scopes", NAMED_SCOPES),
    ],
)
def test_a_switch_takes_a_bool_and_keeps_the_setting_otherwise(name, setting):
    before = setting.stack()
    for wrong in ("yes", 1, None):
        with pytest.raises(TypeError, match=f"^{name} takes a bool, got {type(wrong).__name__}.$"):
            getattr(nnx, name)(wrong)
    assert setting.stack() == before
