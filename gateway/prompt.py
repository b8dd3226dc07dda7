"""Renders the chat template and tokenises, once, so that prompt counts are exact and the engine sees the same ids.

Called by pipeline.py. Short prompts are done on the spot (tens of microseconds); long ones in a thread, because the
tokenizer releases the interpreter there and the event loop goes on.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from backends.tool_marks import has_tool_turns, in_plain_turns
from gateway.errors import PromptInvalid
from gateway.overlong import refuse_overlong
from gateway.request import GenerationRequest
from gateway.segments import SegmentTokenizer

# In place of a user's words where only the template's own are of interest.
_STAND_IN = "\x00words\x00"
# A template names few attributes; one that makes names up is asked about each of them.
_SAFE_KNOWN_MAX = 1024


@dataclass(frozen=True, slots=True)
class Tooled:
    """A conversation in which tools can be called, or were."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    choice: str | Mapping[str, Any]


Prompt = str | Sequence[Mapping[str, Any]] | Tooled


class PromptReader:
    """One model's template and tokenizer. `threads` is shared by all models of the process; its maker closes it.

    folder: holds tokenizer.json and tokenizer_config.json (with chat_template, or chat_template.jinja beside it).
    Raises OSError or ValueError if they are missing or unreadable.
    """

    def __init__(self, folder: Path, threads: ThreadPoolExecutor, *, inline_chars_max: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocabulary_tokens: int = self._tokenizer.get_vocab_size()
        config = json.loads((folder / "tokenizer_config.json").read_text())
        template = config.get("chat_template")
        beside = folder / "chat_template.jinja"
        if template is None and beside.exists():
            template = beside.read_text()
        self._template = _compile(template) if template else None
        self._knows_tools = template is not None and _knows_tools(template)
        self._specials = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
        self._chats = SegmentTokenizer(self._tokenizer)
        self._chats.learn(self._probes(), without=_STAND_IN)
        self._threads = threads
        self._inline_chars_max = inline_chars_max

    async def read(self, request: GenerationRequest, *, context_tokens: int) -> list[int]:
        """The prompt's token ids. Raises PromptInvalid if it can't be rendered, is empty, or names unknown ids, and
        PromptTooLong where it is far beyond the model's context: whether it fits otherwise is admission.py's.

        `logit_bias` names ids as well, and is checked here for the same reason: only the tokenizer knows them.
        """
        if any(int(token) >= self.vocabulary_tokens for token in request.sampling.get("logit_bias") or ()):
            raise PromptInvalid(f"logit_bias: token ids must lie in 0..{self.vocabulary_tokens - 1}.")
        if isinstance(request.prompt, tuple):
            ids = list(request.prompt)
            if any(not 0 <= token < self.vocabulary_tokens for token in ids):
                raise PromptInvalid(f"Token ids must lie in 0..{self.vocabulary_tokens - 1}.")
        elif request.prompt is not None:
            ids = await self._encode_somewhere(request.prompt, len(request.prompt), context_tokens)
        else:
            messages = request.messages or ()
            tools = request.sampling.get("tools")
            size = sum(len(message.get("content") or "") for message in messages)
            if tools or has_tool_turns(messages):
                size += len(json.dumps([tools, [message.get("tool_calls") for message in messages]]))
                choice = request.sampling.get("tool_choice", "auto")
                ids = await self._encode_somewhere(Tooled(messages, tools or [], choice), size, context_tokens)
            else:
                ids = await self._encode_somewhere(messages, size, context_tokens)
        if not ids:
            raise PromptInvalid("The prompt is empty.")
        return ids

    def tokens_of(self, text: str) -> int:
        """Of a text that the model wrote, in the fewest tokens."""
        return len(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    async def _encode_somewhere(self, prompt: Prompt, size: int, context_tokens: int) -> list[int]:
        if size <= self._inline_chars_max:
            return self._encode(prompt, context_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: self._encode(prompt, context_tokens))

    def _encode(self, prompt: Prompt, context_tokens: int) -> list[int]:
        try:
            text = prompt if isinstance(prompt, str) else self._render(prompt)
            # A template writes its own special tokens; a raw prompt gets those that the tokenizer's settings add.
            encode = self._encode_raw if isinstance(prompt, str) else self._chats.encode
            refuse_overlong(text, context_tokens - 1, lambda piece: len(encode(piece)))
            return encode(text)
        except TypeError:  # what the tokenizer raises for a string that has no UTF-8
            raise PromptInvalid("The prompt holds half of a surrogate pair, which is not Unicode text.") from None

    def _encode_raw(self, text: str) -> list[int]:
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=True)[0].ids

    def _render(self, prompt: Sequence[Mapping[str, Any]] | Tooled) -> str:
        if self._template is None:
            raise PromptInvalid("This model has no chat template: send `prompt` instead of `messages`.")
        values: dict[str, Any] = {"messages": prompt}
        if isinstance(prompt, Tooled):
            values = self._with_tools(prompt)
        try:
            return str(self._template.render(add_generation_prompt=True, **values, **self._specials))
        except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise PromptInvalid(f"The model's chat template refuses these messages: {error}") from error

    def _with_tools(self, prompt: Tooled) -> dict[str, Any]:
        """What the template renders: tools in its own way where it knows them, in words where it does not."""
        if not self._knows_tools:
            return {"messages": in_plain_turns(prompt.messages, prompt.tools, prompt.choice)}
        return {"messages": prompt.messages, **({"tools": prompt.tools} if prompt.tools else {})}

    def _probes(self) -> Iterator[str]:
        """Conversations that show what the template writes around any words."""
        user, system, assistant = ({"role": role, "content": _STAND_IN} for role in ("user", "system", "assistant"))
        for turns in ((user,), (system, user, assistant, user)):
            with suppress(PromptInvalid):  # a template may refuse a role, or there is none
                yield self._render(turns)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The library asks at each rendering whether an attribute is safe; it follows from an object's type and a name."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        self._safe: dict[tuple[type, str], bool] = {}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        found = self._safe.get((type(obj), attr))
        if found is None:
            found = super().is_safe_attribute(obj, attr, value)
            if len(self._safe) < _SAFE_KNOWN_MAX:
                self._safe[type(obj), attr] = found
        return found


def _knows_tools(template: str) -> bool:
    return "tools" in find_undeclared_variables(_Sandbox().parse(template))


def _compile(template: str) -> Any:
    """The template is the checkpoint's, not ours: it runs sandboxed and can change nothing it is given."""
    environment = _Sandbox()
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment.globals["raise_exception"] = refuse
    compiled = environment.from_string(template)
    compiled.globals = dict(compiled.globals)  # jinja's chain of maps is walked at each rendering, key by key
    return compiled


def _token_text(token: Any) -> str:
    if isinstance(token, dict):
        return str(token.get("content", ""))
    return str(token or "")
