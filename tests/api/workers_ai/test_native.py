"""The native frames say what the chunks say, character for character, and never parse what they need not."""

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from api.workers_ai.native import native_frames, native_frames_with_tools, read_chunk
from tests.fakes import FINISH_CHUNK, ROLE_CHUNK, FakeStream, chunk, content_chunk

ALPHABET = "abdefghijklmnoprstuvxyz1234567890"

any_text = st.text(st.characters(codec="utf-8") | st.sampled_from(list('"\\{}[]:,\n\u2028')), max_size=40)


def chat_chunk(text: str, **fields: object) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None, **fields}
    return orjson.dumps({"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]})


def text_chunk(text: str) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, "matched_stop": None}
    return orjson.dumps({"id": "x", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]})


@given(any_text)
@example('","content":"stolen')
@example('"finish_reason":null')
@example("\\")
@example('\\"')
def test_a_literal_is_what_a_parser_reads(text: str) -> None:
    for payload in (chat_chunk(text), text_chunk(text)):
        literal, finished = read_chunk(payload)
        assert orjson.loads(literal) == text
        assert literal in payload, "the literal is copied"
        assert finished is None


@given(any_text, any_text)
def test_other_texts_of_a_chunk_are_not_taken_for_it(text: str, other: str) -> None:
    logprobs = {"content": [{"token": other, "logprob": -0.1, "bytes": None, "top_logprobs": []}]}
    assert orjson.loads(read_chunk(chat_chunk(text, logprobs=logprobs))[0]) == text
    delta = {"reasoning_content": other, "content": text}
    assert orjson.loads(read_chunk(chat_chunk(text, delta=delta))[0]) == text


@pytest.mark.parametrize(
    ("payload", "text", "finished"),
    [
        (ROLE_CHUNK, "", None),
        (FINISH_CHUNK, "", "stop"),
        (chat_chunk("end", finish_reason="length"), "end", "length"),
        (chat_chunk("", delta={"role": "assistant", "content": None}), "", None),
        (chat_chunk("", delta={}), "", None),
        (b'{"id": "x", "choices": [{"delta": {"content": "spaced"}, "finish_reason": null}]}', "spaced", None),
        (b'{"choices":[]}', "", None),
    ],
)
def test_unusual_chunks_are_parsed(payload: bytes, text: str, finished: str | None) -> None:
    literal, reason = read_chunk(payload)
    assert (orjson.loads(literal), reason) == (text, finished)


def test_escapes_are_copied_as_they_stand() -> None:
    assert read_chunk(content_chunk("\\u0041\\n"))[0] == b'"\\u0041\\n"'


async def frames(stream: FakeStream, *, with_usage: bool = True) -> list[bytes]:
    return [frame async for frame in native_frames(stream, with_usage=with_usage)]  # type: ignore[arg-type]  # a fake


async def test_the_stream_to_the_byte_but_for_padding() -> None:
    sent = await frames(FakeStream(ROLE_CHUNK, content_chunk("北"), content_chunk("1"), FINISH_CHUNK))
    bare = [frame.partition(b',"p":"')[0] for frame in sent]
    assert bare == [
        'data: {"response":"北"'.encode(),
        b'data: {"response":"1"',
        (
            b'data: {"response":"","finish_reason":"stop","usage":{"prompt_tokens":11,"completion_tokens":9,'
            b'"total_tokens":20,"prompt_tokens_details":{"cached_tokens":4},'
            b'"completion_tokens_details":{"reasoning_tokens":0},"cost":"0.00004329"},"neurons":3.9354'
        ),
        b"data: [DONE]\n\n",
    ]


async def test_padding_is_cut_from_the_alphabet_at_random_lengths() -> None:
    sent = await frames(FakeStream(*[content_chunk("x")] * 300, FINISH_CHUNK))
    paddings = [orjson.loads(frame.removeprefix(b"data: "))["p"] for frame in sent[:-1]]
    assert all(padding and ALPHABET.startswith(padding) for padding in paddings)
    assert len({len(padding) for padding in paddings}) > 16
    assert all(frame.endswith(b'"}\n\n') for frame in sent[:-1])


async def test_usage_can_be_declined_and_the_finish_reason_stays() -> None:
    sent = await frames(FakeStream(content_chunk("x"), chunk(b"{}", b'"length"')), with_usage=False)
    last = orjson.loads(sent[-2].removeprefix(b"data: "))
    assert (last["response"], last["finish_reason"]) == ("", "length")
    assert not {"usage", "neurons"} & set(last)


async def test_thoughts_have_frames_of_their_own_before_the_text() -> None:
    thinking = [chat_chunk("", delta={"content": None, "reasoning_content": said}) for said in ("", "Hm, ", 'a "北"\n')]
    says_so = content_chunk('\\"reasoning_content\\":\\"no')
    both = chat_chunk("", delta={"content": "Yes.", "reasoning_content": "So."})
    for form in (native_frames, native_frames_with_tools):
        stream = FakeStream(ROLE_CHUNK, *thinking, both, says_so, FINISH_CHUNK)
        sent = [frame async for frame in form(stream, with_usage=True)]  # type: ignore[arg-type]  # a fake
        told = [orjson.loads(frame.removeprefix(b"data: ")) for frame in sent[:-2]]
        assert [(one.get("reasoning_content"), one["response"]) for one in told] == [
            ("Hm, ", ""),
            ('a "北"\n', ""),
            ("So.", ""),
            (None, "Yes."),
            (None, '"reasoning_content":"no'),
        ]
