"""Keeps one answer inside its grammar: which tokens may come next, and whether the answer is whole.

The intake makes a Guide off the step loop, the sampler masks its row with it, the engine tells it each token. The
tables over the vocabulary are made once, when the first guided request comes.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock

import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from backends import grammar
from backends.local.errors import InvalidRequestError


class Guide:
    """One answer's. Used by the step loop's thread alone once it was made."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def mask(self, row: Tensor) -> None:
        """Leave only what may come next, in place."""
        # A byte for each token of the vocabulary: zero where it may not come.
        allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        row.masked_fill_(allowed == 0, float("-inf"))

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        """The grammar is satisfied and leaves nothing more to say."""
        return bool(self._matcher.is_stopped()) and not self.failed

    @property
    def failed(self) -> bool:
        """It cost more than a grammar may while it ran: the answer can't be held to it any more."""
        return bool(self._matcher.is_error())


class Guides:
    """Makes guides for one tokenizer; may be called from several threads."""

    def __init__(self, tokenizer_json: Path, vocabulary: int, stop_token_ids: Sequence[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocabulary = vocabulary
        self._stop_token_ids = list(stop_token_ids)
        self._making = Lock()

    def make(self, text: str) -> Guide:
        """text: what grammar.py wrote. Raises InvalidRequestError if it does not compile over this vocabulary."""
        with self._making:
            tables = self._tables
        matcher = LLMatcher(tables, text, log_level=0, limits=grammar.limits())
        if matcher.is_error():
            raise InvalidRequestError(f"The grammar can't be compiled: {matcher.get_error()[:300]}")
        return Guide(matcher)

    @cached_property
    def _tables(self) -> LLTokenizer:
        return LLTokenizer(str(self._tokenizer_json), n_vocab=self._vocabulary, eos_token=self._stop_token_ids or None)
