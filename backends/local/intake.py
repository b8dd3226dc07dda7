"""From a validated body to a request in the engine: tokenise, check the limits, hand over. surface.py calls it.

Everything that can be refused is refused here, before the engine sees it.
"""

import asyncio
import uuid
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from backends import grammar
from backends.local.detokenizer import TextStream
from backends.local.errors import InvalidRequestError, QueueFullError
from backends.local.guide import Guide, Guides
from backends.local.live import LiveRequests, Mailbox
from backends.local.pair.handover import digest
from backends.local.pair.offer import Rooms
from backends.local.schemas import ChatBody, CompletionBody, GenerationBody
from backends.local.sequence import Bootstrap, Sequence
from backends.local.settings import Role
from backends.local.tokenizer import Tokenizer
from backends.local.worker import Worker


@dataclass(frozen=True, slots=True)
class Limits:
    context_tokens: int
    pool_tokens: int
    vocabulary: int
    queued_requests: int
    heeds_priorities: bool = False
    role: Role = Role.UNIFIED

    @property
    def request_tokens(self) -> int:
        """Prompt and output of one request, at most."""
        return min(self.context_tokens, self.pool_tokens)


class Intake:
    def __init__(
        self,
        *,
        limits: Limits,
        tokenizer: Tokenizer,
        guides: Guides,
        worker: Worker,
        live: LiveRequests,
        executor: Executor,
        clock: Callable[[], float],
        rooms: Rooms | None = None,
    ) -> None:
        """rooms: of a prefill process."""
        self._rooms = rooms
        self.limits = limits
        self._tokenizer = tokenizer
        self._guides = guides
        self._worker = worker
        self._live = live
        self._executor = executor
        self._clock = clock

    async def accept(self, body: ChatBody | CompletionBody) -> Mailbox:
        """Start it; the mailbox will receive its tokens. Raises what the client must be told instead."""
        arrived_at = self._clock()
        self._check_room(body.priority or 0)
        prompt = await self._prompt(body)
        guide = await self._guide(body)
        # Tokenising and compiling took a while, and others may have come in between.
        self._check_room(body.priority or 0)
        sequence = self._sequence(body, prompt, arrived_at)
        sequence.guide = guide
        mailbox = self._live.open(sequence.rid)
        if self._rooms is not None:
            assert sequence.bootstrap is not None
            try:
                self._rooms.open(sequence.bootstrap.room, sequence.rid, digest(prompt))
            except InvalidRequestError:
                self._live.close(sequence.rid)
                raise
        self._worker.submit(sequence)
        return mailbox

    def _check_room(self, priority: int) -> None:
        self._worker.must_be_ready()
        report = self._worker.report
        waiting = len(self._live) - report.running
        if waiting < self.limits.queued_requests:
            return
        # With priorities, one that waits may be turned away for this one; twice the queue is the end all the same.
        lowest = report.lowest_waiting_priority
        displaces = self.limits.heeds_priorities and lowest is not None and priority > lowest
        if not displaces or waiting >= 2 * self.limits.queued_requests:
            raise QueueFullError

    async def _prompt(self, body: ChatBody | CompletionBody) -> list[int]:
        given = body.input_ids if isinstance(body, ChatBody) else body.prompt
        if isinstance(given, list):
            return given
        loop = asyncio.get_running_loop()
        if isinstance(given, str):
            return await loop.run_in_executor(self._executor, self._tokenizer.encode, given)
        assert isinstance(body, ChatBody)
        try:
            messages = body.plain_messages()
        except ValueError as error:
            raise InvalidRequestError(f"messages: {error}") from error
        tools, choice = body.shown_tools
        return await loop.run_in_executor(self._executor, self._tokenizer.encode_chat, messages, tools, choice)

    async def _guide(self, body: GenerationBody) -> Guide | None:
        """Compiled in a thread: the first one needs half a second for its tables, a large schema some milliseconds."""
        fields = body.form_fields
        if not fields:
            return None
        try:
            text = grammar.of_fields(fields)
        except grammar.GrammarInvalid as error:
            raise InvalidRequestError(error.reason) from error
        if text is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._guides.make, text)

    def _sequence(self, body: GenerationBody, prompt: list[int], arrived_at: float) -> Sequence:
        self._check_prompt(prompt)
        sampling = body.sampling(self._tokenizer.usual_sampling)
        listed = body.stop_token_ids or []
        if any(token >= self.limits.vocabulary for token, _ in sampling.logit_bias):
            raise InvalidRequestError(f"logit_bias names a token beyond the vocabulary of {self.limits.vocabulary}.")
        room = self.limits.request_tokens - len(prompt)
        prefills = self.limits.role is Role.PREFILL
        return Sequence(
            rid=body.rid or uuid.uuid4().hex,
            prompt_tokens=len(prompt),
            tokens=list(prompt),
            max_new_tokens=1 if prefills else min(body.output_limit or room, room),
            sampling=sampling,
            text=TextStream(self._tokenizer.token_bytes, body.stops),
            stop_token_ids=frozenset() if body.ignore_eos else self._tokenizer.stop_token_ids.union(listed),
            arrived_at=arrived_at,
            priority=body.priority or 0,
            cache_scope=body.cache_scope,
            bootstrap=self._bootstrap(body),
            awaits_pages=self.limits.role is Role.DECODE,
        )

    def _bootstrap(self, body: GenerationBody) -> Bootstrap | None:
        """Where its halves meet; None for a process that is no half."""
        if self.limits.role is Role.UNIFIED:
            return None
        if body.bootstrap_room is None:
            raise InvalidRequestError("Disaggregated request received without bootstrap room id.")
        host = body.bootstrap_host or ""
        if self.limits.role is Role.DECODE and not (host.startswith("unix:") or (host and body.bootstrap_port)):
            raise InvalidRequestError("bootstrap_host and bootstrap_port are needed to find the prefill process.")
        return Bootstrap(host, body.bootstrap_port or 0, body.bootstrap_room)

    def _check_prompt(self, prompt: list[int]) -> None:
        if not prompt:
            raise InvalidRequestError("The prompt is empty.")
        for limit, name in ((self.limits.context_tokens, "context length"), (self.limits.pool_tokens, "KV cache")):
            if len(prompt) >= limit:
                raise InvalidRequestError(
                    f"The input ({len(prompt)} tokens) is longer than the model's {name} ({limit} tokens)."
                )
        if max(prompt) >= self.limits.vocabulary:
            raise InvalidRequestError(f"The prompt names a token beyond the vocabulary of {self.limits.vocabulary}.")
