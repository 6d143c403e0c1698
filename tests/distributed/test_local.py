"""Without a second process: how processes meet, and fail together."""

import json

import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.checkpoint import _orbax
from nnxlite.checkpoint._report import together
from nnxlite.sharding import _processes


class Service:
    """JAX's coordination service; the other processes say what is given, or are away."""

    def __init__(self, *others):
        self.others = others

    def key_value_set(self, key, text):
        self.pairs = [(key, text)]

    def wait_at_barrier(self, folder, milliseconds):
        if not self.others:
            raise RuntimeError("DEADLINE_EXCEEDED: Barrier timed out.")
        texts = enumerate(self.others, start=1)
        self.pairs += [(f"{folder}/{index}", json.dumps(text)) for index, text in texts]

    def key_value_dir_get(self, folder):
        return self.pairs

    def key_value_delete(self, key):
        pass


def answered_by(monkeypatch, *others):
    seen = Service(*others), len(others) + 1, 0
    monkeypatch.setattr(_processes, "coordination", lambda: seen)


def test_a_process_that_is_alone_has_nobody_to_wait_for():
    assert nnx.distributed.exchange("alone", "text") == ["text"]
    with pytest.raises(KeyError), nnx.distributed.agreed("alone"):
        raise KeyError


def test_an_error_is_not_hidden_by_those_that_do_not_come(monkeypatch):
    monkeypatch.setattr(_processes, "coordination", lambda: (Service(), 3, 1))
    with pytest.raises(TimeoutError) as late, nnx.distributed.agreed("reading", timeout=5):
        pass
    assert str(late.value).startswith(
        "reading: 1 of 3 processes came within 5 s; not there: 0, 2. Each of them has to make the same "
    )
    with pytest.raises(KeyError, match="'column'"), nnx.distributed.agreed("reading", timeout=5):
        raise KeyError("column")


def test_what_failed_elsewhere_fails_here(monkeypatch):
    answered_by(monkeypatch, "", "OSError: the disk is full", "KeyError: 'x'")
    message = r"^reading: process 2 failed \(also: 3\): OSError: the disk is full$"
    with pytest.raises(nnx.distributed.ProcessError, match=message) as caught:
        with nnx.distributed.agreed("reading"):
            pass
    assert caught.value.kind == "OSError"


def test_a_checkpoint_that_failed_elsewhere_fails_here_with_an_error_of_the_class(monkeypatch):
    for name, kind in (
        ("DamagedError", nnx.checkpoint.DamagedError),
        ("FileExistsError", FileExistsError),
        ("OSError", nnx.checkpoint.CheckpointError),
    ):
        answered_by(monkeypatch, f"{name}: it is cut short")
        with pytest.raises(kind, match=f"^reading: process 1 failed: {name}: it is cut short$"):
            with together("reading"):
                pass


def test_processes_that_save_different_things(monkeypatch):
    """The message; that all processes get it is tested with processes."""
    theirs = {"b": "Python int 3", "w": "float32[3]"}
    for more, text in (
        ({}, "'b' is on no mesh .* not saved, in process 1 Python int 3. A checkpoint"),
        ({"b": theirs["b"]}, "'w' .*: in process 0 it is float32.2. of hash .* 1 float32"),
    ):
        answer = lambda name, text: [text, json.dumps(theirs) if "differs" in name else "a hash"]
        monkeypatch.setattr(_orbax, "exchange", answer)
        with pytest.raises(nnx.checkpoint.CheckpointError, match=text):
            _orbax.check_same_in_all({"w": "float32[2]", **more}, {"w": np.ones(2, "float32")})
