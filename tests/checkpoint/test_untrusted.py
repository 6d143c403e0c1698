"""Descriptions in files that somebody else may have written."""

from __future__ import annotations

import pytest

from nnxlite.checkpoint import untrusted


def test_a_description_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(untrusted, "LARGEST", 10)
    (tmp_path / "a.json").write_text('{"a": 1}')
    (tmp_path / "b.json").write_text('{"a": 1234567}')
    assert untrusted.read_json(tmp_path / "a.json") == {"a": 1}
    with pytest.raises(ValueError, match="it has more than 10 bytes"):
        untrusted.read_json(tmp_path / "b.json")


def test_a_description_is_a_file_and_not_nested_too_deeply(tmp_path):
    with pytest.raises(ValueError, match="it is not a file"):
        untrusted.read_json(tmp_path)
    with pytest.raises(ValueError, match="it is nested too deeply"):
        untrusted.parse_json(b"[" * 200_000)
