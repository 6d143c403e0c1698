"""Settings, the environment variables they start from, and the harsh environment of these tests."""

import warnings
from pathlib import Path

import jax
import pytest

import nnxlite as nnx
from nnxlite._base import errors
from tests.conftest import QUICK, SLOW

NAME = "NNXLITE_TEST_FLAG"


@pytest.mark.parametrize(
    ("text", "meant"),
    [("1", True), (" True ", True), ("on", True), ("0", False), ("NO", False), ("off", False)],
)
def test_flags_of_the_environment(monkeypatch, text, meant):
    monkeypatch.setenv(NAME, text)
    assert errors.flag_from_environment(NAME, not meant) is meant
    monkeypatch.delenv(NAME)
    assert errors.flag_from_environment(NAME, meant) is meant


def test_a_flag_that_is_none(monkeypatch):
    monkeypatch.setenv(NAME, "maybe")
    with pytest.raises(ValueError, match=f"Environment variable {NAME} must be .* got 'maybe'"):
        errors.flag_from_environment(NAME, True)


SWITCHES = {
    "set_graph_mode": errors.GRAPH_MODE,
    "set_graph_updates": errors.GRAPH_UPDATES,
    "use_eager_sharding": errors.EAGER_SHARDING,
    "use_named_scopes": errors.NAMED_SCOPES,
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_takes_a_bool_and_keeps_the_setting_otherwise(name):
    before = SWITCHES[name].stack()
    for wrong in ("yes", 1, None):
        with pytest.raises(TypeError, match=f"^{name} takes a bool, got {type(wrong).__name__}.$"):
            getattr(nnx, name)(wrong)
    assert SWITCHES[name].stack() == before


def test_eight_devices_no_double_precision_and_warnings_are_errors():
    assert [device.platform for device in jax.devices()] == ["cpu"] * 8
    assert not jax.config.jax_enable_x64
    with pytest.raises(UserWarning, match="raised"):
        warnings.warn("raised, not printed", UserWarning, stacklevel=1)


def test_tiers_are_of_files_and_the_quick_one_has_one_of_every_package():
    here = Path(__file__).parent
    files = {name.partition("::")[0] for name in QUICK | SLOW}
    assert [name for name in files if not (here / name).is_file()] == []
    packages = {path.parent.name for path in here.glob("*/test_*.py")}
    covered = {name.partition("/")[0] for name in QUICK}
    assert packages - covered <= {"benchmarks", "examples", "flax", "parity", "typing"}
