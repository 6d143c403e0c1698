"""Programs and notebooks that are damaged, or nested beyond measure: unreadable, and never run."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("libcst")
from nnxlite.migrate import UnreadableError, migrate_notebook, migrate_text

START = "from flax import nnx\n"
DEEP = {
    "parentheses": "(" * 5000 + ")" * 5000,
    "lists": "[" * 5000 + "]" * 5000,
    "signs": "-" * 20_000 + "1",
    "fewer signs": "-" * 2000 + "1",
    "attributes": "a" + ".b" * 20_000,
    "a surrogate": "\ud800",
    "a zero": "\0",
}


@pytest.mark.parametrize("kind", DEEP)
def test_programs_that_would_end_the_parser(kind):
    with pytest.raises(UnreadableError):
        migrate_text(START + DEEP[kind])


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"cells": [1]}',
        '{"cells": [{"cell_type": "code", "source": [1]}]}',
        '{"cells": [{"cell_type": "code", "source": {"a": "b"}}]}',
        '{"cells": [{"cell_type": "code", "source": null}]}',
        json.dumps({"cells": [{"cell_type": "code", "source": START + "("}]}),
        "",
        "1e999",
    ],
    ids=lambda text: text[:40],
)
def test_notebooks_that_are_none(text):
    with pytest.raises(UnreadableError):
        migrate_notebook(text)


def test_programs_are_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    text = START + "import evil\nfrom evil import *\nnnx.evil.x()\nprint(__import__('evil'))\n"
    assert "import nnxlite as nnx" in migrate_text(text).text
    assert "evil" not in sys.modules
