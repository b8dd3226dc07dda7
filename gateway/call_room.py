"""Who may call an engine that takes a few calls at a time: the accounts in turns, each in the order in which it came.

Used by embedding.py, whose engine has no pages to wait for (those are waiting_room.py's). Belongs to one event loop.
"""

import asyncio
from collections import OrderedDict, deque
from contextlib import suppress


class CallRoom:
    """calls_max: at a time. waiting_max: who may wait, of one account half as many."""

    def __init__(self, *, calls_max: int, waiting_max: int) -> None:
        self._free = calls_max
        self._waiting_max = waiting_max
        # Whose turn it is next stands first.
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self.waiting = 0

    def is_full_for(self, account_id: str) -> bool:
        of_account = len(self._queues.get(account_id, ()))
        return self.waiting >= self._waiting_max or of_account >= self._waiting_max // 2

    async def enter(self, account_id: str) -> None:
        """Wait for a call's place, however many wait already. Whoever got it gives it back by `leave`."""
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._queues.setdefault(account_id, deque()).append(turn)
        self.waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was given in that very moment
                self.leave()
            self._forget(account_id, turn)
            raise
        finally:
            self.waiting -= 1

    def leave(self) -> None:
        while self._queues:
            account_id, queue = self._queues.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._queues[account_id] = queue
            if not turn.done():  # one that is being cancelled has not forgotten its turn yet
                turn.set_result(None)
                return
        self._free += 1

    def _forget(self, account_id: str, turn: asyncio.Future[None]) -> None:
        """Its place among those who wait is another's at once."""
        queue = self._queues.get(account_id, deque())
        with suppress(ValueError):  # its turn had come
            queue.remove(turn)
        if not queue:
            self._queues.pop(account_id, None)
