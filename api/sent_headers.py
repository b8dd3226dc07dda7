"""The headers of a request by name, sorted once: half a dozen parts of `api` ask for some, and clients send twenty.

Starlette's own mapping decodes and copies whenever it is asked. Names are lower case, as ASGI has them.
"""

from collections.abc import Mapping

from starlette.types import Scope

_KEY = "pagegate.headers"


def sent_headers(scope: Scope) -> Mapping[bytes, list[bytes]]:
    """Each name's values, in the order in which they were sent."""
    found: dict[bytes, list[bytes]] | None = scope.get(_KEY)
    if found is None:
        found = scope[_KEY] = {}
        for name, value in scope["headers"]:
            found.setdefault(name, []).append(value)
    return found
