"""The whole service under a seeded stream of requests, and an auditor that foretells what each of them is charged.

Real are the application with its layers, pipeline, holds, spool and database. Scripted are the engine behind the
client's words (it waits for no clock, fails as the plan says, and keeps its own count) and the clients, some of whom
leave after a drawn number of bytes. The auditor knows the plans, the engine's counts and the prices, and no code of
billing's: it has a sentence for every request whose record is not what it foretold. test_simulation.py and
`python -m benchmarks.whole_service` run it.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import orjson
import sqlalchemy as sa
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from api.app import create_app
from backends.client import EngineClient
from backends.errors import EngineBroke, EngineIntegrityAbort, EngineRefused
from backends.wire import Chunk, read_chunk
from billing.budgets import BudgetPeriod
from billing.ledger.payers import AccountMode
from billing.price_book import Price, Tier, read_prices, set_price
from billing.tables import prices, usage_events
from tenancy.database import Database
from tenancy.keys import KeyKind
from tenancy.pepper import open_pepper
from tenancy.provisioning import issue_key, open_account
from tests.api.exchange import Exchange, exchange
from tests.doubles.engine import ScriptedEngine
from tests.e2e.service import Service, running_service
from tests.engines import build_tiny_checkpoint

CONCURRENT: Final = 48
_ROUTES: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/client/v4/accounts/{account}/ai/run/{model}",
)
# How an engine ends a request, and how often.
_ENDS: Final = {"finished": 88, "breaks": 2, "tag": 1, "busy": 1, "refuses": 1}
_CHARGED: Final = {"finished", "client_disconnected", "cancelled"}


@dataclass(frozen=True, slots=True)
class Plan:
    """One request. leaves_after: bytes of the answer after which its client is gone; None: it stays."""

    number: int
    payer: str
    route: int
    stream: bool
    words: int
    max_tokens: int
    produces: int
    cached_share: int
    reasoning_share: int
    end: str
    ends_at: int
    leaves_after: int | None
    end_user: str | None
    priority: bool


@dataclass(slots=True)
class Worked:
    """The engine's own count of one generation."""

    prompt: int
    cached: int
    completion: int = 0
    reasoning: int = 0


@dataclass(slots=True)
class Report:
    """What a run came to. differences: sentences, none in a sound service. charged: requests that cost anything.

    began_s, ended_s: by the machine's monotonic clock, the first request and the last record in the database.
    """

    differences: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    charged: int = 0
    cost_nano: int = 0
    began_s: float = 0.0
    ended_s: float = 0.0


