import random
from typing import Any

import pytest
import torch

from backends.local.engine import PagesWanted
from backends.local.errors import StartError
from backends.local.precision import KVPrecision
from backends.local.sequence import Bootstrap, FinishReason
from backends.local.settings import Role
from tests.backends.local.conftest import StartTiny
from tests.engines import IM_END

PROMPT = [1, 50, 60, 70, 200, 9, 300]


def prompts(count: int, longest: int = 60) -> list[list[int]]:
    source = random.Random(9)
    return [[source.randrange(3, 384) for _ in range(source.randint(1, longest))] for _ in range(count)]


def outputs(tiny_engine: StartTiny, given: dict[str, Any] | None = None, **shape: Any) -> list[list[int]]:
    tiny = tiny_engine(**shape)
    sequences = [tiny.submit(prompt, 40, seed=at, **(given or {})) for at, prompt in enumerate(prompts(10))]
    tiny.drain()
    return [sequence.tokens[sequence.prompt_tokens :] for sequence in sequences]


@pytest.mark.load
@pytest.mark.parametrize(
    "given", [{}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "presence_penalty": 1.0}]
)
def test_pool_size_chunks_and_batches_change_no_output(tiny_engine: StartTiny, given: dict[str, Any]) -> None:
    ample = outputs(tiny_engine, given)
    alone = outputs(tiny_engine, given, running=1)
    chopped = outputs(tiny_engine, given, chunk=7)
    assert ample == alone == chopped


@pytest.mark.load
def test_with_an_fp8_cache_chunks_and_batches_change_no_output_either(tiny_engine: StartTiny) -> None:
    fp8: dict[str, Any] = {"kv_cache_dtype": KVPrecision.FP8_E4M3}
    ample = outputs(tiny_engine, **fp8)
    assert ample == outputs(tiny_engine, running=1, **fp8) == outputs(tiny_engine, chunk=7, **fp8)
    assert ample != outputs(tiny_engine), "what is read is what was quantised, the prompt's own keys included"


def test_the_same_bytes_hold_more_tokens_in_fp8(tiny_engine: StartTiny) -> None:
    wide = tiny_engine(pages=100).engine.allocator.total_tokens
    narrow = tiny_engine(pages=100, kv_cache_dtype=KVPrecision.FP8_E4M3).engine.allocator.total_tokens
    assert narrow == wide * 16 * 8 // (16 + 1) // 16 * 16


def test_the_pool_can_be_sized_in_tokens(tiny_engine: StartTiny) -> None:
    assert tiny_engine(max_total_tokens=100).engine.allocator.total_tokens == 96
    with pytest.raises(StartError, match="max-total-tokens"):
        tiny_engine(max_total_tokens=15)


def test_a_tiny_pool_retracts_and_produces_the_same_text_once(tiny_engine: StartTiny) -> None:
    ample = outputs(tiny_engine, {"temperature": 0.8})
    tiny = tiny_engine(pages=8)
    sequences = [tiny.submit(prompt, 40, seed=at, temperature=0.8) for at, prompt in enumerate(prompts(10))]
    tiny.drain()
    assert tiny.engine.totals.retractions > 3
    assert [sequence.tokens[sequence.prompt_tokens :] for sequence in sequences] == ample
    for sequence, output in zip(sequences, ample, strict=True):
        counts = [event.completion_tokens for event in tiny.events if event.rid == sequence.rid]
        assert counts == list(range(1, 41)), "every token is reported once, in order"
        assert tiny.text(sequence) == tiny.decode(output)
    assert tiny.engine.totals.prompt_tokens == sum(len(prompt) for prompt in prompts(10)), "recomputing is not counted"
    assert tiny.engine.totals.generated_tokens == 400


def test_it_stops_at_the_model_s_own_end_and_does_not_show_it(tiny_engine: StartTiny) -> None:
    tiny = tiny_engine()
    sequence = tiny.submit(PROMPT, logit_bias=((IM_END, 100.0),), stop_token_ids={IM_END})
    tiny.drain()
    assert sequence.finish is not None
    assert (sequence.finish.reason, sequence.finish.matched_stop) == (FinishReason.STOP, IM_END)
    assert sequence.completion_tokens == 1
    assert tiny.text(sequence) == ""


def test_it_stops_at_its_limit(tiny_engine: StartTiny) -> None:
    tiny = tiny_engine()
    sequence = tiny.submit(PROMPT, 5)
    tiny.drain()
    assert sequence.finish is not None
    assert sequence.finish.reason is FinishReason.LENGTH
    assert sequence.completion_tokens == 5


