"""Without a second process: how processes meet, and fail together."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.checkpoint import _orbax
from nnxlite.checkpoint._checkpoint import contents_of
from nnxlite.checkpoint._report import together
from nnxlite.sharding import _processes


class Service:
    """JAX's coordination service, as process 0 sees it; the others say what is given, or are away."""

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
    """As process 0 of several, of which the others give these texts when they exchange."""
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
    """The messages; that all processes get them is tested with processes."""

    def refusal(theirs):
        asked = []

        def answer(name, text):
            asked.append(text)
            return [text, "another hash" if len(asked) == 1 else json.dumps(theirs)]

        monkeypatch.setattr(_orbax, "exchange", answer)
        with pytest.raises(nnx.checkpoint.CheckpointError) as caught:
            _orbax.check_same_in_all({"w": "float32[2]"}, {"w": np.ones(2, "float32")})
        assert len(asked[0]) == 64  # one hash, unless something differs
        return str(caught.value), json.loads(asked[1])

    _, mine = refusal({})
    start = "is on no mesh of all processes, and differs: in process 0 it is"
    for theirs, first, second in (
        ({}, "float32[2] of hash ", "not saved. A checkpoint has one v"),
        ({**mine, "b": "Python int 3"}, "not saved", "Python int 3. A"),
        ({"w": "float32[3]"}, "float32[2] of hash", "float32[3]. A c"),
    ):
        text, _ = refusal(theirs)
        assert text.startswith(f"'{'b' if 'b' in theirs else 'w'}' {start} {first}")
        assert f", in process 1 {second}" in text


def test_a_part_that_cannot_be_written(monkeypatch, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    content = _orbax.content_of(contents_of({"w": jnp.ones(2)}))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    answered_by(monkeypatch, "OSError: No space left on device")
    path = _orbax.folder(tmp_path / "c")
    message = (
        f"could not be written into {tmp_path}, and .*process 1 failed: OSError: No space left"
    )
    with pytest.raises(nnx.checkpoint.CheckpointError, match=message):
        _orbax.write(path, content)
    assert list(tmp_path.iterdir()) == []
