"""Every example with `--quick`, run as a user would run it, and judged by what it prints and writes."""

from __future__ import annotations

import re
import subprocess
import sys
import typing as tp
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import xla_flags

EXAMPLES = Path(__file__).parents[2] / "examples"
JUDGES: dict[str, tp.Any] = {}


def example(name, last="", needs=("sklearn", "matplotlib")):
    """A judge of an example: it gets the numbers of the last line, all of the output, the folder."""

    def add(judge):
        JUDGES[name] = judge, last, needs
        return judge

    return add


@example(
    "char_transformer",
    r"held-out text: (\S+) bits per character, (\S+) by xz, (\S+) by the frequency of characters alone",
    needs=["matplotlib"],
)
def _(learned, xz, frequency, output, out):
    assert learned < frequency - 0.8
    assert output.count(" goes on:\n") == 4


@example(
    "checkpoint_resume",
    r"the resumed run ended with the same bits after (\d+) steps",
    needs=["sklearn", "matplotlib", "orbax.checkpoint", "grain"],
)
def _(steps, output, out):
    before, after = re.search(
        r"optimizer: ([0-9a-f]{16}), resumed: ([0-9a-f]{16})\n", output
    ).groups()
    assert steps == 60 and before == after
    start = int(re.search(r"killed after step \d+, resumed at step (\d+)\n", output)[1])
    assert 0 < start <= 40 and start % 10 == 0


@example("digits", r"test accuracy (\S+) % \((\d+) of 360\)")
def _(accuracy, right, output, out):
    assert accuracy == round(100 * right / 360, 2) and accuracy >= 95
    assert re.search(r"epoch  3: train 0\.\d{3} +9\d\.\d % +validation 0\.\d{3} ", output)
    with np.load(out / "digits.npz") as network:
        assert network["conv1/kernel"].shape == (3, 3, 1, 32)
        assert network["norm2/mean"].any()  # statistics are saved as well


@example(
    "diffusion",
    r"intended digit recognised in (\S+) % of 300 samples, (\S+) % without guidance; "
    r"(\S+) % of real test scans",
)
def _(guided, plain, real, output, out):
    assert guided > 60 and guided > plain + 5 and real > 95


@example("ensemble", r"accuracy (\S+) %, expected calibration error (\S+) %; (\S+) % before .*")
def _(accuracy, after, before, output, out):
    assert accuracy >= 78
    assert after <= 5 and after < before
    assert float(re.search(r"calibrated: .* AUROC of (0\.\d{3})", output)[1]) > 0.7


@example("spiral_rnn", r"test accuracy (\S+) %", needs=["matplotlib"])
def _(accuracy, output, out):
    assert accuracy >= 95


@example("private", r"test accuracy (\S+) % with epsilon (\S+), (\S+) % without privacy")
def _(private, epsilon, ordinary, output, out):
    assert private >= 85 and ordinary >= 94 and epsilon == 3


@example("fsdp", needs=["matplotlib"])
def _(output, out):
    rows = re.findall(r"│ ([a-z+ ]+?) +│ (\d+) kB of (\d+) ", output)
    held = {plan: (int(most), int(whole)) for plan, most, whole in rows}
    whole = held["one device"][0]
    assert held["data"] == (whole, whole)
    assert held["fsdp"][0] < whole / 3 and held["fsdp+tensor"][0] < whole / 6
    assert re.search(r"│ data .*all-reduce", output)


@example(
    "long_sequences", r"along the ring, a step needs (\d+) % of the memory", needs=["matplotlib"]
)
def _(share, output, out):
    held = {m[1]: int(m[2]) for m in re.finditer(r"([a-z ]+): (\d+) kB a device", output)}
    assert held["ring"] == held["one device"] > 3 * held["stages"]
    apart = [float(text) for text in re.findall(r" (\d+e[+-]\d+) apart", output)]
    assert len(apart) == 3 and max(apart) < 1e-3
    assert share < 10


@example("moe", r"8 experts on 8 devices: (\S+) right; (\S+) before training", needs=["matplotlib"])
def _(after, before, output, out):
    assert before < 0.15 and after > 0.8
    loads = re.search(r"load of the experts:((?: \d+%){8});", output)[1].split()
    assert max(int(load[:-1]) for load in loads) < 50


@example(
    "multihost",
    r"(\S+) % of 320 test scans right; (\S+) % after the restore",
    needs=["sklearn", "matplotlib", "orbax.checkpoint"],
)
def _(trained, restored, output, out):
    assert restored == trained >= 90


@example(
    "neural_ode",
    r"error of the populations: (\S+) % within the time of training, (\S+) % in 4 times as long; "
    r"noise 2 %",
    needs=["matplotlib", "diffrax"],
)
def _(within, beyond, output, out):
    assert within <= 15 and beyond <= 40


@example(
    "pitch",
    r"right within half a semitone: (\S+) % of ordinary tones, (\S+) % of those without a "
    r"fundamental; (\S+) % and (\S+) % with (\S+) weights of adapters",
    needs=["matplotlib", "torch", "flatbuffers"],
)
def _(ordinary, lacking, ordinary_after, lacking_after, count, output, out):
    from safetensors.numpy import load_file

    adapters = load_file(out / "adapters.safetensors")
    assert sum(array.size for array in adapters.values()) == count
    assert adapters["blocks.1.conv.kernel.lora_b"].shape == (4, 128)
    assert ordinary > 94 and ordinary_after > 94
    assert lacking < 60 and lacking_after > 62


@example(
    "ppo",
    r"mean return of 64 episodes (\S+), lowest (\d+); (\S+) before training",
    needs=["matplotlib"],
)
def _(mean, lowest, before, output, out):
    assert before < 120 and 200 <= mean <= 500 and lowest <= mean


@example(
    "vae",
    r"test scans take (\S+) bits per pixel with 16 latent variables, (\S+) with 2, "
    r"(\S+) by the frequency of each pixel's values alone",
)
def _(many, two, frequency, output, out):
    assert max(many, two) < frequency < 2.5


def start(folder: Path, name: str, *options: str) -> subprocess.CompletedProcess:
    """Run an example in a folder, as a user would."""
    command = [sys.executable, EXAMPLES / name, *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", JUDGES)
def test_a_quick_run_gives_what_it_promises(name, tmp_path, monkeypatch):
    judge, last, needs = JUDGES[name]
    for package in needs:
        pytest.importorskip(package)
    if (
        name == "pitch" and find_spec("torchcrepe") is None
    ):  # to import it takes much that is not used
        pytest.skip("torchcrepe is not installed")
    if name == "neural_ode":  # without optimisations the solver takes minutes
        monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)
    monkeypatch.setenv("XLA_FLAGS", xla_flags())  # one CPU device, not the eight of these tests
    run = start(tmp_path, f"{name}.py", "--quick")
    assert run.returncode == 0, run.stderr
    figures = re.fullmatch(last or ".*", run.stdout.splitlines()[-1])
    assert figures, run.stdout
    numbers = [float(text.replace(",", "")) for text in figures.groups()]
    judge(*numbers, output=run.stdout, out=tmp_path / "out")
    if name != "multihost":
        pictures = list((tmp_path / "out").glob("*.png"))
        assert pictures and all(p.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for p in pictures)


def test_a_folder_that_cannot_be_made_is_said_in_one_line(tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("not a folder")
    run = start(tmp_path, "digits.py", "--out", "file")
    assert run.returncode == 1 and run.stdout == ""
    assert run.stderr == "digits.py: error: cannot write to file: File exists\n"
