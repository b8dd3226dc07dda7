"""What tenancy refuses.

TenancyError
├── KeyRefused               the credential is no use here (401 in both dialects, but for a missing one)
│   ├── KeyMissing           no credential in the request, or not a bearer token
│   ├── KeyMalformed         wrong alphabet, length or checksum: refused before any look-up
│   ├── KeyUnknown           well formed, never issued
│   ├── KeyExpired  KeyRevoked  KeyDisabled
├── AccessDenied             the credential is good, the thing asked for is not its own (403)
│   ├── AccountSuspended
│   ├── AccountMismatch      foreign and unknown accounts alike
│   └── ScopeMissing
├── AccountNotFound  KeyNotFound      console and CLI only (404)
├── NameTaken                an account with that id, or a key with that name, exists (409)
├── ConcurrencyExceeded      no free slot now (429)
└── TenancyUnavailable       the database does not answer (503; never a 401)
"""


class TenancyError(Exception):
    """Base of all tenancy errors: a stable public `code`, a public message, and when a retry may help."""

    code = "tenancy_error"

    def __init__(self, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class KeyRefused(TenancyError):
    """The credential can't be used. The message never holds the credential."""

    code = "invalid_api_key"


class KeyMissing(KeyRefused):
    code = "missing_api_key"


class KeyMalformed(KeyRefused):
    code = "malformed_api_key"


class KeyUnknown(KeyRefused):
    code = "invalid_api_key"


class KeyExpired(KeyRefused):
    code = "expired_api_key"


class KeyRevoked(KeyRefused):
    code = "revoked_api_key"


class KeyDisabled(KeyRefused):
    code = "disabled_api_key"


class AccessDenied(TenancyError):
    """A good credential that does not reach what was asked for."""

    code = "access_denied"


class AccountSuspended(AccessDenied):
    code = "account_suspended"


class AccountMismatch(AccessDenied):
    code = "account_mismatch"


class ScopeMissing(AccessDenied):
    code = "scope_missing"


class AccountNotFound(TenancyError):
    code = "account_not_found"


class KeyNotFound(TenancyError):
    code = "key_not_found"


class NameTaken(TenancyError):
    code = "name_taken"


class ConcurrencyExceeded(TenancyError):
    """All of the account's concurrent slots are taken. Nothing was consumed by the refusal."""

    code = "concurrency_exceeded"


class TenancyUnavailable(TenancyError):
    """The store of accounts and keys does not answer: said as trouble of ours, never as a bad key."""

    code = "tenancy_unavailable"
