"""What the scripted engine does with the next requests: how fast, how much, and how it fails.

A test sets it on the engine object; a process of its own is sent it as JSON. It knows no HTTP server.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import TypeAdapter


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that is given instead of generating."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Script:
    """Read once when a request arrives, so that a test may change it between requests.

    ttft_s: silence before the first token. itl_ms: between two tokens. text: what every token says; None for numbered
    words. tokens: how many are produced, None for exactly max_tokens. finish_reason: None for `length` at max_tokens
    and `stop` before it. die_after, hang_after, error_after: after so many tokens the connection drops, falls silent,
    or carries an in-band error; at 0 the first two come before any byte of an answer. cut: offsets into the body of a
    streamed answer at which it is split into writes of their own. usage: figures that replace the true ones, by
    SGLang's names and `cached_tokens`. raw: written instead of the events of a stream. loads: `live` figures, the last
    ones for ever (`stale`), or a 503 (`error`); loads_numbers replaces single figures. abort_status: what an abort is
    answered; other than 200, nothing is aborted. memory_s: how long it takes to give its memory up, or to take it back.
    """

    ttft_s: float = 0.0
    itl_ms: float = 0.0
    text: str | None = None
    tokens: int | None = None
    finish_reason: str | None = None
    die_after: int | None = None
    hang_after: int | None = None
    error_after: int | None = None
    cut: tuple[int, ...] = ()
    no_done: bool = False
    no_usage: bool = False
    usage: Mapping[str, int] = field(default_factory=dict)
    refuse: Refusal | None = None
    raw: tuple[bytes, ...] | None = None
    loads: Literal["live", "stale", "error"] = "live"
    loads_numbers: Mapping[str, float] = field(default_factory=dict)
    abort_status: int = 200
    memory_s: float = 0.0
    ready: bool = True


_SCRIPT = TypeAdapter(Script)


def parse_script(body: bytes) -> Script:
    """Reads a script from JSON; what is absent has its default."""
    return _SCRIPT.validate_json(body)
