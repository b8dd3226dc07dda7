"""A Llama-family GGUF small enough to write in a test, from random weights whose Hugging Face form is known."""

from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

HIDDEN, LAYERS, HEADS, KV_HEADS, FEED_FORWARD = 64, 2, 4, 2, 96
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>\n{% endfor %}"
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "Ġ w", "1 2"]
TOKENS = SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]
# Stored in 4 bits; the rest as float32.
QUANTISED = "blk.1.ffn_up.weight"

Array = NDArray[np.float32]


def random_weights(seed: int = 7) -> dict[str, Array]:
    """By GGUF name, rows in Hugging Face's order."""
    draw = np.random.default_rng(seed)
    head = HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HEADS * head, HIDDEN),
            f"blk.{layer}.attn_k.weight": (KV_HEADS * head, HIDDEN),
            f"blk.{layer}.attn_v.weight": (KV_HEADS * head, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HEADS * head),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (FEED_FORWARD, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (FEED_FORWARD, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, FEED_FORWARD),
        }
    return {name: draw.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def interleave_rotary_halves(weight: Array, heads: int) -> Array:
    """What llama.cpp does to q and k when it writes a GGUF."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_tiny_gguf(path: Path, weights: dict[str, Array], *, pre_tokenizer: str = "smollm") -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(TOKENS)
    kinds = [gguf.TokenType.CONTROL if token in SPECIALS else gguf.TokenType.NORMAL for token in TOKENS]
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, values in weights.items():
        stored = values
        if name.endswith("attn_q.weight"):
            stored = interleave_rotary_halves(values, HEADS)
        elif name.endswith("attn_k.weight"):
            stored = interleave_rotary_halves(values, KV_HEADS)
        if name == QUANTISED:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
