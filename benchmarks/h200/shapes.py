"""Checkpoints without weights: configurations for `--load-format dummy`, and a tokenizer with a word for each token.

Llama-3.1-8B's shape with BF16 or FP8 weights (SGLang quantises BF16 at the start) and with GPTQ INT4 of group 128; and
a tiny one to rehearse on a CPU. Speed depends on shapes and types, not on what the weights say; accuracy can't be
judged with these.
"""

import json
from pathlib import Path
from typing import Any

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "pretraining_tp": 1,
}
_8B = _LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_INT4 = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "sym": True,
    "checkpoint_format": "gptq",
    "lm_head": False,
    "dynamic": {},
}
_TINY = _LLAMA | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "vocab_size": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {"8b": _8B, "8b-int4": _8B | {"quantization_config": _INT4}, "tiny": _TINY}


def write_shape(name: str, folder: Path) -> Path:
    """The folder of a checkpoint of this shape, made if it is not there."""
    target, shape = folder / name, SHAPES[name]
    if not (target / "tokenizer.json").exists():
        target.mkdir(parents=True, exist_ok=True)
        (target / "config.json").write_text(json.dumps(shape))
        ends = {key: shape[key] for key in ("bos_token_id", "eos_token_id")}
        (target / "generation_config.json").write_text(json.dumps(ends))
        words = {f"t{token}": token for token in range(shape["vocab_size"])}
        _write_tokenizer(target, words)
    return target


def _write_tokenizer(target: Path, words: dict[str, int]) -> None:
    """Words between spaces, one a token: every token id decodes to something."""
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "model_max_length": 1 << 20}
    (target / "tokenizer_config.json").write_text(json.dumps(facts))
