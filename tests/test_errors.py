"""Exceptions of the package cross process pools: each can be pickled and copied, with its fields."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import os
import pickle
import subprocess
import sys
import typing as tp
from pathlib import Path

import jax
import pytest

import nnxlite as nnx
from nnxlite._base.errors import NnxError, TraceContextError
from nnxlite.checkpoint import MappingError, Mismatch, MismatchError, Report
from nnxlite.graph._plan import Stale
from nnxlite.migrate import UnreadableError

text = "Expected 4 input features, got 5.\nIn MLP.l1"
SAMPLES: dict[type, tp.Callable[[], BaseException]] = {
    TraceContextError: lambda: TraceContextError("Variable", "value", "a", "b", variable=True),
    MismatchError: lambda: MismatchError(
        text, Report("c", ("a",), misshapen=(Mismatch("b", "float32[2]", "None"),))
    ),
    MappingError: lambda: MappingError(text, ["first", "second"]),
    UnreadableError: lambda: UnreadableError(text, 3, 4),
    nnx.distributed.ProcessError: lambda: nnx.distributed.ProcessError(text, "OSError"),
}


# The bridge needs Flax, and its exceptions are those of Flax.
WITHOUT = () if importlib.util.find_spec("flax") else ("bridge",)


def all_classes() -> list[type[BaseException]]:
    """The exception classes that the modules of the package define.

    Not those of `nnxlite.flax`, whose import replaces `flax.nnx` in this process and those it starts.
    """
    found: dict[type[BaseException], None] = {}
    package = Path(nnx.__path__[0])
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).with_suffix("").parts
        if parts[0] not in ("flax", *WITHOUT) and parts[-1] not in ("__main__", "__init__"):
            for value in vars(importlib.import_module(".".join(("nnxlite", *parts)))).values():
                if isinstance(value, type) and issubclass(value, BaseException):
                    if value.__module__.startswith("nnxlite"):
                        found[value] = None
    return sorted(found, key=lambda cls: cls.__name__)


def test_no_test_is_run_with_another_flax():
    assert "NNXLITE_FLAX" not in os.environ and "nnxlite.flax" not in sys.modules


def test_all_classes_are_found():
    classes = set(all_classes())
    assert {*SAMPLES, NnxError, Stale} <= classes
    assert nnx.checkpoint.NotFoundError in classes


@pytest.mark.parametrize("cls", all_classes(), ids=lambda cls: cls.__name__)
def test_an_exception_is_pickled_and_copied_with_its_fields(cls):
    error = SAMPLES.get(cls, lambda: cls(text))()
    error.add_note("in a worker")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error) and str(again) == str(error) and again.args == error.args
        assert vars(again) == vars(error) and again.__notes__ == ["in a worker"]
        with pytest.raises(cls, match="Expected 4|Cannot mutate Variable from a diff"):
            raise again


def test_a_write_from_another_trace_level_is_raised_again_with_more_text():
    """As Keras does, with the class of whatever a layer raised."""
    count = nnx.Variable(0)
    with pytest.raises(TraceContextError) as caught:
        jax.make_jaxpr(count.set_value)(1)
    again = type(caught.value)(f"In a layer: {caught.value}")
    assert type(again) is type(caught.value) and str(again) == f"In a layer: {caught.value}"
    assert again.attribute is None and pickle.loads(pickle.dumps(again)).args == again.args


def test_a_write_from_another_trace_level_leaves_a_worker(tmp_path):
    """Also where the reference is imported, whose class of this name the exception has as a base."""
    count = nnx.Variable(0)
    with pytest.raises(TraceContextError) as caught:
        jax.make_jaxpr(count.set_value)(1)
    (tmp_path / "error").write_bytes(pickle.dumps(caught.value))
    for first in ("nnxlite", "flax.nnx"):
        program = f"""if True:
            import {first}, pickle, nnxlite as nnx
            error = pickle.loads(open({str(tmp_path / "error")!r}, "rb").read())
            assert isinstance(error, nnx.TraceContextError), type(error)
            assert type(error).__name__ == "TraceContextError" and error.owner == "Variable"
            again = pickle.loads(pickle.dumps(error))
            assert str(again) == str(error) and type(again) is type(error), type(again)
            print(error)
        """
        if first != "nnxlite":
            pytest.importorskip("flax")
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert ended.stdout.strip() == str(caught.value), ended.stderr
