"""The example of diffusion, run as a user would run it."""

from __future__ import annotations

import re

import pytest

from tests.examples.process import quick_run

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


def test_quick_run_draws_the_intended_digits(tmp_path):
    output = quick_run("diffusion.py", tmp_path)
    figures = re.fullmatch(
        r"intended digit recognised in (\S+) % of 300 samples, (\S+) % without guidance; "
        r"(\S+) % of real test scans",
        output.splitlines()[-1],
    )
    assert figures, output
    guided, plain, real = map(float, figures.groups())
    assert guided > 60 and guided > plain + 5 and real > 95
    assert (tmp_path / "out" / "diffusion.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
