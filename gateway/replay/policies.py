"""The policies by name, each run on a fresh engine over fresh requests. Used by the command line and benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from gateway.replay.doors import (
    Door,
    Promise,
    fixed_concurrency,
    open_door,
    reserve_everything,
    thresholds,
)
from gateway.replay.engine import Engine
from gateway.replay.our_door import OurDoor
from gateway.replay.profiles import Profile
from gateway.replay.report import Report, report
from gateway.replay.simulation import Played, play
from gateway.replay.traces import Load, TraceRow, arrange

# The engine is launched with this behind a gateway that forecasts: its own reserve stays small and refuses nobody.
LOW_CLIP_TOKENS = 128
CONCURRENCIES = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
POLICIES = ("ours", "oracle", "open", "fixed", "reserve", "thresholds")


@dataclass(frozen=True, slots=True)
class Trial:
    """What all policies are tried on.

    clip_tokens: the same engine reserve for all; None: SGLang's default for the baselines and a low one for the doors
    that forecast.
    """

    rows: list[TraceRow]
    load: Load
    profile: Profile
    promise: Promise
    clip_tokens: int | None = None

    def at(self, factor: float) -> "Trial":
        """The same at another load."""
        return replace(self, load=replace(self.load, factor=factor))


def run_policy(name: str, trial: Trial) -> Report:
    """Raises ValueError for a name not in POLICIES."""
    if name == "ours":
        return report(name, play_ours(trial), trial.promise)
    if name == "oracle":
        knowing = _play(trial, lambda engine: OurDoor(engine, trial.promise, knows_lengths=True), low_clip=True)
        return report(name, knowing, trial.promise)
    if name == "fixed":
        return max((run_fixed(trial, running_max) for running_max in CONCURRENCIES), key=lambda outcome: outcome.good)
    wait_s = trial.promise.first_s
    doors: dict[str, Callable[[Engine], Door]] = {
        "open": open_door,
        "reserve": lambda engine: reserve_everything(engine, wait_s),
        "thresholds": lambda engine: thresholds(engine, wait_s),
    }
    if name not in doors:
        raise ValueError(f"no policy {name!r}: one of {', '.join(POLICIES)}")
    return report(name, _play(trial, doors[name], low_clip=False), trial.promise)


def play_ours(trial: Trial) -> Played:
    """Our policy, with every request's fate."""
    return _play(trial, lambda engine: OurDoor(engine, trial.promise), low_clip=True)


def run_fixed(trial: Trial, running_max: int) -> Report:
    played = _play(trial, lambda engine: fixed_concurrency(engine, trial.promise.first_s, running_max), low_clip=False)
    return report(f"fixed {running_max}", played, trial.promise)


def sustainable_factor(trial: Trial, *, good_share: float = 0.99, steps: int = 7) -> float:
    """The largest load factor at which the oracle keeps the promise for `good_share` of requests; by bisection."""

    def holds(factor: float) -> bool:
        return run_policy("oracle", trial.at(factor)).good_share >= good_share

    low, high = 0.0, 1.0
    if holds(1.0):
        while high < 1024 and holds(high):
            low, high = high, high * 2
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _play(trial: Trial, make_door: Callable[[Engine], Door], *, low_clip: bool) -> Played:
    profile = trial.profile
    clip = trial.clip_tokens if trial.clip_tokens is not None else LOW_CLIP_TOKENS if low_clip else profile.clip_tokens
    engine = Engine(replace(profile, clip_tokens=clip))
    return play(arrange(trial.rows, trial.load, profile), engine, make_door(engine))
