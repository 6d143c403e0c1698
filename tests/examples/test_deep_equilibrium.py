"""The example of a deep equilibrium model, run as a user would run it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.examples.process import EXAMPLES, quick_run

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


def numbers(pattern: str, line: str) -> list[float]:
    """The groups of a pattern that matches the whole line."""
    match = re.fullmatch(pattern, line)
    assert match, line
    return [float(group) for group in match.groups()]


def test_quick_run_reads_digits_by_a_fixed_point(tmp_path):
    output = quick_run("deep_equilibrium.py", tmp_path)
    assert "SpectralNorm" in output  # in the table at the start
    *_, contraction, memory, last = output.splitlines()
    median, largest, bound = numbers(
        r"a step shrinks an error by the factor (\S+) at the median scan, (\S+) at most;"
        r" the norm of the kernel allows (\S+)",
        contraction,
    )
    implicit, exact = numbers(
        r"a gradient takes (\S+) MB of temporary memory, (\S+) MB if it goes back through 150 steps",
        memory,
    )
    accuracy, steps, plain, difference = numbers(
        r"test accuracy (\S+) %; (\S+) steps to the fixed point, (\S+) without acceleration;"
        r" implicit and unrolled gradients differ by (\S+)",
        last,
    )
    assert median < largest <= bound < 1  # a contraction
    assert implicit < exact / 5
    assert accuracy >= 93
    assert steps < plain
    assert difference < 1e-3
    picture = tmp_path / "out" / "deep_equilibrium.png"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    "options, status, complaint",
    [
        (
            ["--quick", "--limit", "5"],
            1,
            (
                r"64 of 64 states did not converge in 5 steps: the largest residual is \de-02,"
                r" the tolerance 1e-05; --limit allows more steps"
            ),
        ),
        (["--limit", "0"], 2, r"argument --limit: a whole number from 1 up, not '0'"),
    ],
)
def test_an_error_is_one_clear_line(tmp_path, options, status, complaint):
    command = [sys.executable, EXAMPLES / "deep_equilibrium.py", *options]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == status
    assert re.fullmatch(f"deep_equilibrium.py: error: {complaint}\n", run.stderr), run.stderr
