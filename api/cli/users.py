"""`pagegate users`, `members` and `audit`: who may sign in, as what, and who changed what.

The deeds are tenancy/people.py's. A password is asked for at the terminal or read from standard input, never given as
an argument: others see those.
"""

import sys
import time
from typing import Annotated, Any

import typer

from api.cli.accounts import AccountId
from api.cli.session import AsJson, Session, open_session, print_record, print_rows, time_text
from api.console.audit import entry_fields, user_fields, verdict_fields
from tenancy import audit_log, people
from tenancy.audit_log import COMMAND_LINE
from tenancy.passwords import Passwords
from tenancy.roles import Role
from tenancy.sign_in import password_fault
from tenancy.users import Member, User

app = typer.Typer(help="Add and change the users of the dashboard.", no_args_is_help=True)
members_app = typer.Typer(help="Say who is a member of an account, and as what.", no_args_is_help=True)
audit_app = typer.Typer(help="Read and check the log of every change.", no_args_is_help=True)

Email = Annotated[str, typer.Argument(help="The address a user signs in with.", show_default=False)]
RoleName = Annotated[Role, typer.Argument(help="What a member may do; the README has the table.")]


@app.command("list")
def list_command(*, as_json: AsJson = False) -> None:
    """List all users."""
    with open_session() as session:
        rows = [user_fields(user) for user in people.list_users(session.database)]
    columns = ("id", "email", "name", "operator", "disabled", "has_password")
    print_rows("Users", rows, columns=columns, as_json=as_json)


@app.command("add")
def add_command(
    email: Email,
    *,
    name: Annotated[str, typer.Option(help="How the dashboard greets them.")],
    operator: Annotated[bool, typer.Option(help="Sees the whole service.")] = False,
    password: Annotated[bool, typer.Option(help="Ask for a password; without one, a one-time link lets in.")] = False,
    as_json: AsJson = False,
) -> None:
    """Add a user, who is no member of any account yet."""
    password_hash = _new_hash() if password else None
    with open_session() as session:
        user = people.add_user(
            session.database,
            email=email,
            name=name,
            password_hash=password_hash,
            operator=operator,
            by=COMMAND_LINE,
            clock=time.time_ns,
        )
    print_record("User", user_fields(user), as_json=as_json)


@app.command("set-password")
def set_password_command(email: Email) -> None:
    """Set a password, asked for or read from standard input. All sessions of the user end."""
    password_hash = _new_hash()
    with open_session() as session:
        user = people.find_user(session.database, email)
        people.set_password(session.database, user.id, password_hash, by=COMMAND_LINE, clock=time.time_ns)


@app.command("disable")
def disable_command(email: Email, *, as_json: AsJson = False) -> None:
    """Let a user in no more; running sessions end at once."""
    _change(email, as_json=as_json, disabled=True)


@app.command("enable")
def enable_command(email: Email, *, as_json: AsJson = False) -> None:
    """Let a disabled user in again."""
    _change(email, as_json=as_json, disabled=False)


@app.command("set-operator")
def set_operator_command(
    email: Email, *, on: Annotated[bool, typer.Option("--on/--off")] = True, as_json: AsJson = False
) -> None:
    """Make a user an operator, who sees the whole service, or one no more."""
    _change(email, as_json=as_json, operator=on)


@members_app.command("list")
def list_members_command(account_id: AccountId, *, as_json: AsJson = False) -> None:
    """List an account's members."""
    with open_session() as session:
        rows = [_member_fields(member) for member in people.list_members(session.database, account_id)]
    print_rows("Members", rows, columns=("user_id", "email", "name", "role"), as_json=as_json)


@members_app.command("set")
def set_member_command(account_id: AccountId, email: Email, role: RoleName) -> None:
    """Make a user a member of an account, or change what a member may do."""
    with open_session() as session:
        _set_member(session, account_id, email, role)


@members_app.command("remove")
def remove_member_command(account_id: AccountId, email: Email) -> None:
    """End a membership; the user and its other memberships stay."""
    with open_session() as session:
        _set_member(session, account_id, email, None)


@audit_app.command("list")
def list_audit_command(
    *,
    account: Annotated[str | None, typer.Option(help="Only what is about this account.", show_default="all")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000)] = 50,
    as_json: AsJson = False,
) -> None:
    """Show the newest entries of the audit log."""
    with open_session() as session:
        rows = [entry_fields(entry) for entry in audit_log.read_audit_log(session.database, account, limit)]
    columns = ("number", "at", "actor", "action", "subject", "detail")
    print_rows("Audit log", rows, columns=columns, as_json=as_json)


@audit_app.command("verify")
def verify_command(
    *,
    known: Annotated[
        str | None, typer.Option(help="NUMBER:HASH as an earlier run printed it; it must still stand.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check that no entry was changed, removed or put in between. Exit code 1 if one was."""
    with open_session() as session:
        verdict = audit_log.verify(session.database, None if known is None else _noted(known))
    print_record("Audit log", verdict_fields(verdict), as_json=as_json)
    if verdict.broken:
        raise typer.Exit(1)


def _noted(text: str) -> tuple[int, str]:
    number, _, entry_hash = text.partition(":")
    if not (number.isascii() and number.isdigit() and len(entry_hash) == 64):
        raise typer.BadParameter("Write NUMBER:HASH, as `audit verify` prints its head.")
    return int(number), entry_hash


def _change(email: str, *, as_json: bool, **values: bool) -> None:
    with open_session() as session:
        user: User = people.find_user(session.database, email)
        changed = people.change_user(session.database, user.id, **values, by=COMMAND_LINE, clock=time.time_ns)
    print_record("User", user_fields(changed), as_json=as_json)


def _set_member(session: Session, account_id: str, email: str, role: Role | None) -> None:
    user = people.find_user(session.database, email)
    people.set_member(session.database, account_id, user.id, role, by=COMMAND_LINE, clock=time.time_ns)


def _new_hash() -> str:
    if sys.stdin.isatty():
        password = typer.prompt("Password", hide_input=True, confirmation_prompt=True)
    else:
        password = sys.stdin.readline().rstrip("\n")
    fault = password_fault(password)
    if fault is not None:
        raise typer.BadParameter(fault)
    passwords = Passwords()
    try:
        return passwords.hash_now(password)
    finally:
        passwords.close()


def _member_fields(member: Member) -> dict[str, Any]:
    return {
        "user_id": member.user.id,
        "email": member.user.email,
        "name": member.user.name,
        "role": member.role.value,
        "created_at": time_text(member.user.created_at_ns),
    }
