"""When a model's engines may sleep: the table `[models.serverless]` of a deployment file. Pure values and their checks.

A model without the table is always awake. Read by topology.py; what it means for one engine now is the gateway's to
decide. A *unit* is what wakes and sleeps as one: a replica, a pair, or a group's half, whose sides are counted apart.

    [models.serverless]
    idle_seconds = 600
    schedules = [{ days = "mon-fri", from = "08:00", to = "18:00", replicas_min = 1 }]
"""

import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Depth = Literal["stopped", "released"]

_DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_TIME: Final = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])|24:00")


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Schedule(_Table):
    """Times of the week, in UTC, at which more units stay awake than otherwise."""

    days: str = Field(
        default="mon-sun",
        description="Days and ranges of days, such as mon-fri or mon,wed,sat: those on which it begins.",
    )
    begins: str = Field(alias="from", description="HH:MM, UTC.")
    ends: str = Field(alias="to", description="HH:MM, UTC; one that is not later than `from` is on the next day.")
    replicas_min: int = Field(ge=1, description="So many units stay awake meanwhile.")

    @field_validator("days")
    @classmethod
    def _are_days(cls, value: str) -> str:
        list(_days(value))
        return value

    @field_validator("begins", "ends")
    @classmethod
    def _is_a_time(cls, value: str) -> str:
        if not _TIME.fullmatch(value):
            raise ValueError("a time is HH:MM, from 00:00 to 24:00")
        return value

    @model_validator(mode="after")
    def _lasts(self) -> Self:
        if self.begins == self.ends:
            raise ValueError("from and to are the same; a whole day is from 00:00 to 24:00")
        return self

    def covers(self, at: datetime) -> bool:
        """Is it in force then? `at`: in UTC."""
        minute = at.hour * 60 + at.minute
        begins, ends = _minute(self.begins), _minute(self.ends)
        if begins < ends:
            return begins <= minute < ends and self._begins_on(at)
        return (minute >= begins and self._begins_on(at)) or (minute < ends and self._begins_on(at - timedelta(days=1)))

    def _begins_on(self, day: datetime) -> bool:
        return day.weekday() in set(_days(self.days))


class Serverless(_Table):
    """How a model's units sleep and wake by themselves."""

    idle_seconds: float = Field(
        default=900, ge=1, le=30 * 86400, description="A unit on which nothing ran for so long may go to sleep."
    )
    replicas_min: int = Field(default=0, ge=0, description="So many units stay awake; 0: the model may sleep entirely.")
    replicas_max: int | None = Field(
        default=None, ge=1, description="At most so many units are awake at once; left out: all that the file names."
    )
    depth: Depth = Field(
        default="stopped",
        description="stopped: a sleeping engine has no process. released: it keeps its process and gives up the memory"
        " of weights and KV pages, so that it wakes sooner.",
    )
    wait_seconds: float | None = Field(
        default=None,
        gt=0,
        le=3600,
        description="A request that finds the model asleep waits at most so long for it; left out: as long as any waits"
        " for pages.",
    )
    schedules: tuple[Schedule, ...] = Field(default=(), max_length=50)

    @model_validator(mode="after")
    def _least_is_not_above_most(self) -> Self:
        if self.replicas_max is not None and self.replicas_min_ever > self.replicas_max:
            raise ValueError(f"replicas_min {self.replicas_min_ever} is over replicas_max {self.replicas_max}")
        return self

    @property
    def replicas_min_ever(self) -> int:
        """The most that any time of the week asks for."""
        return max([self.replicas_min, *(schedule.replicas_min for schedule in self.schedules)])

    def replicas_min_at(self, at: datetime) -> int:
        """Units that stay awake then. `at`: in UTC."""
        return max([self.replicas_min, *(schedule.replicas_min for schedule in self.schedules if schedule.covers(at))])

    def fault(self, *, units: int) -> str | None:
        """Why a model of so many units, or of so many of its smaller side, can't be served so; None: it can."""
        for key, value in (("replicas_min", self.replicas_min_ever), ("replicas_max", self.replicas_max or 0)):
            if value > units:
                return f"{key} {value} is more than the {units} replicas and pairs that the file names"
        return None


def _minute(time: str) -> int:
    hours, minutes = time.split(":")
    return int(hours) * 60 + int(minutes)


def _days(text: str) -> Iterator[int]:
    """Monday is 0. Raises ValueError."""
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if first not in _DAYS or (dash and last not in _DAYS):
            raise ValueError(f"days are {', '.join(_DAYS)}, and ranges of them such as mon-fri")
        begin = _DAYS.index(first)
        length = (_DAYS.index(last) - begin) % 7 if dash else 0
        yield from ((begin + step) % 7 for step in range(length + 1))
