"""What is asked of a model now, as scaling.py counts it: read from its placing and its door every few seconds.

Pure: clocks are handed in. In service and in the replay alike. Where several processes serve a model each reads its own
part, of what it let in and who waits there; what their engines hold they all read from the same reports.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from gateway.door import Door, Waiting
from gateway.lifecycle.scaling import Seen
from gateway.lifecycle.sides import Side
from tenancy.values import value

# Rates are means over about so long.
_FADE_S = 30.0


@value
class Half:
    """One prefill half of a pair: what it holds for prompts, and its pool, in tokens."""

    held_tokens: float
    total_tokens: int


@value
class Part:
    """What one process sees. Tokens, but for: serving and halves, which count engines; cost, refused and prefill, which
    are seconds of a replica asked for in each second; patience_s, of those who wait, on the mean; wait_s, which is
    predicted for a newcomer; prefilling_s, of the prompts that wait. prefill_short: they wait for a prefill half, and
    not for pages of those that decode.

    peak: forecast of its own requests; own: what those hold now. used: what the engines hold, for everybody.
    """

    serving: int = 0
    replica: int = 0
    peak: float = 0.0
    own: float = 0.0
    used: float = 0.0
    waiting: float = 0.0
    cost: float = 0.0
    refused: float = 0.0
    prefill: float = 0.0
    patience_s: float = 0.0
    wait_s: float = 0.0
    prefilling_s: float = 0.0
    halves: int = 0
    half: int = 0
    half_used: float = 0.0
    half_waiting: float = 0.0
    prefill_short: bool = False


@dataclass(slots=True)
class _Rates:
    """Faded sums of what was asked for, in dominant seconds and seconds of prefill, and of the time that passed."""

    passed: float = 0.0
    cost_s: float = 0.0
    refused_s: float = 0.0
    prefill_s: float = 0.0


class Demand:
    """One model's at one door. One writer."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._rates = _Rates()
        self._before: tuple[float, float, float, float] | None = None

    def part(self, now: float, *, halves: Sequence[Half] = ()) -> Part:
        """halves: the prefill halves of pairs."""
        self._count(now)
        door, rates = self._door, self._rates
        gates = [site.gate for site in door.placing.sites.values() if site.open]
        waiting: list[Waiting] = [entry.item for entry in door.queue]
        queued_s = sum(entry.expected.cost_s for entry in waiting)
        step_s = door.placing.experience.speed.step_s
        # A mean over less than that would be a guess: who comes first counts as what comes in all that time.
        passed = max(rates.passed, _FADE_S)
        return Part(
            serving=len(gates),
            replica=min((gate.total_tokens for gate in gates), default=0),
            peak=sum(gate.peak() for gate in gates),
            own=sum(gate.resident_tokens for gate in gates),
            used=sum(gate.total_tokens - gate.free_tokens for gate in gates),
            waiting=sum(door.placing.will_hold(entry.want) for entry in waiting),
            cost=rates.cost_s / passed,
            refused=rates.refused_s / passed,
            prefill=rates.prefill_s / passed,
            # Learned waits know how many replicas work; where they have not been seen, each takes its part.
            patience_s=sum(entry.start_by - entry.arrived_at for entry in waiting) / max(1, len(waiting)),
            wait_s=min(door.waits.starts_in(queued_s).p90_s, 2 * queued_s / max(1, len(gates))),
            prefilling_s=sum(max(0.0, entry.expected.first_s - step_s) for entry in waiting),
            halves=len(halves),
            half=min((half.total_tokens for half in halves), default=0),
            half_used=sum(half.held_tokens for half in halves),
            half_waiting=sum(entry.want.prompt_tokens * entry.want.choices for entry in waiting),
            prefill_short=door.placing.waits_for_prefill,
        )

    def _count(self, now: float) -> None:
        asked = self._door.asked
        counted = (now, asked.cost_s, asked.refused_s, asked.prefill_s)
        if self._before is not None:
            passed, cost_s, refused_s, prefill_s = (
                late - early for late, early in zip(counted, self._before, strict=True)
            )
            fade, rates = math.exp(-passed / _FADE_S), self._rates
            rates.passed = rates.passed * fade + passed
            rates.cost_s = rates.cost_s * fade + cost_s
            rates.refused_s = rates.refused_s * fade + refused_s
            rates.prefill_s = rates.prefill_s * fade + prefill_s
        self._before = counted


def together(parts: Collection[Part], *, awake: int | None, start_s: float) -> dict[Side, Seen]:
    """What all processes see. awake: units that are wished awake, where anybody knows; start_s: in which one serves,
    nine times out of ten.
    """
    serving = max((part.serving for part in parts), default=0)
    halves = max((part.halves for part in parts), default=0)
    used = max((part.used for part in parts), default=0.0)
    others = max(0.0, used - sum(part.own for part in parts))
    cost = sum(part.cost for part in parts)
    patience_s = max(1e-3, max((part.patience_s for part in parts), default=0.0))
    prefilling_s = sum(part.prefilling_s for part in parts) / max(1, halves or serving)
    decoding = Seen(
        serving=serving,
        awake=awake,
        replica_tokens=min((part.replica for part in parts if part.replica), default=0),
        demand_tokens=sum(part.peak + part.waiting for part in parts) + others,
        held_tokens=used,
        prefill_share=sum(part.prefill for part in parts),
        turned_away=min(1.0, sum(part.refused for part in parts) / cost) if cost else 0.0,
        wait_share=max((part.wait_s for part in parts if not part.prefill_short), default=0.0) / patience_s,
        backlog_share=prefilling_s / patience_s,
        start_s=start_s,
        waiting_tokens=sum(part.waiting for part in parts),
        patience_s=patience_s,
    )
    if not halves:
        return {Side.UNIFIED: decoding}
    # Prompts that wait for pages of decode halves say nothing of prefill.
    short = [part for part in parts if part.prefill_short]
    held = max(part.half_used for part in parts)
    prefill = Seen(
        serving=halves,
        awake=awake,
        replica_tokens=min(part.half for part in parts if part.half),
        demand_tokens=held + sum(part.half_waiting for part in short),
        held_tokens=held,
        prefill_share=decoding.prefill_share,
        turned_away=decoding.turned_away,
        wait_share=max((part.wait_s for part in short), default=0.0) / patience_s,
        backlog_share=sum(part.prefilling_s for part in short) / halves / patience_s,
        start_s=start_s,
        waiting_tokens=sum(part.half_waiting for part in short),
        patience_s=patience_s,
    )
    return {Side.DECODE: replace(decoding, backlog_share=0.0), Side.PREFILL: prefill}
