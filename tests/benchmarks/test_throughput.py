"""The contenders of the throughput benchmark do the same work."""

from __future__ import annotations

import json

import pytest

from benchmarks import throughput


@pytest.mark.parametrize("part", throughput.PARTS)
@pytest.mark.filterwarnings("ignore")  # of the peers
def test_a_quick_run_has_figures_that_agree(part, tmp_path):
    file = tmp_path / "figures.json"
    assert throughput.main(["--quick", "--rounds=2", f"--only={part}", f"--json={file}"]) == 0
    for figures in json.loads(file.read_text())["workloads"]:
        assert {"limit", "nnxlite"} <= figures["contenders"].keys()
        assert figures["failed"].keys() <= {"nnxlite, cudnn", "flax", "flax, by steps", "equinox"}


def test_no_contender_is_built_after_the_deadline(capsys):
    assert throughput.main(["--quick", "--only=small", "--seconds=0"]) == 1
    assert "no time was left for it" in capsys.readouterr().out
