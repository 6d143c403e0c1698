"""The example of an exported network, run as a user would run it."""

from __future__ import annotations

import re

import pytest

from tests.examples.process import quick_run

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("flatbuffers")


def test_quick_run_exports_and_serves(tmp_path):
    output = quick_run("export.py", tmp_path)
    figures = re.fullmatch(
        r"100 requests of 1 to 63 scans ran 3 programs; (\d+) of 297 scans read right, (\d+) before "
        r"export",
        output.splitlines()[-1],
    )
    assert figures, output
    assert abs(int(figures[1]) - int(figures[2])) <= 1 and int(figures[1]) > 240
    assert "Exported(classify: inputs=float32[batch, 8, 8], platforms=cpu, weights=10)" in output
    assert re.search(r"│ 32 +│ \d+ +│ 9 to 32 +│ \d+\.\d\d ms", output)
    assert (tmp_path / "out" / "export.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
