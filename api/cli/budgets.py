"""`pagegate budgets`: what may be spent in a period, and by whom. Thin: the rules are billing/budgets.py's."""

import time
from typing import Annotated, Any

import typer

from api.cli.accounts import AccountId
from api.cli.session import AsJson, open_session, parse_time, print_record, print_rows, time_text
from billing.budgets import BudgetPeriod, Budgets, BudgetStanding
from billing.money import parse_usd, usd_decimal
from tenancy import projects, provisioning

app = typer.Typer(help="Set what may be spent in a period.", no_args_is_help=True)


@app.command("list")
def list_command(
    account_id: AccountId,
    *,
    at: Annotated[str | None, typer.Option(help="ISO 8601: the period around it.", show_default="now")] = None,
    as_json: AsJson = False,
) -> None:
    """List an account's budgets and what is spent of them."""
    with open_session() as session:
        provisioning.get_account(session.database, account_id)
        at_ns = None if at is None else parse_time(at)
        rows = [_fields(one) for one in Budgets(session.database, clock=time.time_ns).standings(account_id, at_ns)]
    columns = (
        "id",
        "project_id",
        "key_id",
        "model",
        "end_user",
        "period",
        "limit_usd",
        "spent_usd",
        "hard",
        "to",
        "set_by",
    )
    print_rows("Budgets", rows, columns=columns, as_json=as_json)


@app.command("add")
def add_command(
    account_id: AccountId,
    limit: Annotated[str, typer.Argument(help="Decimal USD.", show_default=False)],
    period: Annotated[BudgetPeriod, typer.Argument(help="UTC calendar days and months.", show_default=False)],
    *,
    key_id: Annotated[
        str | None, typer.Option(help="Only what this key and its successors spend.", show_default="every key")
    ] = None,
    project: Annotated[
        str | None, typer.Option(help="Only what this project spends.", show_default="every project")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.", show_default="every model")] = None,
    end_user: Annotated[
        str | None, typer.Option(help="Only what requests for this end user cost.", show_default="everybody")
    ] = None,
    soft: Annotated[bool, typer.Option("--soft", help="Only report; refuse nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Set a budget. What the current period has spent already counts."""
    try:
        limit_nano = parse_usd(limit)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with open_session() as session:
        provisioning.get_account(session.database, account_id)
        if key_id is not None:
            known = {key.id for key in provisioning.list_keys(session.database, account_id)}
            if key_id not in known:
                raise typer.BadParameter("There is no such key in this account.")
        if project is not None:
            projects.get_project(session.database, account_id, project)
        standing = Budgets(session.database, clock=time.time_ns).add(
            account_id,
            limit_nano,
            period,
            key_id=key_id,
            model=model,
            project_id=project,
            end_user=end_user,
            hard=not soft,
        )
    print_record("Budget", _fields(standing), as_json=as_json)


@app.command("remove")
def remove_command(
    account_id: AccountId,
    budget_id: Annotated[str, typer.Argument(show_default=False)],
    *,
    as_json: AsJson = False,
) -> None:
    """Remove a budget."""
    with open_session() as session:
        Budgets(session.database, clock=time.time_ns).remove(account_id, budget_id)
    print_record("Budget", {"id": budget_id, "removed": True}, as_json=as_json)


def _fields(standing: BudgetStanding) -> dict[str, Any]:
    budget = standing.budget
    total = budget.period is BudgetPeriod.TOTAL
    return {
        "id": budget.id,
        "key_id": budget.key_id,
        "model": budget.model,
        "end_user": budget.end_user,
        "project_id": budget.project_id,
        "period": budget.period.value,
        "limit_usd": usd_decimal(budget.limit_nano),
        "spent_usd": usd_decimal(standing.spent_nano),
        "hard": budget.hard,
        "set_by": budget.set_by.value,
        "from": None if total else time_text(standing.from_ns),
        "to": None if total else time_text(standing.to_ns),
    }
