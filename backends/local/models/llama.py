"""The Llama family: root-mean-square norms, rotary positions, grouped-query attention, a gated MLP.

Rounds where transformers' implementation rounds (norms in float32, products in the model's type), so that greedy
output follows it token by token. Two fusions change no result: the projections of one input are one product, and
queries and keys are rotated together. The cache and attention are not known here beyond `attend`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from torch import Tensor

from backends.local.attention import Layout, attend
from backends.local.errors import StartError
from backends.local.kv.pool import KVPool
from backends.local.weights import Checkpoint, Linear

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    hidden_size: int
    vocabulary: int
    context: int
    rope_theta: float
    norm_epsilon: float
    tied_embeddings: bool
    dtype: torch.dtype

    @classmethod
    def read(cls, folder: Path) -> "LlamaConfig":
        """From the folder's `config.json`, in either of transformers' spellings."""
        try:
            raw = json.loads((folder / "config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise StartError(f"{folder / 'config.json'} can't be read: {error}.") from error
        try:
            return cls._parse(raw)
        except KeyError as error:
            raise StartError(f"{folder / 'config.json'} has no {error}.") from error

    @classmethod
    def _parse(cls, raw: dict[str, Any]) -> "LlamaConfig":
        if "LlamaForCausalLM" not in raw.get("architectures", ()):
            raise StartError(f"Only the Llama family runs here, not {raw.get('architectures')}.")
        if raw.get("hidden_act", "silu") != "silu":
            raise StartError(f"Only the silu activation runs here, not {raw['hidden_act']}.")
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        dtype = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
        if kind != "default":
            raise StartError(f"Rotary scaling of type {kind} is not supported.")
        if dtype not in DTYPES:
            raise StartError(f"Weights of type {dtype} are not supported.")
        return cls(
            layers=raw["num_hidden_layers"],
            heads=raw["num_attention_heads"],
            kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            head_size=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            hidden_size=raw["hidden_size"],
            vocabulary=raw["vocab_size"],
            context=raw["max_position_embeddings"],
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
            norm_epsilon=raw["rms_norm_eps"],
            tied_embeddings=raw.get("tie_word_embeddings", False),
            dtype=DTYPES[dtype],
        )


class Llama:
    def __init__(self, config: LlamaConfig, checkpoint: Checkpoint) -> None:
        self.config = config
        self._embedding = checkpoint.tensor("model.embed_tokens.weight")
        self._layers = [_Layer(config, checkpoint, index) for index in range(config.layers)]
        self._norm = _Norm(checkpoint.tensor("model.norm.weight"), config.norm_epsilon)
        self._head = Linear(self._embedding) if config.tied_embeddings else checkpoint.linear("lm_head")
        self._cosines, self._sines = _rotary_tables(config)

    def forward(self, tokens: Tensor, positions: Tensor, layout: Layout, pool: KVPool) -> Tensor:
        """Hidden states of all rows; their keys and values are in the pool afterwards."""
        cosines = self._cosines.index_select(0, positions)
        sines = self._sines.index_select(0, positions)
        hidden = self._embedding.index_select(0, tokens)
        for layer in self._layers:
            layer.forward(hidden, cosines, sines, layout, pool)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(self._norm(hidden))


class _Layer:
    def __init__(self, config: LlamaConfig, checkpoint: Checkpoint, index: int) -> None:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        self._index = index
        self._heads = config.heads
        self._head_size = config.head_size
        self._rotated_width = (config.heads + config.kv_heads) * config.head_size
        self._query_width = config.heads * config.head_size
        self._input_norm = _Norm(checkpoint.tensor(f"{prefix}.input_layernorm.weight"), config.norm_epsilon)
        self._mlp_norm = _Norm(checkpoint.tensor(f"{prefix}.post_attention_layernorm.weight"), config.norm_epsilon)
        self._qkv = checkpoint.linear(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj")
        self._out = checkpoint.linear(f"{attention}.o_proj")
        self._gate_up = checkpoint.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj")
        self._down = checkpoint.linear(f"{mlp}.down_proj")

    def forward(self, hidden: Tensor, cosines: Tensor, sines: Tensor, layout: Layout, pool: KVPool) -> None:
        """Adds this layer's two contributions to `hidden`, in place."""
        qkv = self._qkv(self._input_norm(hidden))
        rotated = qkv[:, : self._rotated_width].view(len(hidden), -1, self._head_size)
        _rotate(rotated, cosines, sines)
        pool.store(self._index, layout.slots, qkv[:, self._query_width :])
        hidden += self._out(attend(rotated[:, : self._heads], pool, self._index, layout))
        gate, up = self._gate_up(self._mlp_norm(hidden)).chunk(2, dim=-1)
        hidden += self._down(F.silu(gate).mul_(up))


class _Norm:
    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self._weight = weight
        wide = weight.dtype if weight.dtype == torch.float64 else torch.float32
        self._epsilon = torch.full((1, 1), epsilon, dtype=wide)
        self._shares = torch.full((len(weight), 1), 1.0 / len(weight), dtype=wide)

    def __call__(self, rows: Tensor) -> Tensor:
        wide = rows.to(self._epsilon.dtype)
        # The mean of squares plus epsilon as one product: two thirds of the time of mean and sum.
        wide = wide * torch.addmm(self._epsilon, wide * wide, self._shares).rsqrt_()
        return wide.to(rows.dtype).mul_(self._weight)


def _rotary_tables(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines, [positions, 1, head size]; the sign is that of `rotate_half`."""
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.int64).float() / config.head_size
    frequencies = 1.0 / (config.rope_theta**exponents)
    angles = torch.outer(torch.arange(config.context).float(), frequencies)
    cosines, sines = angles.cos(), angles.sin()
    both = torch.cat((cosines, cosines), -1), torch.cat((-sines, sines), -1)
    return both[0].to(config.dtype)[:, None], both[1].to(config.dtype)[:, None]


def _rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Rotary embedding in place: swapping the halves is a roll, and the minus sign is in the sines."""
    swapped = heads.roll(heads.shape[-1] // 2, -1).mul_(sines)
    heads.mul_(cosines).add_(swapped)
