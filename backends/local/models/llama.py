"""The Llama family: root-mean-square norms, rotary positions, grouped-query attention, a gated MLP.

Rounds where transformers' implementation rounds (norms in float32, products in the model's type), so that greedy
output follows it token by token. The projections of one input are one product, which changes no result. What happens
between products is `kernels/`; how products store their weights is `weights.py`.
"""

import json
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backends.local.attention import Layout, attend_prompt
from backends.local.errors import StartError
from backends.local.kernels.protocol import Kernels, Norm, Rotary
from backends.local.kv.pool import KVPool
from backends.local.precision import WeightPrecision
from backends.local.weights import LayerWeights, Linear

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    hidden_size: int
    inner_size: int
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
            inner_size=raw["intermediate_size"],
            vocabulary=raw["vocab_size"],
            context=raw["max_position_embeddings"],
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
            norm_epsilon=raw["rms_norm_eps"],
            tied_embeddings=raw.get("tie_word_embeddings", False),
            dtype=DTYPES[dtype],
        )


class Llama:
    """Embedding, norms and head once; the layers' products once for each precision that a phase asks for."""

    def __init__(
        self, config: LlamaConfig, weights: LayerWeights, kernels: Kernels, threads: Executor | None = None
    ) -> None:
        """threads: to make layers in, several at once."""
        checkpoint = weights.checkpoint
        self.config = config
        self._kernels = kernels
        self._embedding = checkpoint.tensor("model.embed_tokens.weight")
        self._norms = [
            (
                Norm(checkpoint.tensor(f"model.layers.{index}.input_layernorm.weight"), config.norm_epsilon),
                Norm(checkpoint.tensor(f"model.layers.{index}.post_attention_layernorm.weight"), config.norm_epsilon),
            )
            for index in range(config.layers)
        ]
        over = map if threads is None else threads.map
        self._layers = {
            precision: list(over(partial(_Layer, weights, precision), range(config.layers)))
            for precision in weights.precisions
        }
        self._norm = Norm(checkpoint.tensor("model.norm.weight"), config.norm_epsilon)
        self._head = Linear(self._embedding) if config.tied_embeddings else checkpoint.linear("lm_head")
        self._rotary = _rotary_tables(config)

    @property
    def kernels(self) -> str:
        """What computes between the products."""
        return self._kernels.name

    @property
    def weight_bytes(self) -> int:
        """What the weights take in memory, each copy counted once."""
        products = [layer.nbytes for layers in self._layers.values() for layer in layers]
        return self._embedding.nbytes + self._head.nbytes + sum(products)

    def forward(self, tokens: Tensor, layout: Layout, pool: KVPool, precision: WeightPrecision) -> Tensor:
        """Hidden states of all rows; their keys and values are in the pool afterwards."""
        kernels = self._kernels
        hidden = self._embedding.index_select(0, tokens)
        added = None
        for index, (layer, norms) in enumerate(zip(self._layers[precision], self._norms, strict=True)):
            qkv = layer.qkv(kernels.norm(hidden, norms[0], added))
            kernels.rotate_and_store(qkv, self._rotary, pool, index, layout)
            added = layer.out(self._attend(qkv, pool, index, layout))
            added = layer.down(kernels.gate(layer.gate_up(kernels.norm(hidden, norms[1], added))))
        return hidden if added is None else hidden.add_(added)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(self._kernels.norm(hidden, self._norm))

    def _attend(self, qkv: Tensor, pool: KVPool, index: int, layout: Layout) -> Tensor:
        outputs = [] if layout.decode is None else [self._kernels.attend(qkv, pool, index, layout.decode)]
        if layout.prefill:
            queries = qkv.view(len(qkv), -1, pool.head_size)[:, : self.config.heads]
            outputs += [attend_prompt(queries, pool, index, chunk) for chunk in layout.prefill]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class _Layer:
    """The products of one layer in one precision."""

    def __init__(self, weights: LayerWeights, precision: WeightPrecision, index: int) -> None:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        self.qkv = weights.product(precision, f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj")
        self.out = weights.product(precision, f"{attention}.o_proj")
        self.gate_up = weights.product(precision, f"{mlp}.gate_proj", f"{mlp}.up_proj")
        self.down = weights.product(precision, f"{mlp}.down_proj")

    @property
    def nbytes(self) -> int:
        return sum(product.nbytes for product in (self.qkv, self.out, self.gate_up, self.down))


def _rotary_tables(config: LlamaConfig) -> Rotary:
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.int64).float() / config.head_size
    frequencies = 1.0 / (config.rope_theta**exponents)
    angles = torch.outer(torch.arange(config.context).float(), frequencies)
    cosines, sines = angles.cos(), angles.sin()
    return Rotary(torch.cat((cosines, cosines), -1).to(config.dtype), torch.cat((-sines, sines), -1).to(config.dtype))
