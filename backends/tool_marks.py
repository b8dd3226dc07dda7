"""How a model whose chat template knows no tools is told of them, and how it writes a call. Pure text, in one place.

The gateway renders prompts with it, grammar.py forces the form, and the local engine reads the calls back. A model
whose template renders tools itself never meets this file.

    <tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
BETWEEN: Final = "\n"
"""What stands between one call and the next."""
NAME_KEY: Final = '{"name": "'
ARGUMENTS_KEY: Final = '", "arguments": '
_RESULT_OPEN: Final = "<tool_response>"
_RESULT_CLOSE: Final = "</tool_response>"

Turn = Mapping[str, Any]


def has_tool_turns(messages: Sequence[Turn]) -> bool:
    """Whether some turn is a call or a call's result."""
    return any("tool_calls" in message or message["role"] in ("tool", "function") for message in messages)


def in_plain_turns(
    messages: Sequence[Turn], tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The same conversation in system, user and assistant turns of text.

    tools: OpenAI's nested form; empty where only earlier calls are to be told. choice: OpenAI's `tool_choice`.
    """
    turns = [_plain(message) for message in messages]
    if not tools:
        return turns
    told = _instructions(tools, choice)
    if turns and turns[0]["role"] == "system":
        told = f"{turns[0]['content']}\n\n{told}"
        turns = turns[1:]
    return [{"role": "system", "content": told}, *turns]


def _instructions(tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any]) -> str:
    listed = "\n".join(json.dumps(_signature(tool["function"]), ensure_ascii=False) for tool in tools)
    if choice == "auto":
        when = "If a function helps to answer, call it; otherwise answer in plain text."
    elif choice == "required":
        when = "Answer by calling one of the functions."
    else:
        assert not isinstance(choice, str), "a choice that is no word names a function"
        when = f"Answer by calling the function {choice['function']['name']}."
    form = f'{OPEN}{NAME_KEY}the function{ARGUMENTS_KEY}{{"its parameters": "their values"}}}}{CLOSE}'
    return (
        f"These functions can be called, each with its parameters as JSON Schema:\n{listed}\n{when} A call is:\n{form}"
    )


def _signature(function: Mapping[str, Any]) -> dict[str, Any]:
    names = ("name", "description", "parameters")
    return {name: function[name] for name in names if function.get(name) is not None}


def _plain(message: Turn) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] in ("tool", "function"):
        return {"role": "user", "content": f"{_RESULT_OPEN}{content}{_RESULT_CLOSE}"}
    calls = [_written(call["function"]) for call in message.get("tool_calls") or ()]
    return {"role": message["role"], "content": BETWEEN.join([content, *calls] if content else calls or [content])}


def _written(function: Mapping[str, Any]) -> str:
    """A call as the model writes it. Arguments that were no JSON stand as the text they are."""
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{OPEN}{NAME_KEY}{function['name']}{ARGUMENTS_KEY}{text}}}{CLOSE}"
