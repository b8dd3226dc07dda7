"""What became of lines that were lost sight of: judged by what they kept and by their usage records (decision 0076).

The runner asks: after a death of its own process, of one line, and for lines of processes that gave no sign of life. A
line that another process was running is judged by what SQL knows of it; while SQL knows nothing its process may still
come back and tell, so it is given up only after as long as any answer may take.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import structlog

from billing.errors import UsageNotFound
from billing.store import UsageEvent
from billing.usage import TokenUsage
from gateway.batches.batch import Batch, Line, LineState
from gateway.batches.form import Forms
from gateway.batches.settings import BatchSettings
from gateway.batches.store import BatchStore
from tenancy.database import Database

log = structlog.get_logger(__name__)

_AGAIN_AFTER_S: Final = 1.0


@dataclass(slots=True)
class Figures:
    """For the metrics. undone: lines of open batches that have not ended; ended: by how, since the start."""

    open_batches: int = 0
    undone: int = 0
    running: int = 0
    ended: Counter[str] = field(default_factory=Counter)


class Judge:
    """event: the usage record of an account's request. clock: seconds that only grow."""

    def __init__(
        self,
        *,
        database: Database,
        store: BatchStore,
        forms: Forms,
        settings: BatchSettings,
        owner: str,
        event: Callable[[str, str], UsageEvent],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._call = database.call
        self._store = store
        self._forms = forms
        self._settings = settings
        self._owner = owner
        self._event = event
        self._clock = clock
        self._missed: dict[str, float] = {}  # lines of other processes, by request: since when they are missed
        self.figures = Figures()

    async def judge(self, line: Line, *, begun: bool) -> None:
        """begun: it was tried even if there is no record, so that what fails before it leaves one is not tried for
        ever.
        """
        event = await self._record(line)
        may_again = event is None or not event.charged or (event.completion_tokens == 0 and event.cost_nano == 0)
        if line.answer is None and event is None and not begun:
            await self._put_back(line, attempts=line.attempts, after_s=0)
        elif line.answer is None and may_again and line.attempts + 1 < self._settings.attempts_max:
            await self._put_back(line, attempts=line.attempts + 1, after_s=_AGAIN_AFTER_S)
        else:
            await self._end_with(line, event)

    async def take_over(self, batches: Collection[Batch]) -> None:
        """batches: open ones that are this process's or nobody's. Lines of theirs that other processes were running."""
        now = self._clock()
        known: set[str] = set()
        found = await self._left_by_others(batches)
        for line in found:
            if await self._record(line) is not None:
                known.add(line.request_id)
        self._missed = {line.request_id: self._missed.get(line.request_id, now) for line in found}
        # Read again: what a line says is kept before its record ends, so whoever has a record has its answer by now.
        for line in await self._left_by_others(batches):
            missed_s = now - self._missed.get(line.request_id, now)
            given_up = missed_s >= self._settings.missing_seconds_max
            if line.answer is None and line.request_id not in known and not given_up:
                continue
            if await self._call(self._store.lease, line.batch_id, self._owner):
                log.warning("a line of another process is judged", batch_id=line.batch_id, line=line.number)
                await self._judge_anothers(line)

    async def give_up(self, batch: Batch) -> None:
        """At the end of a batch's time nobody waits any more for what others were running of it."""
        for line in await self._left_by_others([batch]):
            await self._end_with(line, await self._record(line))

    async def end(self, line: Line, state: LineState, answer: bytes, usage: TokenUsage) -> None:
        if await self._call(self._store.end, line, state, answer, usage):
            self.figures.ended[state.value] += 1

    async def _record(self, line: Line) -> UsageEvent | None:
        try:
            return await self._call(self._event, line.account_id, line.request_id)
        except UsageNotFound:
            return None

    async def _left_by_others(self, batches: Collection[Batch]) -> list[Line]:
        return await self._call(self._store.left_by_others, [batch.id for batch in batches], self._owner)

    async def _judge_anothers(self, line: Line) -> None:
        """Without a record it is not run again: its process may have one that never came to SQL, and charges for it."""
        if await self._record(line) is None:
            await self._end_with(line, None)
        else:
            await self.judge(line, begun=True)

    async def _put_back(self, line: Line, *, attempts: int, after_s: float) -> None:
        await self._call(partial(self._store.put_back, line, attempts=attempts, after_s=after_s))

    async def _end_with(self, line: Line, event: UsageEvent | None) -> None:
        """With what it kept, or as lost."""
        usage = TokenUsage()
        if event is not None:
            counts = (event.prompt_tokens, event.cached_tokens, event.completion_tokens, event.reasoning_tokens)
            usage = TokenUsage(*counts)
        if line.answer is not None:
            await self.end(line, LineState.SUCCEEDED, line.answer, usage)
            return
        batch = await self._call(self._store.get, line.account_id, line.batch_id)
        await self.end(line, LineState.FAILED, self._forms(batch).lost(batch, line), usage)
