"""Picks the next token of each sequence from its row of logits. The engine calls it once a step.

A row's outcome depends on its own logits, parameters and random stream: each token costs exactly one draw from the
sequence's own generator, turned into a token by the inverse of the cumulative distribution. Neighbours in the batch
can't shift it. (In bfloat16 the logits themselves may still differ in the last bit with the shape of the batch.)

Order of operations: repetition, frequency and presence penalties, bias, grammar; temperature; softmax; then the
smallest set of top_k, top_p and min_p, all three measured on the same distribution, as SGLang does; log-probabilities
are those of the raw logits.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.local.sequence import Sequence, TokenLogprob

CANDIDATES = 256
"""So many most likely tokens are looked at before the whole vocabulary is sorted: they nearly always suffice, and a
partial selection costs a tenth."""


@dataclass(frozen=True, slots=True)
class Sampled:
    token_id: int
    logprob: TokenLogprob | None = None


class Sampler:
    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._histories: dict[str, _History] = {}

    def sample(self, logits: Tensor, sequences: Rows[Sequence]) -> list[Sampled]:
        raw = logits.float()
        if all(sequence.plain for sequence in sequences):
            return [Sampled(token) for token in raw.argmax(-1).tolist()]
        adjusted = self._adjust(raw, sequences)
        tokens = adjusted.argmax(-1).tolist()
        random_rows = [row for row, sequence in enumerate(sequences) if not sequence.sampling.greedy]
        if random_rows:
            temperatures = torch.tensor([[sequences[row].sampling.temperature] for row in random_rows])
            distributions = (adjusted[random_rows] / temperatures).softmax(-1)
            for row, distribution in zip(random_rows, distributions, strict=True):
                tokens[row] = _draw(distribution, sequences[row])
        logprobs = [
            _logprob(row, token, sequence.sampling.top_logprobs)
            for row, token, sequence in zip(raw, tokens, sequences, strict=True)
        ]
        return [Sampled(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True)]

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for it; called when it ends."""
        self._histories.pop(sequence.rid, None)

    def _adjust(self, raw: Tensor, sequences: Rows[Sequence]) -> Tensor:
        """The rows with penalties, biases and grammars; `raw` stays as it is."""
        touched = [
            row
            for row, one in enumerate(sequences)
            if one.sampling.penalises or one.sampling.logit_bias or one.guide is not None
        ]
        if not touched:
            return raw
        adjusted = raw.clone()
        for row in touched:
            sequence = sequences[row]
            if sequence.sampling.penalises:
                history = self._histories.setdefault(sequence.rid, _History(self._vocabulary))
                history.catch_up(sequence)
                history.penalise(adjusted[row], sequence)
            if sequence.sampling.logit_bias:
                tokens, biases = zip(*sequence.sampling.logit_bias, strict=True)
                adjusted[row].index_add_(0, torch.tensor(tokens), torch.tensor(biases, dtype=torch.float32))
            if sequence.guide is not None:
                sequence.guide.mask(adjusted[row])
        return adjusted


class _History:
    """Which tokens a sequence has seen and produced, kept up to date token by token."""

    def __init__(self, vocabulary: int) -> None:
        self._seen = torch.zeros(vocabulary, dtype=torch.bool)
        self._produced = torch.zeros(vocabulary)
        self._known = 0

    def catch_up(self, sequence: Sequence) -> None:
        new = torch.tensor(sequence.tokens[self._known :])
        output = torch.tensor(sequence.tokens[max(self._known, sequence.prompt_tokens) :], dtype=torch.int64)
        self._seen[new] = True
        self._produced.index_add_(0, output, torch.ones(len(output)))
        self._known = len(sequence.tokens)

    def penalise(self, row: Tensor, sequence: Sequence) -> None:
        sampling = sequence.sampling
        if sampling.repetition_penalty != 1.0:
            scaled = torch.where(row > 0, row / sampling.repetition_penalty, row * sampling.repetition_penalty)
            row.copy_(torch.where(self._seen, scaled, row))
        row.sub_(self._produced, alpha=sampling.frequency_penalty)
        row.sub_((self._produced > 0).float(), alpha=sampling.presence_penalty)


def _draw(distribution: Tensor, sequence: Sequence) -> int:
    point = sequence.rng.random()
    if not sequence.sampling.filters:
        return _invert(distribution, point)
    candidates = _candidates(distribution, sequence)
    probabilities = candidates.values
    return int(candidates.indices[_invert(probabilities, point)])


@dataclass(frozen=True, slots=True)
class _Candidates:
    values: Tensor
    indices: Tensor


def _candidates(distribution: Tensor, sequence: Sequence) -> _Candidates:
    """The tokens that the filters leave, most likely first."""
    sampling = sequence.sampling
    width = min(CANDIDATES, len(distribution))
    values, indices = distribution.topk(width)
    keep = _kept(values, sequence)
    if keep == width and sampling.top_k != width:
        values, indices = distribution.sort(descending=True, stable=True)
        keep = _kept(values, sequence)
    return _Candidates(values[:keep], indices[:keep])


def _kept(values: Tensor, sequence: Sequence) -> int:
    """How many of the sorted probabilities pass all filters; at least one."""
    sampling = sequence.sampling
    keep = len(values) if sampling.top_k == -1 else min(sampling.top_k, len(values))
    if sampling.top_p < 1.0:
        before = values.double().cumsum(0) - values
        keep = min(keep, int((before < sampling.top_p).sum()))
    if sampling.min_p > 0.0:
        keep = min(keep, int((values >= values[0] * sampling.min_p).sum()))
    return max(keep, 1)


def _invert(probabilities: Tensor, point: float) -> int:
    """The index whose share of the cumulative distribution holds `point` of [0, 1)."""
    cumulative = probabilities.double().cumsum(0)
    target = cumulative[-1] * point
    index = int(torch.searchsorted(cumulative, target, right=True))
    if index == len(probabilities):
        # Rounding carried the target onto the total: the last token that has any probability is meant.
        index = int(probabilities.nonzero()[-1])
    return index


def _logprob(row: Tensor, token: int, top: int | None) -> TokenLogprob | None:
    if top is None:
        return None
    logprobs = row.log_softmax(-1)
    values, indices = logprobs.topk(top)
    ranked = tuple(zip(indices.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), ranked)
