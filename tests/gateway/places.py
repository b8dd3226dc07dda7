"""A stand-in for the replicas of a model: one place with a number of pages, so that tests of queues count in pages."""

import math
from collections.abc import Mapping

from gateway.forecast import EngineSpeed
from gateway.gate import Gate, GateLimits
from gateway.placing import Placing, PlacingLimits
from gateway.prefixes import NOTHING_KNOWN, Prefixes
from gateway.site import Placed, Site
from gateway.want import Ended, Expected, Want


class PagePlacing(Placing):
    """A request of so many prompt tokens takes so many pages. order: who entered. costs: dominant seconds."""

    def __init__(self, pages: int) -> None:
        super().__init__(PlacingLimits())
        self.free = self.total = pages
        self.taken: dict[str, int] = {}
        self.order: list[str] = []
        self.costs: dict[str, float] = {}
        self.again_in_s = math.inf
        self.prefill_s = 0.0
        speed = EngineSpeed(prefill_tokens_s=1000.0, step_s=0.01)
        limits = GateLimits(prefill_chunk_tokens=1, running_max=1, engine_clip_tokens=0)
        self._site = Site("place", Gate(max(1, pages), 1, limits, speed), Prefixes(1), speed)

    def expect(self, want: Want) -> Expected:
        return Expected(cost_s=self.costs.get(want.request_id, 1.0), first_s=self.prefill_s, cached_share=0.0)

    def place(
        self, want: Want, now: float, *, charged_s: float, beyond: Mapping[str, float] | None = None
    ) -> Placed | None:
        assert not beyond, "these tests know one region"
        self.ask_again_s = self.again_in_s
        if want.prompt_tokens > self.free:
            return None
        self.free -= want.prompt_tokens
        self.taken[want.request_id] = want.prompt_tokens
        self.order.append(want.request_id)
        placed = self.inside[want.request_id] = Placed(want, self._site, charged_s, NOTHING_KNOWN, 0.0, now)
        return placed

    def room_in_s(self, want: Want, now: float, *, probability: float) -> float | None:
        return None

    def give_back(self, request_id: str) -> None:
        self.free += self.taken.pop(request_id, 0)
        assert self.free <= self.total, "no more comes back than was taken"
        self.inside.pop(request_id, None)

    def ended(self, request_id: str, end: Ended) -> float:
        self.give_back(request_id)
        return 0.0
