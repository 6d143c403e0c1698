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
GROWING = [
    case_of("growth", f"{work}, for each Variable", {"100": 3e-6, "1,000": 1e-6, "10,000": 1e-6})
    for work in ("split", "jit call")
]


def test_a_row_holds_every_contender_against_what_the_budget_is_of():
    [row] = plot.rows(STEP)
    assert row.ratios == {"limit": 1.0, "nnxlite": 1.5, "flax": 10.0}
    assert (row.of, row.subject, row.at_most, row.met) == ("limit", "nnxlite", 1.25, False)


def test_an_absolute_budget_is_its_own_measure():
    [row] = plot.rows(
        case_of("construct", "module", {"nnxlite": 512.0}, Budget(2048.0), unit="bytes")
    )
    assert row.ratios == {"nnxlite": 0.25}
    assert (row.of, row.at_most, row.met) == ("2 KiB", 1.0, True)


@pytest.mark.parametrize(
    ("figures", "budgets", "of"),
    [
        ({"limit": 1.0, "nnxlite": 2.0, "flax": 4.0}, (), ["limit"]),
        ({"nnxlite": 2.0, "flax": 4.0}, (), ["flax"]),
        ({"nnxlite": 2.0}, (), []),
        ({"nnxlite": 2.0}, (Budget(1.0, "flax"),), []),
        ({"limit": 1.0, "nnxlite": 2.0}, (Budget(1.0, "flax"), Budget(3.0, "limit")), ["limit"]),
    ],
    ids=["limit", "reference", "alone", "reference absent", "one absent"],
)
def test_rows_without_a_base_are_left_out(figures, budgets, of):
    assert [row.of for row in plot.rows(case_of("eager", "work", figures, *budgets))] == of


def test_ratios_are_drawn_on_a_logarithmic_axis_with_budgets():
    [axes] = plot.ratios_figure([STEP]).axes
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["step   / limit"]
    drawn = {float(line.get_xdata()[0]) for line in axes.lines if len(line.get_xdata()) == 1}
    assert drawn == {1.0, 1.5, 10.0, 1.25}


def test_growth_is_drawn_as_the_whole_work_against_its_size():
    [axes] = [axes for axes in plot.growth_figure(GROWING).axes if axes.get_visible()]
    assert axes.get_xlabel() == "Variables"
    split, proportional, *_ = axes.lines
    assert split.get_label() == "split"
    assert split.get_xdata().tolist() == [100, 1_000, 10_000]
    assert split.get_ydata() == pytest.approx([3e-4, 1e-3, 1e-2])
    assert proportional.get_ydata() == pytest.approx([1e-4, 1e-3, 1e-2])


def chart_rows():
    """A figure for every row of the chart, in which all but the limit differ."""
    numbers = {"limit": 2e-3, "nnxlite": 2.2e-3, "flax": 60e-3, "equinox": 5e-3}
    return [case_of(bench, name, numbers) for bench, name in plot.CHART]


def test_the_chart_has_ten_rows_of_multiples_of_plain_jax():
    [axes] = plot.chart_figure({"cases": chart_rows()}).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [*plot.CHART.values()]
    assert len(plot.CHART) == 10
    shown = [text.get_text() for text in axes.texts]
    assert shown[:4] == ["2.50x", "30x", "1.10x", "2 ms"] and len(shown) == 42
    low, high = axes.get_xlim()
    assert low < 1 and high > 30
    assert "few rounds" not in axes.get_xlabel()
    [axes] = plot.chart_figure({"cases": chart_rows()[:3], "judged": False}).axes
    assert "few rounds: not to be relied on" in axes.get_xlabel()


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
    ("target", "cases", "written"),
    [
        ("", [STEP, *GROWING], ["ratios.svg", "growth.svg"]),
        ("", [STEP], ["ratios.svg"]),
        ("out.svg", [STEP, *GROWING], ["out.svg", "out-growth.svg"]),
        ("out.png", GROWING, ["out-growth.png"]),
    ],
    ids=["folder", "no growth", "file", "growth alone"],
)
def test_pictures_are_named_after_what_was_asked_for(target, cases, written, tmp_path):
    files = plot.draw({"cases": cases}, tmp_path / target)
    assert files == [tmp_path / name for name in written]
    assert all(file.stat().st_size for file in files)


def test_the_same_figures_make_the_same_file(tmp_path):
    for name in ("a.svg", "b.svg"):
        plot.draw({"cases": [STEP]}, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


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
