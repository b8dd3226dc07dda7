"""GET /client/v4/user/tokens/verify and /client/v4/accounts/{account_id}/tokens/verify: is this key any good?"""

from starlette.requests import Request
from starlette.responses import Response

from api.auth import bearer, own_account
from api.errors import TokenInvalid
from api.services import Services
from api.workers_ai.envelope import enveloped
from tenancy.errors import KeyMissing, KeyRefused
from tenancy.principal import Principal


class TokenRoutes:
    """Both routes take both kinds of key, whatever its scopes: which kind one holds is a frequent question."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def verify_user(self, request: Request) -> Response:
        """Whether the key is any good, whosever it is."""
        return _valid(await self._bearer(request))

    async def verify_account(self, request: Request) -> Response:
        """Whether the key is any good, and of this account."""
        principal = await self._bearer(request)
        own_account(principal, request.path_params["account_id"])
        return _valid(principal)

    async def _bearer(self, request: Request) -> Principal:
        try:
            return await bearer(request, self._services)
        except KeyMissing:
            raise
        except KeyRefused as error:
            raise TokenInvalid from error


def _valid(principal: Principal) -> Response:
    return enveloped(
        {"id": principal.key_id, "status": "active"},
        messages=[{"code": 10000, "message": "This API Token is valid and active", "type": None}],
    )
