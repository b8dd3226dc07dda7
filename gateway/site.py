"""One replica as placing.py sees it, and a request that has entered one."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from gateway.forecast import EngineSpeed
from gateway.gate import Gate
from gateway.prefill_half import PrefillHalf, Quote
from gateway.prefixes import Known, Prefixes
from gateway.regions import DEFAULT_REGION, allows
from gateway.want import Want
from tenancy.values import value


class Premises(Protocol):
    """What a replica keeps beside its forecast: pages held by number, and those of the half that computes a prompt."""

    def take(self, want: Want, now: float, half_id: str) -> None:
        """It enters. half_id: the prefill half that computes its prompt; empty where the replica does."""


@dataclass(eq=False, slots=True)
class Site:
    """One replica. open: it takes new requests. on_trial: one at a time, until one has ended well.

    halves: of a replica that only decodes, the open ones that may compute prompts for it; None: it does both.
    away_s: the round trip to its region. share: of what others carry, as much as it may since it came back.
    revision: of the model, that it serves.
    """

    id: str
    gate: Gate
    prefixes: Prefixes
    speed: EngineSpeed
    open: bool = True
    on_trial: bool = False
    premises: Premises | None = None
    region: str = DEFAULT_REGION
    away_s: float = 0.0
    share: float = 1.0
    revision: str = ""
    halves: tuple[PrefillHalf, ...] | None = None

    @property
    def load(self) -> float:
        return self.gate.load


@value
class Placed:
    """A request inside. known: of its prefix when it entered. first_s: predicted then, to its first token. quote: of
    the prefill half that computes its prompt; None where its replica does.
    """

    want: Want
    site: Site
    charged_s: float
    known: Known
    first_s: float
    entered_at: float
    quote: Quote | None = None


def open_to(want: Want, sites: Iterable[Site]) -> list[Site]:
    """Nothing is asked of the others, whatever the request and however full these are."""
    if want.regions is None:
        return [site for site in sites if site.open]
    return [site for site in sites if site.open and allows(want.regions, site.region)]
