"""`pagegate rollout`: what an operator sees of a new revision and decides of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.rollouts import store
from gateway.rollouts.tally import ERRORS, REQUESTS
from tenancy.audit_log import SERVICE
from tenancy.database import open_database
from tests.api.cli.conftest import Pagegate

Answer = Callable[..., Any]


@pytest.fixture
def begun(home: Path) -> None:
    database = open_database(f"sqlite:///{home / 'pagegate.db'}")
    store.begin(database, "m", new="int4", old="stable", share_bp=1_000, by=SERVICE, at_ns=1)
    counts = {("int4", REQUESTS, 0): 7, ("int4", ERRORS, 0): 1, ("stable", REQUESTS, 0): 90}
    store.add_counts(database, store.read_standing(database, "m"), counts, store.Telling("here", 1))
    database.close()


@pytest.mark.usefixtures("begun")
class TestOneThatRuns:
    def test_status_shows_shares_and_what_was_seen_of_both(self, pagegate: Pagegate, answer: Answer) -> None:
        [row] = answer("rollout", "status")
        assert (row["model"], row["state"], row["share_percent"]) == ("m", "running", 10)
        assert (row["new"], row["old"]) == ({"requests": 7, "errors": 1}, {"requests": 90, "errors": 0})
        code, said, _ = pagegate("rollout", "status")
        assert code == 0
        assert "7, 90 old" in said

    def test_another_share_a_score_and_an_end_are_noted(self, answer: Answer) -> None:
        assert answer("rollout", "share", "m", "50")["share_percent"] == 50
        assert answer("rollout", "evaluated", "m", "0.97")["evaluation"] == 0.97
        assert answer("rollout", "promote", "m")["state"] == "promoted"
        again = answer("rollout", "start", "m")
        assert (again["state"], again["share_percent"], again["new"]["requests"]) == ("running", 50, 0)
        aborted = answer("rollout", "abort", "m", "--why", "garbled text")
        assert (aborted["state"], aborted["why"]) == ("rolled_back", "garbled text")

    def test_what_is_over_is_said_to_be(self, pagegate: Pagegate) -> None:
        pagegate("rollout", "abort", "m")
        code, _, said = pagegate("rollout", "promote", "m", "--json")
        assert code == 1
        assert json.loads(said)["error"]["code"] == "rollout_refused"

    def test_why_one_is_over_is_said_in_one_line(self, pagegate: Pagegate) -> None:
        why = "it never started: r1 (5 times): r1 ended with exit code 1: No such file: /weights/config.json"
        pagegate("rollout", "abort", "m", "--why", why)
        _, said, _ = pagegate("rollout", "status")
        assert said.splitlines()[-1] == f"m int4, rolled back: {why}"


def test_a_model_without_one_is_said_to_have_none(pagegate: Pagegate, home: Path) -> None:
    code, _, said = pagegate("rollout", "promote", "m")
    assert (code, said) == (1, "pagegate: The model 'm' has no rollout.\n")
