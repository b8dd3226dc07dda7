"""Which replicas may have something of a request: who is near, and what is forgotten."""

import pytest

from gateway.forecast import EngineSpeed
from gateway.gate import Gate, GateLimits
from gateway.prefixes import Prefixes
from gateway.site import Site
from gateway.want import Want
from gateway.whereabouts import Whereabouts

SPEED = EngineSpeed(prefill_tokens_s=1000.0, step_s=0.01)
LIMITS = GateLimits(prefill_chunk_tokens=8192, running_max=8, engine_clip_tokens=0)


@pytest.fixture
def sites() -> dict[str, Site]:
    return {name: Site(name, Gate(10_000, 16, LIMITS, SPEED), Prefixes(10_000), SPEED) for name in ("a", "b")}


def want(tenant: str = "t", *, blocks: tuple[int, ...] = (), session: str = "") -> Want:
    return Want("r", tenant, "chat", 1000, 1, 10, blocks=blocks, session=session)


def near(whereabouts: Whereabouts, asked: Want, sites: dict[str, Site]) -> list[str]:
    return [site.id for site, _ in whereabouts.near(asked, sites)]


def test_who_has_computed_a_prompt_or_had_a_session_is_near_while_it_is_open(sites: dict[str, Site]) -> None:
    whereabouts = Whereabouts(sessions_max=10)
    whereabouts.note_prompt(want(blocks=(7, 8)), "a")
    whereabouts.note_session(want(session="s"), "b")
    assert near(whereabouts, want(blocks=(7, 9), session="s"), sites) == ["a", "b"]
    assert near(whereabouts, want("another", blocks=(1,), session="s"), sites) == []
    sites["a"].open = False
    assert near(whereabouts, want(blocks=(7,)), sites) == []


def test_a_replica_that_is_gone_is_asked_for_nothing(sites: dict[str, Site]) -> None:
    whereabouts = Whereabouts(sessions_max=10)
    whereabouts.note_prompt(want(blocks=(7,)), "a")
    whereabouts.forget("a")
    assert near(whereabouts, want(blocks=(7,)), sites) == []


def test_the_session_that_was_seen_least_recently_is_forgotten() -> None:
    whereabouts = Whereabouts(sessions_max=2)
    for session in ("one", "two", "one", "three"):
        whereabouts.note_session(want(session=session), "a")
    assert [whereabouts.last_at(want(session=name)) for name in ("one", "two", "three")] == ["a", "", "a"]
