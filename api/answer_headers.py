"""The headers that every answer of a generating route carries, streamed or whole, in whichever dialect."""

from api.rate_limit_headers import rate_limit_headers
from api.sampling import GenerationOptions, ignored_headers
from api.tally import cap_header, neurons_header
from gateway.request import Completion
from gateway.stream import Stream


def answer_headers(answer: Completion | Stream, options: GenerationOptions) -> dict[str, str]:
    """What it cost, if it is whole; what max_tokens was lowered to; how the limits stand; what had no effect."""
    return {
        **(neurons_header(answer.settlement) if isinstance(answer, Completion) else {}),
        **cap_header(answer.cap),
        **rate_limit_headers(answer.standings),
        **ignored_headers(options),
    }
