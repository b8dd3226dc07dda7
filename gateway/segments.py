"""Tokenises a rendered chat in the segments between its added tokens; those that the template writes only once ever.

A tokenizer cuts its added tokens (<|im_start|> and the like) out of a text first and works on what lies between them
apart, unless something in it looks beyond a segment. Where nothing does, the ids of the segments put together are the
ids of the whole, and half of a short prompt is the template's own words. Used by prompt.py; knows no request.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer

# What looks at one segment's characters and nothing else. Metaspace and the like ask whether a text begins here.
_LOCAL_PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Split", "Punctuation", "Whitespace", "WhitespaceSplit"})
_LOCAL_MODELS = frozenset({"BPE", "Unigram", "WordPiece", "WordLevel"})


class SegmentTokenizer:
    """tokenizer: without truncation and padding. learn() makes a template's own segments free."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = _separable_tokens(json.loads(tokenizer.to_str()))
        # Added tokens, and segments that were learned.
        self._known = {content: [token_id] for content, token_id in added.items()}
        # The longest first: so the tokenizer matches them too.
        longest_first = sorted(added, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if added else None

    def learn(self, rendered: Iterable[str], *, without: str) -> None:
        """Remember the segments of these texts that don't hold the stand-in for a user's words."""
        for text in rendered:
            for segment in self._segments(text):
                if segment not in self._known and without not in segment:
                    self._known[segment] = self._encode([segment])[0]

    def encode(self, text: str) -> list[int]:
        """The ids of a text in which added tokens stand for themselves. Raises TypeError if it has no UTF-8."""
        segments = self._segments(text)
        known = list(map(self._known.get, segments))
        new = iter(self._encode([segment for segment, ids in zip(segments, known, strict=True) if ids is None]))
        whole: list[int] = []
        for ids in known:
            whole += next(new) if ids is None else ids
        return whole

    def _segments(self, text: str) -> list[str]:
        return [text] if self._cut is None else [segment for segment in self._cut.split(text) if segment]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        # Not `encode`: that one keeps the interpreter locked while it works.
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def _separable_tokens(description: dict[str, Any]) -> dict[str, int]:
    """Added tokens at which a text can be cut without changing an id, by content; none if that is not certain."""
    kinds = _kinds(description.get("pre_tokenizer"))
    model = description["model"]
    added = description["added_tokens"]
    plain = all(
        token["content"] and not any(token[name] for name in ("single_word", "lstrip", "rstrip", "normalized"))
        for token in added
    )
    local = kinds <= _LOCAL_PRE_TOKENIZERS and model["type"] in _LOCAL_MODELS and not model.get("dropout")
    if description.get("normalizer") is not None or not local or not plain:
        return {}
    return {token["content"]: token["id"] for token in added}


def _kinds(part: dict[str, Any] | None) -> frozenset[str]:
    """The types of a pre-tokenizer and all its parts; one that puts a space in front is not local."""
    if part is None:
        return frozenset({"none"})  # then the model itself sees the text whole, spaces and all
    if part["type"] == "Sequence":
        return frozenset[str]().union(*(_kinds(inner) for inner in part["pretokenizers"]))
    return frozenset({"ByteLevel with a space in front" if part.get("add_prefix_space") else part["type"]})
