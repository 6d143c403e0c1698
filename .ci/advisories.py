"""Known holes in what is installed: compares it with `advisories.json`, without a network.

    python .ci/advisories.py             # exits with 1 where an installed package is affected
    python .ci/advisories.py --refresh   # adds what pip-audit knows, and changes the date

A refresh asks about two versions of each package: the oldest that `pyproject.toml` allows, and the one
that is installed. It needs a network and `pip install pip-audit`. Where pip-audit cannot ask about a
package, nothing is written.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(__file__).with_suffix(".json")


def installed(package: str) -> str | None:
    """The version of a package that is installed, if any."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def affected(
    advisories: Iterable[dict], version_of: Callable[[str], str | None] = installed
) -> list[str]:
    """A line for each package that is installed in an affected version: the hole, and what mends it."""
    lines = []
    for entry in advisories:
        version = version_of(entry["package"])
        if version and SpecifierSet(entry["affected"]).contains(version, prereleases=True):
            remedy = f'pip install "{entry["package"]}>={entry["mended"]}"'
            lines.append(
                f"{entry['package']} {version}: {entry['id']}, {entry['what']}. "
                f"Mended: {remedy if entry['mended'] else 'by no version yet'}."
            )
    return lines


def requirements(project: Path = ROOT / "pyproject.toml") -> list[Requirement]:
    """What the project, its extras and its build need, without the project itself."""
    content = tomllib.loads(project.read_text())
    extras = content["project"]["optional-dependencies"].values()
    texts = [*content["build-system"]["requires"], *content["project"]["dependencies"]]
    found = [Requirement(text) for text in [*texts, *(text for extra in extras for text in extra)]]
    return [one for one in found if canonicalize_name(one.name) != "nnxlite"]


def oldest(requirement: Requirement) -> str | None:
    """The oldest version that a requirement allows, if it says one."""
    floors = [one.version for one in requirement.specifier if one.operator in (">=", "==", "~=")]
    return max(floors, key=Version, default=None)


def versions_to_ask(advisories: Iterable[dict]) -> set[tuple[str, str]]:
    """Packages with the versions that a refresh asks about."""
    needed = requirements()
    names = {canonicalize_name(one.name) for one in needed} | {e["package"] for e in advisories}
    pairs = {(name, version) for name in names if (version := installed(name))}
    return pairs | {(canonicalize_name(r.name), floor) for r in needed if (floor := oldest(r))}


def refresh() -> None:
    """Add what pip-audit knows to the file."""
    content = json.loads(DATA.read_text())
    known = {(entry["id"], entry["package"], entry["mended"]) for entry in content["advisories"]}
    pairs = sorted(versions_to_ask(content["advisories"]))
    rounds: list[list[tuple[str, str]]] = []  # one version of a package at a time
    for pair in pairs:
        free = next((r for r in rounds if pair[0] not in dict(r)), None)
        free.append(pair) if free is not None else rounds.append([pair])
    for some in rounds:
        for dependency in audit(some):
            for hole in dependency["vulns"]:
                mended = min(
                    (
                        v
                        for v in hole["fix_versions"]
                        if Version(v) > Version(dependency["version"])
                    ),
                    key=Version,
                    default=None,
                )
                aliases = [name for name in hole.get("aliases", ()) if name.startswith("CVE-")]
                entry = {
                    "id": (aliases or [hole["id"]])[0],
                    "package": canonicalize_name(dependency["name"]),
                    "affected": f">={dependency['version']}" + (f",<{mended}" if mended else ""),
                    "mended": mended,
                    "what": re.sub(r"\s+", " ", hole.get("description", ""))[:100],
                }
                if (key := (entry["id"], entry["package"], mended)) not in known:
                    known.add(key)
                    content["advisories"].append(entry)
                    print(f"{entry['package']} {entry['affected']}: {entry['id']}")
    content["refreshed"] = datetime.date.today().isoformat()
    DATA.write_text(as_text(content))


def audit(pairs: list[tuple[str, str]]) -> list[dict]:
    """What pip-audit says of packages in certain versions."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.writelines(f"{name}=={version}\n" for name, version in pairs)
        file.flush()
        command = [sys.executable, "-m", "pip_audit", "-r", file.name]
        command += ["--no-deps", "--disable-pip", "--format=json", "--aliases", "--desc"]
        done = subprocess.run(command, capture_output=True, text=True)
    if not done.stdout.startswith("{"):
        sys.exit(f"pip-audit failed, and nothing was written.\n{done.stderr}")
    found = json.loads(done.stdout)["dependencies"]
    if skipped := [one for one in found if "skip_reason" in one]:
        sys.exit(f"Nothing was written. {skipped[0]['skip_reason']}")
    return found


def as_text(content: dict) -> str:
    """The content of the data file, an advisory a line, ordered."""
    head = {key: value for key, value in content.items() if key != "advisories"}
    order = sorted(content["advisories"], key=lambda e: (e["package"], e["id"], str(e["mended"])))
    lines = ",\n".join(f"  {json.dumps(entry, ensure_ascii=False)}" for entry in order)
    return f'{json.dumps(head, indent=1, ensure_ascii=False)[:-2]},\n "advisories": [\n{lines}\n ]\n}}\n'


def main() -> None:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument(
        "--refresh", action="store_true", help="ask pip-audit, and add what is new"
    )
    if options.parse_args().refresh:
        refresh()
    content = json.loads(DATA.read_text())
    lines = affected(content["advisories"])
    print("\n".join(lines))
    date = content["refreshed"] or f"{content['written']}, by hand"
    print(
        f"{len(content['advisories'])} advisories ({date}), {len(lines)} affect what is installed"
    )
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
