"""Regions in the deployment file: their names, and how long the network takes between them. Pure values.

topology.py has `region` beside each replica and pair, and the list of round trips at the top of the file:

    [[round_trips]]
    between = ["eu-west", "us-east"]
    milliseconds = 80

A round trip that isn't in the file is measured by the gateway itself.
"""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

RegionName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]


class RoundTrip(BaseModel):
    """How much later an answer from one of the two regions comes in the other than at home."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    between: tuple[RegionName, RegionName]
    milliseconds: float = Field(gt=0, le=60_000)

    @model_validator(mode="after")
    def _two_regions(self) -> Self:
        if self.between[0] == self.between[1]:
            raise ValueError(f"between names {self.between[0]} twice; a region is at no distance from itself")
        return self


def twice_told(round_trips: tuple[RoundTrip, ...]) -> str | None:
    """Two regions that more than one round trip lies between, as words."""
    told: set[frozenset[str]] = set()
    for trip in round_trips:
        if frozenset(trip.between) in told:
            return f"{trip.between[0]} and {trip.between[1]}"
        told.add(frozenset(trip.between))
    return None


def round_trips_s(round_trips: tuple[RoundTrip, ...], home: str) -> dict[str, float]:
    """Seconds from `home` to each region that is told of."""
    return {
        trip.between[1 - trip.between.index(home)]: trip.milliseconds / 1000
        for trip in round_trips
        if home in trip.between
    }
