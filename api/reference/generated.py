"""What the generating routes answer, whole and streamed, in each dialect. Pure shapes."""

from typing import Final

from api.openai.responses_items import InputItemsQuery
from api.reference.document import Good, Told, answer
from api.reference.errors import GENERATION, KEY, PATH, QUERY, RUNNING, Errors
from api.reference.shapes import (
    COUNT,
    FLAG,
    INTEGER,
    NUMBER,
    TEXT,
    UNIX_SECONDS,
    USD,
    Shape,
    listed,
    one_of,
    or_null,
    record,
    ref,
)
from gateway.errors import AnswerUnknown, BatchesFull, BatchNotFound

_OBJECT: Final[Shape] = {"type": "object"}
_CALLS: Final = listed(
    record(id=TEXT, type={"const": "function"}, function=record(name=TEXT, arguments=TEXT)),
)
_FINISH: Final[Shape] = {"type": ["string", "null"], "examples": ["stop", "length", "tool_calls"]}
_MESSAGE: Final = record(
    {"reasoning_content": TEXT, "tool_calls": _CALLS, "refusal": {"type": "null"}},
    role={"const": "assistant"},
    content=or_null(TEXT),
)
_MODEL_OF: Final = {"id": TEXT, "created": UNIX_SECONDS, "model": TEXT}
_CHAT_CHOICE: Final = record(index=COUNT, message=_MESSAGE, logprobs=or_null(_OBJECT), finish_reason=_FINISH)
_TEXT_CHOICE: Final = record(index=COUNT, text=TEXT, logprobs=or_null(_OBJECT), finish_reason=_FINISH)
_EMBEDDING_USAGE: Final = record(prompt_tokens=COUNT, total_tokens=COUNT, cost=USD)
_RESPONSE_ITEM: Final = record(
    {"role": {"const": "assistant"}, "content": listed(_OBJECT), "summary": listed(_OBJECT), "call_id": TEXT,
     "name": TEXT, "arguments": TEXT},
    id=TEXT,
    type=one_of("message", "reasoning", "function_call"),
    status=one_of("in_progress", "completed", "incomplete"),
)  # fmt: skip
_INPUT_ITEM: Final = record(
    {"role": TEXT, "content": listed(_OBJECT), "summary": listed(_OBJECT), "call_id": TEXT, "name": TEXT,
     "arguments": TEXT, "output": {"anyOf": [TEXT, listed(_OBJECT)]}},
    id=TEXT,
    type=one_of("message", "reasoning", "function_call", "function_call_output"),
    status=TEXT,
)  # fmt: skip

GENERATED_SCHEMAS: Final[dict[str, Shape]] = {
    "Usage": record(
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        total_tokens=COUNT,
        prompt_tokens_details=record(cached_tokens=COUNT),
        completion_tokens_details=record(reasoning_tokens=COUNT),
        cost=USD,
    ),
    "ChatCompletion": record(
        {"system_fingerprint": {"type": "null"}},
        **_MODEL_OF,
        object={"const": "chat.completion"},
        choices={**listed(_CHAT_CHOICE), "minItems": 1},
        usage=ref("Usage"),
    ),
    "ChatCompletionChunk": {
        "description": "One `data:` frame of a stream; the last, without choices, carries usage. `[DONE]` follows.",
        **record(
            {"usage": ref("Usage")},
            **_MODEL_OF,
            object={"const": "chat.completion.chunk"},
            choices=listed(record({"logprobs": or_null(_OBJECT)}, index=COUNT, delta=_OBJECT, finish_reason=_FINISH)),
        ),
    },
    "Completion": record(
        {"system_fingerprint": {"type": "null"}},
        **_MODEL_OF,
        object={"const": "text_completion"},
        choices={**listed(_TEXT_CHOICE), "minItems": 1},
        usage=ref("Usage"),
    ),
    "CompletionChunk": {
        "description": "One `data:` frame of a stream; the last, without choices, carries usage. `[DONE]` follows.",
        **record(
            {"usage": ref("Usage")},
            **_MODEL_OF,
            object={"const": "text_completion"},
            choices=listed(record({"logprobs": or_null(_OBJECT)}, index=COUNT, text=TEXT, finish_reason=_FINISH)),
        ),
    },
    "StreamError": {
        "description": "The last frame of a stream that failed after its first byte; no `[DONE]` follows.",
        **ref("OpenAIError"),
    },
    "Response": record(
        id=TEXT,
        object={"const": "response"},
        created_at=UNIX_SECONDS,
        status=one_of("in_progress", "completed", "incomplete", "failed"),
        error=or_null(record(code=TEXT, message=TEXT)),
        incomplete_details=or_null(record(reason=one_of("max_output_tokens", "content_filter"))),
        instructions=or_null(TEXT),
        max_output_tokens=or_null(INTEGER),
        metadata=_OBJECT,
        model=TEXT,
        output=listed(_RESPONSE_ITEM),
        parallel_tool_calls=FLAG,
        previous_response_id=or_null(TEXT),
        store=FLAG,
        temperature=or_null(NUMBER),
        top_p=or_null(NUMBER),
        truncation={"const": "disabled"},
        usage=or_null(
            record(
                input_tokens=COUNT,
                input_tokens_details=record(cached_tokens=COUNT),
                output_tokens=COUNT,
                output_tokens_details=record(reasoning_tokens=COUNT),
                total_tokens=COUNT,
                cost=USD,
            )
        ),
    ),
    "ResponseEvent": {
        "description": "One `event:` and its `data:`. Sequence numbers have no gaps.",
        **record(
            type=one_of(
                "response.created", "response.in_progress", "response.output_item.added", "response.output_item.done",
                "response.content_part.added", "response.content_part.done", "response.output_text.delta",
                "response.output_text.done", "response.reasoning_text.delta", "response.reasoning_text.done",
                "response.function_call_arguments.delta", "response.function_call_arguments.done",
                "response.completed", "response.incomplete", "response.failed",
            ),
            sequence_number=COUNT,
        ),
    },
    "EmbeddingList": record(
        object={"const": "list"},
        data=listed(
            record(
                object={"const": "embedding"},
                index=COUNT,
                embedding={"anyOf": [listed(NUMBER), {"type": "string", "contentEncoding": "base64"}]},
            )
        ),
        model=TEXT,
        usage=_EMBEDDING_USAGE,
    ),
    "RunResult": {
        "anyOf": [
            record(
                response={"description": "Text; in JSON mode the value itself."},
                tool_calls=listed(record(id=TEXT, name=TEXT, arguments={"type": ["object", "string"]})),
                usage=ref("Usage"),
                **_MODEL_OF,
                object=one_of("chat.completion", "text_completion"),
                choices=listed({"anyOf": [_CHAT_CHOICE, _TEXT_CHOICE]}),
            ),
            record(
                shape={**listed(COUNT), "minItems": 2, "maxItems": 2},
                data=listed(listed(NUMBER)),
                pooling={"const": "mean"},
                usage=_EMBEDDING_USAGE,
            ),
            {"description": "Of requests that may wait.", **record(request_id=TEXT, status=TEXT, model=TEXT)},
            {"description": "Asked after: what they came to.", **record(responses=listed(_OBJECT), usage=_OBJECT)},
            {"description": "What a background run came to.", **record(id=TEXT, state=TEXT)},
        ]
    },
    "RunFrame": {
        "description": "One `data:` frame of a stream; `p` is padding. The last has finish_reason and usage, and "
        "`[DONE]` follows.",
        **record(
            {
                "reasoning_content": TEXT,
                "finish_reason": _FINISH,
                "usage": ref("Usage"),
                "neurons": NUMBER,
                "tool_calls": listed(_OBJECT),
            },
            response=TEXT,
            p=TEXT,
        ),
    },
}  # fmt: skip

