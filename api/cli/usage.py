"""`pagegate usage`: what an account used and paid, from its usage events. Thin: the queries are billing/store.py's."""

import csv
import sys
import time
from dataclasses import asdict
from typing import Annotated, Any

import typer

from api.cli.accounts import AccountId
from api.cli.session import AsJson, open_session, parse_time, print_record, print_rows, time_text
from billing.money import neurons_decimal, usd_decimal
from billing.rollups import DAY_NS
from billing.store import UsageStore
from billing.summaries import PERIODS_NS, GroupBy, UsageFilter, UsageGroup, UsageTotals
from tenancy import provisioning

app = typer.Typer(help="Look at usage and cost.", no_args_is_help=True)

_DEFAULT_DAYS = 30
_EXPORTED = (
    *("id", "started_at", "ended_at", "key_id", "model", "endpoint", "stream", "outcome", "code", "finish_reason"),
    *("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "usage_source", "price_version"),
    *("cost_nano", "cost_usd", "neurons", "queued_ms", "ttft_ms"),
)


@app.command("show")
def show_command(
    account_id: AccountId,
    *,
    from_time: Annotated[str | None, typer.Option("--from", help="ISO 8601, UTC.", show_default="30 days ago")] = None,
    to_time: Annotated[str | None, typer.Option("--to", help="ISO 8601, exclusive.", show_default="now")] = None,
    group_by: Annotated[GroupBy, typer.Option(help="One row for each.")] = GroupBy.NONE,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    key_id: Annotated[str | None, typer.Option(help="Only this key.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="Only this route: chat, completions or run.")] = None,
    outcome: Annotated[str | None, typer.Option(help="Only what ended so, such as finished.")] = None,
    as_json: AsJson = False,
) -> None:
    """Sum up what began in a period."""
    to_ns = time.time_ns() if to_time is None else parse_time(to_time)
    from_ns = to_ns - _DEFAULT_DAYS * DAY_NS if from_time is None else parse_time(from_time)
    only = UsageFilter(model=model, key_id=key_id, endpoint=endpoint, outcome=outcome)
    with open_session() as session:
        provisioning.get_account(session.database, account_id)
        summary = UsageStore(session.database).usage_summary(account_id, from_ns, to_ns, group_by, only)
    totals = _totals(summary.totals)
    groups = [{group_by.value: _key(group, group_by), **_totals(group.totals)} for group in summary.groups]
    if as_json:
        period = {"from": time_text(from_ns), "to": time_text(to_ns), "group_by": group_by.value}
        print_record("Usage", {"account_id": account_id, **period, "totals": totals, "groups": groups}, as_json=True)
        return
    if groups:
        print_rows("Usage", groups, columns=tuple(groups[0]), as_json=False)
    print_record("Total", totals, as_json=False)


@app.command("request")
def request_command(
    account_id: AccountId,
    request_id: Annotated[str, typer.Argument(help="The answer's id.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Show the record of one request that has ended."""
    with open_session() as session:
        event = UsageStore(session.database).request_record(account_id, request_id)
    record = asdict(event) | {
        "cost_usd": usd_decimal(event.cost_nano),
        "neurons": neurons_decimal(event.neurons_micro),
        "started_at": time_text(event.started_at_ns),
        "ended_at": time_text(event.ended_at_ns),
    }
    print_record("Request", record, as_json=as_json)


@app.command("export")
def export_command(
    account_id: AccountId,
    *,
    from_time: Annotated[str, typer.Option("--from", help="ISO 8601, UTC.", show_default=False)],
    to_time: Annotated[str, typer.Option("--to", help="ISO 8601, exclusive.", show_default=False)],
) -> None:
    """Write one CSV line per request that began in a period, oldest first, to standard output."""
    from_ns, to_ns = parse_time(from_time), parse_time(to_time)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(_EXPORTED)
    with open_session() as session:
        provisioning.get_account(session.database, account_id)
        for event in UsageStore(session.database).requests_between(account_id, from_ns, to_ns):
            row = asdict(event) | {
                "cost_usd": usd_decimal(event.cost_nano),
                "neurons": neurons_decimal(event.neurons_micro),
                "started_at": time_text(event.started_at_ns),
                "ended_at": time_text(event.ended_at_ns),
            }
            writer.writerow([row[name] for name in _EXPORTED])


def _key(group: UsageGroup, group_by: GroupBy) -> str:
    if group_by not in PERIODS_NS:
        return group.key
    moment = time_text(group.starts_at_ns(group_by)) or ""
    return moment[:10] if group_by is GroupBy.DAY else moment


def _totals(totals: UsageTotals) -> dict[str, Any]:
    return {
        "requests": totals.requests,
        "prompt_tokens": totals.prompt_tokens,
        "cached_tokens": totals.cached_tokens,
        "completion_tokens": totals.completion_tokens,
        "reasoning_tokens": totals.reasoning_tokens,
        "cost_nano": totals.cost_nano,
        "cost_usd": usd_decimal(totals.cost_nano),
        "neurons": neurons_decimal(totals.neurons_micro),
    }
