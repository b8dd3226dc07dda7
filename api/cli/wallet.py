"""`pagegate wallet`: an account's money: how it pays, what it has, and deeds on it. Thin: billing/ledger/wallet.py's.

The service notices a deed within a second.
"""

import time
from typing import Annotated, Any

import typer

from api.cli.accounts import AccountId
from api.cli.session import AsJson, Session, open_session, parse_time, print_record, print_rows, time_text
from billing.ledger.payers import AccountMode, HoldMode
from billing.ledger.statement import StatementLine, read_statement
from billing.ledger.wallet import Booked, Wallets, WalletView
from billing.money import parse_usd, usd_decimal
from tenancy import provisioning

app = typer.Typer(help="Look at an account's money, and move it.", no_args_is_help=True)

AmountUsd = Annotated[str, typer.Argument(help="Decimal USD, such as 12.50.", show_default=False)]
IdempotencyKey = Annotated[str, typer.Option(help="Names this deed: doing it again books nothing.", show_default=False)]
Memo = Annotated[str | None, typer.Option(help="One line that stays with it.")]


@app.command("show")
def show_command(account_id: AccountId, *, as_json: AsJson = False) -> None:
    """Show what an account has, what it owes, and its grants."""
    with open_session() as session:
        _print(_wallets(session, account_id).show(account_id), as_json=as_json)


@app.command("mode")
def mode_command(
    account_id: AccountId,
    mode: Annotated[AccountMode, typer.Argument(help="Pay from what it has, or by invoice up to its credit limit.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Set how an account pays from now on."""
    with open_session() as session:
        wallets = _wallets(session, account_id)
        wallets.set_mode(account_id, mode)
        _print(wallets.show(account_id), as_json=as_json)


@app.command("hold-mode")
def hold_mode_command(
    account_id: AccountId,
    hold_mode: Annotated[HoldMode, typer.Argument(help="clamp: shorter answers rather than refusals near the floor.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Set what becomes of requests that may cost more than the account has left."""
    with open_session() as session:
        wallets = _wallets(session, account_id)
        wallets.set_hold_mode(account_id, hold_mode)
        _print(wallets.show(account_id), as_json=as_json)


@app.command("top-up")
def top_up_command(
    account_id: AccountId,
    amount: AmountUsd,
    *,
    idempotency_key: IdempotencyKey,
    memo: Memo = None,
    as_json: AsJson = False,
) -> None:
    """Book money that came in."""
    with open_session() as session:
        booked = _wallets(session, account_id).top_up(
            account_id, _nano(amount), idempotency_key=idempotency_key, memo=memo
        )
    _print_booked(booked, as_json=as_json)


@app.command("pay")
def pay_command(
    account_id: AccountId,
    amount: AmountUsd,
    *,
    idempotency_key: IdempotencyKey,
    memo: Memo = None,
    as_json: AsJson = False,
) -> None:
    """Book money that came in for an invoice: it lessens what the account owes."""
    with open_session() as session:
        booked = _wallets(session, account_id).pay(
            account_id, _nano(amount), idempotency_key=idempotency_key, memo=memo
        )
    _print_booked(booked, as_json=as_json)


@app.command("grant")
def grant_command(
    account_id: AccountId,
    amount: AmountUsd,
    *,
    idempotency_key: IdempotencyKey,
    priority: Annotated[int, typer.Option(help="The lowest is used first.")] = 0,
    expires: Annotated[str | None, typer.Option(help="ISO 8601, UTC.", show_default="never")] = None,
    memo: Memo = None,
    as_json: AsJson = False,
) -> None:
    """Give money that is used before the wallet's own."""
    with open_session() as session:
        booked = _wallets(session, account_id).grant(
            account_id,
            _nano(amount),
            idempotency_key=idempotency_key,
            priority=priority,
            expires_at_ns=None if expires is None else parse_time(expires),
            memo=memo,
        )
    _print_booked(booked, as_json=as_json)


@app.command("reverse")
def reverse_command(
    account_id: AccountId,
    source: Annotated[str, typer.Argument(help="Of a transaction in the statement, such as usage:REQUEST_ID.")],
    *,
    memo: Memo = None,
    as_json: AsJson = False,
) -> None:
    """Take a transaction back: refund a request, undo a top-up or a grant."""
    with open_session() as session:
        booked = _wallets(session, account_id).reverse(account_id, source, memo=memo)
    _print_booked(booked, as_json=as_json)


@app.command("statement")
def statement_command(
    account_id: AccountId,
    *,
    limit: Annotated[int, typer.Option(min=1, max=1_000)] = 50,
    as_json: AsJson = False,
) -> None:
    """List what was booked on an account, newest first."""
    with open_session() as session:
        provisioning.get_account(session.database, account_id)
        rows = [_line(line) for line in read_statement(session.database, account_id, limit)]
    print_rows("Statement", rows, columns=("posted_at", "source", "entries", "memo"), as_json=as_json)


def _wallets(session: Session, account_id: str) -> Wallets:
    provisioning.get_account(session.database, account_id)
    return Wallets(session.database, clock=time.time_ns)


def _nano(amount: str) -> int:
    try:
        return parse_usd(amount)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _print(view: WalletView, *, as_json: bool) -> None:
    grants = [
        {
            "id": grant.id,
            "amount_usd": usd_decimal(grant.amount_nano),
            "left_usd": usd_decimal(grant.left_nano),
            "priority": grant.priority,
            "expires_at": time_text(grant.expires_at_ns),
        }
        for grant in view.grants
    ]
    record = {
        "account_id": view.account_id,
        "mode": view.mode.value,
        "hold_mode": view.hold_mode.value,
        "wallet_usd": usd_decimal(view.wallet_nano),
        "owed_usd": usd_decimal(view.owed_nano),
        "grants": grants,
    }
    if as_json:
        print_record("Wallet", record, as_json=True)
        return
    del record["grants"]
    print_record("Wallet", record, as_json=False)
    if grants:
        print_rows("Grants", grants, columns=tuple(grants[0]), as_json=False)


def _print_booked(booked: Booked, *, as_json: bool) -> None:
    print_record("Booked", {"source": booked.source, "replayed": booked.replayed}, as_json=as_json)


def _line(line: StatementLine) -> dict[str, Any]:
    return {
        "source": line.source,
        "kind": line.kind,
        "posted_at": time_text(line.posted_at_ns),
        "occurred_at": time_text(line.occurred_at_ns),
        "reverses": line.reverses,
        "memo": line.memo,
        "entries": [f"{account} {usd_decimal(amount)}" for account, amount in line.entries],
    }
