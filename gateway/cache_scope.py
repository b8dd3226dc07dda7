"""Who may share cached prefixes with whom: an opaque name for each account, for engines' caches and for affinity.

The pipeline sends it with every call as `cache_salt`; an engine separates its prefix cache by it, so that one account's
prompts never show as cached in another's. It is a keyed hash: an engine, its logs and its cache events learn nothing of
accounts, and nobody without the secret can name another's scope. Gateways with the same secret give the same names.
"""

import hmac
from functools import lru_cache

_PURPOSE = b"pagegate prefix cache 1"
# Names that are kept: each is asked for with every call, and never changes.
_KEPT_MAX = 4096


class CacheScopes:
    """secret: shared by all gateways of a service, and kept from everybody else."""

    def __init__(self, secret: bytes) -> None:
        # A key of its own, so that what engines are sent can't be compared with anything else made from the secret.
        self._key = hmac.digest(secret, _PURPOSE, "sha256")
        self._kept = lru_cache(_KEPT_MAX)(self._named)

    def of(self, account_id: str, model: str) -> str:
        """The scope of an account's calls to a model, 64 hexadecimal digits."""
        return self._kept(account_id, model)

    def _named(self, account_id: str, model: str) -> str:
        """NUL is in neither id, so no two pairs of them are hashed alike."""
        return hmac.digest(self._key, f"{account_id}\0{model}".encode(), "sha256").hex()
