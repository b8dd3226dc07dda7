"""The door of one model: who may come in, who waits, whose turn it is, who is told to come again and when.

The service (waiting_room.py, model_fleet.py) and the replay stand in front of the same door, so that the replay's
figures are the service's. It joins the fair queue (fairness.py), the forecast of waits (waiting_forecast.py), kept
promises (promises.py) and the placing of requests (placing.py). Pure: clocks are handed in, nothing here waits.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from gateway.fairness import Entry as Turn
from gateway.fairness import FairQueue, QueueBounds
from gateway.placing import Placing
from gateway.promises import Promises
from gateway.site import Placed
from gateway.waiting_forecast import StartsIn, WaitForecast
from gateway.want import Ended, Expected, Want
from tenancy.values import value

# Dominant seconds of a replica by which a tenant whose request comes again as told may be served before its turn.
_KEPT_AHEAD_S = 10.0

# Behind one that waits for some regions alone, so many are asked whether they may go to others.
_ASKED_BEHIND_MAX = 8

_AT_ONCE = StartsIn(0.0, 0.0)


class No(Enum):
    """Why a request is sent away."""

    BUSY = "busy"  # it would not wait
    LATE = "late"  # it would not start in time
    FULL = "full"  # the queue is
    EXPIRED = "expired"  # it has waited until its deadline


@dataclass(frozen=True, slots=True)
class Refusal:
    why: No
    retry_after_s: int


@dataclass(eq=False, slots=True)
class Waiting:
    """A request in the queue. start_by: the latest moment at which it may enter. kept: by a promise.

    turn_at: the regions in which it waits, and when it would have its first token there; None: in all.
    """

    want: Want
    arrived_at: float
    start_by: float
    expected: Expected
    ahead_s: float
    kept: bool = False
    predicted: StartsIn = _AT_ONCE
    left: bool = False  # whoever took it out of the queue says so
    turn_at: Mapping[str, float] | None = None

    @property
    def id(self) -> str:
        return self.want.request_id


@value
class Let:
    """It is in."""

    waiting: Waiting
    placed: Placed


@dataclass(frozen=True, slots=True)
class Sent:
    """It has left the queue unserved."""

    waiting: Waiting
    refusal: Refusal


@dataclass(slots=True)
class Asked:
    """What has been asked for since the start: dominant seconds, those that were refused, and seconds of prefill.

    Unlike what runs it does not stop at what fits, so that demand beyond capacity is seen.
    """

    cost_s: float = 0.0
    refused_s: float = 0.0
    prefill_s: float = 0.0


class Door:
    """retry_after_s_max: the largest hint."""

    def __init__(self, placing: Placing, bounds: QueueBounds, *, retry_after_s_max: int) -> None:
        self.placing = placing
        self.waits = WaitForecast()
        self.promises = Promises()
        self.asked = Asked()
        self.queue: FairQueue[Waiting] = FairQueue(bounds, kept_ahead_s=_KEPT_AHEAD_S)
        self._retry_after_s_max = retry_after_s_max
        self._opened_at = -math.inf

    def arrive(self, want: Want, now: float, *, wait_s: float) -> Waiting | Let | Refusal:
        """It comes and may wait so long: let in at once if there is room and nobody waits, queued, or sent away."""
        expected = self.placing.expect(want)
        self.asked.cost_s += expected.cost_s
        self.asked.prefill_s += expected.first_s - self.placing.experience.speed.step_s
        if not len(self.queue):
            placed = self.placing.place(want, now, charged_s=expected.cost_s)
            if placed is not None:
                self.queue.pass_by(want.tenant, want.tier, expected.cost_s, weight=want.weight)
                return self._let_at_once(want, placed, expected, now)
        elif (beyond := self._waited_for(now)) is not None:
            ask_again_s = self.placing.ask_again_s
            placed = self.placing.place(want, now, charged_s=expected.cost_s, beyond=beyond)
            self.placing.ask_again_s = min(ask_again_s, self.placing.ask_again_s)
            if placed is not None:
                turn = self._turn(Waiting(want, now, now, expected, 0.0))
                self.queue.push(turn)
                self.queue.serve(turn)
                return self._let_at_once(want, placed, expected, now)
        else:
            self.placing.wait_behind(want)
        kept = len(self.promises) > 0 and wait_s > 0 and self._comes_again(want, now)
        waiting = Waiting(want, now, now + self._patience_s(want, expected, wait_s), expected, 0.0, kept)
        waiting.ahead_s = self._ahead_s(want, kept=kept)
        waiting.predicted = self.waits.starts_in(waiting.ahead_s)
        if wait_s <= 0:
            return self._refused(waiting, No.BUSY, now)
        if not kept and self._late_s(waiting, now) > 0:
            return self._refused(waiting, No.LATE, now)
        if not self.queue.has_room(want.tenant, want.tier, want.prompt_tokens, kept=kept):
            if kept:
                self.waits.observe_retry(admitted=False)
            return self._refused(waiting, No.FULL, now)
        self.queue.push(self._turn(waiting), first=kept)
        self._waits(waiting, now)
        return waiting

    def next(self, now: float) -> Let | Sent | None:
        """Whoever's turn it is enters, or leaves because it is too late for it; None if the next one does not fit.

        A large head is not overtaken: it would starve. Where it waits in some regions alone, those behind it are asked
        whether they may go to others. `ask_again_s` says when None may change by itself.
        """
        head = self.queue.head()
        if head is None:
            self.placing.ask_again_s = math.inf
            return None
        answer = self._next(head, now, {})
        if answer is not None or self.placing.waits_in is None:
            return answer
        ask_again_s, beyond = self.placing.ask_again_s, dict(self.placing.waits_in)
        for turn in islice(self.queue.behind(head), _ASKED_BEHIND_MAX):
            answer = self._next(turn, now, beyond)
            ask_again_s = min(ask_again_s, self.placing.ask_again_s)
            if answer is not None or self.placing.waits_in is None:
                break
            beyond |= self.placing.waits_in
        self.placing.ask_again_s = ask_again_s
        return answer

    def _next(self, turn: Turn[Waiting], now: float, beyond: Mapping[str, float]) -> Let | Sent | None:
        """beyond: the regions in which those before it wait."""
        waiting = turn.item
        if now > waiting.start_by:
            return Sent(waiting, self.expired(waiting, now))
        placed = self.placing.place(waiting.want, now, charged_s=turn.cost_s, beyond=beyond)
        if placed is None:
            self._waits(waiting, now)
            return None
        self.queue.serve(turn)
        waiting.left = True
        if waiting.kept:
            self.waits.observe_retry(admitted=True)
        self.waits.observe(waiting.ahead_s, now - max(waiting.arrived_at, self._opened_at))
        return Let(waiting, placed)

    @property
    def ask_again_s(self) -> float:
        """After `next` said None: seconds until it may say something else although nothing has happened."""
        return self.placing.ask_again_s

    def leave(self, waiting: Waiting) -> None:
        """It leaves the queue. Idempotent."""
        waiting.left = True
        self.queue.remove(waiting.id)

    def expired(self, waiting: Waiting, now: float) -> Refusal:
        """It has waited as long as it may."""
        self.leave(waiting)
        if waiting.kept:
            self.waits.observe_retry(admitted=False)
        return self._refused(waiting, No.EXPIRED, now)

    def opened(self, now: float) -> None:
        """There was no replica to let anybody in to, and now there is: who waited for that did not wait for others."""
        self._opened_at = now

    def ended(self, request_id: str, end: Ended) -> None:
        """A request that was let in has left its engine; its tenant is charged what it really took."""
        placed = self.placing.inside.get(request_id)
        if placed is not None:
            beyond_s = self.placing.ended(request_id, end)
            want = placed.want
            self.queue.correct(want.tenant, want.tier, beyond_s, weight=want.weight)

    def tick(self, now: float) -> None:
        """The time of a poll: promises lapse, trust comes back."""
        self.promises.lapse(now)
        self.placing.experience.doubt.tick(now)

    # Inside

    def _let_at_once(self, want: Want, placed: Placed, expected: Expected, now: float) -> Let:
        if len(self.promises) and self._comes_again(want, now):
            self.waits.observe_retry(admitted=True)
        return Let(Waiting(want, now, now, expected, 0.0), placed)

    def _waits(self, waiting: Waiting, now: float) -> None:
        """It was asked for just now, and does not enter."""
        waits_in = self.placing.waits_in
        waiting.turn_at = None if waits_in is None else {region: now + in_s for region, in_s in waits_in.items()}

    def _waited_for(self, now: float) -> dict[str, float] | None:
        """The regions in which somebody waits, and the seconds to the last one's turn; None: nobody may pass."""
        beyond: dict[str, float] = {}
        if not self.placing.apart:
            return None
        for entry in self.queue:
            if entry.item.turn_at is None:
                return None
            for region, at in entry.item.turn_at.items():
                beyond[region] = max(beyond.get(region, 0.0), at - now)
        return beyond

    def _turn(self, waiting: Waiting) -> Turn[Waiting]:
        want, expected = waiting.want, waiting.expected
        return Turn(
            want.request_id,
            want.tenant,
            want.tier,
            expected.cost_s,
            want.prompt_tokens,
            waiting,
            weight=want.weight,
            cached=expected.cached_share,
            kept=waiting.kept,
        )

    @staticmethod
    def _patience_s(want: Want, expected: Expected, wait_s: float) -> float:
        """How long it may wait and still have its first token as promised. A prompt that alone takes longer than the
        promise is served for what it is worth.
        """
        spare_s = want.first_s_max - expected.first_s
        return min(wait_s, spare_s) if spare_s > 0 else wait_s

    def _comes_again(self, want: Want, now: float) -> bool:
        digest = want.digest()
        return bool(digest) and self.promises.redeem(want.tenant, digest, now)

    def _ahead_s(self, want: Want, *, kept: bool) -> float:
        owed_s = 0.0 if kept else self.promises.owed_s(want.tenant)
        return self.queue.ahead_s(want.tenant, want.tier, weight=want.weight, first=kept, owed_s=owed_s)

    def _late_s(self, waiting: Waiting, now: float) -> float:
        """How much too late it would enter, by the median of the forecast. Nobody is refused on no experience."""
        if not self.waits.learned:
            return 0.0
        return waiting.predicted.p50_s - (waiting.start_by - now)

    def _refused(self, waiting: Waiting, why: No, now: float) -> Refusal:
        """The hint is the time by which it would no more be late; who does not wait is told when there is room."""
        want = waiting.want
        self.asked.refused_s += waiting.expected.cost_s
        starts = self.waits.starts_in(self._ahead_s(want, kept=False))
        if why is No.BUSY:
            room_s = 0.0 if len(self.queue) else self.placing.room_in_s(want, now, probability=0.9)
            late_s = max(starts.p90_s, room_s or 0.0)
        else:
            late_s = starts.p50_s - (waiting.start_by - waiting.arrived_at)
        # Drawn from the tenant: a replayed decision comes out the same.
        jitter = (zlib.crc32(want.tenant.encode()) & 0xFFFF) / 0x10000
        hint_s = math.ceil(self.waits.retry_after_s(late_s, jitter=jitter, most_s=self._retry_after_s_max))
        if why is not No.BUSY and (digest := want.digest()):
            cost_s = waiting.expected.cost_s
            self.promises.give(want.tenant, digest, now=now, in_s=hint_s, cost_s=cost_s)
        return Refusal(why, hint_s)