def test_a_stop_string_ends_it_at_the_token_that_completes_it(tiny_engine: StartTiny) -> None:
    tiny = tiny_engine()
    free = tiny.submit(PROMPT, 20)
    tiny.drain()
    text = tiny.text(free)
    stop = text[5:8]
    stopped = tiny.submit(PROMPT, 20, (stop,))
    tiny.drain()
    assert stopped.finish is not None
    assert stopped.finish.matched_stop == stop
    assert tiny.text(stopped) == text[: text.find(stop)]
    produced = stopped.tokens[stopped.prompt_tokens :]
    assert stop in tiny.decode(produced)
    assert stop not in tiny.decode(produced[:-1])


def test_an_abort_frees_its_pages_at_once_and_leaves_the_others(tiny_engine: StartTiny) -> None:
    tiny = tiny_engine(running=2)
    victim, other, waiting = (tiny.submit(PROMPT, 30, rid=rid) for rid in ("aa", "bb", "ab"))
    for _ in range(4):
        tiny.step()
    used = tiny.engine.scheduler.held_pages
    events = tiny.engine.abort(lambda sequence: sequence.rid.startswith("a"))
    assert [(event.rid, event.finish and event.finish.reason) for event in events] == [("aa", "abort"), ("ab", "abort")]
    assert [event.completion_tokens for event in events] == [4, 0]
    assert tiny.engine.scheduler.held_pages < used
    tiny.engine.check_integrity()
    tiny.drain()
    assert other.completion_tokens == 30
    assert victim.pages == waiting.pages == []


def test_no_logit_is_ever_nan(tiny_engine: StartTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_engine(pages=8)
    sampler = tiny.engine._sampler
    original, seen = sampler.sample, []

    def watch(logits: torch.Tensor, sequences: Any) -> Any:
        seen.append(bool(logits.isfinite().all()))
        return original(logits, sequences)

    monkeypatch.setattr(sampler, "sample", watch)
    for prompt in prompts(6):
        tiny.submit(prompt, 30)
    tiny.drain()
    assert seen
    assert all(seen)


def test_times_of_first_and_later_tokens_are_told(tiny_engine: StartTiny) -> None:
    tiny = tiny_engine()
    tiny.submit(PROMPT, 3)
    tiny.drain()
    first, *later = tiny.events
    assert first.first_token_seconds is not None
    assert first.gap_seconds is None
    assert [(event.first_token_seconds, event.gap_seconds) for event in later] == [(None, 1.0), (None, 1.0)]


def test_an_identical_prompt_of_the_same_scope_is_computed_once_and_gives_the_same_text(
    tiny_engine: StartTiny,
) -> None:
    tiny = tiny_engine()
    prompt = prompts(1, 60)[0] * 3
    first = tiny.submit(prompt, 20, cache_scope="a")
    tiny.drain()
    second, stranger = tiny.submit(prompt, 20, cache_scope="a"), tiny.submit(prompt, 20, cache_scope="b")
    tiny.drain()
    found = (len(prompt) - 1) // 16 * 16
    assert (first.cached_tokens, second.cached_tokens, stranger.cached_tokens) == (0, found, 0)
    assert first.tokens == second.tokens == stranger.tokens
    assert {event.cached_tokens for event in tiny.events if event.rid == second.rid} == {found}
    assert tiny.engine.totals.cached_tokens == found


def test_the_next_turn_of_a_conversation_finds_the_answer_before_it(tiny_engine: StartTiny) -> None:
    tiny = tiny_engine()
    first = tiny.submit(PROMPT, 40)
    tiny.drain()
    second = tiny.submit([*first.tokens, 77, 78], 5)
    tiny.drain()
    assert second.cached_tokens == (len(first.tokens) - 1) // 16 * 16
    tiny.engine.flush_cache()
    third = tiny.submit([*first.tokens, 77, 78], 5)
    tiny.drain()
    assert third.cached_tokens == 0
    assert third.tokens == second.tokens


def test_an_engine_that_can_only_wait_for_other_processes_says_so(tiny_engine: StartTiny) -> None:
    tiny = tiny_engine(pages=4, role=Role.DECODE, disable_radix_cache=True)
    sequences = [tiny.sequence(prompts(1, 60)[0][:20] * 2, 5) for _ in range(2)]
    for sequence in sequences:
        sequence.awaits_pages, sequence.bootstrap = True, Bootstrap("here", 1, 1)
        tiny.engine.submit(sequence)

    def step() -> tuple[list[type], bool]:
        return [type(event) for event in tiny.engine.step()], tiny.engine.stalled

    assert step() == ([PagesWanted], False)
    assert step() == ([], True), "the other one has no pages, and nothing runs"
    assert not tiny.engine.idle
    tiny.engine.abort(lambda one: one is sequences[0])
    assert step() == ([PagesWanted], False)
    tiny.engine.abort(lambda one: one is sequences[1])
