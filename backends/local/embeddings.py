"""`POST /v1/embeddings` of the engine, in SGLang's words: texts or token ids in, one vector each out.

A small encoder beside the language model, with a thread of its own: its texts hold no pages and wait for no step. The
weights are read when the first text comes. surface.py mounts it where a folder was named.
"""

import asyncio
import base64
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
import torch
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Tokenizer
from torch import Tensor

from backends.local.errors import InvalidRequestError, QueueFullError, StartError
from backends.local.models.bert import Bert, BertConfig
from backends.local.weights import Checkpoint

INPUTS_MAX = 2048
BATCH_TOKENS = 4096
"""Padded tokens a pass: more win nothing on a CPU, and the activations stay under 100 MB."""
WAITING_MAX = 32
"""Calls that may wait for the thread."""

TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


class EmbeddingBody(BaseModel):
    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    input: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=INPUTS_MAX)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=INPUTS_MAX)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None

    @property
    def texts(self) -> list[str | list[int]]:
        given: Any = self.input
        return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


class Embedder:
    """One encoder and its thread. Raises StartError if the folder can't be served."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.config = BertConfig.read(folder)
        self._folder = folder
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            raise StartError(f"{folder / 'tokenizer.json'} can't be read: {error}.") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embed")
        self._waiting = 0

    async def answer(self, body: EmbeddingBody) -> bytes:
        """The whole answer's JSON. Raises InvalidRequestError or QueueFullError."""
        if body.dimensions not in (None, self.config.hidden_size):
            raise InvalidRequestError(f"dimensions: this model gives {self.config.hidden_size} and no others.")
        if self._waiting >= WAITING_MAX:
            raise QueueFullError
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, body)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _answer(self, body: EmbeddingBody) -> bytes:
        ids = [self._checked(text) for text in body.texts]
        shown = _as_base64 if body.encoding_format == "base64" else _as_floats
        vectors = self._encode(ids, shown)
        tokens = sum(len(text) for text in ids)
        data = [{"embedding": vector, "index": at, "object": "embedding"} for at, vector in enumerate(vectors)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return orjson.dumps({"data": data, "model": body.model or self.name, "object": "list", "usage": usage})

    def _checked(self, text: str | list[int]) -> list[int]:
        ids = self._tokenizer.encode(text).ids if isinstance(text, str) else text
        if len(ids) > self.config.context:
            limit = self.config.context
            raise InvalidRequestError(f"The input ({len(ids)} tokens) is longer than the context ({limit} tokens).")
        if max(ids) >= self.config.vocabulary:
            raise InvalidRequestError(f"The input names a token beyond the vocabulary of {self.config.vocabulary}.")
        return list(ids)

    def _encode(self, texts: Sequence[list[int]], shown: Callable[[Tensor], Any]) -> list[Any]:
        """Texts of like length go together, so that little is computed for padding."""
        order = sorted(range(len(texts)), key=lambda at: -len(texts[at]))
        vectors: list[Any] = [None] * len(texts)
        while order:
            count = max(1, BATCH_TOKENS // len(texts[order[0]]))
            batch, order = order[:count], order[count:]
            for at, row in zip(batch, self._model.encode([texts[at] for at in batch]), strict=True):
                vectors[at] = shown(row)
        return vectors

    @cached_property
    def _model(self) -> Bert:
        return Bert(self.config, Checkpoint(self._folder, torch.float32))


def _as_floats(row: Tensor) -> list[float]:
    floats: list[float] = row.tolist()
    return floats


def _as_base64(row: Tensor) -> str:
    """Little-endian float32, as OpenAI's clients read it."""
    return base64.b64encode(row.numpy().astype("<f4").tobytes()).decode()
