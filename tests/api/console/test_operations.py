"""Invariants and capacity, for operators."""

import io
import time

import pytest
from rich.console import Console
from starlette.types import ASGIApp

from api.cli.top import render
from backends.client import EngineClient
from backends.connections import open_session
from backends.engine_figures import EngineFigures
from backends.settings import BackendSettings
from backends.wire import Loads, ServerInfo
from gateway.door import Waiting
from gateway.model_fleet import ModelFleet
from gateway.replica import Replica
from gateway.settings import GatewaySettings
from gateway.want import Want
from tests.api.exchange import get, post
from tests.fakes import ADMIN_KEY, KEY, MODEL, OPERATOR_KEY, Fakes


def fleet(*, known: bool = True, held: int = 0, waiting: int = 0) -> ModelFleet:
    replica = Replica("engine-0", EngineClient("http://nowhere", open_session(), BackendSettings()))
    made = ModelFleet(MODEL, [replica], GatewaySettings())
    if known:
        replica.info = ServerInfo(16, 1024, 8192, "auto", "1")
        loads = Loads(total_tokens=1024, used_tokens=48, running=1, waiting=0, running_max=16)
        made.reported(replica, loads, time.monotonic())
    if held:
        replica.ledger.take("r", held, now=0.0)
    for number in range(waiting):
        want = Want(f"w{number}", f"account-{number % 2}", "chat", 5000, 1, 10)
        assert isinstance(made.door.arrive(want, time.monotonic(), wait_s=60), Waiting)
    return made


@pytest.mark.parametrize("path", ["/console/v1/invariants", "/console/v1/capacity"])
async def test_only_operators_may_look(app: ASGIApp, path: str) -> None:
    assert (await get(app, path, key=KEY)).status == 403
    assert (await get(app, path, key=None)).status == 401
    assert (await get(app, path, key=ADMIN_KEY)).status == 200


