"""What the pictures show, and where they go."""

from __future__ import annotations

import importlib.util
import json
import pathlib

import pytest

pytest.importorskip("matplotlib")

from benchmarks import __main__ as command
from benchmarks import plot, report
from benchmarks.harness import Budget, Case, Once, Pace, measure

PACE = Pace(rounds=2)


def case_of(bench, name, figures, *budgets, unit="seconds"):
    contenders = {n: (lambda value=value: Once(lambda: value)) for n, value in figures.items()}
    result = measure(Case(bench, name, lambda: contenders, budgets, unit), PACE)
    return report.case_json(result)


STEP = case_of(
    "dispatch", "step", {"limit": 2.0, "nnxlite": 3.0, "flax": 20.0}, Budget(1.25, "limit")
)


def test_a_row_holds_every_contender_against_what_the_budget_is_of():
    [row] = plot.rows(STEP)
    assert row.ratios == {"limit": 1.0, "nnxlite": 1.5, "flax": 10.0}
    assert (row.of, row.subject, row.at_most, row.met) == ("limit", "nnxlite", 1.25, False)


def test_the_cases_of_the_chart_exist_and_alone_are_measured(monkeypatch, tmp_path):
    known = {(case.bench, case.name) for case in command.CASES}
    assert plot.CHART.keys() <= known
    build = lambda: {"limit": lambda: Once(lambda: 1.0), "nnxlite": lambda: Once(lambda: 2.0)}
    cases = [Case("eager", "grad", build), Case("eager", "cond", build)]
    monkeypatch.setattr(command, "CASES", cases)
    picture, file = tmp_path / "chart.svg", tmp_path / "chart.json"
    assert command.main(["--quick", "--chart", str(picture), "--json", str(file)]) == 0
    assert [case["case"] for case in json.loads(file.read_text())["cases"]] == ["grad"]
    assert picture.read_text().count("<svg") == 1
    again = tmp_path / "again.svg"
    assert command.main(["--load", str(file), "--chart", str(again)]) == 0
    assert again.read_bytes() == picture.read_bytes()


def test_the_figures_of_the_readme_are_kept():
    docs = pathlib.Path(__file__).parents[2] / "docs"
    kept = json.loads((docs / "benchmarks.json").read_text())
    assert {(case["bench"], case["case"]) for case in kept["cases"]} == plot.CHART.keys()
    assert kept["judged"] and not any(case["failed"] for case in kept["cases"])


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("figures.txt", "figures.txt is neither a folder nor ends in .svg or .png"),
        ("absent/a.svg", "cannot write absent/a.svg: there is no absent"),
    ],
)
def test_a_bad_target_is_found_before_anything_is_measured(target, complaint, capsys):
    with pytest.raises(SystemExit):
        command.main(["--plot", target])
    assert capsys.readouterr().err == (
        f"python -m benchmarks: error: argument --plot: {complaint}\n"
    )


def test_without_matplotlib_the_message_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        command.main(["--plot", "a.svg"])
    assert 'needs matplotlib: pip install -e ".[bench]"' in capsys.readouterr().err
