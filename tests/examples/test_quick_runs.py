"""Every example with `--quick`, run as a user would run it, and judged by what it prints and writes."""

import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import xla_flags

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NEEDS = {
    "checkpoint_resume": ["sklearn", "matplotlib", "orbax.checkpoint", "grain"],
    "multihost": ["sklearn", "matplotlib", "orbax.checkpoint"],
    "neural_ode": ["matplotlib", "diffrax"],
    "pitch": ["matplotlib", "torch", "flatbuffers"],
} | dict.fromkeys("digits diffusion ensemble private vae".split(), ["sklearn", "matplotlib"])
LAST = {
    "char_transformer": r"held-out text: (\S+) bits per character, (\S+) by xz, "
    r"(\S+) by the frequency of characters alone",
    "checkpoint_resume": r"the resumed run ended with the same bits after (\d+) steps",
    "digits": r"test accuracy (\S+) % \((\d+) of 360\)",
    "diffusion": r"intended digit recognised in (\S+) % of 300 samples, (\S+) % without guidance; "
    r"(\S+) % of real test scans",
    "ensemble": r"accuracy (\S+) %, expected calibration error (\S+) %; (\S+) % before .*",
    "fsdp": ".*",
    "long_sequences": r"along the ring, a step needs (\d+) % of the memory",
    "moe": r"8 experts on 8 devices: (\S+) right; (\S+) before training",
    "multihost": r"(\S+) % of 320 test scans right; (\S+) % after the restore",
    "neural_ode": r"error of the populations: (\S+) % within the time of training, "
    r"(\S+) % in 4 times as long; noise 2 %",
    "pitch": r"right within half a semitone: (\S+) % of ordinary tones, "
    r"(\S+) % of those without a fundamental; (\S+) % and (\S+) % with (\S+) weights of adapters",
    "ppo": r"mean return of 64 episodes (\S+), lowest (\d+); (\S+) before training",
    "private": r"test accuracy (\S+) % with epsilon (\S+), (\S+) % without privacy",
    "spiral_rnn": r"test accuracy (\S+) %",
    "vae": r"test scans take (\S+) bits per pixel with 16 latent variables, (\S+) with 2, "
    r"(\S+) by the frequency of each pixel's values alone",
}
"""The last line that each example prints, with the numbers that are judged."""

JUDGED = {
    "char_transformer": lambda learned, xz, frequency: learned < frequency - 0.8,
    "diffusion": lambda guided, plain, real: guided > 60 and guided > plain + 5 and real > 95,
    "ensemble": lambda right, after, before: right >= 78 and after <= 5 and after < before,
    "multihost": lambda trained, restored: restored == trained >= 90,
    "neural_ode": lambda within, beyond: within <= 15 and beyond <= 40,
    "ppo": lambda mean, lowest, before: before < 120 and lowest <= mean and 200 <= mean <= 500,
    "private": lambda private, epsilon, ordinary: private >= 85 and ordinary >= 94 and epsilon == 3,
    "spiral_rnn": lambda accuracy: accuracy >= 95,
    "vae": lambda many, two, frequency: max(many, two) < frequency < 2.5,
}
"""What these numbers are; the examples below are judged by more than their last line."""


def char_transformer(*numbers, output, out):
    assert output.count(" goes on:\n") == 4


def checkpoint_resume(steps, output, out):
    assert steps == 60
    assert re.search(r"optimizer: ([0-9a-f]{16}), resumed: \1\n", output)
    start = int(re.search(r"killed after step \d+, resumed at step (\d+)\n", output)[1])
    assert 0 < start <= 40 and start % 10 == 0


def digits(accuracy, right, output, out):
    assert accuracy == round(100 * right / 360, 2) and accuracy >= 95
    assert re.search(r"epoch  3: train 0\.\d{3} +9\d\.\d % +validation 0\.\d{3} ", output)
    with np.load(out / "digits.npz") as network:
        assert network["conv1/kernel"].shape == (3, 3, 1, 32)
        assert network["norm2/mean"].any()  # statistics are saved as well


def ensemble(*numbers, output, out):
    assert float(re.search(r"calibrated: .* AUROC of (0\.\d{3})", output)[1]) > 0.7


