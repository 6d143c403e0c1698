"""The main job, judged as a user would: by its output, its exit status and its files."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.examples.process import environment

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"


def digits(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, DIGITS, *arguments],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits_example", DIGITS)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_quick_run_trains_saves_and_draws(tmp_path):
    run = digits("--quick", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    last = run.stdout.splitlines()[-1]
    figure = re.fullmatch(r"test accuracy (\d+\.\d\d) % \((\d+) of 360\)", last)
    assert figure, last
    assert float(figure[1]) == round(100 * int(figure[2]) / 360, 2)
    assert float(figure[1]) >= 95
    assert re.search(
        r"epoch  3: train 0\.\d{3} +9\d\.\d % +validation 0\.\d{3} +\d\d\.\d %", run.stdout
    )
    assert (tmp_path / "out" / "digits.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with np.load(tmp_path / "out" / "digits.npz") as network:
        assert network["conv1/kernel"].shape == (3, 3, 1, 32)
        assert network["norm2/mean"].shape == (64,)
        assert not np.array_equal(network["norm2/mean"], np.zeros(64))  # statistics are saved too


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--epochs", "0"], "argument --epochs: a whole number from 1 up, not '0'"),
        (["--epochs", "two"], "argument --epochs: a whole number from 1 up, not 'two'"),
        (["--batch-size", "-3"], "argument --batch-size: a whole number from 1 up, not '-3'"),
        (["--batch-size", "5000"], "--batch-size 5000 is more than the 1293 training scans"),
        (["--lr", "nan"], "argument --lr: a number from 1e-06 to below 10, not 'nan'"),
        (["--dropout", "1"], "argument --dropout: a number from 0 to below 1, not '1'"),
        (["--seed", "x"], "argument --seed: a whole number from 0 up, not 'x'"),
        (["--colour"], "unrecognized arguments: --colour"),
        (["--out", "file/folder"], "cannot write to file/folder: Not a directory"),
        (["--out", "file"], "cannot write to file: File exists"),
        (["--out", "taken"], "cannot write to taken: Is a directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_clear_line_before_any_training(
    tmp_path, monkeypatch, capsys, example, arguments, complaint
):
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "taken" / "digits.png").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(example, "train", lambda *_: pytest.fail("training began"))
    with pytest.raises(SystemExit) as stop:
        example.main(arguments)
    output = capsys.readouterr()
    assert stop.value.code not in (0, None)
    assert output.out == ""
    # `sys.exit(text)` leaves the printing of its text to the interpreter.
    said = output.err or f"{stop.value.code}\n"
    assert said == f"digits.py: error: {complaint}\n"


def test_the_exit_status_of_a_bad_option_reaches_the_shell(tmp_path):
    run = digits("--epochs", "0", cwd=tmp_path)
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr == (
        "digits.py: error: argument --epochs: a whole number from 1 up, not '0'\n"
    )


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission_is_refused(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    run = digits("--out", "locked", cwd=tmp_path)
    assert run.returncode != 0
    assert run.stderr == "digits.py: error: cannot write to locked: Permission denied\n"
