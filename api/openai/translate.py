"""The OpenAI wire ⇄ the gateway's words. Pure: bodies to GenerationRequest, completions and settlements to answers."""

from typing import Any

from api.conversation import conversation
from api.errors import InputInvalid, ParameterUnsupported
from api.intake import Arrival, generation_request
from api.openai.schemas import ChatBody, CompletionBody
from api.sampling import GenerationOptions
from api.tally import service_tier_field, usage_object
from api.tool_calls import whole_calls
from gateway.request import Completion, Endpoint, GenerationRequest, Settlement


def chat_request(body: ChatBody, arrived: Arrival) -> GenerationRequest:
    _refuse_lora(body)
    return generation_request(
        arrived,
        body,
        model=body.model,
        endpoint=Endpoint.CHAT,
        route="chat",
        messages=conversation(body.messages),
        more_sampling=_chat_logprobs(body),
    )


def completion_request(body: CompletionBody, arrived: Arrival) -> GenerationRequest:
    _refuse_lora(body)
    if body.echo:
        raise ParameterUnsupported(("echo",), "echoing the prompt is not served.")
    if body.suffix:
        raise ParameterUnsupported(("suffix",), "inserting before a suffix is not served.")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ParameterUnsupported(("best_of",), "must be equal to n.")
    return generation_request(
        arrived,
        body,
        model=body.model,
        endpoint=Endpoint.COMPLETIONS,
        route="completions",
        prompt=body.prompt,
        more_sampling=None if body.logprobs is None else {"logprobs": body.logprobs},
    )


def answer(request: GenerationRequest, completion: Completion) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    chat = request.endpoint is Endpoint.CHAT
    choice_object = _chat_choice if chat else _text_choice
    return {
        "id": request.id,
        "object": "chat.completion" if chat else "text_completion",
        "created": completion.created,
        "model": request.model,
        "choices": [choice_object(choice) for choice in completion.choices],
        "usage": usage_object(completion.settlement),
        "system_fingerprint": None,
        **service_tier_field(request, completion.settlement),
    }


def usage_chunk(request: GenerationRequest, created: int, settlement: Settlement) -> dict[str, Any]:
    """The one chunk of a stream that carries usage: the last before [DONE], without choices."""
    return {
        "id": request.id,
        "object": "chat.completion.chunk" if request.endpoint is Endpoint.CHAT else "text_completion",
        "created": created,
        "model": request.model,
        "choices": [],
        "usage": usage_object(settlement),
        **service_tier_field(request, settlement),
    }


def _refuse_lora(body: GenerationOptions) -> None:
    if body.asks_for_lora:
        raise ParameterUnsupported(("lora",), "adapters are not served.")


def _chat_logprobs(body: ChatBody) -> dict[str, Any]:
    if not body.logprobs:
        if body.top_logprobs:
            raise InputInvalid(("top_logprobs",), "needs logprobs: true.")
        return {}
    return {"logprobs": True, "top_logprobs": body.top_logprobs or 0}


def _chat_choice(choice: dict[str, Any]) -> dict[str, Any]:
    """What a message may carry outward; anything else an engine adds stays here."""
    message = choice["message"]
    told: dict[str, Any] = {"role": "assistant", "content": message.get("content"), "refusal": None}
    if message.get("reasoning_content"):
        told["reasoning_content"] = message["reasoning_content"]
    if message.get("tool_calls"):
        told["tool_calls"] = whole_calls(message)
    return {
        "index": choice["index"],
        "message": told,
        "logprobs": choice.get("logprobs"),
        "finish_reason": choice.get("finish_reason"),
    }


def _text_choice(choice: dict[str, Any]) -> dict[str, Any]:
    return {
        "index": choice["index"],
        "text": choice["text"],
        "logprobs": choice.get("logprobs"),
        "finish_reason": choice.get("finish_reason"),
    }
