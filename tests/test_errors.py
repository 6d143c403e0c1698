"""Exceptions of the package cross process pools, with their fields; docs/errors.md shows messages."""

import copy
import importlib
import os
import pickle
import subprocess
import sys
import typing as tp

import jax
import pytest

import nnxlite as nnx
from nnxlite._base.errors import NnxError, TraceContextError
from nnxlite.checkpoint import MappingError, Mismatch, MismatchError, Report
from nnxlite.graph._plan import Stale
from nnxlite.migrate import UnreadableError
from tests.errors_page import PAGE, SECTIONS, raised, words
from tests.structure import modules

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


def all_classes() -> list[type[BaseException]]:
    """The exception classes that the modules of the package define."""
    found = {
        value
        for module in map(importlib.import_module, modules())
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, BaseException)
        if value.__module__.startswith("nnxlite")
    }
    return sorted(found, key=lambda cls: cls.__name__)


def test_no_test_is_run_with_another_flax():
    assert "NNXLITE_FLAX" not in os.environ and "nnxlite.flax" not in sys.modules


def test_all_classes_are_found():
    assert {*SAMPLES, NnxError, Stale, nnx.checkpoint.NotFoundError} <= {*all_classes()}


@pytest.mark.parametrize("cls", all_classes(), ids=lambda cls: cls.__name__)
def test_an_exception_is_pickled_and_copied_with_its_fields(cls):
    error = SAMPLES.get(cls, lambda: cls(text))()
    error.add_note("in a worker")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error) and str(again) == str(error) and again.args == error.args
        assert vars(again) == vars(error) and again.__notes__ == ["in a worker"]
        with pytest.raises(cls, match="Expected 4|Cannot mutate Variable from a diff"):
            raise again


def refused_write() -> TraceContextError:
    """What a write from another trace level raises."""
    with pytest.raises(TraceContextError) as caught:
        jax.make_jaxpr(nnx.Variable(0).set_value)(1)
    return caught.value


def test_a_write_from_another_trace_level_is_raised_again_with_more_text():
    """As Keras does, with the class of whatever a layer raised."""
    error = refused_write()
    again = type(error)(f"In a layer: {error}")
    assert type(again) is type(error) and str(again) == f"In a layer: {error}"
    assert again.attribute is None and pickle.loads(pickle.dumps(again)).args == again.args


def test_a_write_from_another_trace_level_leaves_a_worker(tmp_path):
    """Also where the reference is imported, whose class of this name the exception has as a base."""
    pytest.importorskip("flax")
    (tmp_path / "error").write_bytes(pickle.dumps(refused_write()))
    program = f"""if True:
        import flax.nnx, pickle, nnxlite as nnx
        error = pickle.loads(open({str(tmp_path / "error")!r}, "rb").read())
        assert isinstance(error, nnx.TraceContextError), type(error)
        assert type(error).__name__ == "TraceContextError" and error.owner == "Variable"
        again = pickle.loads(pickle.dumps(error))
        assert str(again) == str(error) and type(again) is type(error), type(again)
        print(error)
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stdout.strip() == str(refused_write()), ended.stderr


def test_every_section_of_the_page_is_compared():
    assert len(SECTIONS) == PAGE.read_text().count("\n## ") >= 10


@pytest.mark.parametrize("title", SECTIONS)
def test_the_message_on_the_page_is_what_is_raised(title):
    seen, shown = raised(SECTIONS[title]["code"], nnx), words(SECTIONS[title]["ours"])
    if f"JAX {jax.__version__}" not in PAGE.read_text():
        shown = shown[: len(seen)]  # a newer JAX says more
    assert seen == shown
