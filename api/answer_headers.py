"""The headers that every answer of a generating route carries, streamed or whole, in whichever dialect."""

from api.charged_body import ChargedBody, ignored_headers
from api.rate_limit_headers import rate_limit_headers
from api.sampling import GenerationOptions
from api.tally import cap_header, neurons_header
from gateway.embedding import Embedded
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


def embedded_headers(embedded: Embedded, body: ChargedBody) -> dict[str, str]:
    """The same of vectors."""
    return {
        **neurons_header(embedded.settlement),
        **rate_limit_headers(embedded.standings),
        **ignored_headers(body),
    }
