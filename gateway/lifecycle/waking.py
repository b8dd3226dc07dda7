"""What a request is told that finds no engine of its model awake: how long a start will take, or that there is none.

The pipeline asks where no replica answers, and nowhere else: a model that is awake costs no look here and no database.
The first request wishes a unit awake; all others find that it has been wished. Verdicts are pure.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from gateway.errors import EngineUnavailable, GatewayError, ModelWarming
from gateway.lifecycle.sides import Side, by_side
from gateway.lifecycle.states import By, Depth, Record, State, Unit, Wish, Wished
from gateway.lifecycle.store import Call, UnitStore
from tenancy.errors import TenancyUnavailable

# A start that takes longer than nine of ten did may end at any moment.
_LEAST_S: Final = 1.0
# A failed unit's rest may last long; whoever asks may ask again sooner, since an operator may have mended it.
_RETRY_S_MAX: Final = 60
# So long after it could be used a unit of another place may take to be seen from here.
_SEEN_S_MAX: Final = 5.0
# How units stand is known within moments of this process's start, unless the database is away.
_FIRST_NEWS_S_MAX: Final = 5.0


StartSeconds = Callable[[Unit, Depth], tuple[float, bool]]


@dataclass(frozen=True, slots=True)
class Warming:
    """eta_s: seconds until it can be used, nine times of ten. learned: by starts that were seen, and not presumed.
    unit: the one to be wished awake first, if any.
    """

    eta_s: float
    learned: bool = False
    unit: Unit | None = None


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Every unit is held asleep, or has failed and rests."""

    retry_after_s: int


def verdict(records: Collection[Record], now_ns: int, start_s: StartSeconds) -> Warming | Unavailable | None:
    """Of a model that has these units and none that answers. None: nothing is asleep; it is as if there were no units.

    start_s: the 90th percentile of a unit's start from this depth, in seconds, and whether it has been learned.
    """
    if not records or any(record.state is State.READY for record in records):
        return None
    coming = [_warming_in(record, now_ns, start_s) for record in records if _comes(record)]
    if coming:
        return min(coming, key=lambda warming: warming.eta_s)
    asleep = [record for record in records if record.wish is not Wish.HELD and record.state is not State.FAILED]
    if not asleep:
        rests = [record.retry_at_ns for record in records if record.state is State.FAILED]
        rest_s = max(_LEAST_S, (min(rests) - now_ns) / 1e9) if rests else _RETRY_S_MAX
        return Unavailable(min(_RETRY_S_MAX, math.ceil(rest_s)))
    first = min(asleep, key=lambda record: (_warming_in(record, now_ns, start_s).eta_s, record.unit))
    return replace(_warming_in(first, now_ns, start_s), unit=first.unit)


def verdict_of_sides(
    sides: Iterable[Collection[Record]], now_ns: int, start_s: StartSeconds
) -> Warming | Unavailable | None:
    """As `verdict`, where a request needs one unit of each side: it waits for the later one."""
    found = [one for side in sides if (one := verdict(side, now_ns, start_s)) is not None]
    missing = [one for one in found if isinstance(one, Unavailable)]
    if missing:
        return max(missing, key=lambda one: one.retry_after_s)
    warming = [one for one in found if isinstance(one, Warming)]
    if not warming:
        return None
    unit = next((one.unit for one in warming if one.unit is not None), None)
    return Warming(max(one.eta_s for one in warming), all(one.learned for one in warming), unit)


def _comes(record: Record) -> bool:
    return record.wish is Wish.AWAKE and record.state is not State.FAILED


def _warming_in(record: Record, now_ns: int, start_s: StartSeconds) -> Warming:
    whole_s, learned = start_s(record.unit, record.depth)
    if record.state is State.WARMING:
        return Warming(max(_LEAST_S, whole_s - (now_ns - record.since_ns) / 1e9), learned)
    return Warming(whole_s + max(0.0, (record.retry_at_ns - now_ns) / 1e9), learned)


@dataclass(slots=True)
class _Model:
    records: dict[Unit, Record]
    wishes: "dict[Unit, asyncio.Task[None]]" = field(default_factory=dict)  # that are under way


