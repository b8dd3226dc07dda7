"""The requests that have a client right now, and a mailbox for each. Lives on the event loop alone.

The worker's events are merged in the mailbox until the client's response takes them, so a slow client costs the memory
of its own answer and nothing more.
"""

import asyncio
from dataclasses import dataclass, field

from backends.local.engine import TokenEvent
from backends.local.errors import InvalidRequestError
from backends.local.sequence import Finish, TokenLogprob


@dataclass(slots=True)
class Delivery:
    """What happened since the last one."""

    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, event: TokenEvent) -> None:
        self.text += event.text
        self.prompt_tokens = event.prompt_tokens
        self.completion_tokens = event.completion_tokens
        self.cached_tokens = event.cached_tokens
        self.finish = event.finish
        if event.logprob is not None:
            self.logprobs.append(event.logprob)


class Mailbox:
    def __init__(self, rid: str) -> None:
        self.rid = rid
        self._arrived = asyncio.Event()
        self._pending = Delivery()

    def put(self, event: TokenEvent) -> None:
        self._pending.add(event)
        self._arrived.set()

    async def take(self) -> Delivery:
        """The next delivery; waits as long as the engine takes. The last one carries `finish`."""
        await self._arrived.wait()
        self._arrived.clear()
        taken, self._pending = self._pending, Delivery()
        return taken


class LiveRequests:
    def __init__(self) -> None:
        self._mailboxes: dict[str, Mailbox] = {}

    def __len__(self) -> int:
        return len(self._mailboxes)

    def open(self, rid: str) -> Mailbox:
        if rid in self._mailboxes:
            raise InvalidRequestError(f"A request with rid {rid} is running already.")
        mailbox = self._mailboxes[rid] = Mailbox(rid)
        return mailbox

    def close(self, rid: str) -> None:
        """It never began."""
        del self._mailboxes[rid]

    def dispatch(self, events: list[TokenEvent]) -> None:
        """The last event closes a mailbox: the id may then be used again."""
        for event in events:
            mailbox = self._mailboxes.get(event.rid)
            assert mailbox is not None, f"an event for {event.rid}, which is not live"
            mailbox.put(event)
            if event.finish is not None:
                del self._mailboxes[event.rid]
