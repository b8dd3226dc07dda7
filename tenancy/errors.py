"""What tenancy refuses.

TenancyError
├── KeyRefused               the credential is no use here (401 in both dialects, but for a missing one)
│   ├── KeyMissing           no credential in the request, or not a bearer token
│   ├── KeyMalformed         wrong alphabet, length or checksum: refused before any look-up
│   ├── KeyUnknown           well formed, never issued
│   ├── KeyExpired  KeyRevoked  KeyDisabled
├── AccessDenied             the credential is good, the thing asked for is not its own (403)
│   ├── AccountSuspended
│   ├── ProjectArchived
│   ├── AccountMismatch      foreign and unknown accounts alike
│   ├── ScopeMissing
│   ├── ModelNotAllowed      the key is for other models
│   └── AddressNotAllowed    the key is for other networks
├── AccountNotFound  KeyNotFound  QuotaNotFound      console and CLI only (404)
├── ProjectNotFound  ServiceAccountNotFound
├── UserNotFound  MemberNotFound
├── NameTaken                an account or a project with that name exists (409)
├── MembershipConflict       an account would be left without an owner (409)
├── SignInRefused            wrong password, unknown user: one answer for all (401)
├── SignInThrottled          too many attempts (429)
├── LinkInvalid              a one-time link that was used, has expired or never was (404)
├── RightMissing             a signed-in user whose role does not allow it (403)
├── QuotaExceeded            429; nothing was consumed by the refusal
│   ├── RateExceeded         requests or tokens in a minute or a day
│   ├── NeuronsExceeded      the day's neurons
│   ├── RequestExceedsQuota  larger than a limit: it can't fit at any time
│   └── ConcurrencyExceeded  no free slot now
├── WallRefused              row-level security can't be put up so: command line only (409)
├── CopyRefused              a database can't be copied there, or was not copied faithfully: command line only (409)
├── TextUnstorable           a text that PostgreSQL can't hold: it has a NUL character (400)
└── TenancyUnavailable       the database does not answer (503; never a 401)
"""

from tenancy.claims import Meter, Standing


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


class ProjectArchived(AccessDenied):
    code = "project_archived"


class AccountMismatch(AccessDenied):
    code = "account_mismatch"


class ScopeMissing(AccessDenied):
    code = "scope_missing"


class ModelNotAllowed(AccessDenied):
    code = "model_not_allowed"


class AddressNotAllowed(AccessDenied):
    code = "address_not_allowed"


class AccountNotFound(TenancyError):
    code = "account_not_found"


class KeyNotFound(TenancyError):
    code = "key_not_found"


class ProjectNotFound(TenancyError):
    code = "project_not_found"


class ServiceAccountNotFound(TenancyError):
    code = "service_account_not_found"


class QuotaNotFound(TenancyError):
    code = "limit_not_found"


class NameTaken(TenancyError):
    code = "name_taken"


class UserNotFound(TenancyError):
    code = "user_not_found"


class MemberNotFound(TenancyError):
    code = "member_not_found"


class MembershipConflict(TenancyError):
    code = "membership_conflict"


class SignInRefused(TenancyError):
    """Says the same of a wrong password, an unknown and a disabled user."""

    code = "sign_in_refused"


class SignInThrottled(TenancyError):
    code = "sign_in_throttled"


class LinkInvalid(TenancyError):
    code = "link_invalid"


class RightMissing(TenancyError):
    code = "right_missing"


class QuotaExceeded(TenancyError):
    """A limit of the account, the key or the model. Nothing was consumed by the refusal.

    standings: every counter that the request would have taken from, as it stands.
    """

    code = "quota_exceeded"

    def __init__(self, message: str, *, standings: tuple[Standing, ...] = (), retry_after_s: int | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.standings = standings


class RateExceeded(QuotaExceeded):
    """Too many requests or tokens for now; the code names the meter, such as `requests_per_minute_exceeded`."""

    code = "rate_exceeded"

    def __init__(
        self,
        message: str,
        *,
        meter: Meter | None = None,
        standings: tuple[Standing, ...] = (),
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message, standings=standings, retry_after_s=retry_after_s)
        if meter is not None:
            self.code = f"{meter}_exceeded"


class NeuronsExceeded(QuotaExceeded):
    """The neurons of the UTC day are used up."""

    code = "neurons_per_day_exceeded"


class RequestExceedsQuota(QuotaExceeded):
    """The request alone is more than a limit: waiting can't help."""

    code = "request_exceeds_quota"


class ConcurrencyExceeded(QuotaExceeded):
    """All of the concurrent slots are taken."""

    code = "concurrency_exceeded"


class WallRefused(TenancyError):
    code = "wall_refused"


class CopyRefused(TenancyError):
    code = "copy_refused"


class TenancyUnavailable(TenancyError):
    """The store of accounts and keys does not answer: said as trouble of ours, never as a bad key."""

    code = "tenancy_unavailable"


class TextUnstorable(TenancyError):
    """Raised for reading, too: nothing is named by such a text."""

    code = "invalid_request"
