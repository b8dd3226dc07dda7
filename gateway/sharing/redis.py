"""The board in Redis (7 or newer) or Valkey: one function call a claim, by the server's clock (functions.lua).

Chosen by api/sharing.py, which also listens to `channel`: when others give something back, whoever waits asks again.
"""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from backends.wire import Loads
from gateway.sharing.board import Beat, BoardAway, Claim, Grant, Report
from tenancy.meters.calls import TROUBLE, FunctionCalls

log = structlog.get_logger(__name__)

_LIBRARY = Path(__file__).with_name("functions.lua")
# Of the functions' words, in their names: gateways that are replaced one by one call each their own for a while.
_VERSION = 3


class RedisBoard:
    """Implements Board, for one model. calls: shared by all models of the process."""

    def __init__(self, calls: FunctionCalls, model: str, *, lease_s: float) -> None:
        self._calls = calls
        self._tag = f"pagegate:{{{model}}}"
        self._lease_ms = round(lease_s * 1000)

    @property
    def _reports(self) -> str:
        """What is told has the fields of this version."""
        return self._key("reports", str(_VERSION))

    @property
    def channel(self) -> str:
        """On which it is said that something is free again."""
        return f"{self._tag}:freed"

    @property
    def reports_channel(self) -> str:
        """On which it is said that an engine was asked again."""
        return f"{self._tag}:reported"

    async def claim(self, claim: Claim) -> Grant:
        hunger = "" if claim.hunger is None else repr(claim.hunger)
        keys = [self._key("claims", claim.replica), self._key("hungry", claim.replica), self._key("leases")]
        figures: list[str | int] = [claim.process, claim.epoch, claim.total, claim.least, claim.wanted, hunger]
        epoch, granted, others, yields = await self._call(
            "claim", keys, [*figures, self._lease_ms, self.channel, claim.replica]
        )
        return Grant(str(epoch), int(granted), int(others), bool(yields))

    async def restarted(self, replica: str, before: str, epoch: str) -> None:
        await self._call("restarted", [self._key("claims", replica)], [before, epoch])

    async def beat(self, process: str, running: Mapping[str, int]) -> Beat:
        theirs = [self._key(kind, engine) for engine in running for kind in ("running", "hungry")]
        keys = [self._key("leases"), self._key("polls"), *theirs]
        words: list[str | int] = [word for pair in running.items() for word in pair]
        polls, dead, others, hungry = await self._call("beat", keys, [process, self._lease_ms, *words])
        counts = dict(zip(running, map(int, others), strict=True))
        return Beat(frozenset(polls), tuple(dead), counts, frozenset(hungry))

    async def report(self, report: Report) -> None:
        words = [report.engine, round(report.age_s * 1000), report.epoch, json.dumps(asdict(report.loads))]
        await self._call("report", [self._reports], [*words, self.reports_channel])

    async def reports(self, engines: tuple[str, ...]) -> dict[str, Report]:
        flat = iter(await self._call("reports", [self._reports], list(engines)))
        told = {}
        for engine, age_ms, epoch, loads in zip(flat, flat, flat, flat, strict=True):
            told[engine] = Report(engine, epoch, Loads(**json.loads(loads)), int(age_ms) / 1000)
        return told

    async def note_requests(self, process: str, came: dict[str, str], gone: tuple[str, ...]) -> None:
        pairs = [word for rid, replica in came.items() for word in (rid, replica)]
        await self._call("note_requests", [self._key("requests", process)], [len(came), *pairs, *gone])

    async def estate(self, process: str) -> dict[str, str]:
        flat = await self._call("estate", [self._key("requests", process)], [])
        return dict(zip(flat[::2], flat[1::2], strict=True))

    async def bury(self, process: str, replicas: tuple[str, ...]) -> None:
        await self._leave(process, replicas, "1")

    async def served(self, process: str, seconds: dict[str, float]) -> dict[str, float]:
        del process
        if not seconds:
            return {}
        words = [word for tenant, more in seconds.items() for word in (tenant, repr(more))]
        totals = await self._call("served", [self._key("served")], words)
        return dict(zip(seconds, map(float, totals), strict=True))

    async def leave(self, process: str, replicas: tuple[str, ...]) -> None:
        await self._leave(process, replicas, "0")

    async def _leave(self, process: str, replicas: tuple[str, ...], must_be_dead: str) -> None:
        theirs = [self._key(kind, replica) for replica in replicas for kind in ("claims", "running")]
        keys = [self._key("leases"), self._key("requests", process), *theirs]
        await self._call("leave", keys, [process, must_be_dead, self.channel])

    async def _call(self, function: str, keys: list[str], arguments: list[Any]) -> Any:
        try:
            return await self._calls.call(f"pagegate_{function}_{_VERSION}", keys, arguments)
        except TROUBLE as error:
            raise BoardAway(f"{type(error).__name__}: {error}") from error

    def _key(self, *parts: str) -> str:
        return ":".join((self._tag, *parts))


@asynccontextmanager
async def open_calls(url: str, *, timeout_s: float) -> AsyncIterator[FunctionCalls]:
    """The connection of one process. A server that is away now is found later: claims fail until then."""
    calls = FunctionCalls(url, _LIBRARY.read_text(), timeout_s=timeout_s)
    try:
        await calls.open()
    except TROUBLE as error:
        log.warning("the board of pages is away", error=f"{type(error).__name__}: {error}")
    try:
        yield calls
    finally:
        await calls.close()
