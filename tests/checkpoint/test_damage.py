"""Checkpoints that are damaged, or are none, change nothing; those of older formats are read."""

import hashlib
import json
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.checkpoint import CheckpointError, DamagedError, MismatchError, NotFoundError
from tests.checkpoint.models import bits, build, linear, params

checkpoint = nnx.checkpoint
HERE = Path(__file__).parent


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "c"


NUMBERS = np.random.default_rng(0).normal(size=3000).astype("float32")


@pytest.fixture
def small(folder):
    checkpoint.save(folder, model=params(w=NUMBERS, v=np.ones(3, "f")))
    return folder


def zeros():
    return params(w=jnp.zeros(3000), v=jnp.zeros(3))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["cut", "gone"])
def test_damaged_files_change_nothing(small, how):
    refused = 0
    for file in sorted(p for p in small.rglob("*") if p.is_file()):
        content = file.read_bytes()
        if how == "gone":
            file.unlink()
        else:
            file.write_bytes(content[: len(content) // 2])
        model = zeros()
        try:
            checkpoint.restore(small, model=model)
        except (DamagedError, NotFoundError) as error:
            assert str(small) in str(error)
            assert not model.w.any() and not model.v.any()
            refused += 1
        else:  # a file that is not needed
            assert model.v.tolist() == [1, 1, 1] and model.w.any()
        file.write_bytes(content)
    assert refused >= 4


INSTEAD = {
    "nothing": "the folder does not exist.",
    "empty": "the folder is empty.",
    "killed": "only the unfinished .killed.new.orbax-checkpoint-tmp is there",
    "a.safetensors": "it is a file, not a folder; nnx.load_safetensors reads",
    "run": "a folder of several (steps 5): open it with nnx.checkpoint.Manager",
    "mine": "the folder contains notes.txt.",
}


def test_what_is_there_instead_of_a_checkpoint(tmp_path):
    for name in ("empty", ".killed.new.orbax-checkpoint-tmp", "mine"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine/notes.txt").touch()
    nnx.save_safetensors(tmp_path / "a.safetensors", linear())
    with checkpoint.Manager(tmp_path / "run") as manager:
        manager.save(5, step=5)
    for name, message in INSTEAD.items():
        with pytest.raises(NotFoundError, match="No checkpoint at") as caught:
            checkpoint.restore(tmp_path / name, step=0)
        assert message in str(caught.value)


def test_descriptions_that_are_not_ours(tmp_path, small):
    file = small / "nnxlite/metadata"
    about = json.loads(file.read_text())
    leaves = about["leaves"]
    like = lambda **changes: {**about, "leaves": {**leaves, **changes}}
    reshaped = lambda *shape: like(**{"model.w": {**leaves["model.w"], "shape": shape}})
    later = "by a later version of nnxlite (format 99; this version reads 4)"
    cases = [
        ({**about, "format": 99}, later),
        ({}, "nnxlite/metadata is damaged (KeyError: 'format')"),
        (reshaped(10**12), "stored float32[1000000000000], wanted float32[3000]"),
        (reshaped(1500, 2), "damaged: 'model.w' is not what was saved (float32[3000], saved as"),
        (like(**{"model.z": leaves["model.v"]}), "damaged: 'model.z' is not what was saved."),
    ]
    for changed, message in cases:
        file.write_text(json.dumps(changed))
        model = zeros()
        if "saved (" in message:
            model.w = nnx.Param(jnp.zeros((1500, 2)))
        if "model.z" in message:
            model.z = nnx.Param(jnp.zeros(3))
        with pytest.raises(CheckpointError) as caught:
            checkpoint.restore(small, model=model)
        assert message in str(caught.value)
        assert not any(leaf.any() for leaf in jax.tree.leaves(nnx.state(model)))
    file.write_text("{")
    with pytest.raises(DamagedError, match=r"c: nnxlite/metadata is damaged \(JSONDecodeError: E"):
        checkpoint.restore(small, model=zeros())
    (tmp_path / "_METADATA").write_text("{")  # as one of Orbax alone
    with pytest.raises(DamagedError, match=f"{tmp_path.name} is damaged or cannot be read: "):
        checkpoint.restore(tmp_path, model=zeros())


def test_saving_removes_nothing_that_belongs_to_others(tmp_path):
    """Names are not patterns: `run[1]` is not `run1`, and `.run.newest` is not left over of `run`."""
    others = [tmp_path / name for name in (".run1.new", ".run.newest", ".run.new.txt")]
    left = tmp_path / ".run[1].new.orbax-checkpoint-tmp"
    for other in (*others, left):
        other.mkdir()
    for name in ("run", "run[1]", "*"):
        checkpoint.save(tmp_path / name, step=1)
        assert checkpoint.restore(tmp_path / name, step=0).values["step"] == 1
    assert all(other.exists() for other in others) and not left.exists()


def test_what_a_file_says_cannot_control_a_terminal(folder):
    checkpoint.save(folder, **{"a\x1b[2J": 1, "b": nnx.Dict()})
    with pytest.raises(MismatchError) as caught:
        checkpoint.restore(folder, **{"a\x1b[2J": "", "c\r": 1})
    for said in (caught.value, repr(caught.value.report), repr(checkpoint.info(folder))):
        text = str(said)
        assert r"a\x1b[2J" in text and "\x1b" not in text and "\r" not in text


def test_a_disk_that_fails_leaves_nothing(tmp_path, folder, monkeypatch):
    ocp = pytest.importorskip("orbax.checkpoint")
    failing = Mock(side_effect=OSError("No space left on device"))
    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "save", failing)
    message = f"could not be written into {tmp_path}, and those .* No space left on device"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.save(folder, model=linear())
    assert list(tmp_path.iterdir()) == []


def test_without_orbax_the_message_names_the_extra(tmp_path, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r'Orbax: pip install "nnxlite\[checkpoint\]"') as caught:
        checkpoint.save(folder, model=linear())
    assert caught.value.name == "orbax" and list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_format_1_stays_readable(folder):
    """`format_1` was written on Python 3.11 with JAX 0.10.2, after three steps of training."""
    model, optimizer = build(1)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    items = {"model": model, "optimizer": optimizer, "metrics": metrics}
    shutil.copytree(HERE / "format_1", folder)
    report = checkpoint.restore(folder, **items, cast=None)
    assert report.complete and report.values["position"] == 3
    found = hashlib.sha256(repr(sorted(bits(*items.values()).items())).encode()).hexdigest()
    assert found.startswith("fa6b51b6f12ef36f")


def test_a_checkpoint_of_format_2_stays_readable():
    """`format_2` was written before checkpoints had no checksums; it has plain data."""
    model = linear(1)
    report = checkpoint.restore(HERE / "format_2", model=model, settings={}, z=0j)
    for found in (report.values, checkpoint.info(HERE / "format_2").values):
        assert found["settings"] == {"a": [1, None, b"xy", (2.5, "t")], "empty": {}}
        assert found["z"] == 1 + 2j
    np.testing.assert_array_equal(model.kernel, linear().kernel)
