"""`pagegate keys`: issue, rotate, revoke, disable and enable API keys. Thin: the deeds are tenancy/provisioning's.

A key's text is printed by `issue` and `rotate`, once; no other command can show it.
"""

import time
from typing import Annotated, Any

import typer

from api.cli.accounts import AccountId
from api.cli.session import AsJson, open_session, parse_time, print_record, print_rows, time_text
from tenancy import provisioning
from tenancy.keys import ApiKey, KeyKind
from tenancy.principal import Scope

app = typer.Typer(help="Issue and revoke API keys.", no_args_is_help=True)

KeyId = Annotated[str, typer.Argument(help="The key's public id, as `keys list` shows it.", show_default=False)]


@app.command("list")
def list_command(account_id: AccountId, *, as_json: AsJson = False) -> None:
    """List an account's keys, without their texts."""
    with open_session() as session:
        rows = [_fields(key) for key in provisioning.list_keys(session.database, account_id)]
    columns = ("id", "name", "kind", "hint", "scopes", "state", "expires_at", "last_used_at")
    print_rows("API keys", rows, columns=columns, as_json=as_json)


@app.command("issue")
def issue_command(
    account_id: AccountId,
    *,
    name: Annotated[str, typer.Option(help="What it is for.")],
    kind: Annotated[KeyKind, typer.Option(help="Inference keys can't administer, admin keys can't infer.")] = (
        KeyKind.INFERENCE
    ),
    scope: Annotated[
        list[Scope] | None,
        typer.Option(help="May be given several times.", show_default="all of its kind but an operator's"),
    ] = None,
    expires: Annotated[str | None, typer.Option(help="ISO 8601 time.", show_default="never")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="May be given several times.", show_default="all models")
    ] = None,
    network: Annotated[
        list[str] | None, typer.Option(help="CIDR; may be given several times.", show_default="from anywhere")
    ] = None,
    project: Annotated[
        str | None, typer.Option(help="A project's id.", show_default="the account's default project")
    ] = None,
    service_account: Annotated[
        str | None, typer.Option(help="The id of the program that owns it.", show_default="people use it")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Issue a key and print its text, which nobody can read again."""
    with open_session() as session:
        issued = provisioning.issue_key(
            session.database,
            session.pepper(),
            account_id,
            name=name,
            kind=kind,
            scopes=scope or None,
            expires_at_ns=None if expires is None else parse_time(expires),
            models=model or None,
            networks=network or None,
            project_id=project,
            service_account_id=service_account,
            clock=time.time_ns,
        )
    _print_issued(issued, as_json=as_json)


@app.command("rotate")
def rotate_command(
    account_id: AccountId,
    key_id: KeyId,
    *,
    grace_s: Annotated[int, typer.Option(help="Seconds for which the old key goes on working.")] = 3600,
    as_json: AsJson = False,
) -> None:
    """Issue a key in place of another, which ends after a grace period. Both share their limits."""
    with open_session() as session:
        issued = provisioning.rotate_key(
            session.database, session.pepper(), account_id, key_id, grace_s=grace_s, clock=time.time_ns
        )
    _print_issued(issued, as_json=as_json)


@app.command("revoke")
def revoke_command(account_id: AccountId, key_id: KeyId, *, as_json: AsJson = False) -> None:
    """Revoke a key for good; every process refuses it within a second."""
    with open_session() as session:
        key = provisioning.revoke_key(session.database, account_id, key_id, clock=time.time_ns)
    print_record("API key", _fields(key), as_json=as_json)


@app.command("disable")
def disable_command(account_id: AccountId, key_id: KeyId, *, as_json: AsJson = False) -> None:
    """Refuse a key until it is enabled again."""
    with open_session() as session:
        key = provisioning.set_key_disabled(session.database, account_id, key_id, disabled=True)
    print_record("API key", _fields(key), as_json=as_json)


@app.command("enable")
def enable_command(account_id: AccountId, key_id: KeyId, *, as_json: AsJson = False) -> None:
    """Accept a disabled key again."""
    with open_session() as session:
        key = provisioning.set_key_disabled(session.database, account_id, key_id, disabled=False)
    print_record("API key", _fields(key), as_json=as_json)


def _print_issued(issued: provisioning.IssuedKey, *, as_json: bool) -> None:
    print_record(
        "API key: keep it now, it is not shown again", {"key": issued.text, **_fields(issued.key)}, as_json=as_json
    )


def _fields(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "account_id": key.account_id,
        "name": key.name,
        "project_id": key.project,
        "service_account_id": key.service_account_id,
        "kind": key.kind.value,
        "hint": key.hint,
        "scopes": sorted(scope.value for scope in key.scopes),
        "state": _state(key),
        "created_at": time_text(key.created_at_ns),
        "expires_at": time_text(key.expires_at_ns),
        "revoked_at": time_text(key.revoked_at_ns),
        "last_used_at": time_text(key.last_used_at_ns),
        "lineage_id": key.lineage,
        "models": None if key.models is None else list(key.models),
        "networks": None if key.networks is None else [str(network) for network in key.networks],
    }


def _state(key: ApiKey) -> str:
    if key.revoked_at_ns is not None:
        return "revoked"
    return "disabled" if key.disabled else "enabled"
