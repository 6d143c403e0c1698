"""`docs/build.py`: every public name has an entry in `docs/api`, and the build of the site is strict."""

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import nnxlite
from tests.structure import load

DOCS = Path(__file__).parents[1] / "docs"
build = load(DOCS / "build.py")


def test_every_public_name_has_one_entry_and_a_docstring():
    assert build.api_problems() == []


@pytest.mark.parametrize("page", sorted(build.API.glob("*.md")), ids=lambda page: page.name)
def test_summaries_are_those_of_the_docstrings(page):
    text = page.read_text()
    assert build.summarized(text) == text, "run `python docs/build.py --summaries`"


def test_a_summary_is_the_first_sentence():
    package = types.SimpleNamespace(f=documented)
    entry = "::: nnxlite.f\n\n> Does nothing.\n"
    for text in ("::: nnxlite.f\n", "::: nnxlite.f\n\n> Was other.\n"):
        assert build.summarized(f"# A\n\n{text}\nMore.\n", package) == f"# A\n\n{entry}\nMore.\n"


def test_the_index_links_to_every_page():
    pages = {path.name for path in build.API.glob("*.md")}
    linked = set(re.findall(r"^\| \[[^]]+\]\((\S+?)\)", (build.API / "index.md").read_text(), re.M))
    assert linked == pages - {"index.md"}


def test_an_entry_links_to_the_guides_that_use_the_name_most():
    pytest.importorskip("mkdocs")
    see_also = load(DOCS / "hooks.py").see_also
    assert see_also("jit", limit=1) == [("transforms/jit.md", "jit")]
    assert see_also("generate")[0] == ("generating.md", "Generating text")
    assert see_also("no_such_name") == []


# Each check can fail ------------------------------------------------------------------------------


def problems(folder: Path, page: str, **names: object) -> list[str]:
    """What is wrong with a page for a package with some names."""
    package = types.ModuleType("package")
    vars(package).update(names)
    (folder / "a.md").write_text(page)
    return build.api_problems(folder, package)


def documented():
    """Does nothing."""


def bare():
    pass


ENTRY, ROW = "::: nnxlite.f\n", "| `nnx.f` | `math.sin` | the sine |\n"
FOUND = [
    (ENTRY, {"g": documented}, "nnx.g is on no page of {0}"),
    (f"{ENTRY}| `nnx.f` | twice |\n", {}, "nnx.f is listed 2 times: a.md, a.md"),
    (f"{ENTRY}\n::: nnxlite.sub.g\n", {}, "a.md: nnx.sub.g does not exist"),
    (ENTRY, {"f": bare}, "a.md: nnx.f has no docstring"),
    ("| `nnx.f` |  |\n", {"f": bare}, "a.md: the row of nnx.f does not say what it is"),
    (ROW, {}, "a.md: nnx.f is not math.sin"),
    (ROW.replace("math.sin", "no_such.module"), {}, "a.md: nnx.f is not no_such.module"),
]


@pytest.mark.parametrize("page, names, problem", FOUND, ids=[problem for *_, problem in FOUND])
def test_each_check_can_fail(page, names, problem, tmp_path):
    assert problems(tmp_path, ENTRY, f=documented) == []
    found = problems(tmp_path, page, **({"f": documented} | names))
    assert found == [problem.format(tmp_path.name)]


def test_a_name_of_a_submodule(tmp_path):
    page = "| `nnx.lora` | `nnxlite.lora` | adapters |\n"
    missing = problems(tmp_path, page, lora=nnxlite.lora)
    assert "nnx.lora.inject is on no page" in " ".join(missing)
    below = problems(tmp_path, page, lora=nnxlite.lora, inject=nnxlite.lora.inject)
    assert "lora.inject" not in " ".join(below)  # the package has it itself


# Docstrings as Markdown ---------------------------------------------------------------------------


def test_examples_are_fenced_and_names_are_links():
    pytest.importorskip("griffe")
    docstrings = load(DOCS / "docstrings.py")
    examples = ">>> f(1)\n1\n\n>>> f(\n...     2)\n2"
    text = f"What `nnx.split` does to a `State`.\n\n{examples}\n\nMore: `x`.\n\n>>> g()"
    fenced = docstrings.fenced(text)
    assert fenced == (
        "What `nnx.split` does to a `State`.\n\n"
        f"```pycon\n{examples}\n```\n\n"
        "More: `x`.\n\n```pycon\n>>> g()\n```"
    )
    linked = docstrings.linked(fenced, "merge")
    assert "[`nnx.split`][nnxlite.split]" in linked and "[`State`][nnxlite.State]" in linked
    assert "`x`" in linked and "`nnx.split` does" in docstrings.linked(text, "split")


# The site -----------------------------------------------------------------------------------------


def test_a_broken_link_or_anchor_fails_the_build(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    # The settings of the repository, with two pages and without what reads the package.
    settings = (DOCS.parent / ".mkdocs.yml").read_text()
    without = r"^(nav|plugins|hooks|extra_css):.*?(?=^\w|\Z)|^  (favicon|logo):.*?\n"
    (tmp_path / "mkdocs.yml").write_text(re.sub(without, "", settings, flags=re.M | re.S))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Title\n\n[there](page.md#part)\n")
    command = f"{sys.executable} -m mkdocs build --strict --clean -f mkdocs.yml".split()

    def made(prose: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "docs" / "page.md").write_text(f"# Page\n\n## Part\n\n{prose}\n")
        env = build.environment()
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    whole = made("Text.")
    assert whole.returncode == 0, whole.stderr
    assert made("[a](missing.md)").returncode and made("[a](index.md#missing)").returncode


def test_help_names_the_steps(capsys):
    with pytest.raises(SystemExit):
        build.main(["--help"])
    text = capsys.readouterr().out
    assert all(option in text for option in ("--no-code", "--serve", "--out", "--notebooks"))
