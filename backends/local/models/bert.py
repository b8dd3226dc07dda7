"""The BERT family as an encoder of sentences: one vector of length one for each text, pooled as its folder says.

Follows transformers' BertModel and sentence-transformers' pooling and normalisation, in float32. Nothing is cached
and nothing is generated, so this shares no more with the language models than the reader of weights.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from torch import Tensor

from backends.local.errors import StartError
from backends.local.weights import Checkpoint
from backends.pooling import Pooling, PoolingUnknownError, pooling_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig:
    layers: int
    heads: int
    hidden_size: int
    vocabulary: int
    context: int
    norm_epsilon: float
    pooling: Pooling

    @classmethod
    def read(cls, folder: Path) -> "BertConfig":
        """From the folder's `config.json`. Raises StartError if it is not there or not of this family.

        pooling: the mean where the folder does not say.
        """
        try:
            raw = json.loads((folder / "config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise StartError(f"{folder / 'config.json'} can't be read: {error}.") from error
        if "BertModel" not in raw.get("architectures", ()) or raw.get("hidden_act") != "gelu":
            raise StartError(f"Only BertModel with gelu runs here as an encoder, not {raw.get('architectures')}.")
        try:
            pooling = pooling_of(folder) or "mean"
        except PoolingUnknownError as error:
            raise StartError(str(error)) from error
        return cls(
            layers=raw["num_hidden_layers"],
            heads=raw["num_attention_heads"],
            hidden_size=raw["hidden_size"],
            vocabulary=raw["vocab_size"],
            context=raw["max_position_embeddings"],
            norm_epsilon=raw["layer_norm_eps"],
            pooling=pooling,
        )


class Bert:
    def __init__(self, config: BertConfig, checkpoint: Checkpoint) -> None:
        self.config = config
        embeddings = "embeddings"
        self._words = checkpoint.tensor(f"{embeddings}.word_embeddings.weight")
        # Every text is one segment, so its row of the segment table is part of the positions.
        segments = checkpoint.tensor(f"{embeddings}.token_type_embeddings.weight")
        self._positions = checkpoint.tensor(f"{embeddings}.position_embeddings.weight") + segments[0]
        self._norm = _Norm(checkpoint, f"{embeddings}.LayerNorm", config)
        self._layers = [_Layer(config, checkpoint, f"encoder.layer.{index}") for index in range(config.layers)]

    @torch.inference_mode()
    def encode(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """A row of length one for each text, texts in the order given; padded to the longest of them."""
        longest = max(len(text) for text in texts)
        tokens = torch.tensor([[*text, *([0] * (longest - len(text)))] for text in texts])
        present = torch.arange(longest) < torch.tensor([[len(text)] for text in texts])
        hidden = self._norm(self._words[tokens] + self._positions[:longest])
        for layer in self._layers:
            hidden = layer(hidden, present)
        if self.config.pooling == "cls":
            return F.normalize(hidden[:, 0], dim=-1)
        weights = present[:, :, None].float()
        return F.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


class _Layer:
    def __init__(self, config: BertConfig, checkpoint: Checkpoint, prefix: str) -> None:
        attention = f"{prefix}.attention"
        self._heads = config.heads
        self._qkv = checkpoint.linear(*(f"{attention}.self.{part}" for part in ("query", "key", "value")))
        self._out = checkpoint.linear(f"{attention}.output.dense")
        self._attention_norm = _Norm(checkpoint, f"{attention}.output.LayerNorm", config)
        self._up = checkpoint.linear(f"{prefix}.intermediate.dense")
        self._down = checkpoint.linear(f"{prefix}.output.dense")
        self._norm = _Norm(checkpoint, f"{prefix}.output.LayerNorm", config)

    def __call__(self, hidden: Tensor, present: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        flat = hidden.reshape(rows * length, width)
        query, key, value = (
            part.view(rows, length, self._heads, -1).transpose(1, 2) for part in self._qkv(flat).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=present[:, None, None, :])
        flat = self._attention_norm(flat + self._out(mixed.transpose(1, 2).reshape(rows * length, width)))
        return self._norm(flat + self._down(F.gelu(self._up(flat)))).view(rows, length, width)


class _Norm:
    def __init__(self, checkpoint: Checkpoint, prefix: str, config: BertConfig) -> None:
        self._weight = checkpoint.tensor(f"{prefix}.weight")
        self._bias = checkpoint.tensor(f"{prefix}.bias")
        self._epsilon = config.norm_epsilon

    def __call__(self, rows: Tensor) -> Tensor:
        return F.layer_norm(rows, rows.shape[-1:], self._weight, self._bias, self._epsilon)
