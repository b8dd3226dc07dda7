"""The sentence encoder."""

from sglang.srt.models.bert import EntryClass  # type: ignore[import-not-found]  # SGLang's own environment has it

__all__ = ["EntryClass"]
