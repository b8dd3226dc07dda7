"""Stand-ins for what routes call: fake_services() gives a Services whose parts do as they are told and remember it.

Used by the tests of api alone; they implement the few methods that routes use, and no more.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry

from api.services import Services
from api.settings import Settings
from billing.budgets import BudgetStanding
from billing.errors import PriceUnavailable, UsageNotFound
from billing.ledger.payers import AccountMode, HoldMode
from billing.ledger.wallet import WalletView
from billing.price_book import Price, with_derived_neurons
from billing.store import UsageEvent
from billing.summaries import GroupBy, UsageFilter, UsageSummary, UsageTotals
from billing.usage import TokenUsage
from gateway.catalogue import Catalogue, ModelCard
from gateway.conversations import Conversation
from gateway.errors import AnswerUnknown
from gateway.request import Completion, GenerationRequest, Outcome, OutputCap, Settlement
from tenancy.claims import Standing
from tenancy.errors import KeyUnknown
from tenancy.principal import Principal, Scope

ACCOUNT = "0123456789abcdef0123456789abcdef"
OTHER_ACCOUNT = "f" * 32
MODEL = "@cf/test/tiny-instruct"
KEY = "inference-key"
ADMIN_KEY = "admin-key"
OPERATOR_KEY = "operator-key"
CREATED = 1_800_000_000

CARD = ModelCard(
    id=MODEL,
    created=1_790_000_000,
    owned_by="test",
    description="A tiny model that answers tests.",
    context_tokens=8192,
    output_tokens_max=4096,
    precisions={"weights": "bfloat16", "kv_cache": "bfloat16"},
)
PRICE = with_derived_neurons(
    MODEL,
    input_nano_per_m=950_000_000,
    cached_input_nano_per_m=160_000_000,
    output_nano_per_m=4_000_000_000,
    reasoning_nano_per_m=None,
    effective_from_ns=0,
)
SETTLEMENT = Settlement(
    outcome=Outcome.FINISHED,
    usage=TokenUsage(prompt=11, cached=4, completion=9),
    cost_nano=43_290,
    neurons_micro=3_935_400,
    price_version=1,
)
CAP = OutputCap(tokens=64, clamped=False)


def principal(*scopes: Scope, account_id: str = ACCOUNT) -> Principal:
    return Principal(account_id, "key-1", frozenset(scopes), concurrency=None, credit_limit_nano=None)


def chat_completion(text: str = "Paris.", *, cap: OutputCap = CAP, **message: object) -> Completion:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, "tool_calls": None, **message},
        "logprobs": None,
        "finish_reason": "stop",
        "matched_stop": 2,
        "hidden_states": None,
    }
    return Completion(CREATED, (choice,), cap, SETTLEMENT)


def text_completion(text: str = " Paris.") -> Completion:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "length", "matched_stop": None}
    return Completion(CREATED, (choice,), CAP, SETTLEMENT)


def chunk(delta: bytes, finish: bytes = b"null") -> bytes:
    return (
        b'{"id":"engine-id","object":"chat.completion.chunk","created":1800000000,"model":"@cf/test/tiny-instruct",'
        b'"choices":[{"index":0,"delta":%b,"logprobs":null,"finish_reason":%b,"matched_stop":null}]}' % (delta, finish)
    )


ROLE_CHUNK = chunk(b'{"role":"assistant","content":""}')
FINISH_CHUNK = chunk(b"{}", b'"stop"')


def content_chunk(literal: str) -> bytes:
    """literal: the text as it stands between the quotes of the engine's JSON."""
    return chunk(b'{"content":"%b"}' % literal.encode())


class FakeStream:
    """Yields the payloads; then fails with `error`, waits for ever if `hangs`, or ends settled."""

    def __init__(
        self,
        *payloads: bytes,
        error: Exception | None = None,
        hangs: bool = False,
        cap: OutputCap = CAP,
        close_error: Exception | None = None,
    ) -> None:
        self._payloads = list(payloads)
        self._error = error
        self._hangs = hangs
        self._close_error = close_error
        self.cap = cap
        self.created = CREATED
        self.standings: tuple[Standing, ...] = ()
        self.settlement: Settlement | None = None
        self.closed = 0

    def __aiter__(self) -> "FakeStream":
        return self

    async def __anext__(self) -> bytes:
        if self._payloads:
            return self._payloads.pop(0)
        if self._hangs:
            await asyncio.Event().wait()
        if self._error is not None:
            raise self._error
        self.settlement = SETTLEMENT
        raise StopAsyncIteration

    async def aclose(self) -> None:
        await asyncio.sleep(0)  # a settle takes at least one turn of the loop, in which a cancellation could hit
        self.closed += 1
        if self._close_error is not None:
            raise self._close_error


