"""What is shown of names and texts that come from files; and JSON that deceives."""

from __future__ import annotations

import pytest

from nnxlite.checkpoint import untrusted


@pytest.mark.parametrize("text", ["plain", "ö 漢", "a b", ""])
def test_what_can_be_printed_stays(text):
    assert untrusted.printable(text) == text


@pytest.mark.parametrize(
    "text", ["\x1b]0;title\x07", "a\rb", "\x00", "\u202egnp.exe", "\x9b2J", "\x7f"]
)
def test_control_characters_are_escaped(text):
    shown = untrusted.printable(text)
    assert shown.isprintable() and "\\" in shown
    assert untrusted.printable_lines(f"x\n{text}").startswith("x\n")


def test_json_says_one_thing():
    assert untrusted.parse_json(b'{"a": {"a": [1, NaN]}}')["a"]["a"][0] == 1
    for text in (b'{"a": 1, "a": 1}', b"[" * 10_000, b"\xff", b"", b"1 2", b"9" * 5000):
        with pytest.raises(ValueError):
            untrusted.parse_json(text)


def test_only_files_are_read(tmp_path, monkeypatch):
    (tmp_path / "f").write_bytes(b"[1]")
    assert untrusted.read_json(tmp_path / "f") == [1]
    with pytest.raises(ValueError, match="it is not a file"):
        untrusted.read_json(tmp_path)
    monkeypatch.setattr(untrusted, "LARGEST", 2)
    with pytest.raises(ValueError, match="it has more than 2 bytes"):
        untrusted.read_json(tmp_path / "f")
