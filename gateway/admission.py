"""May it enter at all? Pure arithmetic over plain values: how long a request's output may be, and what never fits.

Called by pipeline.py; knows no clock, socket or engine. A page holds `page_tokens` tokens of KV for all layers. When
and where a request enters is door.py's.
"""

from collections.abc import Mapping
from typing import Any, Final

from billing.price_book import Price
from billing.rating import hold_nano, outputs_within
from gateway.errors import AnswerTooLarge, PromptTooLong
from gateway.request import OutputCap

# A token, its bytes and its log-probability in an engine's JSON: the mean over the vocabulary of the embedded model.
LOGPROB_BYTES: Final = 85


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that hold `tokens` tokens: every size rounds up."""
    return -(-tokens // page_tokens)


def output_cap(
    *,
    requested: int | None,
    prompt_tokens: int,
    output_tokens_max: int,
    context_tokens: int,
    pool_tokens: int,
    prompt_tokens_max: int | None = None,
) -> OutputCap:
    """How many tokens a choice may have: the least of model limit, context and a replica's whole pool.

    An explicit larger request is clamped and marked so. Raises PromptTooLong if the prompt leaves no room for a token,
    or is over prompt_tokens_max, the pool of a pair's prefill half.
    """
    if prompt_tokens_max is not None and prompt_tokens > prompt_tokens_max:
        limit = "the cache of what computes its prompts"
        raise PromptTooLong(prompt_tokens=prompt_tokens, limit_tokens=prompt_tokens_max, limit=limit)
    room = min(context_tokens, pool_tokens) - prompt_tokens
    if room < 1:
        limit = f"its {'context' if context_tokens <= pool_tokens else 'cache'} less one token of output"
        raise PromptTooLong(prompt_tokens=prompt_tokens, limit_tokens=prompt_tokens + room - 1, limit=limit)
    most = min(output_tokens_max, room)
    if requested is None:
        return OutputCap(tokens=most, clamped=False)
    return OutputCap(tokens=min(requested, most), clamped=requested > most)


def refuse_too_large(sampling: Mapping[str, Any], *, outputs: int, bytes_max: int) -> None:
    """Raises AnswerTooLarge where so many outputs come with more log-probabilities than fit into an answer of so many
    bytes. sampling: the engine's fields.
    """
    asked = sampling.get("logprobs")
    if asked is None or asked is False:
        return
    wanted = outputs * (1 + (sampling.get("top_logprobs", 0) if asked is True else asked))
    most = bytes_max // LOGPROB_BYTES
    if wanted > most:
        raise AnswerTooLarge(
            f"This answer may have {wanted} log-probabilities (choices × tokens × alternatives), and one that is not "
            f"streamed has at most {most}. Stream it, or ask for fewer."
        )


def clamped_hold(left_nano: int, *, prompt_tokens: int, choices: int, price: Price) -> int:
    """What to hold of what is left, in nano-USD: as many outputs for each choice as that pays; 0 if not one."""
    outputs = outputs_within(left_nano, prompt_tokens, price)
    if outputs is None or outputs < choices:  # outputs that cost nothing are not what there is too little for
        return 0
    return hold_nano(prompt_tokens, outputs - outputs % choices, price)


def cap_within(held_nano: int, *, prompt_tokens: int, choices: int, price: Price) -> OutputCap:
    """The cap that a clamped hold pays for."""
    outputs = outputs_within(held_nano, prompt_tokens, price)
    assert outputs is not None, "what costs nothing is not clamped"
    assert outputs >= choices, "a clamped hold pays an output of each choice"
    return OutputCap(tokens=outputs // choices, clamped=True, by_money=True)
