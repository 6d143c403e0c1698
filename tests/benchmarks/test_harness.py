"""The harness measures what it says it measures, on contenders whose cost is known; what it draws."""

import importlib.util
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import pytest

from benchmarks import __main__ as command
from benchmarks import plot, report
from benchmarks.harness import Budget, Calls, Case, Pace, SelfTimed, Spread, measure


def steady(seconds):
    return lambda: SelfTimed(lambda: seconds)


def measured(contenders, *budgets):
    pace = Pace(rounds=4, batch=0.001, warm_calls=2)
    return measure(Case("bench", "case", lambda: contenders, budgets), pace)


def test_contenders_take_turns_and_a_ratio_is_taken_round_by_round_so_that_drift_cancels():
    order = []

    def drifting(name, factor):
        return lambda: SelfTimed(lambda: order.append(name) or factor * ((len(order) - 1) // 3))

    result = measured({"a": drifting("a", 1), "b": drifting("b", 2), "c": drifting("c", 3)})
    assert "".join(order) == "abc" + "abc" + "bca" + "cab" + "abc"  # the warm-up comes first
    assert len(set(result.samples["a"])) > 2 and result.ratio("c", "a") == Spread(3, 3, 3)


def test_budgets_say_what_they_limit_and_whether_they_are_met():
    result = measured(
        {"limit": steady(1.0), "nnxlite": steady(1.05), "flax": steady(42.0)},
        Budget(1.08, "limit"),
        Budget(1.04, "limit"),
        Budget(1 / 30, "flax"),
        Budget(0.5e-6),
        Budget(1.0, "equinox"),
    )
    described = [(b.text("seconds"), result.met(b)) for b in result.case.budgets]
    assert described == [
        ("at most 1.08x limit", True),
        ("at most 1.04x limit", False),
        ("30x faster than flax", True),
        ("at most 500 ns", False),
        ("at most 1x equinox", None),
    ]
    row = plot.rows(report.case_json(result))[0]
    assert row.ratios == {"limit": 1.0, "nnxlite": 1.05, "flax": 42.0}
    assert (row.of, row.subject, row.at_most, row.met) == ("limit", "nnxlite", 1.08, True)


def test_a_contender_that_compiles_while_timed_is_marked():
    sizes = iter(range(1, 100))

    def compiling():
        jax.jit(lambda x: x + 1)(jnp.zeros(next(sizes)))

    result = measured({"limit": lambda: Calls(lambda: None), "nnxlite": lambda: Calls(compiling)})
    assert result.recompiled == {"nnxlite"}


def absent():
    raise ModuleNotFoundError("No module named 'flax'", name="flax")


def broken():
    raise ValueError("not\nyet")


def test_a_contender_that_cannot_run_does_not_hide_the_others(monkeypatch, capsys):
    contenders = {"limit": steady(1.0), "nnxlite": broken, "flax": absent}
    result = measured(contenders)
    assert result.failed == {"nnxlite": "ValueError: not yet", "flax": "flax is not installed"}
    assert result.figure("limit") == Spread(1.0, 1.0, 1.0)
    assert result.figure("nnxlite") is None
    monkeypatch.setattr(command, "CASES", [Case("eager", "work", lambda: contenders)])
    assert command.main(["--quick"]) == 1
    assert "eager: work: nnxlite: ValueError: not yet" in capsys.readouterr().out


def test_a_change_within_the_spread_is_not_called_one():
    assert report.change(Spread(1, 0.9, 1.4), Spread(1.3, 1.2, 1.4)) == ""
    assert "slower" in report.change(Spread(1, 0.9, 1.1), Spread(1.3, 1.2, 1.4))
    assert "faster" in report.change(Spread(1.3, 1.2, 1.4), Spread(1, 0.9, 1.1))
    grown = report.change(Spread(1, 1, 1), Spread(2, 2, 2), report.LARGER["bytes"])
    assert "more" in grown


@pytest.fixture
def one_case(monkeypatch):
    build = lambda: {"limit": steady(1.0), "nnxlite": steady(1.5)}
    cases = [Case("eager", name, build, (Budget(2, "limit"),)) for name in ("grad", "work")]
    monkeypatch.setattr(command, "CASES", cases)


def test_command_prints_a_table_and_writes_and_compares_json(one_case, tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert command.main(["--rounds", "2", "--only", "eager", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    case, _ = figures["cases"]
    assert case["seconds"]["nnxlite"] == {"median": 1.5, "low": 1.5, "high": 1.5}
    assert math.isclose(case["nnxlite_to"]["limit"]["median"], 1.5)
    assert case["budgets"][0]["met"] is True
    assert figures["machine"]["jax"] == jax.__version__
    assert command.main(["--rounds", "2", "--compare", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "1.50x" in printed and "at most 2x limit" in printed and "met" in printed
    assert "compared" in printed and "1.00x" in printed


def test_the_cases_of_the_chart_alone_are_measured_and_drawn(one_case, tmp_path):
    pytest.importorskip("matplotlib")
    picture, file, again = (tmp_path / name for name in ("chart.svg", "chart.json", "again.svg"))
    assert command.main(["--quick", "--chart", str(picture), "--json", str(file)]) == 0
    assert [case["case"] for case in json.loads(file.read_text())["cases"]] == ["grad"]
    assert picture.read_text().count("<svg") == 1
    assert command.main(["--load", str(file), "--chart", str(again)]) == 0
    assert again.read_bytes() == picture.read_bytes()


def test_the_figures_of_the_readme_are_those_of_cases_that_exist():
    kept = json.loads((pathlib.Path(__file__).parents[2] / "docs/benchmarks.json").read_text())
    assert {(case["bench"], case["case"]) for case in kept["cases"]} == plot.CHART.keys()
    assert plot.CHART.keys() <= {(case.bench, case.name) for case in command.CASES}
    assert kept["judged"] and not any(case["failed"] for case in kept["cases"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--only speed", "invalid choice: 'speed'"),
        ("--rounds 1", "at least 2, not 1"),
        ("--json absent/file", "cannot write absent/file: No such file"),
        ("--compare absent", "cannot read absent: No such file"),
        ("--compare other", "other is not a file written by --json"),
        ("--load other", "other is not a file written by --json"),
        ("--load old", "old is of an earlier version, which kept less"),
        ("--plot a.txt", "a.txt is neither a folder nor ends in .svg or .png"),
        ("--plot absent/a.svg", "cannot write absent/a.svg: there is no absent"),
        ("--chart a.svg", 'needs matplotlib: pip install -e ".[bench]"'),
    ],
)
def test_bad_options_are_one_line(arguments, complaint, tmp_path, monkeypatch, capsys):
    spec = None if arguments.startswith("--chart") else importlib.util.find_spec("json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").write_text("[]")
    (tmp_path / "old").write_text('{"cases": [{"seconds": {}}]}')
    with pytest.raises(SystemExit) as stop:
        command.main(arguments.split())
    assert stop.value.code == 2
    said, option = capsys.readouterr().err, arguments.split()[0]
    assert said.startswith(f"python -m benchmarks: error: argument {option}: {complaint}")
    assert said.count("\n") == 1
