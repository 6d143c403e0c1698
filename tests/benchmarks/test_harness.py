"""The harness measures what it says it measures, on contenders whose cost is known."""

from __future__ import annotations

import itertools
import json
import math

import jax
import jax.numpy as jnp
import pytest

from benchmarks import __main__ as command
from benchmarks import harness, report
from benchmarks.harness import Budget, Calls, Case, Pace, SelfTimed, Spread, measure

PACE = Pace(rounds=4, batch=0.001, warm_calls=2)


def steady(seconds: float):
    return lambda: SelfTimed(lambda: seconds)


def measured(contenders, *budgets: Budget, pace: Pace = PACE) -> harness.Result:
    return measure(Case("bench", "case", lambda: contenders, budgets), pace)


def test_a_ratio_is_taken_round_by_round_so_that_drift_cancels():
    clock = itertools.count()

    class Drifting:
        """Twice as slow as its neighbour, on a machine that grows slower with every round."""

        def __init__(self, factor: int):
            self.factor = factor

        def warm(self, pace):
            pass

        def sample(self):
            return self.factor * (1 + next(clock) // 2)

    result = measured({"limit": lambda: Drifting(1), "nnxlite": lambda: Drifting(2)})
    assert result.samples["limit"] == [1, 2, 3, 4]
    assert result.ratio("nnxlite", "limit") == Spread(2, 2, 2)


def test_contenders_take_turns_in_a_rotating_order():
    order = []

    def contender(name):
        return lambda: SelfTimed(lambda: order.append(name) or 1.0)

    measured({name: contender(name) for name in "abc"}, pace=Pace(rounds=3))
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"  # the warm-up comes first


def test_calls_counts_units_and_fills_the_batch():
    calls = Calls(lambda: sum(range(100)), units=10)
    calls.warm(PACE)
    assert calls.count > 1
    assert 0 < calls.sample() < PACE.batch


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


def test_a_contender_that_compiles_while_timed_is_marked():
    sizes = iter(range(1, 100))

    def compiling():
        jax.jit(lambda x: x + 1)(jnp.zeros(next(sizes)))

    result = measured({"limit": lambda: Calls(lambda: None), "nnxlite": lambda: Calls(compiling)})
    assert result.recompiled == {"nnxlite"}


def test_a_contender_that_cannot_run_does_not_hide_the_others():
    def absent():
        raise ModuleNotFoundError("No module named 'flax'", name="flax")

    def broken():
        raise ValueError("not\nyet")

    result = measured({"limit": steady(1.0), "nnxlite": broken, "flax": absent})
    assert result.failed == {"nnxlite": "ValueError: not yet", "flax": "flax is not installed"}
    assert result.figure("limit") == Spread(1.0, 1.0, 1.0)
    assert result.figure("nnxlite") is None


def test_a_change_within_the_spread_is_not_called_one():
    assert report.change(Spread(1, 0.9, 1.4), Spread(1.3, 1.2, 1.4)) == ""
    assert "slower" in report.change(Spread(1, 0.9, 1.1), Spread(1.3, 1.2, 1.4))
    assert "faster" in report.change(Spread(1.3, 1.2, 1.4), Spread(1, 0.9, 1.1))
    grown = report.change(Spread(1, 1, 1), Spread(2, 2, 2), report.LARGER["bytes"])
    assert "more" in grown


@pytest.fixture
def one_case(monkeypatch):
    build = lambda: {"limit": steady(1.0), "nnxlite": steady(1.5)}
    monkeypatch.setattr(command, "CASES", [Case("eager", "work", build, (Budget(2, "limit"),))])


def test_command_prints_a_table_and_writes_and_compares_json(one_case, tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert command.main(["--rounds", "2", "--only", "eager", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    [case] = figures["cases"]
    assert case["seconds"]["nnxlite"] == {"median": 1.5, "low": 1.5, "high": 1.5}
    assert math.isclose(case["nnxlite_to"]["limit"]["median"], 1.5)
    assert case["budgets"][0]["met"] is True
    assert figures["machine"]["jax"] == jax.__version__
    assert command.main(["--rounds", "2", "--compare", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "1.50x" in printed and "at most 2x limit" in printed and "met" in printed
    assert "compared" in printed and "1.00x" in printed


def test_exit_status_tells_that_our_own_contender_failed(monkeypatch, capsys):
    def broken():
        raise RuntimeError("no figure")

    monkeypatch.setattr(command, "CASES", [Case("eager", "work", lambda: {"nnxlite": broken})])
    assert command.main(["--quick"]) == 1
    assert "eager: work: nnxlite: RuntimeError: no figure" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--only", "speed"], "argument --only: invalid choice: 'speed'"),
        (["--rounds", "1"], "argument --rounds: at least 2, not 1"),
        (["--json", "absent/file"], "argument --json: cannot write absent/file: No such file"),
        (["--compare", "absent"], "argument --compare: cannot read absent: No such file"),
        (["--compare", "other"], "argument --compare: other is not a file written by --json"),
        (["--load", "other"], "argument --load: other is not a file written by --json"),
        (["--load", "old"], "argument --load: old is of an earlier version, which kept less"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_one_line(arguments, complaint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").write_text("[]")
    (tmp_path / "old").write_text('{"cases": [{"seconds": {}}]}')
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"python -m benchmarks: error: {complaint}")
    assert said.count("\n") == 1
