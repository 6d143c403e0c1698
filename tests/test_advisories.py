"""No version that the project allows has a known hole. What is installed is checked by CI."""

from __future__ import annotations

import importlib.util
import json
import re
from datetime import date
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / ".ci/advisories.py"
spec = importlib.util.spec_from_file_location("advisories", FILE)
assert spec is not None and spec.loader is not None
advisories = importlib.util.module_from_spec(spec)
spec.loader.exec_module(advisories)

CONTENT = json.loads(advisories.DATA.read_text())
ENTRIES = CONTENT["advisories"]


def test_nothing_that_the_project_allows_has_a_known_hole():
    oldest = {r.name.lower(): advisories.oldest(r) for r in advisories.requirements()}
    assert {"jax", "safetensors", "torch", "setuptools"} <= oldest.keys()
    assert advisories.affected(ENTRIES, oldest.get) == []


@pytest.mark.parametrize(
    ("package", "version", "mended"),
    [
        ("torch", "2.5.1", "2.6.0"),
        ("pillow", "11.2.1", "11.3.0"),
        ("protobuf", "6.31.0", "6.31.1"),
        ("protobuf", "6.30.0rc2", "6.31.1"),
        ("setuptools", "77.0.3", "78.1.1"),
    ],
)
def test_a_package_with_a_hole_is_named_with_what_mends_it(package, version, mended):
    (line,) = advisories.affected(ENTRIES, {package: version}.get)
    assert line.startswith(f"{package} {version}: CVE-")
    assert line.endswith(f'Mended: pip install "{package}>={mended}".')


def test_a_hole_that_no_version_mends_is_named_too():
    entry = {"id": "CVE-1", "package": "p", "affected": ">=1", "mended": None, "what": "w"}
    assert advisories.affected([entry], lambda name: "2") == [
        "p 2: CVE-1, w. Mended: by no version yet."
    ]


@pytest.mark.parametrize("version", ["2.6.0", "2.13.0", None])
def test_a_mended_or_absent_package_is_not_named(version):
    assert not advisories.affected(ENTRIES, lambda name: version if name == "torch" else None)


def test_the_file_is_well_formed():
    assert CONTENT["refreshed"] is None or date.fromisoformat(CONTENT["refreshed"])
    assert date.fromisoformat(CONTENT["written"])
    assert advisories.as_text(CONTENT) == advisories.DATA.read_text()
    for entry in ENTRIES:
        assert entry.keys() == {"id", "package", "affected", "mended", "what"}
        assert re.fullmatch(r"(CVE-\d{4}-\d+|GHSA-[\w-]+|PYSEC-[\d-]+)", entry["id"])
        assert entry["package"] == advisories.canonicalize_name(entry["package"])
        affected = advisories.SpecifierSet(entry["affected"])
        assert entry["mended"] is None or not affected.contains(entry["mended"])


def answer(vulns, **more):
    return {"name": "Torch", "version": "2.5.0", "vulns": vulns, **more}


def test_a_refresh_adds_what_is_new_once(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(advisories, "DATA", tmp_path / "data.json")
    advisories.DATA.write_text(advisories.as_text(CONTENT))
    hole = {"id": "GHSA-1-2-3", "aliases": ["CVE-2030-1"], "description": "a\nb"}
    hole["fix_versions"] = ["2.4.1", "2.7.0", "2.6.1"]
    asked = []

    def audit(pairs):
        names = [name for name, _ in pairs]
        assert len(set(names)) == len(names)
        asked.extend(pairs)
        return [answer([hole])]

    monkeypatch.setattr(advisories, "audit", audit)
    advisories.refresh()
    new = json.loads(advisories.DATA.read_text())
    (added,) = [entry for entry in new["advisories"] if entry not in ENTRIES]
    assert added["id"] == "CVE-2030-1" and added["what"] == "a b"
    assert (added["affected"], added["mended"]) == (">=2.5.0,<2.6.1", "2.6.1")
    assert new["refreshed"] == date.today().isoformat()
    assert ("torch", "2.13.0") in asked and ("setuptools", "78.1.1") in asked
    assert "torch >=2.5.0,<2.6.1: CVE-2030-1" in capsys.readouterr().out


def test_a_refresh_that_cannot_ask_writes_nothing(monkeypatch):
    class Done:
        stdout = json.dumps({"dependencies": [{"name": "torch", "skip_reason": "not found"}]})
        stderr = "no network"

    monkeypatch.setattr(advisories.subprocess, "run", lambda *args, **kwargs: Done)
    with pytest.raises(SystemExit, match="Nothing was written. not found"):
        advisories.refresh()
    Done.stdout = ""
    with pytest.raises(SystemExit, match="pip-audit failed, and nothing was written.\nno network"):
        advisories.refresh()
    assert json.loads(advisories.DATA.read_text()) == CONTENT
