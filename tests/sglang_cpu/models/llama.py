"""The tiny checkpoints that tests build."""

from sglang.srt.models.llama import EntryClass  # type: ignore[import-not-found]  # SGLang's own environment has it

__all__ = ["EntryClass"]
