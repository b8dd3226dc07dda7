"""Why a request went where it went: what was predicted when it came, beside what then was.

Filled in along the way by pipeline.py and run.py; an answer carries it where the client asks, and each log line of a
generating request does. Says nothing of other tenants' requests.
"""

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final


@dataclass(slots=True)
class Decision:
    """verdict: fits_now, fits_later (it waited), or refused. prefill: the half that computed its prompt, where that is
    another engine than its replica. predicted_wait_s, …_p90_s: at arrival. Seconds, tokens.

    None: it never came to that, or not yet.
    """

    verdict: str | None = None
    refused: str | None = None
    predicted_wait_s: float | None = None
    predicted_wait_p90_s: float | None = None
    waited_s: float | None = None
    kept_place: bool = False
    replica: str | None = None
    prefill: str | None = None
    region: str | None = None
    prompt_tokens: int | None = None
    expected_cached_tokens: int | None = None
    cached_tokens: int | None = None
    predicted_first_token_s: float | None = None
    first_token_s: float | None = None

    def known(self) -> dict[str, Any]:
        """What is known by now, times to the millisecond."""
        return {
            name: int(value * 1000 + 0.5) / 1000 if type(value) is float else value
            for name, value in zip(_NAMES, _values_of(self), strict=True)
            if value is not None and value is not False
        }


_NAMES: Final = Decision.__slots__
_values_of: Final = attrgetter(*_NAMES)
