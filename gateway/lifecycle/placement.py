"""Many models on few machines: which idle units go to sleep so that another one can wake. Pure.

Asked before a unit is started. Memory is counted in MiB by pool, as backends/machines.py names them. The least recently
needed sleep first, and nobody sleeps whose memory is not needed for it. Whoever has requests, running or waiting,
stays; so do units that their model must keep awake.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from backends.machines import Memory, together
from gateway.lifecycle.states import Unit


@dataclass(frozen=True, slots=True)
class Resident:
    """A unit that takes memory now: awake, or on its way there or back.

    needed_at: when a request last ran there. steady: ready, so that it can be told to sleep; neither starting nor
    stopping. leaving: its memory comes free by itself. busy: requests run there or wait for it. frees_in_s: seconds
    until it will be idle or gone, None if nobody can say.
    """

    unit: Unit
    memory: Memory
    needed_at: float
    steady: bool = True
    leaving: bool = False
    busy: bool = False
    frees_in_s: float | None = None

    @property
    def idle(self) -> bool:
        return self.steady and not self.busy and not self.leaving


@dataclass(frozen=True, slots=True)
class Place:
    """It can wake once these have gone to sleep; at once if there are none."""

    sleep: tuple[Unit, ...] = ()


@dataclass(frozen=True, slots=True)
class Later:
    """It can't wake now. in_s: seconds after which to ask again at best; None where nobody can say.

    short_mib: so much is missing in the pool although all sleep that may.
    """

    pool: str
    short_mib: int
    in_s: float | None


def place(
    unit: Unit,
    memory: Memory,
    *,
    room: Memory,
    residents: Sequence[Resident],
    awake_min: Mapping[str, int],
) -> Place | Later:
    """May `unit`, which takes `memory`, wake, and who sleeps for it?

    room: the size of each pool; a pool that is not in it is not counted. residents: all that take memory there.
    awake_min: by model, how many of its units stay awake.
    """
    others = [resident for resident in residents if resident.unit != unit]
    needed = {pool: taken for pool, taken in memory.items() if taken and pool in room}
    if not _short(needed, room, others):
        return Place()
    # What is on its way out is waited for, and need not be made room for twice.
    staying = [resident for resident in others if not resident.leaving]
    may_sleep = _spare_units(staying, awake_min)
    asleep: list[Resident] = []
    for resident in sorted(staying, key=_least_needed):
        if not _short(needed, room, _without(staying, asleep)):
            break
        # Units of the model itself are no use: one would sleep for its own sister.
        useful = resident.unit.model != unit.model and any(resident.memory.get(pool) for pool in needed)
        if useful and resident.idle and may_sleep[resident.unit.model] > 0:
            may_sleep[resident.unit.model] -= 1
            asleep.append(resident)
    if _short(needed, room, _without(staying, asleep)):
        pool, short_mib = _widest(_short(needed, room, _without(staying, asleep)))
        return Later(pool, short_mib, _frees_in_s(needed, room, _without(others, asleep), may_sleep))
    sleep = _needed_of(needed, room, staying, asleep)
    if sleep:
        return Place(tuple(resident.unit for resident in sleep))
    return Later(*_widest(_short(needed, room, others)), _frees_in_s(needed, room, others, may_sleep))


def _least_needed(resident: Resident) -> tuple[float, str, str]:
    return resident.needed_at, resident.unit.model, resident.unit.name


def _spare_units(staying: Sequence[Resident], awake_min: Mapping[str, int]) -> Counter[str]:
    """By model, how many of its units may sleep; one that is still starting keeps nobody's place."""
    awake = Counter(resident.unit.model for resident in staying if resident.steady)
    return Counter({model: max(0, count - awake_min.get(model, 0)) for model, count in awake.items()})


def _needed_of(needed: Memory, room: Memory, staying: Sequence[Resident], asleep: Sequence[Resident]) -> list[Resident]:
    """Of those that would sleep, the ones without which it does not fit; the most recently needed are spared first."""
    kept = list(asleep)
    for resident in reversed(asleep):
        fewer = [other for other in kept if other is not resident]
        if not _short(needed, room, _without(staying, fewer)):
            kept = fewer
    return kept


def _frees_in_s(needed: Memory, room: Memory, residents: Sequence[Resident], may_sleep: Counter[str]) -> float | None:
    """When enough of the leaving and the busy will have gone, if each goes when it is foreseen to."""
    left, spare = list(residents), Counter(may_sleep)
    for resident in sorted(residents, key=lambda one: math.inf if one.frees_in_s is None else one.frees_in_s):
        if resident.frees_in_s is None:
            break
        if not resident.leaving:
            if spare[resident.unit.model] <= 0:
                continue
            spare[resident.unit.model] -= 1
        left.remove(resident)
        if not _short(needed, room, left):
            return resident.frees_in_s
    return None


def _without(residents: Sequence[Resident], gone: Sequence[Resident]) -> list[Resident]:
    return [resident for resident in residents if all(resident is not other for other in gone)]


def _short(needed: Memory, room: Memory, residents: Iterable[Resident]) -> dict[str, int]:
    """By pool, what is missing for `needed` beside these."""
    taken = together(resident.memory for resident in residents)
    missing = {pool: size + taken.get(pool, 0) - room[pool] for pool, size in needed.items()}
    return {pool: short for pool, short in missing.items() if short > 0}


def _widest(short: Mapping[str, int]) -> tuple[str, int]:
    return max(short.items(), key=lambda item: item[1])
