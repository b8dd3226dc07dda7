"""A trace as a day: busy at noon, quiet at night. Deterministic by its seed. Used by the replay of growing fleets."""

import math
import random
from dataclasses import dataclass, replace

from gateway.replay.profiles import Profile
from gateway.replay.requests import SimulatedRequest
from gateway.replay.traces import Load, TraceRow, arrange

# Blocks of prompts are told apart by the round of the trace they come from: the next day asks other things.
_ROUND_BLOCKS = 1 << 40


@dataclass(frozen=True, slots=True)
class Day:
    """length_s: from midnight to midnight. night_share: the load at midnight, of that at noon. days: how many."""

    length_s: float = 7200.0
    night_share: float = 0.1
    days: int = 1

    def load(self, at_s: float) -> float:
        """The part of noon's load at this moment."""
        noon = (1 - math.cos(2 * math.pi * at_s / self.length_s)) / 2
        return self.night_share + (1 - self.night_share) * noon


def arrange_days(rows: list[TraceRow], load: Load, profile: Profile, day: Day) -> list[SimulatedRequest]:
    """The trace over and over at noon's load, of which each moment keeps its part."""
    draw = random.Random(load.seed)  # noqa: S311 - reproducible, not secret
    whole_s = day.length_s * day.days * load.factor
    # A trace ends with its last request: the next round begins a mean gap later.
    round_s = rows[-1].at_s * (1 + 1 / max(1, len(rows) - 1)) or 1.0
    kept = []
    for turn in range(math.ceil(whole_s / round_s)):
        for row in rows:
            at_s = turn * round_s + row.at_s
            if at_s < whole_s and draw.random() < day.load(at_s / load.factor):
                blocks = tuple(turn * _ROUND_BLOCKS + block for block in row.blocks)
                kept.append(replace(row, at_s=at_s, blocks=blocks))
    return arrange(kept, load, profile) if kept else []