_REQUEST_HEADERS: Final = (
    "IdempotencyKey", "SessionAffinity", "RequestTimeout", "MaxAttempts", "RetryDelay", "Backoff", "Explain",
)  # fmt: skip
_ANSWER_HEADERS: Final = {
    "cf-ai-neurons": "Neurons",
    "x-pagegate-max-tokens": "MaxTokens",
    "x-pagegate-limit-reason": "LimitReason",
    "ratelimit": "RateLimit",
    "ratelimit-policy": "RateLimitPolicy",
    "x-ignored-params": "IgnoredParams",
    "cf-aig-step": "Step",
    "cf-aig-model": "ServedModel",
    "x-pagegate-attempts": "Attempts",
    "deprecation": "Deprecation",
    "sunset": "Sunset",
}


def envelope(result: Shape, **more: Shape) -> Shape:
    return record(result=result, success={"const": True}, errors=listed(_OBJECT), messages=listed(_OBJECT), **more)


def _events(frame: str) -> Shape:
    """OpenAPI 3.1 has no words for the frames of an event stream; their schema is named beside it."""
    return {
        "type": "string",
        "description": f"With `stream: true`: server-sent events, each a {frame}; one of StreamError if it fails.",
        "x-event-schema": ref(frame),
    }


def _generating(whole: Shape, frame: str, errors: Errors = ()) -> Told:
    good = Good(
        {"application/json": whole, "text/event-stream": _events(frame)},
        description="The answer, whole or, with `stream: true`, as events.",
        headers=_ANSWER_HEADERS,
    )
    return Told("Inference", (good,), (*GENERATION, *PATH, *errors), headers=_REQUEST_HEADERS)


CHAT: Final = _generating(ref("ChatCompletion"), "ChatCompletionChunk")
COMPLETIONS: Final = _generating(ref("Completion"), "CompletionChunk")
RESPONSES: Final = _generating(ref("Response"), "ResponseEvent", (AnswerUnknown,))
_KEPT: Final[Errors] = (*KEY, *PATH, AnswerUnknown)
KEPT_RESPONSE: Final = Told("Inference", (answer(ref("Response")),), (*_KEPT, *QUERY))
RESPONSE_INPUT: Final = Told(
    "Inference",
    (answer(record(object={"const": "list"}, data=listed(_INPUT_ITEM), first_id=TEXT, last_id=TEXT, has_more=FLAG)),),
    (*_KEPT, *QUERY),
    query=InputItemsQuery,
)
KEPT_RESPONSE_DELETED: Final = Told(
    "Inference", (answer(record(id=TEXT, object={"const": "response.deleted"}, deleted={"const": True})),), _KEPT
)
RUN: Final = _generating(envelope(ref("RunResult")), "RunFrame", (BatchNotFound, BatchesFull))
EMBEDDINGS: Final = Told(
    "Inference",
    (Good({"application/json": ref("EmbeddingList")}, headers=_ANSWER_HEADERS),),
    (*RUNNING, *PATH),
    headers=("IdempotencyKey",),
)
