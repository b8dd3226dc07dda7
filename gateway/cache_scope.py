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

    def of(self, account_id: str, model: str, weights: str = "") -> str:
        """The scope of an account's calls to a model, 64 hexadecimal digits. weights: what its pages are computed with;
        engines may share a store of pages, and those of other weights would be wrong.
        """
        return self._kept(account_id, model, weights)

    def _named(self, account_id: str, model: str, weights: str) -> str:
        """NUL is in none of them, so no two of their kind are hashed alike."""
        words = (account_id, model, weights) if weights else (account_id, model)
        return hmac.digest(self._key, "\0".join(words).encode(), "sha256").hex()