class TestInvariants:
    async def test_an_idle_service_holds_nothing(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.fleets = [fleet()]
        answer = await get(app, "/console/v1/invariants", key=ADMIN_KEY)
        assert answer.json == {
            "ok": True,
            "live_holds": 0,
            "live_slots": 0,
            "held_nano": 0,
            "kv_pages_held": 0,
            "violations": [],
        }
        assert fakes.metering.flushed == 1

    async def test_a_busy_service_may_hold(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.holds.live, fakes.holds.slots, fakes.holds.nano = {"r": object()}, 1, 500
        fakes.fleets = [fleet(held=7)]
        answer = (await get(app, "/console/v1/invariants", key=ADMIN_KEY)).json
        assert (answer["ok"], answer["live_holds"], answer["kv_pages_held"]) == (True, 1, 7)

    async def test_a_busy_service_holds_nothing_for_requests_that_have_ended(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.holds.live, fakes.holds.slots = {"other": object()}, 1
        fakes.fleets = [fleet(held=7)]
        answer = (await get(app, "/console/v1/invariants", key=ADMIN_KEY)).json
        assert answer["ok"] is False
        assert answer["violations"] == ["engine-0 holds pages for 1 requests that are not live"]

    async def test_what_is_held_for_nobody_is_a_violation(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.holds.slots, fakes.holds.nano = 1, 500
        fakes.fleets = [fleet(held=7)]
        answer = (await get(app, "/console/v1/invariants", key=ADMIN_KEY)).json
        assert answer["ok"] is False
        assert [sentence.split(", but ")[1] for sentence in answer["violations"]] == [
            "live_slots is 1",
            "held_nano is 500",
            "kv_pages_held is 7",
        ]

    async def test_records_that_contradict_themselves_are_violations(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.usage.broken = ["request x: costs 1 nano-USD, its tokens come to 2"]
        answer = (await get(app, "/console/v1/invariants", key=ADMIN_KEY)).json
        assert (answer["ok"], answer["violations"]) == (False, fakes.usage.broken)


class TestCapacity:
    async def test_shows_reports_beside_promises(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.fleets = [fleet(held=7)]
        (model,) = (await get(app, "/console/v1/capacity", key=ADMIN_KEY)).json["models"]
        (replica,) = model.pop("replicas")
        assert (model["model"], model["up"], model["waiting_for_pages"], model["waiting"]) == (MODEL, True, 0, [])
        assert replica["reported"].pop("age_ms") >= 0
        forecast = replica.pop("forecast")
        assert (forecast["total_tokens"], forecast["free_tokens"], forecast["release"]) == (1024, 976, [])
        assert replica == {
            "id": "engine-0",
            "role": "unified",
            "region": "default",
            "round_trip_ms": 0.0,
            "standing": "open",
            "held_pages": 7,
            "live_requests": 1,
            "page_tokens": 16,
            "ghost_requests": 0,
            "prompts": None,
            "reported": {"total_pages": 64, "used_pages": 3, "running": 1, "waiting": 0, "running_max": 16},
            "engine": None,
        }

    async def test_shows_what_an_engine_says_of_its_cache_and_its_tags(self, app: ASGIApp, fakes: Fakes) -> None:
        shown = fleet()
        shown.replicas[0].figures = EngineFigures(evictable_tokens=160, retracted_waiting=2, tags_active=1)
        fakes.fleets = [shown]
        (model,) = (await get(app, "/console/v1/capacity", key=ADMIN_KEY)).json["models"]
        engine = model["replicas"][0]["engine"]
        assert (engine["evictable_tokens"], engine["retracted_waiting"], engine["tags_active"]) == (160, 2, 1)
        assert engine["retractions"] is None  # it does not say

    async def test_shows_who_waits_and_what_they_were_served(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.fleets = [fleet(waiting=3)]
        (model,) = (await get(app, "/console/v1/capacity", key=ADMIN_KEY)).json["models"]
        assert model["waiting_for_pages"] == 3
        assert [(row["account_id"], row["requests"], row["prompt_tokens"]) for row in model["waiting"]] == [
            ("account-0", 2, 10_000),
            ("account-1", 1, 5_000),
        ]

    async def test_an_engine_that_does_not_answer_is_unknown(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.fleets = [fleet(known=False)]
        (model,) = (await get(app, "/console/v1/capacity", key=ADMIN_KEY)).json["models"]
        assert (model["up"], model["replicas"][0]["reported"], model["replicas"][0]["standing"]) == (
            False,
            None,
            "down",
        )

    async def test_the_terminal_shows_all_of_it(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.fleets = [fleet(held=7, waiting=3), fleet(known=False)]
        console = Console(width=200, file=io.StringIO())
        console.print(render((await get(app, "/console/v1/capacity", key=ADMIN_KEY)).json))
        assert isinstance(console.file, io.StringIO)
        shown = console.file.getvalue()
        assert "3 waiting" in shown
        assert "account-1" in shown
        assert "open" in shown
        assert "down" in shown


class TestDraining:
    async def test_a_replica_is_drained_and_taken_back(self, app: ASGIApp, fakes: Fakes) -> None:
        served = fleet()
        fakes.fleets = [served]
        path = "/console/v1/replicas/engine-0/drain"
        answer = await post(app, path, {"draining": True}, key=OPERATOR_KEY)
        assert (answer.status, answer.json) == (200, {"id": "engine-0", "draining": True})
        assert not served.placing.sites["engine-0"].open
        await post(app, path, {"draining": False}, key=OPERATOR_KEY)
        assert served.placing.sites["engine-0"].open

    async def test_an_unknown_replica_and_a_foreign_key_are_refused(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.fleets = [fleet()]
        body = {"draining": True}
        assert (await post(app, "/console/v1/replicas/nobody/drain", body, key=OPERATOR_KEY)).status == 404
        assert (await post(app, "/console/v1/replicas/engine-0/drain", body, key=KEY)).status == 403


@pytest.mark.parametrize("path", ["replicas/engine-0/drain", "batches/b/cancel"])
async def test_who_sees_all_and_administers_one_account_turns_nothing_off_for_all(
    app: ASGIApp, fakes: Fakes, path: str
) -> None:
    fakes.fleets = [served := fleet()]
    answer = await post(app, f"/console/v1/{path}", {"draining": True}, key=ADMIN_KEY)
    assert (answer.status, answer.json["code"]) == (403, "scope_missing")
    assert served.placing.sites["engine-0"].open
