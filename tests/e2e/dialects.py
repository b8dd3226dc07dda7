"""The routes that generate, each with the body it takes and the words in which it answers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from tests.e2e.service import Service

PROMPT = "Say something."
MESSAGES = [{"role": "user", "content": PROMPT}]


@dataclass(frozen=True)
class Dialect:
    """One route. always_usage: its streams carry usage although nobody asked."""

    name: str
    path: Callable[[Service], str]
    prompt: dict[str, Any]
    names_model: bool
    always_usage: bool
    text_of: Callable[[dict[str, Any]], str]
    usage_of: Callable[[dict[str, Any]], dict[str, Any]]
    delta_of: Callable[[dict[str, Any]], str]
    error_of: Callable[[dict[str, Any]], tuple[str | int | None, str]]

    def body(self, service: Service, **fields: Any) -> dict[str, Any]:
        """A good body of eight tokens; a field given as None is left out."""
        body = {"model": service.model} if self.names_model else {}
        body |= self.prompt | {"max_tokens": 8} | fields
        return {name: value for name, value in body.items() if value is not None}

    def said(self, events: list[bytes]) -> str:
        return "".join(self.delta_of(orjson.loads(event)) for event in events if event != b"[DONE]")


def _account_path(tail: str) -> Callable[[Service], str]:
    return lambda service: f"/client/v4/accounts/{service.account_id}/ai/{tail}"


def _choice_delta(chunk: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def _choice_text(chunk: dict[str, Any]) -> str:
    return "".join(choice["text"] for choice in chunk["choices"])


def _openai_error(body: dict[str, Any]) -> tuple[str | int | None, str]:
    return body["error"]["code"], body["error"]["message"]


def _cloudflare_error(body: dict[str, Any]) -> tuple[str | int | None, str]:
    assert body["success"] is False
    return body["errors"][0]["code"], body["errors"][0]["message"]


CHAT = Dialect(
    name="chat",
    path=lambda _: "/v1/chat/completions",
    prompt={"messages": MESSAGES},
    names_model=True,
    always_usage=False,
    text_of=lambda body: str(body["choices"][0]["message"]["content"]),
    usage_of=lambda body: dict(body["usage"]),
    delta_of=_choice_delta,
    error_of=_openai_error,
)
ACCOUNT_CHAT = Dialect(
    name="account chat",
    path=_account_path("v1/chat/completions"),
    prompt={"messages": MESSAGES},
    names_model=True,
    always_usage=True,
    text_of=CHAT.text_of,
    usage_of=CHAT.usage_of,
    delta_of=_choice_delta,
    error_of=_openai_error,
)
COMPLETIONS = Dialect(
    name="completions",
    path=lambda _: "/v1/completions",
    prompt={"prompt": PROMPT},
    names_model=True,
    always_usage=False,
    text_of=lambda body: str(body["choices"][0]["text"]),
    usage_of=CHAT.usage_of,
    delta_of=_choice_text,
    error_of=_openai_error,
)
RUN = Dialect(
    name="run",
    path=lambda service: _account_path(f"run/{service.model}")(service),
    prompt={"messages": MESSAGES},
    names_model=False,
    always_usage=True,
    text_of=lambda body: str(body["result"]["response"]),
    usage_of=lambda body: dict(body["result"]["usage"]),
    delta_of=lambda frame: str(frame["response"]),
    error_of=_cloudflare_error,
)
DIALECTS = [CHAT, ACCOUNT_CHAT, COMPLETIONS, RUN]


def dialect_name(dialect: Dialect) -> str:
    """The id of a parametrised test."""
    return dialect.name
