"""The example of a run that is killed and goes on, run as a user would run it."""

from __future__ import annotations

import os
import re

import pytest

from tests.examples.process import quick_run

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("orbax.checkpoint")


@pytest.mark.skipif(os.name != "posix", reason="kills a process by SIGKILL")
def test_quick_run_ends_with_the_same_bits(tmp_path):
    output = quick_run("checkpoint_resume.py", tmp_path)
    assert output.splitlines()[-1] == "the resumed run ended with the same bits after 60 steps"
    digests = re.findall(r"│ ([0-9a-f]{16}) ", output)
    assert len(digests) == 2 and digests[0] == digests[1]
    assert (tmp_path / "out" / "resume.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
