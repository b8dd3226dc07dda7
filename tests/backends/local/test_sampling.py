import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.local.detokenizer import TextStream
from backends.local.sampling import CANDIDATES, Sampler
from backends.local.sequence import SamplingParams, Sequence

VOCABULARY = 1000
DRAWS = 4000


def make_sequence(prompt: list[int] | None = None, rid: str = "r", **given: Any) -> Sequence:
    tokens = prompt or [0]
    return Sequence(
        rid=rid,
        prompt_tokens=len(tokens),
        tokens=list(tokens),
        max_new_tokens=100,
        sampling=SamplingParams(**given),
        text=TextStream([]),
    )


def logits_of(probabilities: dict[int, float], vocabulary: int = VOCABULARY) -> Tensor:
    row = torch.full((vocabulary,), -torch.inf)
    for token, probability in probabilities.items():
        row[token] = math.log(probability)
    return row


def draw_many(row: Tensor, **given: Any) -> Counter[int]:
    sampler, sequence = Sampler(len(row)), make_sequence(seed=11, **given)
    return Counter(sampler.sample(row[None], [sequence])[0].token_id for _ in range(DRAWS))


def pick(row: Tensor, sequence: Sequence) -> int:
    return Sampler(len(row)).sample(row[None], [sequence])[0].token_id


SKEWED = {7: 0.5, 3: 0.3, 900: 0.15, 41: 0.05}


@pytest.mark.load
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, [7, 3, 900, 41]),
        ({"top_k": 2}, [7, 3]),
        ({"top_p": 0.5}, [7]),
        ({"top_p": 0.51}, [7, 3]),
        ({"top_p": 0.96}, [7, 3, 900, 41]),
        ({"min_p": 0.2}, [7, 3, 900]),
        ({"min_p": 0.7}, [7]),
        ({"top_p": 0.9, "top_k": 3, "min_p": 0.5}, [7, 3]),
        ({"top_p": 1e-9}, [7]),
        ({"top_k": 1}, [7]),
    ],
)
def test_draws_follow_the_distribution_that_the_filters_leave(given: dict[str, Any], kept: list[int]) -> None:
    drawn = draw_many(logits_of(SKEWED), **given)
    assert set(drawn) == set(kept)
    mass = sum(SKEWED[token] for token in kept)
    for token in kept:
        wanted = SKEWED[token] / mass
        sigma = math.sqrt(wanted * (1 - wanted) / DRAWS)
        assert abs(drawn[token] / DRAWS - wanted) <= 5 * sigma + 1e-9


