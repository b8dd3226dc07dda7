"""Answers stay inside their grammars, whatever the model would rather say, and neighbours notice nothing."""

import json
from typing import Any

import jsonschema
import pytest

from backends import grammar
from backends.local.errors import InvalidRequestError
from backends.local.guide import Guides
from backends.local.sequence import FinishReason, Sequence
from backends.local.tool_calls import ArgumentsGrew, CallBegan, Said, ToolCallReader
from tests.backends.local.conftest import StartTiny, TinyEngine
from tests.engines import IM_END

VOCABULARY = 384
PROMPT = [1, 50, 60, 70, 200, 9, 300]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["page", "slot"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "parent": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/name"}]},
    },
    "required": ["kind", "count", "tags", "parent"],
    "$defs": {"name": {"type": "string", "maxLength": 8}},
}
TOOLS = [
    {"type": "function", "function": {"name": "set_page", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def guides(tiny_checkpoint: Any) -> Guides:
    return Guides(tiny_checkpoint / "tokenizer.json", VOCABULARY, [IM_END])


def guided(tiny: TinyEngine, guides: Guides, fields: dict[str, Any], **given: Any) -> Sequence:
    limit = given.pop("max_new_tokens", 400)
    sequence = tiny.sequence(PROMPT, limit, stop_token_ids=[IM_END], **given)
    sequence.guide = guides.make(str(grammar.of_fields(fields)))
    tiny.engine.submit(sequence)
    return sequence


def test_random_answers_fit_their_schema(tiny_engine: StartTiny, guides: Guides) -> None:
    tiny = tiny_engine(pages=1024)
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
    sequences = [guided(tiny, guides, form, temperature=1.5, seed=seed) for seed in range(32)]
    tiny.drain()
    texts = [tiny.text(sequence) for sequence in sequences]
    for sequence, text in zip(sequences, texts, strict=True):
        jsonschema.validate(json.loads(text), SCHEMA)
        assert sequence.finish is not None
        assert sequence.finish.reason is FinishReason.STOP
    assert len(set(texts)) > 10, "the model still chooses"


@pytest.mark.load
def test_a_required_call_comes_fifty_times_out_of_fifty(tiny_engine: StartTiny, guides: Guides) -> None:
    tiny = tiny_engine(pages=1024)
    form = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    sequences = [guided(tiny, guides, form, temperature=2.0, seed=seed) for seed in range(50)]
    tiny.drain()
    names = set()
    for sequence in sequences:
        pieces = ToolCallReader().read(tiny.text(sequence))
        assert not any(isinstance(piece, Said) for piece in pieces)
        (began,) = [piece for piece in pieces if isinstance(piece, CallBegan)]
        arguments = json.loads("".join(piece.text for piece in pieces if isinstance(piece, ArgumentsGrew)))
        jsonschema.validate(arguments, SCHEMA if began.name == "set_page" else {"maxProperties": 0})
        names.add(began.name)
    assert names == {"set_page", "now"}


def test_neighbours_of_a_guided_answer_say_what_they_say_alone(tiny_engine: StartTiny, guides: Guides) -> None:
    alone = tiny_engine()
    plain = alone.submit(PROMPT, 30)
    seeded = alone.submit(PROMPT, 30, temperature=1.0, seed=3)
    alone.drain()
    together = tiny_engine()
    sequences = [together.submit(PROMPT, 30), together.submit(PROMPT, 30, temperature=1.0, seed=3)]
    for seed in range(4):
        guided(together, guides, {"regex": "[a-z]{40}"}, temperature=1.0, seed=seed)
    together.drain()
    assert [sequence.tokens for sequence in sequences] == [plain.tokens, seeded.tokens]


def test_an_answer_that_lost_its_pages_goes_on_inside_its_grammar(tiny_engine: StartTiny, guides: Guides) -> None:
    tiny = tiny_engine(pages=12, running=4)
    given: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 100}
    sequences = [guided(tiny, guides, {"regex": "[a-f]{90}"}, seed=seed, **given) for seed in range(4)]
    tiny.drain()
    assert tiny.engine.totals.retractions > 0
    assert all(len(tiny.text(sequence)) == 90 for sequence in sequences)
    assert all(set(tiny.text(sequence)) <= set("abcdef") for sequence in sequences)


def test_greedy_answers_and_log_probabilities_are_held_as_well(tiny_engine: StartTiny, guides: Guides) -> None:
    tiny = tiny_engine()
    greedy = guided(tiny, guides, {"regex": "yes|no"})
    measured = guided(tiny, guides, {"regex": "yes|no"}, top_logprobs=2)
    tiny.drain()
    assert tiny.text(greedy) == tiny.text(measured)
    assert tiny.text(greedy) in ("yes", "no")
    logprobs = [event.logprob for event in tiny.events if event.rid == measured.rid]
    assert all(one is not None and one.logprob < 0 for one in logprobs), "log-probabilities stay the raw logits'"


def test_the_token_limit_cuts_a_guided_answer_like_any_other(tiny_engine: StartTiny, guides: Guides) -> None:
    tiny = tiny_engine()
    sequence = guided(tiny, guides, {"regex": "[a-z]{400}"}, max_new_tokens=5)
    tiny.drain()
    assert sequence.finish is not None
    assert sequence.finish.reason is FinishReason.LENGTH


class _Failing:
    complete = False
    failed = False

    def mask(self, row: Any) -> None:
        pass

    def take(self, token: int) -> None:
        self.failed = True


def test_an_answer_that_cant_be_held_any_more_is_given_up(tiny_engine: StartTiny) -> None:
    tiny = tiny_engine()
    sequence = tiny.sequence(PROMPT, 50)
    sequence.guide = _Failing()
    tiny.engine.submit(sequence)
    tiny.drain()
    assert sequence.finish is not None
    assert sequence.finish.reason is FinishReason.ABORT


def test_a_grammar_that_does_not_compile_is_refused(guides: Guides) -> None:
    with pytest.raises(InvalidRequestError, match="can't be compiled"):
        guides.make("start: nothing")
