"""The rows of the matrix of versions follow from pyproject.toml and from what is released."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.reliability import versions
from tests.reliability.versions import ROOT, Claims, Interpreter, Result, Row, rows_for

TEXT = """
[project]
requires-python = ">=3.11"
dependencies = ["jax>=0.10", "jaxlib>=0.10", "rich>=13"]
[project.optional-dependencies]
test = ["nnxlite[checkpoint]", "pytest>=8.2"]
checkpoint = ["orbax-checkpoint>=0.11"]
"""
RELEASED = {
    "jax": ["0.11.0", "0.10.1", "0.10.0", "0.9.2"],
    "jaxlib": ["0.11.0", "0.10.1", "0.10.0"],
    "rich": ["14.0.0", "13.0.1", "13.0.0", "12.9.9"],
    "orbax-checkpoint": ["0.12.0", "0.11.3", "0.10.0"],
    "pytest": ["9.0.0", "8.2.0"],
}
PYTHONS = [
    Interpreter("old", "3.10.13"),
    Interpreter("a", "3.11.7"),
    Interpreter("b", "3.13.0"),
    Interpreter("c", "3.13.1", free_threaded=True),
]


def released(python: Interpreter, package: str) -> list[str]:
    found = RELEASED[package]
    needs_newer = package == "jax" and python.version.startswith("3.11")
    return [version for version in found if not (needs_newer and version.startswith("0.11"))]


@pytest.fixture
def rows() -> dict[str, Row]:
    return {row.name: row for row in rows_for(Claims(TEXT), PYTHONS, released)}


def test_each_claim_has_a_row(rows):
    assert set(rows) == {
        *("oldest", "pre", "required", "required-oldest"),
        *("jax-0.10.0", "jax-0.10.1", "jax-0.11.0"),
        *("python-3.11", "python-3.13", "python-3.13t"),
        *("oldest-rich", "oldest-orbax-checkpoint"),
    }


def test_the_oldest_row_has_the_oldest_release_that_each_requirement_allows(rows):
    oldest = "jax==0.10.0 jaxlib==0.10.0 rich==13.0.0 orbax-checkpoint==0.11.3 pytest==8.2.0"
    assert rows["oldest"].requirements == tuple(oldest.split())
    assert rows["oldest"].python.version == "3.11.7"
    assert rows["required-oldest"].requirements == tuple(oldest.split()[:3])


def test_a_release_of_jax_runs_on_the_oldest_python_that_has_it(rows):
    assert rows["jax-0.10.1"].python.version == "3.11.7"
    assert rows["jax-0.11.0"].python.version == "3.13.0"
    assert rows["jax-0.11.0"].requirements[-1] == "jax==0.11.0"


def test_one_dependency_is_old_and_the_others_are_free(rows):
    requirements = rows["oldest-rich"].requirements
    assert requirements[:3] == ("jax>=0.10", "jaxlib>=0.10", "rich>=13")
    assert requirements[-1] == "rich==13.0.0"


def test_pre_releases_are_for_their_row_alone(rows):
    assert [row.name for row in rows.values() if "--pre" in row.options] == ["pre"]
    text = "jax (0.13.0rc1)\nAvailable versions: 0.13.0rc1, 0.12.0, 0.11.2.dev1"
    assert versions.releases_of(text) == ["0.12.0"]


def test_the_project_claims_what_has_an_oldest_version():
    claims = Claims((ROOT / "pyproject.toml").read_text())
    assert Version(claims.oldest_python) <= Version("3.11")
    for requirement in claims.tested:
        assert {spec.operator for spec in requirement.specifier} <= {">=", "<", "=="}, requirement
    assert versions.oldest(Requirement("a>=1,<2"), ["2.0", "1.5", "1.1", "0.9"]).name == "a"


@pytest.mark.parametrize("tier", versions.TIERS)
def test_the_files_of_a_tier_are_there(tier):
    files = [name for name in versions.chosen(tier) if not name.startswith("--")]
    assert [name for name in files if not (ROOT / name).exists()] == []
    assert len(files) == len(set(files)) and (files or tier == "whole")


def test_the_line_of_a_row_says_what_came_of_it(rows):
    result = Result(
        rows["oldest"], "failed", {"jax": "0.10.0"}, {"passed": 7, "failed": 1}, [], 3.0
    )
    assert versions.line(result).split() == (
        "oldest 3.11.7 failed 7 passed 1 failed 3 s jax 0.10.0".split()
    )


def test_a_row_that_pip_refuses_is_said_to_be_so(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "environment", lambda *args: None)
    result = versions.run_row(rows["oldest"], Path(tmp_path), "few", "0", False)
    assert result.outcome == "not installable"