def fsdp(output, out):
    rows = re.findall(r"│ ([a-z+ ]+?) +│ (\d+) kB of (\d+) ", output)
    held = {plan: (int(most), int(whole)) for plan, most, whole in rows}
    whole = held["one device"][0]
    assert held["data"] == (whole, whole)
    assert held["fsdp"][0] < whole / 3 and held["fsdp+tensor"][0] < whole / 6
    assert re.search(r"│ data .*all-reduce", output)


def long_sequences(share, output, out):
    held = {m[1]: int(m[2]) for m in re.finditer(r"([a-z ]+): (\d+) kB a device", output)}
    assert held["ring"] == held["one device"] > 3 * held["stages"]
    apart = [float(text) for text in re.findall(r" (\d+e[+-]\d+) apart", output)]
    assert len(apart) == 3 and max(apart) < 1e-3
    assert share < 10


def moe(after, before, output, out):
    assert before < 0.15 and after > 0.8
    loads = re.search(r"load of the experts:((?: \d+%){8});", output)[1].split()
    assert max(int(load[:-1]) for load in loads) < 50


def pitch(ordinary, lacking, ordinary_after, lacking_after, count, output, out):
    from safetensors.numpy import load_file

    adapters = load_file(out / "adapters.safetensors")
    assert sum(array.size for array in adapters.values()) == count
    assert adapters["blocks.1.conv.kernel.lora_b"].shape == (4, 128)
    assert ordinary > 94 and ordinary_after > 94
    assert lacking < 60 and lacking_after > 62


SEVERAL = char_transformer, checkpoint_resume, digits, ensemble, fsdp, long_sequences, moe, pitch
JUDGES = {judge.__name__: judge for judge in SEVERAL}
assert LAST.keys() == JUDGED.keys() | JUDGES.keys()


def start(folder, name, *options):
    command = [sys.executable, EXAMPLES / name, *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", LAST)
def test_a_quick_run_gives_what_it_promises(name, tmp_path, monkeypatch):
    for package in NEEDS.get(name, ["matplotlib"]):
        pytest.importorskip(package)
    if name == "pitch" and find_spec("torchcrepe") is None:  # importing it takes much unused code
        pytest.skip("torchcrepe is not installed")
    if name in ("neural_ode", "char_transformer"):  # which compute for long
        monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)
    monkeypatch.setenv("XLA_FLAGS", xla_flags())  # one CPU device, not the eight of these tests
    run = start(tmp_path, f"{name}.py", "--quick")
    assert run.returncode == 0, run.stderr
    figures = re.fullmatch(LAST[name], run.stdout.splitlines()[-1])
    assert figures, run.stdout
    numbers = [float(text.replace(",", "")) for text in figures.groups()]
    assert name not in JUDGED or JUDGED[name](*numbers), numbers
    if name in JUDGES:
        JUDGES[name](*numbers, output=run.stdout, out=tmp_path / "out")
    if name != "multihost":
        pictures = list((tmp_path / "out").glob("*.png"))
        assert pictures and all(p.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for p in pictures)


def test_each_is_tested_here_is_short_and_is_on_the_page_with_its_command():
    page = (ROOT / "docs/gallery.md").read_text()
    assert LAST.keys() == {path.stem for path in EXAMPLES.glob("[!_]*.py")}
    for name in LAST:
        text = (EXAMPLES / f"{name}.py").read_text()
        assert len(text.splitlines()) <= 120 and "\nResult: " in text.split('"""')[1], name
        assert f"[`{name}.py`](../examples/{name}.py)" in page
        command = rf"^python .*examples/{name}\.py( --processes 4)?$"
        assert re.search(command, page, re.MULTILINE), name
    for picture in (ROOT / "docs/gallery").glob("*.png"):
        assert picture.stat().st_size <= 100_000 and f"gallery/{picture.name}" in page


def test_what_an_example_needs_can_be_installed(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    launcher = runpy.run_path(str(EXAMPLES / "__main__.py"))
    assert launcher["NEEDS"].keys() <= LAST.keys()
    assert set().union(*launcher["NEEDS"].values()) <= launcher["environment"].EXTRAS.keys()


def test_a_folder_that_cannot_be_made_is_said_in_one_line(tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("not a folder")
    run = start(tmp_path, "digits.py", "--out", "file")
    assert run.returncode == 1 and run.stdout == ""
    assert run.stderr == "digits.py: error: cannot write to file: File exists\n"
