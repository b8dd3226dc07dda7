"""Prompts become exact token ids: by the model's own template and tokenizer, wherever the work is done."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from gateway.errors import PromptInvalid, PromptTooLong
from gateway.prompt import PromptReader
from gateway.request import Endpoint
from tests.engines import build_tiny_checkpoint
from tests.gateway.test_engine_call import request

CONTEXT_TOKENS = 2_048


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
def reader(folder: Path, threads: ThreadPoolExecutor) -> PromptReader:
    return PromptReader(folder, threads, inline_chars_max=50)


async def test_messages_go_through_the_template(reader: PromptReader, folder: Path) -> None:
    ids = await reader.read(request(messages=({"role": "user", "content": "hi"},)), context_tokens=CONTEXT_TOKENS)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).decode(ids, skip_special_tokens=False) == text


async def test_a_thread_gives_the_same_ids_as_the_spot(reader: PromptReader, folder: Path) -> None:
    long = "the pages are the scarce thing 🙂 " * 40
    ids = await reader.read(
        request(endpoint=Endpoint.COMPLETIONS, messages=None, prompt=long), context_tokens=CONTEXT_TOKENS
    )
    assert ids == Tokenizer.from_file(str(folder / "tokenizer.json")).encode(long).ids


@pytest.mark.parametrize("chat", [False, True])
async def test_what_is_far_beyond_the_context_is_not_tokenised_to_its_end(
    reader: PromptReader,
    chat: bool,  # noqa: FBT001 - a table's column
) -> None:
    long = "1" * (1 << 20)
    asked = (
        request(messages=({"role": "user", "content": long},))
        if chat
        else request(endpoint=Endpoint.COMPLETIONS, messages=None, prompt=long)
    )
    with pytest.raises(PromptTooLong, match=f"more than {2 * (CONTEXT_TOKENS - 1)} tokens") as refused:
        await reader.read(asked, context_tokens=CONTEXT_TOKENS)
    assert refused.value.limit_tokens == CONTEXT_TOKENS - 1


async def test_what_was_counted_to_its_end_is_told_exactly(reader: PromptReader, folder: Path) -> None:
    long = "1" * 1_000
    tokens = len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(long).ids)
    asked = request(endpoint=Endpoint.COMPLETIONS, messages=None, prompt=long)
    with pytest.raises(PromptTooLong, match=f"The prompt has {tokens} tokens; this model takes at most 15 "):
        await reader.read(asked, context_tokens=16)


async def test_a_long_text_of_few_tokens_is_tokenised_whole(reader: PromptReader, folder: Path) -> None:
    long = "the pages are the scarce thing 🙂 " * 40
    ids = await reader.read(
        request(endpoint=Endpoint.COMPLETIONS, messages=None, prompt=long), context_tokens=len(long) // 8 - 1
    )
    assert ids == Tokenizer.from_file(str(folder / "tokenizer.json")).encode(long).ids


async def test_token_ids_pass_as_they_are_and_unknown_ones_are_refused(reader: PromptReader) -> None:
    assert await reader.read(
        request(endpoint=Endpoint.COMPLETIONS, messages=None, prompt=(5, 6)), context_tokens=CONTEXT_TOKENS
    ) == [5, 6]
    for unknown in (reader.vocabulary_tokens, -1):
        with pytest.raises(PromptInvalid, match="Token ids"):
            await reader.read(
                request(endpoint=Endpoint.COMPLETIONS, messages=None, prompt=(5, unknown)),
                context_tokens=CONTEXT_TOKENS,
            )


@pytest.mark.parametrize("prompt", ["", ()])
async def test_an_empty_prompt_is_refused(reader: PromptReader, prompt: str | tuple[int, ...]) -> None:
    with pytest.raises(PromptInvalid, match="empty"):
        await reader.read(
            request(endpoint=Endpoint.COMPLETIONS, messages=None, prompt=prompt), context_tokens=CONTEXT_TOKENS
        )


async def test_half_a_character_is_refused(reader: PromptReader) -> None:
    with pytest.raises(PromptInvalid, match="surrogate"):
        await reader.read(request(messages=({"role": "user", "content": "\ud83d"},)), context_tokens=CONTEXT_TOKENS)


async def test_a_template_that_refuses_says_why_and_can_change_nothing(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    folder = build_tiny_checkpoint(tmp_path)
    config = folder / "tokenizer_config.json"
    config.write_text('{"chat_template": "{{ raise_exception(\'no tools here\') }}"}')
    strict = PromptReader(folder, threads, inline_chars_max=50)
    with pytest.raises(PromptInvalid, match="no tools here"):
        await strict.read(request(), context_tokens=CONTEXT_TOKENS)
    config.write_text('{"chat_template": "{{ messages.clear() }}{{ \'\'.__class__.__mro__ }}"}')
    nosy = PromptReader(folder, threads, inline_chars_max=50)
    with pytest.raises(PromptInvalid):
        await nosy.read(request(), context_tokens=CONTEXT_TOKENS)


async def test_a_model_without_a_template_takes_prompts_alone(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    folder = build_tiny_checkpoint(tmp_path)
    (folder / "tokenizer_config.json").write_text("{}")
    plain = PromptReader(folder, threads, inline_chars_max=50)
    with pytest.raises(PromptInvalid, match="no chat template"):
        await plain.read(request(), context_tokens=CONTEXT_TOKENS)
    assert await plain.read(
        request(endpoint=Endpoint.COMPLETIONS, messages=None, prompt="hi"), context_tokens=CONTEXT_TOKENS
    )


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}


async def test_a_template_without_tools_is_told_of_them_in_words(reader: PromptReader, folder: Path) -> None:
    asked = request(messages=({"role": "user", "content": "hi"}, CALLED, {"role": "tool", "content": "4"}))
    plain = await reader.read(asked, context_tokens=CONTEXT_TOKENS)
    told = await reader.read(
        replace(asked, sampling={"tools": TOOLS, "tool_choice": "required"}), context_tokens=CONTEXT_TOKENS
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = tokenizer.decode(told, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\n")
    assert '{"name": "f", "parameters": {"type": "object"}}' in text
    for shown in (text, tokenizer.decode(plain, skip_special_tokens=False)):
        assert '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' in shown
        assert "<|im_start|>user\n<tool_response>4</tool_response>" in shown


async def test_a_template_that_knows_tools_renders_them_itself(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    folder = build_tiny_checkpoint(tmp_path)
    template = "{% for tool in tools or [] %}T:{{ tool.function.name }};{% endfor %}{{ messages | length }}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    reader = PromptReader(folder, threads, inline_chars_max=5000)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    told = await reader.read(request(sampling={"tools": TOOLS, "tool_choice": "auto"}), context_tokens=CONTEXT_TOKENS)
    assert tokenizer.decode(told) == "T:f;1"
    assert tokenizer.decode(await reader.read(request(), context_tokens=CONTEXT_TOKENS)) == "1"


async def test_a_template_that_breaks_on_a_turn_is_a_refusal(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    folder = build_tiny_checkpoint(tmp_path)
    template = "{{ tools }}{{ messages[0].tool_calls[0].function.arguments.items() | list + 1 }}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(PromptInvalid, match="template refuses"):
        await PromptReader(folder, threads, inline_chars_max=5000).read(
            request(messages=(CALLED,)), context_tokens=CONTEXT_TOKENS
        )
