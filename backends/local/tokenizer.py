"""Text to token ids and token ids to bytes, and the chat template. intake.py calls it off the event loop.

The template comes with the checkpoint: a stranger's program, so it runs in jinja2's sandbox, immutable and without
access to attributes of Python objects.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as RustTokenizer

from backends.local.errors import InvalidRequestError, StartError
from backends.tool_marks import has_tool_turns, in_plain_turns

Message = Mapping[str, Any]


class Tokenizer:
    def __init__(self, folder: Path) -> None:
        try:
            self._rust = RustTokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            raise StartError(f"{folder / 'tokenizer.json'} can't be read: {error}.") from error
        self._config = _read_json(folder / "tokenizer_config.json")
        self._generation = _read_json(folder / "generation_config.json")
        self._template_knows_tools = False
        self._template = self._compile(folder)

    @cached_property
    def token_bytes(self) -> Sequence[bytes]:
        """The bytes that each token shows; special tokens show none."""
        return [b"" if token in self._special_ids else self.token_text(token) for token in range(self.size)]

    @property
    def size(self) -> int:
        return self._rust.get_vocab_size(with_added_tokens=True)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """What ends an answer, by the checkpoint's own word."""
        listed = self._generation.get("eos_token_id")
        if listed is None:
            eos = self._rust.token_to_id(self._special_text("eos_token") or "")
            return frozenset() if eos is None else frozenset({eos})
        return frozenset(listed if isinstance(listed, list) else [listed])

    @cached_property
    def usual_sampling(self) -> Mapping[str, float]:
        """The sampling that the checkpoint recommends; SGLang, too, takes it where a request says nothing."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        return {name: self._generation[name] for name in names if self._generation.get(name) is not None}

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with the marks that the tokenizer itself adds."""
        return list(self._rust.encode(text).ids)

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), choice: str | Message = "auto"
    ) -> list[int]:
        """Ids of a conversation that waits for the assistant; the template writes all marks."""
        return list(self._rust.encode(self.render_chat(messages, tools, choice), add_special_tokens=False).ids)

    def render_chat(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), choice: str | Message = "auto"
    ) -> str:
        """A template that knows no tools is given them in words (backends/tool_marks.py)."""
        if self._template is None:
            raise InvalidRequestError("This model has no chat template; use /v1/completions.")
        if not self._template_knows_tools and (tools or has_tool_turns(messages)):
            messages, tools = in_plain_turns(messages, tools, choice), ()
        marks = {name: self._special_text(name) or "" for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        try:
            more = {"tools": tools} if tools else {}
            text: str = self._template.render(messages=messages, add_generation_prompt=True, **more, **marks)
        except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise InvalidRequestError(f"The chat template refused the messages: {error}") from error
        return text

    def token_text(self, token: int) -> bytes:
        """The bytes of any token, special ones included: how log-probabilities name it."""
        if token >= self.size:
            return b""
        return _shown_bytes(self._rust.id_to_token(token), added=token in self._added)

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._rust.get_added_tokens_decoder())

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(token for token, added in self._rust.get_added_tokens_decoder().items() if added.special)

    def _special_text(self, name: str) -> str | None:
        """Special tokens are written as text or as an object with `content`."""
        value = self._config.get(name)
        return value.get("content") if isinstance(value, dict) else value

    def _compile(self, folder: Path) -> Any:
        source = self._config.get("chat_template")
        separate = folder / "chat_template.jinja"
        if source is None and separate.is_file():
            source = separate.read_text(encoding="utf-8")
        if source is None:
            return None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, autoescape=False, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        try:
            self._template_knows_tools = "tools" in find_undeclared_variables(environment.parse(source))
            return environment.from_string(source)
        except TemplateError as error:
            raise StartError(f"The chat template of {folder} can't be compiled: {error}.") from error


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        loaded: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise StartError(f"{path} is not JSON: {error}.") from error
    return loaded


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, every other byte for a letter above 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return letters | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _shown_bytes(token: str | None, *, added: bool) -> bytes:
    if token is None:
        return b""
    if added or any(letter not in _BYTES for letter in token):
        return token.encode()
    return bytes(_BYTES[letter] for letter in token)
