"""A sentence encoder of two small layers with random weights, in the folder layout of a real one."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor

WIDTH, LAYERS, HEADS, CONTEXT = 32, 2, 4, 64
_WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "pages", "are", "scarce", "thing", "gate", "is", "by", "a", "of")


def build_tiny_encoder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(_WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_padding(length=16)  # as real ones say it, and a server must not heed it
    tokenizer.enable_truncation(8)
    tokenizer.save(str(path / "tokenizer.json"))
    save_file(_weights(), path / "model.safetensors")
    config = {
        "architectures": ["BertModel"], "model_type": "bert", "hidden_act": "gelu", "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 2 * WIDTH,
        "vocab_size": len(_WORDS), "max_position_embeddings": CONTEXT, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
        "pad_token_id": 0, "position_embedding_type": "absolute",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def _weights() -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source) * 0.2

    weights = {
        "embeddings.word_embeddings.weight": drawn(len(_WORDS), WIDTH),
        "embeddings.position_embeddings.weight": drawn(CONTEXT, WIDTH),
        "embeddings.token_type_embeddings.weight": drawn(2, WIDTH),
        "embeddings.LayerNorm.weight": 1 + drawn(WIDTH),
        "embeddings.LayerNorm.bias": drawn(WIDTH),
    }
    for layer in range(LAYERS):
        prefix = f"encoder.layer.{layer}"
        shapes = {
            **{f"attention.self.{part}": (WIDTH, WIDTH) for part in ("query", "key", "value")},
            "attention.output.dense": (WIDTH, WIDTH),
            "intermediate.dense": (2 * WIDTH, WIDTH),
            "output.dense": (WIDTH, 2 * WIDTH),
        }
        for name, shape in shapes.items():
            weights |= {f"{prefix}.{name}.weight": drawn(*shape), f"{prefix}.{name}.bias": drawn(shape[0])}
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            weights |= {f"{prefix}.{name}.weight": 1 + drawn(WIDTH), f"{prefix}.{name}.bias": drawn(WIDTH)}
    return weights
