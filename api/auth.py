"""From the Authorization header to a Principal that may do what the route does. All routes but health call this."""

import re
from typing import Final

from starlette.requests import Request

from api.client_address import client_address
from api.errors import AccountIdMalformed
from api.sent_headers import sent_headers
from api.services import Services
from tenancy.audit_log import Actor, ActorKind
from tenancy.database import act_for_alone
from tenancy.errors import AccountMismatch, AccountNotFound, AddressNotAllowed, KeyMissing, ScopeMissing
from tenancy.principal import Principal, Scope
from tenancy.rule_setters import RuleSetter

_ACCOUNT_ID: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)


async def bearer(request: Request, services: Services) -> Principal:
    """Whoever holds the key, whatever it may do. Raises KeyMissing and the rest of the KeyRefused family."""
    token = _token(request)
    principal = await services.authenticator.authenticate(token)
    if principal.networks is not None:
        address = client_address(request.scope, services.settings.trusted_proxies)
        if not principal.may_come_from(address):
            raise AddressNotAllowed("Authentication error: this API key may not be used from here.")
    return principal


async def permitted(request: Request, services: Services, scope: Scope) -> Principal:
    """The bearer, if the key has this scope and reaches the account in the path, where there is one.

    In this order: who asks, which account, what for. Raises ScopeMissing, AccountMismatch or AccountIdMalformed.
    """
    principal = await bearer(request, services)
    account_id = request.path_params.get("account_id")
    if account_id is not None:
        own_account(principal, account_id)
    if scope not in principal.scopes:
        raise ScopeMissing(f"Authentication error: this API key lacks the scope {scope.value}.")
    return principal


async def owned(request: Request, services: Services, scope: Scope) -> Principal:
    """As `permitted`, in the console's way: another's account is as unknown as one that does not exist.

    Raises AccountNotFound or ScopeMissing.
    """
    principal = await bearer(request, services)
    if request.path_params["account_id"] != principal.account_id:
        raise AccountNotFound("There is no such account.")
    if scope not in principal.scopes:
        raise ScopeMissing(f"This API key lacks the scope {scope.value}.")
    act_for_alone(principal.account_id)
    return principal


async def governed(request: Request, services: Services) -> tuple[Principal, str]:
    """The bearer, and the account in the path that it governs: its own, or any for an operator's key.

    Whether that account exists is for the deed to say: other keys are told that it does not. Raises AccountNotFound or
    ScopeMissing.
    """
    principal = await bearer(request, services)
    account_id: str = request.path_params["account_id"]
    if Scope.OPERATOR_WRITE not in principal.scopes:
        if account_id != principal.account_id:
            raise AccountNotFound("There is no such account.")
        if Scope.ACCOUNT_ADMIN not in principal.scopes:
            raise ScopeMissing(f"This API key lacks the scope {Scope.ACCOUNT_ADMIN.value}.")
    act_for_alone(account_id)
    return principal, account_id


def key_actor(principal: Principal) -> Actor:
    """Who did it, for the audit log."""
    return Actor(ActorKind.KEY, principal.key_id)


def rule_setter(principal: Principal) -> RuleSetter:
    """In whose name the bearer sets limits and budgets."""
    return RuleSetter.OPERATOR if Scope.OPERATOR_WRITE in principal.scopes else RuleSetter.ACCOUNT


def own_account(principal: Principal, account_id: str) -> None:
    """Foreign and unknown accounts are refused alike: which accounts exist is a secret."""
    if principal.account_id == account_id:
        return
    if not _ACCOUNT_ID.fullmatch(account_id):
        raise AccountIdMalformed
    raise AccountMismatch("Authentication error: this API key does not belong to the account in the path.")


def _token(request: Request) -> str:
    """Exactly one `Authorization: Bearer …`; two could be read two ways by two servers."""
    found = sent_headers(request.scope).get(b"authorization")
    if found is None:
        raise KeyMissing("Missing Authorization header: send 'Authorization: Bearer <API key>'.")
    scheme, _, token = found[0].decode("latin-1").partition(" ")
    token = token.strip()
    if len(found) > 1 or scheme.lower() != "bearer" or not token:
        raise KeyMissing("Unusable Authorization header: send 'Authorization: Bearer <API key>', once.")
    return token