class Waking:
    """wished: told when this process has wished a unit awake. start_s: see `verdict`. clock: Unix nanoseconds.

    places: whose units can be asked from here as long as they run; those of other places may be cut off. among: names
    of the units that may serve whoever asks; None: all of the model's.
    """

    def __init__(
        self,
        store: UnitStore,
        call: Call,
        *,
        start_s: StartSeconds,
        wished: Callable[[Record], None],
        clock: Callable[[], int],
        places: Collection[str] = ("",),
    ) -> None:
        self._places = places
        self._store = store
        self._call = call
        self._start_s = start_s
        self._wished = wished
        self._clock = clock
        self._models: dict[str, _Model] = {}
        self._sides: Mapping[str, Mapping[str, Side]] = {}
        self._serverless: frozenset[str] = frozenset()
        self._waits_s: dict[str, float] = {}
        self._news = asyncio.Event()

    def serve(self, waits_s: Mapping[str, float | None], sides: Mapping[str, Mapping[str, Side]] | None = None) -> None:
        """waits_s: of each model that sleeps and wakes, how long a request may wait for its engines, where the
        deployment says so. sides: of models whose units are halves, by unit.
        """
        self._serverless = frozenset(waits_s)
        self._sides = sides or {}
        self._waits_s = {model: seconds for model, seconds in waits_s.items() if seconds is not None}

    def heard(self, record: Record) -> None:
        """So it stands now."""
        self._models.setdefault(record.unit.model, _Model({})).records[record.unit] = record
        self._news.set()
        self._news = asyncio.Event()

    def forget(self, unit: Unit) -> None:
        """There is no such unit any more."""
        self._models[unit.model].records.pop(unit, None)

    def records(self, model: str | None = None) -> list[Record]:
        """As last heard of; of one model or of all."""
        found = self._models.values() if model is None else filter(None, [self._models.get(model)])
        return [record for one in found for record in one.records.values()]

    def verdict(self, model: str, among: Collection[str] | None = None) -> Warming | Unavailable | None:
        now_ns = self._clock()
        records = [record for record in self.records(model) if among is None or record.unit.name in among]
        near = [one for one in records if not self._is_cut_off(one, now_ns)]
        return verdict_of_sides(by_side(near, self._sides.get(model, {})).values(), now_ns, self._start_s)

    def _is_cut_off(self, record: Record, now_ns: int) -> bool:
        """It serves at another place, and not here: nobody is asked where a replica answers."""
        away = record.unit.place not in self._places
        return away and record.state is State.READY and now_ns - record.since_ns > _SEEN_S_MAX * 1e9

    def wakes(self, model: str) -> bool:
        """Would a request wake it, or is it waking?"""
        return isinstance(self.verdict(model), Warming)

    def sleeps(self, model: str) -> bool:
        """Is it meant to be asleep now?"""
        records = self.records(model)
        return bool(records) and all(record.wish is not Wish.AWAKE for record in records)

    def wait_s_max(self, model: str) -> float | None:
        """How long a request may wait for its engines to wake; None: as long as for pages."""
        return self._waits_s.get(model)

    def refusal(self, model: str, among: Collection[str] | None = None) -> GatewayError | None:
        """What a request is told now that has waited in vain, or would."""
        match self.verdict(model, among):
            case Warming(eta_s=eta_s):
                return _warming(model, eta_s)
            case Unavailable(retry_after_s=retry_after_s):
                return _unavailable(retry_after_s)
            case None:
                return None

    def end_of_wait(self, model: str, among: Collection[str] | None = None) -> GatewayError | None:
        """What those are told who wait, where a unit has failed. None: another one comes."""
        match self.verdict(model, among):
            case None | Warming(unit=None):
                return None
            case _:
                return self.refusal(model, among)

    async def wake(
        self, model: str, *, wait_s: float, among: Collection[str] | None = None, named: str | None = None
    ) -> bool:
        """A request for it has come that may wait so long. False: nothing of it is asleep. named: what the client calls
        the model, if it is another one of the same engine.

        Raises ModelWarming if it won't be awake in time, as far as that has been learned (it is being woken all the
        same, for whoever comes again), and EngineUnavailable if it can't be woken.
        """
        await self._first_news(model, wait_s)
        found = self.verdict(model, among)
        for _ in Side:  # at most one unit of each
            if isinstance(found, Warming) and found.unit is not None:
                await self._wish(model, found.unit)
                found = self.verdict(model, among)
        match found:
            case None:
                return False
            case Unavailable(retry_after_s=retry_after_s):
                raise _unavailable(retry_after_s)
            case Warming(eta_s=eta_s, learned=learned) if wait_s <= 0 or (learned and eta_s > wait_s):
                raise _warming(named or model, eta_s)
        return True

    async def _first_news(self, model: str, wait_s: float) -> None:
        """Right after a start: a model of which nothing has been heard yet is not one that is awake."""
        if model not in self._serverless or self.records(model):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(min(wait_s, _FIRST_NEWS_S_MAX)):
                while not self.records(model):
                    await self._news.wait()

    async def until_awake(self, model: str, *, wait_s: float, among: Collection[str], named: str) -> None:
        """For requests that have no queue to wait in: returns when nothing of it is asleep. Raises as `wake`."""
        now = asyncio.get_running_loop().time
        until = now() + wait_s
        while await self.wake(model, wait_s=until - now(), among=among, named=named):
            with suppress(TimeoutError):
                async with asyncio.timeout(until - now()):
                    await self._news.wait()

    async def _wish(self, model: str, unit: Unit) -> None:
        """Once for all who come at the same time, whichever of them leaves."""
        wishes = self._models[model].wishes
        wish = wishes.get(unit)
        if wish is None:
            wish = wishes[unit] = asyncio.create_task(self._wish_once(unit), name=f"wake {unit.name}")
            wish.add_done_callback(lambda _: wishes.pop(unit))
        try:
            await asyncio.shield(wish)
        except TenancyUnavailable as error:
            raise _unavailable(5) from error

    async def _wish_once(self, unit: Unit) -> None:
        record = await self._call(self._store.wish, unit, Wished(Wish.AWAKE, By.REQUEST))
        if record is None:
            self.forget(unit)
        else:
            self.heard(record)
            self._wished(record)


def _warming(model: str, eta_s: float) -> ModelWarming:
    return ModelWarming(
        f"The model {model} was asleep and is being started. Try again in a while.",
        retry_after_s=math.ceil(eta_s),
    )


def _unavailable(retry_after_s: int) -> EngineUnavailable:
    return EngineUnavailable("No engine of this model answers at the moment.", retry_after_s=retry_after_s)
