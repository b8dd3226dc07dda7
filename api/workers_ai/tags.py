"""`?tags=` of /ai/run: words that Workers AI's clients group their requests by, here as tags that are true.

A word `prod` is what `cf-aig-metadata: {"prod": true}` says, so usage and costs are told by either.
"""

import re
from typing import Final

from starlette.requests import Request

from api.errors import InputInvalid

_WORDS_MAX: Final = 5
_WORD: Final = re.compile(r"[A-Za-z0-9:\-./@]{1,50}")


def query_tags(request: Request) -> dict[str, str]:
    """Given several times or separated by commas; those that are repeated count once. Raises InputInvalid."""
    if b"tags=" not in request.scope["query_string"]:
        return {}
    words = dict.fromkeys(word for given in request.query_params.getlist("tags") for word in given.split(",") if word)
    if len(words) > _WORDS_MAX:
        raise InputInvalid(("tags",), f"must be at most {_WORDS_MAX} words.")
    if not all(_WORD.fullmatch(word) for word in words):
        raise InputInvalid(("tags",), "must be words of 1 to 50 letters, digits, and any of : - . / @.")
    return dict.fromkeys(words, "true")
