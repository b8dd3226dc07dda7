"""What is asked of a model now, as scaling.py counts it: read from its placing and its door every few seconds.

Pure: clocks are handed in. In service and in the replay alike. Of engines that other gateways use too, what those hold
now is in the engines' reports; who waits there is not seen here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.door import Door, Waiting
from gateway.gate import Gate
from gateway.lifecycle.scaling import Seen, Side
from tenancy.values import value

# Rates are means over about so long.
_FADE_S = 30.0


@value
class Half:
    """One prefill half of a pair: what it holds for prompts, and its pool, in tokens."""

    held_tokens: float
    total_tokens: int


@dataclass(slots=True)
class _Rates:
    """Faded sums of what was asked for, in dominant seconds and seconds of prefill, and of the time that passed."""

    passed: float = 0.0
    cost_s: float = 0.0
    refused_s: float = 0.0
    prefill_s: float = 0.0


class Demand:
    """One model's. One writer."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._rates = _Rates()
        self._before: tuple[float, float, float, float] | None = None

    def see(self, now: float, *, starting: int, start_s: float, halves: Sequence[Half] = ()) -> dict[Side, Seen]:
        """starting: units that will serve, in `start_s` nine times out of ten. halves: the prefill halves of pairs."""
        self._count(now)
        door, rates = self._door, self._rates
        gates = [site.gate for site in door.placing.sites.values() if site.open]
        serving = len(gates)
        waiting = [entry.item for entry in door.queue]
        queued_s = sum(entry.expected.cost_s for entry in waiting)
        step_s = door.placing.speed.step_s
        prefilling_s = sum(gate.prefilling_s() for gate in gates)
        prefilling_s += sum(max(0.0, entry.expected.first_s - step_s) for entry in waiting)
        decoding = Seen(
            serving=serving,
            starting=starting,
            replica_tokens=min((gate.total_tokens for gate in gates), default=0),
            demand_tokens=sum(map(_demand, gates)) + sum(door.placing.will_hold(entry.want) for entry in waiting),
            held_tokens=sum(gate.total_tokens - gate.free_tokens for gate in gates),
            prefill_share=rates.prefill_s / rates.passed if rates.passed else 0.0,
            turned_away=min(1.0, rates.refused_s / rates.cost_s) if rates.cost_s else 0.0,
            # Learned waits know how many replicas work; where they have not been seen, each takes its part.
            wait_s=min(door.waits.starts_in(queued_s).p90_s, 2 * queued_s / max(1, serving)),
            backlog_s=prefilling_s / max(1, serving),
            start_s=start_s,
        )
        if not halves:
            return {Side.UNIFIED: decoding}
        return {Side.DECODE: decoding, Side.PREFILL: _prefill(decoding, halves, waiting)}

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


def _demand(gate: Gate) -> float:
    """The peak of what is inside, and what the engine holds for others."""
    others = max(0.0, gate.total_tokens - gate.free_tokens - gate.resident_tokens)
    return gate.peak() + others


def _prefill(decoding: Seen, halves: Sequence[Half], waiting: Sequence[Waiting]) -> Seen:
    """The other side: prompts in pages of its own, until they have been handed over."""
    held = sum(half.held_tokens for half in halves)
    prompts = sum(entry.want.prompt_tokens * entry.want.choices for entry in waiting)
    return replace(
        decoding,
        serving=len(halves),
        replica_tokens=min(half.total_tokens for half in halves),
        demand_tokens=held + prompts,
        held_tokens=held,
        backlog_s=decoding.backlog_s * decoding.serving / len(halves),
    )