@dataclass
class FakePipeline:
    """completes, streams: what the next request gets; an exception is raised. None waits until it is cancelled."""

    completes: Completion | Exception | None = field(default_factory=chat_completion)
    streams: FakeStream | Exception | None = field(
        default_factory=lambda: FakeStream(ROLE_CHUNK, content_chunk("Hi"), FINISH_CHUNK)
    )
    requests: list[GenerationRequest] = field(default_factory=list)
    cancelled: int = 0
    gate: asyncio.Event | None = None

    def hold_answers(self) -> asyncio.Event:
        """Requests wait from now on until the event is set."""
        self.gate = asyncio.Event()
        return self.gate

    async def complete(self, request: GenerationRequest) -> Completion:
        return cast("Completion", await self._next(request, self.completes))

    async def stream(self, request: GenerationRequest) -> FakeStream:
        return cast("FakeStream", await self._next(request, self.streams))

    async def _next(self, request: GenerationRequest, told: object) -> object:
        self.requests.append(request)
        try:
            if self.gate is not None:
                await self.gate.wait()
            if told is None:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(told, Exception):
            raise told
        return told


class FakeAuthenticator:
    def __init__(self) -> None:
        self.keys: dict[str, Principal | Exception] = {
            KEY: principal(Scope.AI_RUN, Scope.AI_READ, Scope.USAGE_READ),
            ADMIN_KEY: principal(Scope.AI_READ, Scope.USAGE_READ, Scope.ACCOUNT_ADMIN, Scope.OPERATOR_READ),
            OPERATOR_KEY: principal(Scope.OPERATOR_READ, Scope.OPERATOR_WRITE),
        }

    async def authenticate(self, token: str | None) -> Principal:
        found = self.keys.get(token or "")
        if found is None:
            raise KeyUnknown("Authentication error: this API key is not known here.")
        if isinstance(found, Exception):
            raise found
        return found


class FakeDatabase:
    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


@dataclass
class FakeMetering:
    flushed: int = 0
    error: Exception | None = None

    def lag_records(self) -> int:
        return 0

    async def flush(self) -> None:
        if self.error is not None:
            raise self.error
        self.flushed += 1


@dataclass
class FakeUsage:
    summary: UsageSummary = field(default_factory=lambda: UsageSummary(UsageTotals(), ()))
    events: list[UsageEvent] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    asked: list[tuple[Any, ...]] = field(default_factory=list)

    def usage_summary(
        self, account_id: str, from_ns: int, to_ns: int, group_by: GroupBy, only: UsageFilter
    ) -> UsageSummary:
        self.asked.append((account_id, from_ns, to_ns, group_by, only))
        return self.summary

    def request_record(self, account_id: str, request_id: str) -> UsageEvent:
        for event in self.events:
            if (event.account_id, event.id) == (account_id, request_id):
                return event
        raise UsageNotFound("There is no record of this request in this account.")

    def recent_requests(
        self, account_id: str, limit: int, before: tuple[int, str] | None, only: UsageFilter, since_ns: int
    ) -> list[UsageEvent]:
        self.asked.append((account_id, limit, before, only, since_ns))
        return self.events[:limit]

    def violations(self) -> list[str]:
        return self.broken


@dataclass
class FakeConversations:
    """Those that are kept by the id of their response."""

    kept: dict[str, Conversation] = field(default_factory=dict)

    def fits(self, _conversation: Conversation) -> bool:
        return True

    def keep(self, _account_id: str, response_id: str, conversation: Conversation) -> None:
        self.kept[response_id] = conversation

    def get(self, _account_id: str, response_id: str) -> Conversation:
        if response_id not in self.kept:
            raise AnswerUnknown(response_id)
        return self.kept[response_id]


@dataclass
class FakeWallets:
    view: WalletView = field(
        default_factory=lambda: WalletView(ACCOUNT, AccountMode.POSTPAID, HoldMode.REFUSE, 0, 0, ())
    )

    def show(self, account_id: str) -> WalletView:
        assert account_id == self.view.account_id
        return self.view


@dataclass
class FakeBudgets:
    standing: list[BudgetStanding] = field(default_factory=list)
    asked: list[tuple[str, int | None]] = field(default_factory=list)

    def standings(self, account_id: str, at_ns: int | None) -> list[BudgetStanding]:
        self.asked.append((account_id, at_ns))
        return self.standing


@dataclass
class FakePriceBook:
    prices: dict[str, Price] = field(default_factory=lambda: {MODEL: PRICE})

    def price_in_force(self, model: str, _at_ns: int) -> Price:
        if model not in self.prices:
            raise PriceUnavailable(f"The model {model!r} has no price, so it can't be used now.")
        return self.prices[model]

    def by_version(self, _version: int) -> Price:
        return PRICE


