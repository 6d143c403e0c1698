"""The example of variational autoencoders, run as a user would run it."""

from __future__ import annotations

import re

import pytest

from tests.examples.process import quick_run

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


def test_quick_run_codes_and_draws(tmp_path):
    output = quick_run("vae.py", tmp_path)
    figures = re.fullmatch(
        r"test scans take (\d\.\d\d) bits per pixel with 16 latent variables, (\d\.\d\d) with 2, "
        r"(\d\.\d\d) by the frequency of each pixel's values alone",
        output.splitlines()[-1],
    )
    assert figures, output
    many, two, frequency = map(float, figures.groups())
    assert max(many, two) < frequency < 2.5
    assert (tmp_path / "out" / "vae.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
