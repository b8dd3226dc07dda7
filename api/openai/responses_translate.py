"""The Responses wire ⇄ the gateway's words. Pure: a body to a GenerationRequest, a completion to a response object.

responses_events.py tells the same objects piece by piece; both make them here, so that they can't differ.
"""

from typing import Any, Final

from api.conversation import MESSAGES_MAX, conversation
from api.errors import InputInvalid, ParameterUnsupported
from api.intake import Arrival, generation_request
from api.openai.responses_schemas import ResponsesBody
from api.tally import service_tier_field, usage_object
from api.tool_calls import whole_calls
from gateway.request import Completion, Endpoint, GenerationRequest, Settlement

_ROLES: Final = ("user", "assistant", "system", "developer")
_TEXT_KEYS: Final = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_OTHER_PARTS: Final = frozenset({"input_image", "input_file", "input_audio"})
# The engine's finish reasons that leave an answer incomplete, and what the dialect calls them.
_CUT_SHORT: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}


def responses_request(
    body: ResponsesBody, arrived: Arrival, earlier: list[dict[str, Any]] | None = None
) -> GenerationRequest:
    """A chat for the gateway; a text alone is one user turn, and instructions are system text before all other.

    earlier: items that this goes on from, whose instructions are not among them.
    """
    body.refuse_unserved()
    messages = _messages([*earlier, *input_items(body)] if earlier else body.input)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    return generation_request(
        arrived,
        body,
        model=body.model,
        endpoint=Endpoint.CHAT,
        route="responses",
        messages=conversation(messages),
    )


def input_items(body: ResponsesBody) -> list[dict[str, Any]]:
    return [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input


def answer(request: GenerationRequest, body: ResponsesBody, completion: Completion) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    choice = completion.choices[0]
    finish_reason = choice.get("finish_reason")
    status = status_of(finish_reason)
    output = []
    reasoning = choice["message"].get("reasoning_content")
    if reasoning:
        output.append(reasoning_item(reasoning_id(request.id, 0), [reasoning_part(reasoning)], status="completed"))
    text = choice["message"].get("content") or ""
    calls = whole_calls(choice["message"])
    if text or not calls:
        output.append(message_item(message_id(request.id, len(output)), [text_part(text)], status=status))
    for call in calls:
        function = call["function"]
        made = call_id_of(request.id, len(output))
        output.append(call_item(made, call["id"], function["name"], function["arguments"], status=status))
    return response_object(
        request,
        body,
        completion.created,
        status=status,
        output=output,
        finish_reason=finish_reason,
        settlement=completion.settlement,
    )


def response_object(
    request: GenerationRequest,
    body: ResponsesBody,
    created: int,
    *,
    status: str,
    output: list[dict[str, Any]],
    finish_reason: str | None = None,
    settlement: Settlement | None = None,
    error: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The response at any moment of its life, with what was asked for beside it."""
    return {
        "id": request.id,
        "object": "response",
        "created_at": created,
        "status": status,
        "background": False,
        "error": error,
        "incomplete_details": {"reason": _CUT_SHORT[finish_reason]} if finish_reason in _CUT_SHORT else None,
        "instructions": body.instructions,
        "max_output_tokens": body.output_tokens,
        "metadata": body.metadata or {},
        "model": request.model,
        "output": output,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "store": body.store is True,
        "temperature": body.temperature,
        "text": {"format": body.answer_format[1] or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None if settlement is None else _usage(settlement),
        **service_tier_field(request, settlement),
    }


def status_of(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason in _CUT_SHORT else "completed"


def message_id(request_id: str, index: int) -> str:
    return f"msg_{request_id}-{index}"


def reasoning_id(request_id: str, index: int) -> str:
    return f"rs_{request_id}-{index}"


def call_id_of(request_id: str, index: int) -> str:
    return f"fc_{request_id}-{index}"


def call_item(item_id: str, call_id: str, name: str, arguments: str, *, status: str) -> dict[str, Any]:
    """id: the item's. call_id: the call's, which its result names."""
    return {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def message_item(item_id: str, content: list[dict[str, Any]], *, status: str) -> dict[str, Any]:
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def reasoning_item(item_id: str, content: list[dict[str, Any]], *, status: str) -> dict[str, Any]:
    return {"id": item_id, "type": "reasoning", "status": status, "summary": [], "content": content}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _usage(settlement: Settlement) -> dict[str, Any]:
    usage = usage_object(settlement)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
        "cost": usage["cost"],
    }


def _messages(asked: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(asked, str):
        return [{"role": "user", "content": asked}]
    if len(asked) >= MESSAGES_MAX:  # the instructions are a message more
        raise InputInvalid(("input",), f"must hold fewer than {MESSAGES_MAX} items.")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(asked):
        message = _message(item, index)
        if message is None:
            continue
        if "tool_calls" in message and messages and messages[-1]["role"] == "assistant":
            # What was said and called in one answer is one turn of the model's.
            messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
    if not messages:
        raise InputInvalid(("input",), "must hold at least one message.")
    return messages


def _message(item: dict[str, Any], index: int) -> dict[str, Any] | None:
    """None for what the model does not read again: its own earlier reasoning."""
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role not in _ROLES:
                raise InputInvalid(("input", index, "role"), f"must be one of {', '.join(_ROLES)}.")
            return {"role": role, "content": _text(item.get("content"), ("input", index, "content"))}
        case "reasoning":
            return None
        case "function_call":
            return {"role": "assistant", "content": None, "tool_calls": [_earlier_call(item, index)]}
        case "function_call_output":
            output = item.get("output")
            path = ("input", index, "output")
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(output, path)}
        case "item_reference":
            raise ParameterUnsupported(("input", index), "answers are not kept here; send the item itself.")
        case _:
            raise InputInvalid(("input", index, "type"), "must be message, function_call or function_call_output.")


def _earlier_call(item: dict[str, Any], index: int) -> dict[str, Any]:
    name, arguments = item.get("name"), item.get("arguments")
    for field, value in (("name", name), ("arguments", arguments), ("call_id", item.get("call_id"))):
        if not isinstance(value, str):
            raise InputInvalid(("input", index, field), "must be a string.")
    return {"id": item["call_id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(content: object, path: tuple[str | int, ...]) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputInvalid(path, "must be text or a list of text parts.")
    return "".join(_part_text(part, (*path, at)) for at, part in enumerate(content))


def _part_text(part: object, path: tuple[str | int, ...]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise InputInvalid(path, "must be a text part: {type: 'input_text', text: …}.")
    if kind in _OTHER_PARTS:
        raise ParameterUnsupported(path, "this model reads text only; pictures, sound and files are not served.")
    if kind not in _TEXT_KEYS:
        raise InputInvalid((*path, "type"), "must be 'input_text' or 'output_text'.")
    text = part.get(_TEXT_KEYS[kind])
    if not isinstance(text, str):
        raise InputInvalid((*path, _TEXT_KEYS[kind]), "must be a string.")
    return text
