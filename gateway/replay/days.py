"""A trace as a day: busy at noon, quiet at night; or as a burst, a ramp, a square wave. Deterministic by its seed.

Used by the replay of growing fleets.
"""

import math
import random
from dataclasses import dataclass, replace
from enum import StrEnum

from gateway.replay.profiles import Profile
from gateway.replay.requests import SimulatedRequest
from gateway.replay.traces import Load, TraceRow, arrange

# Blocks of prompts are told apart by the round of the trace they come from: the next day asks other things.
_ROUND_BLOCKS = 1 << 40


class Shape(StrEnum):
    """How the load goes between night's and noon's.

    day: as the sun. burst: noon for a tenth of the day, in its middle. ramp: a straight line up to noon, which is there
    for the last quarter. square: night and noon by turns, four times each.
    """

    DAY = "day"
    BURST = "burst"
    RAMP = "ramp"
    SQUARE = "square"

    def noon(self, part: float) -> float:
        """part: of the day, from 0 to 1. Answers the part of the way from night's load to noon's."""
        match self:
            case Shape.DAY:
                return (1 - math.cos(2 * math.pi * part)) / 2
            case Shape.BURST:
                return 1.0 if 0.45 <= part < 0.55 else 0.0
            case Shape.RAMP:
                return min(1.0, part / 0.75)
            case Shape.SQUARE:
                return float(math.floor(8 * part) % 2)


@dataclass(frozen=True, slots=True)
class Day:
    """length_s: from midnight to midnight. night_share: the load at midnight, of that at noon. days: how many."""

    length_s: float = 7200.0
    night_share: float = 0.1
    days: int = 1
    shape: Shape = Shape.DAY

    def load(self, at_s: float) -> float:
        """The part of noon's load at this moment."""
        noon = self.shape.noon(at_s / self.length_s % 1)
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
