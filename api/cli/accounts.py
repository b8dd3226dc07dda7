"""`pagegate accounts`: open, look at, limit and suspend accounts. Thin: the deeds are tenancy/provisioning's."""

import time
from typing import Annotated, Any

import typer

from api.cli.session import AsJson, open_session, print_record, print_rows, time_text
from api.console.limits import rule_fields
from billing.money import parse_usd, usd_decimal
from tenancy import provisioning
from tenancy.accounts import Account
from tenancy.claims import Meter
from tenancy.quotas import Plan
from tenancy.rule_setters import RuleSetter

app = typer.Typer(help="Open, limit and suspend accounts.", no_args_is_help=True)

_NO_LIMIT = "none"
_ANY = "any"

MeterName = Annotated[Meter, typer.Argument(help="What is limited.")]
OfKey = Annotated[str | None, typer.Option("--key", help="A key's public id; it and its successors share the limit.")]
OfProject = Annotated[str | None, typer.Option("--project", help="A project's id; the account's for its default one.")]
OfModel = Annotated[str | None, typer.Option("--model", help="A model's id.")]
ModelIds = Annotated[list[str], typer.Argument(help="All that are allowed, or 'any'.", show_default=False)]
AccountId = Annotated[str, typer.Argument(help="Account id: 32 hexadecimal digits.", show_default=False)]
Concurrency = Annotated[str | None, typer.Option(help="Requests at once, or 'none'.", show_default="unchanged")]
CreditLimit = Annotated[
    str | None, typer.Option(help="What it may spend in all, in USD, or 'none'.", show_default="unchanged")
]


@app.command("list")
def list_command(*, as_json: AsJson = False) -> None:
    """List all accounts."""
    with open_session() as session:
        rows = [_fields(account) for account in provisioning.list_accounts(session.database)]
    print_rows(
        "Accounts",
        rows,
        columns=("id", "name", "plan", "suspended", "concurrency", "credit_limit_usd"),
        as_json=as_json,
    )


@app.command("open")
def open_command(
    name: Annotated[str, typer.Argument(help="A name that no other account has.")],
    *,
    concurrency: Concurrency = None,
    credit_limit: CreditLimit = None,
    as_json: AsJson = False,
) -> None:
    """Open an account. Without options it has no limits."""
    with open_session() as session:
        account = provisioning.open_account(
            session.database,
            name,
            concurrency=_concurrency(concurrency),
            credit_limit_nano=_credit_limit(credit_limit),
            clock=time.time_ns,
        )
    _print(account, as_json=as_json)


@app.command("show")
def show_command(account_id: AccountId, *, as_json: AsJson = False) -> None:
    """Show one account."""
    with open_session() as session:
        account = provisioning.get_account(session.database, account_id)
    _print(account, as_json=as_json)


@app.command("suspend")
def suspend_command(account_id: AccountId, *, as_json: AsJson = False) -> None:
    """Refuse the account's requests, within a second, until it is resumed. Running ones end normally."""
    with open_session() as session:
        account = provisioning.set_suspended(session.database, account_id, suspended=True)
    _print(account, as_json=as_json)


@app.command("resume")
def resume_command(account_id: AccountId, *, as_json: AsJson = False) -> None:
    """End a suspension."""
    with open_session() as session:
        account = provisioning.set_suspended(session.database, account_id, suspended=False)
    _print(account, as_json=as_json)


@app.command("set-limits")
def set_limits_command(
    account_id: AccountId,
    *,
    concurrency: Concurrency = None,
    credit_limit: CreditLimit = None,
    as_json: AsJson = False,
) -> None:
    """Change one limit or both; what is not named stays."""
    if concurrency is None and credit_limit is None:
        raise typer.BadParameter("Name --concurrency, --credit-limit or both.")
    with open_session() as session:
        before = provisioning.get_account(session.database, account_id)
        account = provisioning.set_limits(
            session.database,
            account_id,
            concurrency=before.concurrency if concurrency is None else _concurrency(concurrency),
            credit_limit_nano=before.credit_limit_nano if credit_limit is None else _credit_limit(credit_limit),
        )
    _print(account, as_json=as_json)