@dataclass
class FakeHolds:
    live: dict[str, object] = field(default_factory=dict)
    slots: int = 0
    nano: int = 0
    refreshes: int = 0

    @property
    def meters(self) -> Any:
        return SimpleNamespace(live_slots=lambda: self.slots)

    @property
    def credit(self) -> Any:
        return SimpleNamespace(held_nano=lambda: self.nano, refresh=self.refresh)

    async def refresh(self) -> None:
        self.refreshes += 1


@dataclass
class Fakes:
    """The parts, to be told what to do; `services` is what create_app takes."""

    settings: Settings = field(
        default_factory=lambda: Settings.model_validate({"home": Path("/nowhere"), "cache_dir": Path("/nowhere")})
    )
    authenticator: FakeAuthenticator = field(default_factory=FakeAuthenticator)
    sign_ins: Any = None  # tests of the dashboard put the real ones here
    pipeline: FakePipeline = field(default_factory=FakePipeline)
    embeddings: Any = None
    batching: Any = field(default_factory=lambda: SimpleNamespace(files=None, store=None))  # tests of it use real ones
    metering: FakeMetering = field(default_factory=FakeMetering)
    usage: FakeUsage = field(default_factory=FakeUsage)
    wallets: FakeWallets = field(default_factory=FakeWallets)
    budgets: FakeBudgets = field(default_factory=FakeBudgets)
    conversations: FakeConversations = field(default_factory=FakeConversations)
    kept_answers: Any = None  # tests of idempotency put the real ones here
    price_book: FakePriceBook = field(default_factory=FakePriceBook)
    holds: FakeHolds = field(default_factory=FakeHolds)
    fleets: list[Any] = field(default_factory=list)
    cards: list[ModelCard] = field(default_factory=lambda: [CARD])
    is_ready: tuple[bool, str] = (True, "ready")

    @property
    def services(self) -> Services:
        return fake_services(self)


def fake_services(fakes: Fakes | None = None) -> Services:
    parts: Any = fakes or Fakes()
    return Services(
        settings=parts.settings,
        database=cast("Any", FakeDatabase()),
        authenticator=parts.authenticator,
        sign_ins=parts.sign_ins,
        catalogue=Catalogue(parts.cards),
        trials=cast("Any", SimpleNamespace(by_model={})),
        pipeline=parts.pipeline,
        embeddings=parts.embeddings,
        batching=parts.batching,
        holds=parts.holds,
        fleet=cast("Any", SimpleNamespace(all=lambda: tuple(parts.fleets))),
        metering=parts.metering,
        usage=parts.usage,
        wallets=parts.wallets,
        webhooks=cast("Any", None),
        kept_answers=parts.kept_answers,
        conversations=parts.conversations,
        budgets=parts.budgets,
        price_book=parts.price_book,
        registry=CollectorRegistry(),
        ready=lambda: parts.is_ready,
        reload=partial(asyncio.sleep, 0),
        lifecycle=cast("Any", SimpleNamespace(waking=SimpleNamespace(records=lambda *_: []))),
    )


def usage_event(**changes: Any) -> UsageEvent:
    """A finished chat of the test account."""
    values: dict[str, Any] = {
        "id": "0197f5a0-0000-7000-8000-000000000001",
        "account_id": ACCOUNT,
        "key_id": "key-1",
        "model": MODEL,
        "endpoint": "chat",
        "stream": True,
        "outcome": "finished",
        "code": None,
        "finish_reason": "stop",
        "prompt_tokens": 11,
        "cached_tokens": 4,
        "completion_tokens": 9,
        "reasoning_tokens": 0,
        "usage_source": "engine",
        "charged": True,
        "cost_nano": 43_290,
        "neurons_micro": 3_935_400,
        "price_version": 1,
        "started_at_ns": CREATED * 1_000_000_000 + 123_456_789,
        "ended_at_ns": CREATED * 1_000_000_000 + 1_623_456_789,
        "queued_ms": 3,
        "ttft_ms": 120,
        "replica": "engine-0",
        "tier": "standard",
        "end_user": "ada",
        "tags": '{"team":"search"}',
        "kv_page_ms": 5_000,
        "deployment": "0123456789ab",
        "precisions": "weights=bfloat16,kv_cache=bfloat16",
        "region": "eu-west",
    }
    return UsageEvent(**{**values, **changes})


async def until(condition: Callable[[], bool], *, seconds: float = 5.0) -> None:
    """Let the loop turn until the condition holds; fails at the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.001)
