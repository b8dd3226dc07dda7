"""Workers AI's wire ⇄ the gateway's words, for /ai/run. Pure."""

from typing import Any

import orjson
from pydantic import ValidationError

from api.body import input_invalid
from api.conversation import conversation
from api.errors import InputInvalid, LoraUnsupported, ParameterUnsupported
from api.intake import Arrival, generation_request
from api.tally import usage_object
from api.tool_calls import native_calls, whole_calls
from api.workers_ai.embed import EmbedBody
from api.workers_ai.schemas import NamedRunBody, RunBody
from gateway.request import Completion, Endpoint, GenerationRequest


def run_body(named: NamedRunBody) -> RunBody:
    """What the model reads. Errors name places inside `input`, as they do where the input is the whole body."""
    read = {**(named.model_extra or {}), **named.input}
    if named.options is not None:
        read["options"] = named.options
    try:
        return RunBody.model_validate(read)
    except ValidationError as error:
        raise input_invalid(error) from None


def embed_body(named: NamedRunBody) -> EmbedBody:
    """As run_body, for a model that gives vectors."""
    try:
        return EmbedBody.model_validate({**(named.model_extra or {}), **named.input})
    except ValidationError as error:
        raise input_invalid(error) from None


def run_request(model: str, body: RunBody, arrived: Arrival) -> GenerationRequest:
    """A prompt is one user turn, so that instruct models answer it; `raw` sends it as it is, without a template."""
    if body.asks_for_lora:
        raise LoraUnsupported(model[:200])
    if body.requests is not None:
        raise ParameterUnsupported(("requests",), "several requests are sent with ?queueRequest=true.")
    if body.image is not None:
        raise ParameterUnsupported(("image",), "this model reads text only.")
    if body.streamed and (body.n or 1) > 1:
        raise ParameterUnsupported(("n",), "the frames of this route can't tell several choices apart; don't stream.")
    if body.streamed and body.logprobs:
        raise ParameterUnsupported(("logprobs",), "the frames of this route carry none; don't stream.")
    raw_prompt = body.prompt if body.raw else None
    return generation_request(
        arrived,
        body,
        model=model,
        endpoint=Endpoint.CHAT if raw_prompt is None else Endpoint.COMPLETIONS,
        route="run",
        messages=_messages(body) if raw_prompt is None else None,
        prompt=raw_prompt,
        more_sampling=_logprobs(body, raw=raw_prompt is not None),
    )


def _messages(body: RunBody) -> tuple[dict[str, Any], ...]:
    if (body.prompt is None) == (body.messages is None):
        raise InputInvalid(("prompt",), "give exactly one of prompt and messages.")
    if body.messages is not None:
        return conversation(body.messages)
    return ({"role": "user", "content": body.prompt},)


def _logprobs(body: RunBody, *, raw: bool) -> dict[str, Any]:
    """Chat says it in two fields, completions in one number."""
    if not body.logprobs:
        if body.top_logprobs:
            raise InputInvalid(("top_logprobs",), "needs logprobs: true.")
        return {}
    top = body.top_logprobs or 0
    return {"logprobs": top} if raw else {"logprobs": True, "top_logprobs": top}


def result(request: GenerationRequest, completion: Completion) -> dict[str, Any]:
    """Both shapes in one: `response` as native models give it, and the choices as OpenAI-shaped ones do."""
    chat = request.endpoint is Endpoint.CHAT
    choices = [_choice(choice, chat=chat) for choice in completion.choices]
    first = choices[0]["message"]["content"] if chat else choices[0]["text"]
    return {
        "response": _parsed(first) if "response_format" in request.sampling and first else first or "",
        "tool_calls": native_calls(choices[0]["message"]) if chat else [],
        "usage": usage_object(completion.settlement),
        "id": request.id,
        "object": "chat.completion" if chat else "text_completion",
        "created": completion.created,
        "model": request.model,
        "choices": choices,
    }


def _parsed(text: str) -> Any:
    """In JSON mode the native `response` is the value itself; of an answer that was cut, the text there is."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _choice(choice: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    shaped = {
        "index": choice["index"],
        "logprobs": choice.get("logprobs"),
        "finish_reason": choice.get("finish_reason"),
    }
    if not chat:
        return {**shaped, "text": choice["text"]}
    message: dict[str, Any] = {"role": "assistant", "content": choice["message"].get("content"), "refusal": None}
    reasoning = choice["message"].get("reasoning_content")
    if reasoning:
        message["reasoning_content"] = message["reasoning"] = reasoning  # clients read either
    if choice["message"].get("tool_calls"):
        message["tool_calls"] = whole_calls(choice["message"])
    return {**shaped, "message": message}
