"""Invariants and capacity, for operators."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import ASGIApp

from gateway.hold import PageLedger
from gateway.replica import Snapshot
from tests.api.exchange import get
from tests.fakes import ADMIN_KEY, KEY, MODEL, Fakes


def fleet(*, known: bool = True, held: int = 0) -> Any:
    ledger = PageLedger()
    if held:
        ledger.take("r", held, now=0.0)
    snapshot = Snapshot(time.monotonic(), total_pages=64, used_pages=3, running=1, waiting=0, running_max=16)
    replica = SimpleNamespace(
        id="engine-0",
        ledger=ledger,
        info=SimpleNamespace(page_tokens=16) if known else None,
        snapshot=snapshot if known else None,
    )
    return SimpleNamespace(model=MODEL, up=known, room=[], engines=lambda: [replica])


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
        assert model == {"model": MODEL, "up": True, "waiting_for_pages": 0}
        assert replica["reported"].pop("age_ms") >= 0
        assert replica == {
            "id": "engine-0",
            "held_pages": 7,
            "live_requests": 1,
            "page_tokens": 16,
            "reported": {"total_pages": 64, "used_pages": 3, "running": 1, "waiting": 0, "running_max": 16},
        }

    async def test_an_engine_that_does_not_answer_is_unknown(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.fleets = [fleet(known=False)]
        (model,) = (await get(app, "/console/v1/capacity", key=ADMIN_KEY)).json["models"]
        assert (model["up"], model["replicas"][0]["reported"]) == (False, None)
