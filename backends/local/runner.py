"""Turns a step plan into tensors, runs the model once and returns the logits that are to be sampled.

The engine calls it; it owns the model and the pool's tensors, and decides nothing.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from backends.local.attention import Extent, lay_out
from backends.local.kv.pool import KVPool
from backends.local.models.llama import Llama
from backends.local.scheduler import StepPlan
from backends.local.sequence import Sequence
from backends.local.threads import ThreadChooser


class ModelRunner:
    def __init__(
        self, model: Llama, pool: KVPool, *, threads: ThreadChooser | None, clock: Callable[[], float]
    ) -> None:
        """Without a chooser the number of threads stays what it is."""
        self._model = model
        self._pool = pool
        self._threads = threads
        self._clock = clock

    def run(self, plan: StepPlan) -> tuple[list[Sequence], Tensor | None]:
        """The sequences whose next token can be sampled now, and a row of logits for each."""
        if self._threads is None or plan.prefill:
            return self._compute(plan)
        torch.set_num_threads(self._threads.threads)
        began = self._clock()
        computed = self._compute(plan)
        self._threads.note(len(plan.decode), self._clock() - began)
        return computed

    def _compute(self, plan: StepPlan) -> tuple[list[Sequence], Tensor | None]:
        decode = sorted(plan.decode, key=lambda sequence: -len(sequence.tokens))
        tokens = [sequence.tokens[-1] for sequence in decode]
        positions = [len(sequence.tokens) - 1 for sequence in decode]
        sampled = list(decode)
        rows = list(range(len(decode)))
        for chunk in plan.prefill:
            tokens += chunk.sequence.tokens[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            if chunk.completes:
                sampled.append(chunk.sequence)
                rows.append(len(tokens) - 1)
        layout = lay_out(
            [Extent(sequence.pages, len(sequence.tokens), 1) for sequence in decode],
            [Extent(chunk.sequence.pages, chunk.end, chunk.count) for chunk in plan.prefill],
            self._pool.page_size,
            self._model.config.dtype,
        )
        hidden = self._model.forward(torch.tensor(tokens), torch.tensor(positions), layout, self._pool)
        if not sampled:
            return [], None
        if plan.prefill:
            hidden = hidden.index_select(0, torch.tensor(rows))
        return sampled, self._model.logits(hidden)
