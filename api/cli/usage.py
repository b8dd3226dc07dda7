"""`pagegate usage`: what an account used and paid, from its usage events. Thin: the queries are billing/store.py's."""

import csv
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from api.cli.accounts import AccountId
from api.cli.session import AsJson, open_session, parse_time, print_record, print_rows, time_text
from api.settings import load_settings
from billing.attributed_usage import is_attributed
from billing.exports.events import EventFormat, event_line
from billing.exports.focus import COLUMNS, DECIMALS, FocusIssuer, focus_rows
from billing.exports.parquet import write_parquet
from billing.money import neurons_decimal, usd_decimal
from billing.rollups import DAY_NS
from billing.store import UsageEvent, UsageStore
from billing.summaries import PERIODS_NS, GroupBy, UsageFilter, UsageGroup, UsageTotals
from tenancy import provisioning

app = typer.Typer(help="Look at usage and cost.", no_args_is_help=True)

_DEFAULT_DAYS = 30
_EXPORTED_TYPES = {
    **dict.fromkeys(("started_at", "ended_at"), "TIMESTAMPTZ"),
    **dict.fromkeys(("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens"), "BIGINT"),
    **dict.fromkeys(("price_version", "cost_nano", "queued_ms", "ttft_ms", "kv_page_ms"), "BIGINT"),
    "cost_usd": "DECIMAL(38, 9)",
    "neurons": "DECIMAL(38, 6)",
    "stream": "BOOLEAN",
}
_EXPORTED = (
    *("id", "started_at", "ended_at", "key_id", "model", "endpoint", "stream", "outcome", "code", "finish_reason"),
    *("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "usage_source", "price_version"),
    *("cost_nano", "cost_usd", "neurons", "queued_ms", "ttft_ms", "tier", "end_user", "tags"),
    *("kv_page_ms", "deployment", "precisions", "region"),
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
    project: Annotated[str | None, typer.Option(help="Only this project, by its id.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="Only this route: chat, completions or run.")] = None,
    outcome: Annotated[str | None, typer.Option(help="Only what ended so, such as finished.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only this tag, as team=search; whole days.")] = None,
    end_user: Annotated[str | None, typer.Option(help="Only this end user; whole days.")] = None,
    as_json: AsJson = False,
) -> None:
    """Sum up what began in a period."""
    only = UsageFilter(
        model=model,
        key_id=key_id,
        endpoint=endpoint,
        outcome=outcome,
        project_id=project,
        tag=tag,
        end_user=end_user,
    )
    now_ns = time.time_ns()
    if is_attributed(group_by, only):
        now_ns = (now_ns // DAY_NS + 1) * DAY_NS  # they are summed by day: today's whole
    to_ns = now_ns if to_time is None else parse_time(to_time)
    from_ns = to_ns - _DEFAULT_DAYS * DAY_NS if from_time is None else parse_time(from_time)
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
    print_record("Request", _exported(event), as_json=as_json)


class ExportFormat(StrEnum):
    CSV = "csv"
    PARQUET = "parquet"
    FOCUS_CSV = "focus-csv"
    FOCUS_PARQUET = "focus-parquet"
    CLOUDEVENTS = "cloudevents"
    STRIPE = "stripe"


@app.command("export")
def export_command(
    account_id: AccountId,
    *,
    from_time: Annotated[str, typer.Option("--from", help="ISO 8601, UTC.", show_default=False)],
    to_time: Annotated[str, typer.Option("--to", help="ISO 8601, exclusive.", show_default=False)],
    form: Annotated[ExportFormat, typer.Option("--format", help="focus: FOCUS 1.2, by day.")] = ExportFormat.CSV,
    output: Annotated[Path | None, typer.Option(help="A file.", show_default="standard output")] = None,
) -> None:
    """Write what began in a period: a line per request, oldest first, or rows of FOCUS."""
    from_ns, to_ns = parse_time(from_time), parse_time(to_time)
    if output is None and form in {ExportFormat.PARQUET, ExportFormat.FOCUS_PARQUET}:
        raise typer.BadParameter("Parquet needs --output FILE.")
    issuer = FocusIssuer(load_settings().billing.invoice_seller.splitlines()[0])
    with open_session() as session:
        account = provisioning.get_account(session.database, account_id)
        events = UsageStore(session.database).requests_between(account_id, from_ns, to_ns)
        focus = focus_rows(session.database, account_id, from_ns, to_ns, account_name=account.name, issuer=issuer)
        match form:
            case ExportFormat.CSV:
                _write_csv(output, _EXPORTED, map(_exported, events))
            case ExportFormat.FOCUS_CSV:
                _write_csv(output, COLUMNS, focus)
            case ExportFormat.PARQUET:
                assert output is not None, "checked above"
                write_parquet(map(_exported, events), _EXPORTED, _EXPORTED_TYPES, output)
            case ExportFormat.FOCUS_PARQUET:
                assert output is not None, "checked above"
                types = {name: f"DECIMAL(38, {decimals})" for name, decimals in DECIMALS.items()}
                write_parquet(focus, COLUMNS, types, output)
            case _:
                with _opened(output) as file:
                    file.writelines(event_line(event, EventFormat(form.value)).decode() for event in events)


def _write_csv(output: Path | None, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    with _opened(output) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([row[name] for name in columns] for row in rows)


def _opened(output: Path | None) -> AbstractContextManager[TextIO]:
    return nullcontext(sys.stdout) if output is None else output.open("w", newline="", encoding="utf-8")


def _exported(event: UsageEvent) -> dict[str, object]:
    return asdict(event) | {
        "cost_usd": usd_decimal(event.cost_nano),
        "neurons": neurons_decimal(event.neurons_micro),
        "started_at": time_text(event.started_at_ns),
        "ended_at": time_text(event.ended_at_ns),
    }


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