class SimulatedEngine:
    """Stands where an EngineClient does: generates by plan, without waiting. worked: by the engine's rid."""

    def __init__(self, real: EngineClient, plans: Mapping[int, Plan]) -> None:
        self._plans = plans
        self._streams: dict[str, _Generation] = {}
        self.worked: dict[str, Worked] = {}
        for name in ("ready", "loads", "server_info", "figures", "still_for"):
            setattr(self, name, getattr(real, name))

    async def ask(self, path: str, body: bytes) -> "_Generation":
        return self._begin(path, body)

    async def open_stream(self, path: str, body: bytes) -> "_Generation":
        return self._begin(path, body)

    async def abort(self, rid: str) -> None:
        if rid in self._streams:
            self._streams[rid].aborted = True

    def forget(self, rid: str) -> None:
        self._streams.pop(rid, None)

    def _begin(self, path: str, body: bytes) -> "_Generation":
        fields = orjson.loads(body)
        plan = self._plans[fields["seed"]]
        if plan.end in {"busy", "refuses"}:
            raise EngineRefused("by plan", status=503 if plan.end == "busy" else 400)
        prompt = len(fields["input_ids"] if "input_ids" in fields else fields["prompt"])
        worked = self.worked[fields["rid"]] = Worked(prompt, prompt * plan.cached_share // 100)
        made = self._streams[fields["rid"]] = _Generation(self, fields["rid"], plan, worked, chat="chat" in path)
        return made


class _Generation:
    """One answer: iterated as a stream, or asked for its fields. Each token is a turn of the loop."""

    def __init__(self, engine: SimulatedEngine, rid: str, plan: Plan, worked: Worked, *, chat: bool) -> None:
        self._engine, self._rid, self._plan, self._worked, self._chat = engine, rid, plan, worked, chat
        self._state = "begins"
        self.aborted = False

    def __aiter__(self) -> "_Generation":
        return self

    async def __anext__(self) -> Chunk:
        if self._state == "over":
            raise StopAsyncIteration
        await asyncio.sleep(0)
        if self._state == "begins":
            self._state = "runs"
            if self._chat:
                return self._chunk({"role": "assistant", "content": ""}, "", None)
        if self._ends():
            self._state = "over"
            return self._chunk({}, "", self._finish())
        self._produce()
        return self._chunk({"content": "word "}, "word ", None)

    async def fields(self) -> dict[str, Any]:
        while not self._ends():
            await asyncio.sleep(0)
            self._produce()
        text = "word " * self._worked.completion
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": self._finish()}
        choice |= {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return {"id": self._rid, "choices": [choice], "usage": self._usage()}

    def close(self) -> None:
        self._engine.forget(self._rid)

    def _ends(self) -> bool:
        return self.aborted or self._worked.completion >= min(self._plan.produces, self._plan.max_tokens)

    def _produce(self) -> None:
        worked, plan = self._worked, self._plan
        if worked.completion >= plan.ends_at and plan.end == "breaks":
            raise EngineBroke("by plan")
        if worked.completion >= plan.ends_at and plan.end == "tag":
            raise EngineIntegrityAbort("by plan")
        worked.completion += 1
        worked.reasoning = worked.completion * plan.reasoning_share // 100

    def _finish(self) -> str:
        if self.aborted:
            return "abort"
        return "length" if self._plan.produces >= self._plan.max_tokens else "stop"

    def _usage(self) -> dict[str, Any]:
        worked = self._worked
        return {
            "prompt_tokens": worked.prompt,
            "total_tokens": worked.prompt + worked.completion,
            "completion_tokens": worked.completion,
            "prompt_tokens_details": {"cached_tokens": worked.cached},
            "reasoning_tokens": worked.reasoning,
        }

    def _chunk(self, delta: dict[str, Any], text: str, finish: str | None) -> Chunk:
        choice: dict[str, Any] = {"index": 0}
        choice |= {"delta": delta} if self._chat else {"text": text}
        choice |= {"logprobs": None, "finish_reason": finish}
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        fields = {"id": self._rid, "object": kind, "created": 1, "model": "m", "choices": [choice]}
        return read_chunk(orjson.dumps(fields | {"usage": self._usage()}))


class _Client(Exchange):
    """Leaves once it has had so many bytes."""

    leaves_after: int | None = None
    had = 0

    async def _send(self, message: Any) -> None:
        await super()._send(message)
        self.had += len(message.get("body", b""))
        if self.leaves_after is not None and self.had >= self.leaves_after:
            self.leave()


def plan_of(number: int, seed: int) -> Plan:
    """The same for the same number and seed, however requests interleave."""
    chance = random.Random(seed * 1_000_003 + number)
    route, stream = chance.randrange(len(_ROUTES)), chance.random() < 0.6
    # Short answers mostly: a token more is a turn of the loop more, and one that ends early tells as much of a charge.
    produces = chance.choices((0, 1, 2, 5, 12, 30), weights=(20, 25, 25, 20, 7, 3))[0]
    leaves = chance.random() < 0.25
    payer = chance.choices(("postpaid", "prepaid"), weights=(8, 2))[0]
    return Plan(
        number=number,
        payer=payer,
        route=route,
        stream=stream,
        words=chance.randrange(1, 40),
        max_tokens=chance.choice((1, 4, 16, 40)),
        produces=produces,
        cached_share=chance.choice((0, 0, 30, 100)),
        reasoning_share=chance.choice((0, 0, 50)),
        end=chance.choices(list(_ENDS), weights=list(_ENDS.values()))[0],
        ends_at=chance.randrange(8),
        leaves_after=chance.randrange(900) if leaves else None,
        end_user="ada" if payer == "postpaid" and chance.random() < 0.1 else None,
        priority=chance.random() < 0.2,
    )


class Simulation:
    """Sets a running service up for it; `run` then drives so many requests and audits them."""

    def __init__(self, service: Service, app: ASGIApp, pepper: bytes, *, seed: int) -> None:
        self._service = service
        self._app = app
        self._seed = seed
        self._plans: dict[int, Plan] = {}
        self._ids: dict[int, str] = {}
        self._prepaid_nano = self._budget_nano = 0
        services = service.services
        self._prepaid = open_account(services.database, "prepaid", clock=time.time_ns).id
        key = issue_key(
            services.database, pepper, self._prepaid, name="prepaid", kind=KeyKind.INFERENCE, clock=time.time_ns
        )
        self._keys = {"postpaid": service.api_key, "prepaid": key.text}
        self._accounts = {"postpaid": service.account_id, "prepaid": self._prepaid}
        services.wallets.set_mode(self._prepaid, AccountMode.PREPAID)
        with services.database.write() as connection:
            (listed,) = read_prices(connection)
            connection.execute(prices.delete())
            odd = replace(
                listed,
                input_nano_per_m=333_333_331,
                cached_input_nano_per_m=77_777,
                output_nano_per_m=1_999_999_999,
                reasoning_nano_per_m=2_500_000_001,
                effective_from_ns=1,
                effective_to_ns=None,
            )
            set_price(connection, odd)
            dear = replace(odd, tier=Tier.PRIORITY.value, output_nano_per_m=7_000_000_001, request_nano=41)
            set_price(connection, dear)
            self._prices = {price.version: price for price in read_prices(connection)}
        self._engines: list[SimulatedEngine] = []
        for fleet in services.fleet.all():
            for replica in fleet.replicas:
                engine = SimulatedEngine(replica.client, self._plans)
                replica.client = engine  # type: ignore[assignment]  # it has the words that calls use
                self._engines.append(engine)

    @property
    def database(self) -> Database:
        return self._service.services.database

    async def run(self, requests: int, *, prepaid_nano: int, budget_nano: int) -> Report:
        """prepaid_nano: what the prepaid account has in all; budget_nano: what one end user may cost in a day."""
        services = self._service.services
        await services.price_book.refresh()
        services.wallets.top_up(self._prepaid, prepaid_nano, idempotency_key="simulation")
        services.budgets.add(self._service.account_id, budget_nano, BudgetPeriod.TOTAL, end_user="ada")
        await services.holds.credit.refresh()
        numbers = iter(range(requests))
        began_s = time.monotonic()

        async def worker() -> None:
            for number in numbers:
                await self._one(plan_of(number, self._seed))

        await asyncio.gather(*(worker() for _ in range(CONCURRENT)))
        await services.pipeline.drain(within_s=30)
        await services.metering.flush()
        ended_s = time.monotonic()
        self._prepaid_nano, self._budget_nano = prepaid_nano, budget_nano
        return replace(await self.audit(), began_s=began_s, ended_s=ended_s)

    async def _one(self, plan: Plan) -> None:
        self._plans[plan.number] = plan
        account, model = self._accounts[plan.payer], self._service.model
        text = " ".join(["word"] * plan.words)
        body: dict[str, Any] = {"model": model, "seed": plan.number, "stream": plan.stream}
        body["max_tokens"] = plan.max_tokens
        match plan.route:
            case 1:
                body["prompt"] = text
            case 2:
                body["input"] = text
            case _:
                body["messages"] = [{"role": "user", "content": text}]
        if plan.end_user is not None:
            body["user"] = plan.end_user
        if plan.priority:
            body["service_tier"] = "priority"
        path = _ROUTES[plan.route].format(account=account, model=model)
        made = exchange(self._app, "POST", path, body=body, key=self._keys[plan.payer])
        client = _Client(self._app, made.scope, made.parts)
        client.leaves_after = plan.leaves_after
        await client.run()
        self._ids[plan.number] = client.scope["state"]["request_id"]

    async def audit(self) -> Report:
        """Everything that is not as it must be, of the requests that were run."""
        services = self._service.services
        with services.database.read() as connection:
            rows = {row["id"]: row for row in connection.execute(sa.select(usage_events)).mappings()}
        report = Report(requests=len(self._ids))
        for number, request_id in sorted(self._ids.items()):
            row = rows.pop(request_id, None)
            wrong = "has no record" if row is None else self._wrong(self._plans[number], row)
            if wrong is not None:
                report.differences.append(f"request {number}: {wrong}")
            if row is not None:
                report.outcomes[row["outcome"]] += 1
                report.charged += row["cost_nano"] > 0
                report.cost_nano += row["cost_nano"]
        report.differences += [f"nobody asked for {name}" for name in rows]
        # Not by way of the database's calls, which are bounded: of so many requests it takes its time.
        report.differences += await asyncio.to_thread(services.usage.violations)
        report.differences += self._wrong_sums()
        return report

    def _wrong_sums(self) -> list[str]:
        services, found = self._service.services, []
        wallet, spent = services.wallets.show(self._prepaid).wallet_nano, self._sum(self._prepaid)
        if wallet < 0 or wallet != self._prepaid_nano - spent:
            found.append(f"the wallet has {wallet}, {self._prepaid_nano} came and {spent} was spent")
        (budget,) = services.budgets.standings(self._service.account_id)
        if budget.spent_nano > self._budget_nano:
            found.append(f"{budget.spent_nano} of a budget of {self._budget_nano} was spent")
        if services.holds.live or services.holds.credit.held_nano():
            found.append("something is held for nobody")
        return found

    def _sum(self, account_id: str) -> int:
        query = sa.select(sa.func.sum(usage_events.c.cost_nano)).where(usage_events.c.account_id == account_id)
        with self._service.services.database.read() as connection:
            return int(connection.scalar(query) or 0)

    def _wrong(self, plan: Plan, row: sa.RowMapping) -> str | None:
        """What is not as foretold of the record; None if all is."""
        worked = next((engine.worked[row["id"]] for engine in self._engines if row["id"] in engine.worked), None)
        allowed = self._outcomes(plan, worked)
        if row["outcome"] not in allowed:
            return f"ended as {row['outcome']}, not as one of {sorted(allowed)}"
        charged = row["outcome"] in _CHARGED and worked is not None
        expected = _exact_cost(worked, self._prices[row["price_version"]]) if charged and worked is not None else 0
        if row["cost_nano"] != expected:
            return f"{row['outcome']}, costs {row['cost_nano']}, foretold were {expected} of {worked}"
        if charged and worked is not None:
            counts = (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"], row["reasoning_tokens"])
            if counts != (worked.prompt, worked.cached, worked.completion, worked.reasoning):
                return f"counts {counts}, the engine's are {worked}"
        tier = Tier.PRIORITY if plan.priority else Tier.STANDARD
        if (row["tier"], row["end_user"]) != (tier, plan.end_user):
            return f"is of {row['tier']} and {row['end_user']}"
        if row["outcome"] == "refused" and plan.end != "refuses" and plan.payer == "postpaid" and plan.end_user is None:
            return f"was refused with {row['code']}, and could be paid"
        return None

    @staticmethod
    def _outcomes(plan: Plan, worked: Worked | None) -> set[str]:
        """How it may end. A client that leaves may do so before, or after, whatever else ends it."""
        if plan.end == "refuses" or worked is None:
            own = {"refused"} if plan.end != "busy" else {"refused", "upstream_failed"}
        elif plan.end in {"breaks", "tag"} and plan.ends_at < min(plan.produces, plan.max_tokens):
            own = {"upstream_failed" if plan.end == "breaks" else "integrity_abort"}
        else:
            own = {"finished"}
        return own if plan.leaves_after is None else own | {"client_disconnected"}


def _exact_cost(worked: Worked, price: Price) -> int:
    """Tokens × price by class, rounded once, half up: the rule of the contract, written anew."""
    if not worked.prompt + worked.completion:
        return 0
    assert price.cached_input_nano_per_m is not None, "the prices here name every class"
    assert price.reasoning_nano_per_m is not None, "the prices here name every class"
    millionths = (worked.prompt - worked.cached) * price.input_nano_per_m
    millionths += worked.cached * price.cached_input_nano_per_m
    millionths += (worked.completion - worked.reasoning) * price.output_nano_per_m
    millionths += worked.reasoning * price.reasoning_nano_per_m
    whole, left = divmod(millionths, 10**6)
    return price.request_nano + whole + (2 * left >= 10**6)


@asynccontextmanager
async def simulated_service(folder: Path, *, seed: int) -> AsyncIterator[Simulation]:
    """A service of its own, with a simulation that is about to run."""
    checkpoint = build_tiny_checkpoint(folder / "tiny")
    async with (
        ScriptedEngine(pool_tokens=50_000_000, running_max=4_096) as engine,
        running_service(folder / "home", checkpoint, engine) as service,
    ):
        app = create_app(replace(service.services, registry=CollectorRegistry()))  # the listening one has its own
        yield Simulation(service, app, open_pepper(service.services.settings.pepper_path), seed=seed)
