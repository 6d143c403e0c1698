"""The version, the changelog and the citation agree: see `docs/contributing.md`."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

import nnxlite

ROOT = Path(__file__).parents[1]


def numbers(version: str) -> tuple[int, ...]:
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    return tuple(map(int, version.split(".")))


def test_the_version_is_said_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"] and "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "nnxlite.__version__"}
    cited = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert numbers(nnxlite.__version__) and cited == [nnxlite.__version__]


def test_the_installed_package_has_that_version():
    try:
        installed = importlib.metadata.version("nnxlite")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("runs from a folder, not installed")
    assert installed == nnxlite.__version__


def test_the_changelog_has_released_versions_in_order_and_what_is_not_released_first():
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    released = headings[headings[0] == "Unreleased" :]
    assert released == headings[1:] or headings[0].split()[0] == nnxlite.__version__
    dated = re.compile(r"\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)")
    assert [heading for heading in released if not dated.fullmatch(heading)] == []
    versions = [numbers(heading.split()[0]) for heading in released]
    assert versions == sorted(versions, reverse=True)
    assert max(versions, default=()) <= numbers(nnxlite.__version__)


def test_forms_of_the_code_host_are_well_formed():
    yaml = pytest.importorskip("yaml")
    forms = ROOT / ".github" / "ISSUE_TEMPLATE"
    for name in ("bug_report", "feature_request"):
        form = yaml.safe_load((forms / f"{name}.yml").read_text())
        assert {"name", "description", "body"} <= form.keys()
        ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert ids and len(set(ids)) == len(ids)
    assert yaml.safe_load((forms / "config.yml").read_text()) == {"blank_issues_enabled": True}
