"""Turns a step plan into tensors, runs the model on it and returns the logits that are to be sampled.

The engine calls it; it owns the model and the pool's tensors, and decides nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from backends.local.attention import Extent, lay_out
from backends.local.kv.pool import KVPool
from backends.local.models.llama import Llama
from backends.local.precision import WeightPrecision
from backends.local.scheduler import StepPlan
from backends.local.sequence import Sequence
from backends.local.threads import ThreadChooser


class ModelRunner:
    def __init__(
        self,
        model: Llama,
        pool: KVPool,
        *,
        prefill_weights: WeightPrecision,
        decode_weights: WeightPrecision,
        threads: ThreadChooser | None,
        clock: Callable[[], float],
    ) -> None:
        self.threads = threads
        """None: the number of threads stays what it is."""
        self._prefill_weights = prefill_weights
        self._decode_weights = decode_weights
        self._model = model
        self._pool = pool
        self._clock = clock

    def run(self, plan: StepPlan) -> tuple[list[Sequence], Tensor | None]:
        """The sequences whose next token can be sampled now, and a row of logits for each."""
        if self.threads is None or plan.prefill:
            return self._compute(plan)
        torch.set_num_threads(self.threads.threads)
        began = self._clock()
        computed = self._compute(plan)
        self.threads.note(len(plan.decode), self._clock() - began)
        return computed

    def _compute(self, plan: StepPlan) -> tuple[list[Sequence], Tensor | None]:
        """Two passes, since a token's weights follow from what it is: part of a prompt, or produced.

        Not from how it is computed: a prompt's last token alone is a prompt's, and after a retraction the produced
        tokens get the weights that they had before. So neither chunks nor retractions change what a request gets.
        """
        prompts, outputs = _Pass(), _Pass()
        for sequence in sorted(plan.decode, key=lambda one: -len(one.tokens)):
            if sequence.computed < sequence.prompt_tokens:
                prompts.add_chunk(sequence, sequence.computed, len(sequence.tokens), samples=True)
            else:
                outputs.add_row(sequence)
        for chunk in plan.prefill:
            border = min(max(chunk.start, chunk.sequence.prompt_tokens), chunk.end)
            if chunk.start < border:
                prompts.add_chunk(chunk.sequence, chunk.start, border, samples=chunk.completes and border == chunk.end)
            if border < chunk.end:
                outputs.add_chunk(chunk.sequence, border, chunk.end, samples=chunk.completes)
        # Prompts first: the produced part of a chunk reads the keys of its prompt.
        logits = [self._run(prompts, self._prefill_weights), self._run(outputs, self._decode_weights)]
        computed = [one for one in logits if one is not None]
        if not computed:
            return [], None
        return prompts.sampled + outputs.sampled, computed[0] if len(computed) == 1 else torch.cat(computed)

    def _run(self, one: "_Pass", precision: WeightPrecision) -> Tensor | None:
        """Logits for the pass's sequences that are to be sampled."""
        if not one.tokens:
            return None
        layout = lay_out(one.decode, one.chunks, self._pool.page_size, self._model.config.dtype)
        hidden = self._model.forward(torch.tensor(one.tokens), layout, self._pool, precision)
        if not one.sampled:
            return None
        if len(one.sampled_rows) < len(one.tokens):
            hidden = hidden.index_select(0, torch.tensor(one.sampled_rows))
        return self._model.logits(hidden)


@dataclass(slots=True)
class _Pass:
    """Tokens that are computed together, with the same weights: decoding rows, longest first, then chunks."""

    tokens: list[int] = field(default_factory=list)
    decode: list[Extent] = field(default_factory=list)
    chunks: list[Extent] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    sampled_rows: list[int] = field(default_factory=list)

    def add_row(self, sequence: Sequence) -> None:
        assert not self.chunks
        self.decode.append(Extent(sequence.pages, len(sequence.tokens), 1))
        self.tokens.append(sequence.tokens[-1])
        self._sample(sequence)

    def add_chunk(self, sequence: Sequence, start: int, end: int, *, samples: bool) -> None:
        self.chunks.append(Extent(sequence.pages, end, end - start))
        self.tokens += sequence.tokens[start:end]
        if samples:
            self._sample(sequence)

    def _sample(self, sequence: Sequence) -> None:
        self.sampled.append(sequence)
        self.sampled_rows.append(len(self.tokens) - 1)
