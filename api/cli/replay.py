"""`pagegate replay`: a public trace through the admission policies, in front of a simulated engine.

Thin: the policies and the simulation are gateway/replay's. Needs no configuration, engine or database.
"""

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from api.cli.replay_days import print_days, print_fleets
from api.cli.session import AsJson, print_record
from gateway.replay.day_trials import DAY_POLICIES, DayTrial, run_day
from gateway.replay.days import Day
from gateway.replay.doors import Promise
from gateway.replay.growing import Starts
from gateway.replay.policies import POLICIES, Trial, run_policy, sustainable_factor
from gateway.replay.profiles import FLEETS, PROFILES
from gateway.replay.report import Report
from gateway.replay.traces import Load, TraceInvalid, read_trace

_SECONDS = ("first_p50_s", "first_p95_s", "first_p99_s", "between_p50_s", "between_p95_s", "between_p99_s")


def replay_command(
    trace: Annotated[Path, typer.Argument(help="Azure's CSV or Mooncake's JSON lines, plain or gzip.")],
    *,
    profile: Annotated[str, typer.Option(help=f"The engine: {', '.join(PROFILES)}.")] = "h200-8b-bf16",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One of {', '.join(POLICIES)}; with --grow-to of {', '.join(DAY_POLICIES)}. May be repeated.",
            show_default="all",
        ),
    ] = None,
    load: Annotated[float, typer.Option(min=0.001, help="Arrivals come so many times as fast.")] = 1.0,
    of_sustainable: Annotated[
        bool, typer.Option("--of-sustainable", help="--load counts in what the oracle sustains for 99 % of requests.")
    ] = False,
    tenants: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    skew: Annotated[float, typer.Option(min=0, help="The k-th tenant's share is 1 / k^skew.")] = 1.0,
    greedy: Annotated[int, typer.Option(min=0, help="Copies of the first tenant's requests beside its own.")] = 0,
    seed: int = 1,
    first_s: Annotated[float, typer.Option(min=0.01, help="The promise: seconds to the first token.")] = 5.0,
    between_ms: Annotated[float, typer.Option(min=0.1, help="The promise: mean milliseconds between tokens.")] = 50.0,
    clip_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="The engine's own reserve, for all policies.", show_default="low behind a forecast"),
    ] = None,
    grow_to: Annotated[
        int | None,
        typer.Option(min=1, help="A day's curve over the trace, before 1 to so many engines; --load is noon's."),
    ] = None,
    day_seconds: Annotated[float, typer.Option(min=60, help="From midnight to midnight.")] = 7200.0,
    night_share: Annotated[float, typer.Option(min=0, max=1, help="The load at midnight, of noon's.")] = 0.1,
    start_seconds: Annotated[float, typer.Option(min=0, help="Until a started engine serves.")] = 60.0,
    fleet: Annotated[
        list[int] | None,
        typer.Option(help=f"Replicas of a whole fleet, one of {', '.join(map(str, FLEETS))}; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare admission policies on a trace: goodput, latencies, waste, fairness, honesty, coverage.

    With --grow-to: hours of engines and promises kept, by what decides how many engines there are. With --fleet: how
    cost and quality of decisions grow, for the trace's sizes before many replicas, regions and gateways.
    """
    policies = POLICIES if grow_to is None else DAY_POLICIES
    names = policy or list(policies)
    unknown = sorted(set(names) - set(policies))
    if unknown:
        raise typer.BadParameter(f"no policy {unknown[0]!r}: one of {', '.join(policies)}", param_hint="--policy")
    if strange := sorted(set(fleet or ()) - set(FLEETS)):
        raise typer.BadParameter(
            f"no fleet of {strange[0]}: one of {', '.join(map(str, FLEETS))}", param_hint="--fleet"
        )
    if profile not in PROFILES:
        raise typer.BadParameter(f"no profile {profile!r}: one of {', '.join(PROFILES)}", param_hint="--profile")
    try:
        rows = read_trace(trace)
    except TraceInvalid as error:
        typer.echo(f"pagegate: {error}", err=True)
        raise typer.Exit(1) from error
    if fleet:
        print_fleets(
            rows, fleet, profile, about={"trace": trace.name, "profile": profile, "seed": seed}, as_json=as_json
        )
        return
    promise = Promise(first_s, between_ms / 1000)
    plain = Load(factor=1.0, tenants=tenants, skew=skew, greedy=greedy, seed=seed)
    trial = Trial(rows, plain, PROFILES[profile], promise, clip_tokens)
    factor = load * sustainable_factor(trial) if of_sustainable else load
    if grow_to is not None:
        starts, day = Starts(seconds=start_seconds, seed=seed), Day(length_s=day_seconds, night_share=night_share)
        days = DayTrial(
            rows, replace(plain, factor=factor, returning=0.0), PROFILES[profile], promise, grow_to, day, starts
        )
        about = {"trace": trace.name, "profile": profile, "seed": seed, "load_factor": factor, "grow_to": grow_to}
        print_days([run_day(name, days) for name in names], about, as_json=as_json)
        return
    trial = trial.at(factor)
    reports = [run_policy(name, trial) for name in names]
    if as_json:
        about = {"trace": trace.name, "profile": profile, "seed": seed, "load_factor": factor}
        print_record(
            "Replay",
            {**about, "promise": asdict(promise), "policies": [asdict(each) for each in reports]},
            as_json=True,
        )
        return
    _print_table(reports, f"{trace.name} × {factor:.2f} on {profile}, seed {seed}")


def _print_table(reports: list[Report], title: str) -> None:
    """A line for each figure, a column for each policy: the figures are many and the policies few."""
    table = Table(title=title)
    table.add_column("figure")
    for each in reports:
        table.add_column(each.policy, justify="right")
    for name in (field.name for field in fields(Report) if field.name != "policy"):
        table.add_row(name, *(_text(name, getattr(each, name)) for each in reports))
    Console().print(table)


def _text(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if name in _SECONDS:
        return f"{value:.4f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