def test_temperature_sharpens_and_flattens() -> None:
    shares = [draw_many(logits_of(SKEWED), temperature=t)[7] / DRAWS for t in (0.3, 1.0, 3.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.8


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_temperature_zero_is_the_argmax(temperature: float) -> None:
    assert pick(logits_of(SKEWED), make_sequence(temperature=temperature)) == 7


@pytest.mark.load
@pytest.mark.parametrize(
    "given", [{"top_p": 0.999}, {"top_k": CANDIDATES + 50}, {"min_p": 1e-6}, {"top_k": CANDIDATES}]
)
def test_filters_that_keep_more_than_the_short_list_are_exact(given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    row = torch.randn(VOCABULARY) * 0.1
    probabilities, order = row.softmax(-1).double().sort(descending=True, stable=True)
    before = probabilities.cumsum(0) - probabilities
    keep = (
        (before < given.get("top_p", 2.0))
        & (torch.arange(VOCABULARY) < given.get("top_k", VOCABULARY))
        & (probabilities >= probabilities[0] * given.get("min_p", 0.0))
    )
    allowed = set(order[keep].tolist())
    assert len(allowed) >= CANDIDATES
    drawn = set(draw_many(row, **given))
    assert drawn <= allowed
    assert len(drawn) > 0.8 * len(allowed)


def test_equal_seeds_draw_equal_tokens_and_neighbours_do_not_matter() -> None:
    torch.manual_seed(5)
    rows = torch.randn(20, 4, VOCABULARY)
    alone, sampler = make_sequence(seed=42, rid="alone"), Sampler(VOCABULARY)
    wanted = [sampler.sample(step[2:3], [alone])[0].token_id for step in rows]
    mine = make_sequence(seed=42, rid="mine", top_p=1.0)
    crowd = [
        make_sequence(seed=1, rid="a", temperature=0.7, top_p=0.9),
        make_sequence(rid="b", temperature=0.0, top_logprobs=3),
        mine,
        make_sequence(seed=2, rid="c", repetition_penalty=1.3, top_k=400),
    ]
    got = []
    for step in rows:
        sampled = sampler.sample(step, crowd)
        for sequence, one in zip(crowd, sampled, strict=True):
            sequence.tokens.append(one.token_id)
        got.append(sampled[2].token_id)
    assert got == wanted


def test_a_request_without_a_seed_draws_differently_each_time() -> None:
    row = torch.zeros(VOCABULARY)
    runs = [[pick(row, sequence) for _ in range(8)] for sequence in (make_sequence(), make_sequence())]
    assert runs[0] != runs[1]


def test_penalties_weigh_what_was_seen_and_produced() -> None:
    row = torch.zeros(8)
    row[:4] = torch.tensor([3.0, 2.9, 2.8, -1.0])
    sequence = make_sequence([0, 3], temperature=0.0, repetition_penalty=1.5)
    assert pick(row, sequence) == 1, "the prompt counts for repetition"
    sequence = make_sequence([0], temperature=0.0, presence_penalty=0.5)
    assert pick(row, sequence) == 0, "the prompt does not count for presence"
    sequence.tokens.append(0)
    assert pick(row, sequence) == 1
    sequence = make_sequence([5], temperature=0.0, frequency_penalty=0.06)
    sequence.tokens += [0, 0, 0]
    assert pick(row, sequence) == 1
    sequence = make_sequence([5], temperature=0.0, frequency_penalty=0.02)
    sequence.tokens += [0, 0, 0]
    assert pick(row, sequence) == 0


def test_repetition_penalty_lowers_negative_logits_too() -> None:
    row = torch.tensor([-1.0, -1.2])
    assert pick(row, make_sequence([0], temperature=0.0, repetition_penalty=1.5)) == 1


def test_penalties_follow_the_output_token_by_token() -> None:
    sampler, row = Sampler(5), torch.zeros(1, 5)
    sequence = make_sequence([0], temperature=0.0, presence_penalty=1.0)
    for _ in range(5):
        sequence.tokens.append(sampler.sample(row, [sequence])[0].token_id)
    assert sorted(sequence.tokens[1:]) == [0, 1, 2, 3, 4]


def test_bias_adds_to_the_logit() -> None:
    row = torch.zeros(8)
    assert pick(row, make_sequence(temperature=0.0, logit_bias=((6, 1.0),))) == 6
    assert draw_many(row, logit_bias=((6, 100.0),)) == {6: DRAWS}
    assert 2 not in draw_many(row, logit_bias=((2, -100.0),))


def test_logprobs_are_those_of_the_raw_logits_whatever_picks_the_token() -> None:
    row = logits_of({1: 0.6, 2: 0.4})
    sequence = make_sequence(temperature=0.0, logit_bias=((2, 50.0),), top_logprobs=2)
    sampled = Sampler(VOCABULARY).sample(row[None], [sequence])[0]
    assert sampled.token_id == 2
    assert sampled.logprob is not None
    assert sampled.logprob.logprob == pytest.approx(math.log(0.4), abs=1e-6)
    assert [token for token, _ in sampled.logprob.top] == [1, 2]


def test_sampling_leaves_the_logits_alone() -> None:
    row = torch.zeros(1, 8)
    Sampler(8).sample(row, [make_sequence([1], repetition_penalty=2.0, logit_bias=((3, 5.0),), top_p=0.5)])
    assert row.eq(0).all()
