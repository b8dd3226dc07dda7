"""`pagegate replay`: a table or one JSON document, and a clear word for what it can't read."""

from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import typer
from typer.testing import CliRunner

from api.cli.replay import replay_command
from gateway.replay.profiles import FLEETS

ROWS = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:{second:02d}.0000000,{500 + 40 * second},{10 + second}\n" for second in range(60)
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(ROWS)
    return path


def invoke(*arguments: str) -> tuple[int, str, str]:
    app = typer.Typer()
    app.command()(replay_command)
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_json_carries_every_policy_and_what_was_played(trace: Path) -> None:
    code, out, _ = invoke(str(trace), "--policy", "ours", "--policy", "reserve", "--json", "--load", "2", "--seed", "7")
    assert code == 0
    document = orjson.loads(out)
    assert [each["policy"] for each in document["policies"]] == ["ours", "reserve"]
    assert document["load_factor"] == 2.0
    assert document["seed"] == 7
    assert all(each["requests"] == 60 for each in document["policies"])


def test_a_table_names_the_policies(trace: Path) -> None:
    code, out, _ = invoke(str(trace), "--policy", "ours", "--policy", "open")
    assert code == 0
    assert "goodput_s" in out
    assert "ours" in out


def test_a_day_compares_hours_of_engines(trace: Path) -> None:
    day = ("--grow-to", "2", "--day-seconds", "120", "--policy", "demand", "--policy", "fixed")
    code, out, _ = invoke(str(trace), *day, "--json")
    assert code == 0
    demand, fixed = orjson.loads(out)["policies"]
    assert demand["requests"] == fixed["requests"] > 0
    assert demand["unit_hours"] < fixed["unit_hours"]
    code, out, _ = invoke(str(trace), *day)
    assert code == 0
    assert "unit_hours" in out


@pytest.mark.load
def test_a_fleet_says_what_decisions_cost_and_how_good_they_are(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FLEETS, 10, replace(FLEETS[10], decisions=200))
    code, out, _ = invoke(str(trace), "--fleet", "10", "--json")
    assert code == 0
    alone, shared = orjson.loads(out)["fleets"]
    assert (alone["shared"], shared["shared"]) == (False, True)
    for fleet in (alone, shared):
        assert (fleet["replicas"], fleet["decisions"]) == (10, 200)
        assert fleet["decision_us_p50"] > 0
    assert shared["over_full"] == 0.0
    code, out, _ = invoke(str(trace), "--fleet", "10")
    assert code == 0
    assert "good_of_oracle" in out
    assert invoke(str(trace), "--fleet", "11")[0] == 2


def test_a_policy_of_the_other_kind_is_refused(trace: Path) -> None:
    assert invoke(str(trace), "--policy", "demand")[0] == 2
    assert invoke(str(trace), "--grow-to", "2", "--policy", "ours")[0] == 2


def test_a_missing_trace_is_said_so() -> None:
    code, _, error = invoke("/nowhere/trace.csv")
    assert code == 1
    assert "/nowhere/trace.csv" in error


@pytest.mark.parametrize("wrong", [("--policy", "hope"), ("--profile", "abacus")])
def test_an_unknown_name_is_said_with_the_known_ones(trace: Path, wrong: tuple[str, str]) -> None:
    code, _, error = invoke(str(trace), *wrong)
    assert code == 2
    assert wrong[1] in error
