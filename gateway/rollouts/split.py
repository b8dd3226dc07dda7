"""Which revision of a model serves a conversation? Pure: by a hash of what stays the same from turn to turn.

Set on a model's fleet while a rollout runs, and asked for each of its requests (gateway/run_want.py). Every gateway
gives the same answer, and a larger share only ever moves conversations from the old revision to the new one.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final

from gateway.request import GenerationRequest
from tenancy.values import value

WHOLE_BP: Final = 10_000
_BITS: Final = 64


@value
class Split:
    """share_bp: hundredths of a percent of conversations that the new revision gets. elsewhere: a request whose
    revision has no room now goes to the other.
    """

    new: str
    old: str
    share_bp: int
    elsewhere: bool

    def revision_of(self, conversation: bytes) -> str:
        # The name is part of it, so that not always the same customers are the first to try what is new.
        digest = blake2b(conversation, digest_size=_BITS // 8, person=b"rollout", key=self.new.encode()[:64]).digest()
        return self.new if int.from_bytes(digest) * WHOLE_BP >> _BITS < self.share_bp else self.old


def conversation_of(request: GenerationRequest) -> bytes:
    """What all turns of a conversation have alike: the account with the session that the client names, else with the
    words that it began with; of a bare prompt, all of it.
    """
    begun: object = request.session
    if not begun:
        begun = request.prompt if request.messages is None else _beginning(request.messages)
    return f"{request.principal.account_id}\0{begun!r}".encode(errors="surrogatepass")


def _beginning(messages: tuple[Mapping[str, Any], ...]) -> list[tuple[object, object]]:
    """Up to the first word of a user."""
    words: list[tuple[object, object]] = []
    for message in messages:
        words.append((message.get("role"), message.get("content")))
        if message.get("role") == "user":
            break
    return words
