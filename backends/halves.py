"""Engines of a deployment file that compute prompts, and those that go on from them: a pair or a group of such. Pure.

A pair is one of each half, a group several of each.
In a group any prefill half works with any decode half: the gateway picks both for each request, and halves come and go
one by one. `sides` gives both forms in one shape, a pair as a group of one and one that wakes and sleeps as one.
topology.py reads them; sglang/launch.py and local_command.py take from here what an engine is told of its side.
"""

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from backends.engine_tables import Engine, Name, Table
from backends.rollout import STABLE
from backends.round_trips import RegionName

Transfer = Literal["mooncake", "nixl", "mooncake_tcp"]

_BOOTSTRAP_PORT = 8998


@dataclass(frozen=True, slots=True)
class NamedHalf:
    """name: of the engine, as logs and commands have it. unit: what wakes and sleeps as one with it. bootstrap: host
    and port at which decode halves ask a prefill half for its pages; of a decode half None.
    """

    name: str
    unit: str
    engine: Engine
    bootstrap: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Sides:
    """The halves of a pair or group: each of decode may get its pages from each of prefill."""

    region: str | None
    revision: str
    prefill: tuple[NamedHalf, ...]
    decode: tuple[NamedHalf, ...]


@dataclass(frozen=True, slots=True)
class Handover:
    """What a half is told of how pages change hands. bootstrap_port: where a prefill half says how to reach it."""

    transfer: Transfer
    bootstrap_port: int | None


class Pair(Table):
    """Two engines: one computes prompts, the other generates from the pages that it is sent."""

    name: Name
    region: RegionName | None = Field(
        default=None, description="Where both halves are; left out: where the gateway is."
    )
    revision: Name = Field(default=STABLE, description="As a replica's.")
    transfer: Transfer = "mooncake"
    bootstrap_port: int = Field(
        default=_BOOTSTRAP_PORT, ge=1, le=65535, description="Where prefill says how to reach it."
    )
    prefill: Engine
    decode: Engine

    @property
    def bootstrap(self) -> tuple[str, int]:
        """Host and port at which decode asks prefill for its pages."""
        return _host_of(self.prefill), self.bootstrap_port

    @property
    def sides(self) -> Sides:
        prefill = NamedHalf(f"{self.name}-prefill", self.name, self.prefill, self.bootstrap)
        return Sides(
            self.region, self.revision, (prefill,), (NamedHalf(f"{self.name}-decode", self.name, self.decode),)
        )

    def handovers(self) -> dict[str, Handover]:
        """By engine."""
        told = Handover(self.transfer, self.bootstrap_port)
        return {f"{self.name}-prefill": told, f"{self.name}-decode": told}

    @model_validator(mode="after")
    def _switched_as_one(self) -> Self:
        one, other = self.prefill.managed, self.decode.managed
        if (one is None) != (other is None) or (one and other and (one.systemd is None) != (other.systemd is None)):
            raise ValueError("managed: the halves of a pair start and stop as one, by one manager")
        return self

    @model_validator(mode="after")
    def _halves_meet(self) -> Self:
        _check_scales(self.prefill, self.decode)
        _check_ranks(self.prefill, self.decode)
        return self


class Half(Engine):
    """One of several engines that do the same half."""

    name: Name


class PrefillHalf(Half):
    bootstrap_port: int = Field(
        default=_BOOTSTRAP_PORT,
        ge=1,
        le=65535,
        description="Where it says how to reach it; another one for each on the same host.",
    )


class Group(Table):
    """Prefill halves and decode halves, any of which works with any. Each wakes, fails and goes by itself."""

    region: RegionName | None = Field(default=None, description="Where all are; left out: where the gateway is.")
    revision: Name = Field(default=STABLE, description="As a replica's.")
    transfer: Transfer = "mooncake"
    prefill: tuple[PrefillHalf, ...] = Field(min_length=1)
    decode: tuple[Half, ...] = Field(min_length=1)

    @property
    def sides(self) -> Sides:
        prefill = tuple(NamedHalf(one.name, one.name, one, (_host_of(one), one.bootstrap_port)) for one in self.prefill)
        decode = tuple(NamedHalf(one.name, one.name, one) for one in self.decode)
        return Sides(self.region, self.revision, prefill, decode)

    def handovers(self) -> dict[str, Handover]:
        """By engine."""
        told = {one.name: Handover(self.transfer, one.bootstrap_port) for one in self.prefill}
        return told | {one.name: Handover(self.transfer, None) for one in self.decode}

    @model_validator(mode="after")
    def _any_works_with_any(self) -> Self:
        for prefill in self.prefill:
            for decode in self.decode:
                _check_scales(prefill, decode)
                _check_ranks(prefill, decode)
        return self

    @model_validator(mode="after")
    def _a_side_is_of_one_make(self) -> Self:
        """What a prompt's pages were computed with must not depend on who was free: tenants are told, caches keyed."""
        for side, halves in (("prefill", self.prefill), ("decode", self.decode)):
            other = next((one for one in halves if one.weights != halves[0].weights), None)
            if other is not None:
                raise ValueError(f"weights differ between {halves[0].name} and {other.name} on the {side} side")
        return self

    @model_validator(mode="after")
    def _bootstraps_apart(self) -> Self:
        places: dict[tuple[str, int], str] = {}
        for one in self.prefill:
            place = _host_of(one), one.bootstrap_port
            if (other := places.setdefault(place, one.name)) != one.name:
                raise ValueError(f"bootstrap_port: {other} and {one.name} are both at {place[0]}:{place[1]}")
        return self


def _host_of(engine: Engine) -> str:
    host = engine.launch.host if engine.launch is not None else engine.url.host if engine.url is not None else None
    assert host, "an engine is launched or at a URL"
    return host


def _check_scales(prefill: Engine, decode: Engine) -> None:
    """SGLang's handshake compares dtype and page size, not scales: unequal ones garble the cache silently."""
    one, other = prefill.weights.kv_scales_digest, decode.weights.kv_scales_digest
    if one != other:
        raise ValueError(f"kv_scales_digest differs: prefill has {one}, decode has {other}")


def _check_ranks(prefill: Engine, decode: Engine) -> None:
    """Each rank of decode gets its pages from one rank of each prefill half, and no rank of prefill stands idle."""
    if decode.ranks % prefill.ranks:
        raise ValueError(
            f"data_parallel is {decode.ranks} on the decode side, which is no multiple of prefill's {prefill.ranks}"
        )