@app.command("set-plan")
def set_plan_command(
    account_id: AccountId,
    plan: Annotated[Plan, typer.Argument(help="On the free plan a UTC day ends at its free neurons.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Put an account on the free or the paid plan."""
    with open_session() as session:
        account = provisioning.set_plan(session.database, account_id, plan)
    _print(account, as_json=as_json)


@app.command("set-turns")
def set_turns_command(
    account_id: AccountId,
    *,
    tier: Annotated[int | None, typer.Option(help="0 goes before 1, and so on.", show_default="unchanged")] = None,
    weight_percent: Annotated[
        int | None, typer.Option(help="Its part of the turns in its tier; 100 as most.", show_default="unchanged")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Whose requests wait behind whose, and how turns are shared. It holds within a second."""
    if tier is None and weight_percent is None:
        raise typer.BadParameter("Name --tier, --weight-percent or both.")
    with open_session() as session:
        before = provisioning.get_account(session.database, account_id)
        account = provisioning.set_turns(
            session.database,
            account_id,
            tier=before.tier if tier is None else tier,
            weight_percent=before.weight_percent if weight_percent is None else weight_percent,
        )
    _print(account, as_json=as_json)


@app.command("set-regions")
def set_regions_command(
    account_id: AccountId,
    regions: Annotated[list[str], typer.Argument(help="All that are allowed, or 'any'.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Where engines may see the account's prompts. It holds within a second, whatever else is asked for."""
    with open_session() as session:
        chosen = None if regions == [_ANY] else regions
        account = provisioning.set_regions(session.database, account_id, chosen)
    _print(account, as_json=as_json)


@app.command("set-models")
def set_models_command(account_id: AccountId, models: ModelIds, *, as_json: AsJson = False) -> None:
    """All that the account's keys may use, whatever projects and keys say. It holds within a second."""
    with open_session() as session:
        account = provisioning.set_models(session.database, account_id, chosen_models(models))
    _print(account, as_json=as_json)


@app.command("limits")
def limits_command(account_id: AccountId, *, as_json: AsJson = False) -> None:
    """List an account's limits over time. All that match a request apply."""
    with open_session() as session:
        rows = [rule_fields(quota) for quota in provisioning.list_quotas(session.database, account_id)]
    print_rows("Limits", rows, columns=("meter", "limit", "project_id", "key_id", "model", "set_by"), as_json=as_json)


@app.command("set-limit")
def set_limit_command(
    account_id: AccountId,
    meter: MeterName,
    limit: Annotated[int, typer.Argument(help="In whole requests, tokens or neurons.")],
    *,
    key: OfKey = None,
    model: OfModel = None,
    project: OfProject = None,
    as_json: AsJson = False,
) -> None:
    """Limit an account, a project, a key, a model, or the use of a model by one of them. It holds within a second."""
    with open_session() as session:
        quota = provisioning.set_quota(
            session.database, account_id, meter, limit, key_id=key, model=model, project_id=project
        )
    print_record("Limit", rule_fields(quota), as_json=as_json)


@app.command("remove-limit")
def remove_limit_command(
    account_id: AccountId,
    meter: MeterName,
    *,
    key: OfKey = None,
    model: OfModel = None,
    project: OfProject = None,
    set_by: Annotated[
        RuleSetter | None, typer.Option(help="Whose limit.", show_default="the operator's, else the account's own")
    ] = None,
) -> None:
    """Remove a limit that was set."""
    with open_session() as session:
        provisioning.remove_quota(
            session.database, account_id, meter, key_id=key, model=model, project_id=project, set_by=set_by
        )


def chosen_models(models: list[str]) -> list[str] | None:
    """None for any."""
    return None if models == [_ANY] else models


def _concurrency(text: str | None) -> int | None:
    if text is None or text == _NO_LIMIT:
        return None
    if not text.isascii() or not text.isdigit():
        raise typer.BadParameter(f"{text!r} is neither a whole number nor 'none'.")
    return int(text)


def _credit_limit(text: str | None) -> int | None:
    if text is None or text == _NO_LIMIT:
        return None
    try:
        return parse_usd(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _fields(account: Account) -> dict[str, Any]:
    limit_nano = account.credit_limit_nano
    return {
        "id": account.id,
        "name": account.name,
        "created_at": time_text(account.created_at_ns),
        "plan": account.plan.value,
        "suspended": account.suspended,
        "tier": account.tier,
        "weight_percent": account.weight_percent,
        "regions": None if account.regions is None else list(account.regions),
        "models": None if account.models is None else list(account.models),
        "concurrency": account.concurrency,
        "credit_limit_usd": None if limit_nano is None else usd_decimal(limit_nano),
    }


def _print(account: Account, *, as_json: bool) -> None:
    print_record("Account", _fields(account), as_json=as_json)
