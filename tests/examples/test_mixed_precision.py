"""The example of mixed precision, run as a user would run it."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from tests.examples.process import quick_run


def test_every_precision_learns_and_float16_skips_the_steps_that_overflow(tmp_path):
    text = quick_run("mixed_precision.py", tmp_path)
    rows = re.findall(r"│ (\w+) +│ [\d.]+ │ (\d+) +│ ([\d.]+) % +│ ([\d.]+) % +│", text)
    assert [name for name, *_ in rows] == ["float32", "bfloat16", "float16"]
    assert [skipped == "0" for _, skipped, *_ in rows] == [True, True, False]
    assert all(abs(float(whole) - float(half)) <= 1 for *_, whole, half in rows)
    least = re.fullmatch(
        r"each of the six networks reads at least (\S+) % .*", text.splitlines()[-1]
    )
    assert least and float(least[1]) >= 90
    assert (tmp_path / "out" / "mixed_precision.png").stat().st_size > 10_000
