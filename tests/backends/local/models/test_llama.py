import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backends.local.attention import Extent, lay_out
from backends.local.errors import StartError
from backends.local.kernels.torch_kernels import TorchKernels
from backends.local.kv.pool import KVPool
from backends.local.models.llama import Llama, LlamaConfig
from backends.local.precision import WeightPrecision
from backends.local.weights import Checkpoint, LayerWeights
from tests.backends.local.reference import transformers
from tests.engines import build_tiny_checkpoint

PROMPT = [1, 50, 60, 70, 200, 9, 9, 300, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51]


def forward(folder: Path, tokens: list[int]) -> Tensor:
    config = LlamaConfig.read(folder)
    model = Llama(config, LayerWeights(Checkpoint(folder, config.dtype), {WeightPrecision.BF16}), TorchKernels())
    pool = KVPool(
        layers=config.layers,
        pages=4,
        page_size=16,
        kv_heads=config.kv_heads,
        head_size=config.head_size,
        dtype=config.dtype,
    )
    layout = lay_out([], [Extent([2, 0], len(tokens), len(tokens))], 16, config.dtype)
    with torch.inference_mode():
        return model.logits(model.forward(torch.tensor(tokens), layout, pool, WeightPrecision.BF16))


def reference(folder: Path, tokens: list[int]) -> Tensor:
    model = transformers().AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.load
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"head_dim": 32, "rope_theta": 100000.0},
        {"torch_dtype": "float64"},
    ],
)
def test_logits_equal_those_of_transformers(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = build_tiny_checkpoint(tmp_path, **changes)
    got, wanted = forward(folder, PROMPT), reference(folder, PROMPT)
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.load
def test_tied_embeddings_are_the_head(tmp_path: Path) -> None:
    folder = build_tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    torch.testing.assert_close(forward(folder, PROMPT), reference(folder, PROMPT), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "Only the Llama family"),
        ({"hidden_act": "gelu"}, "silu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "Rotary scaling of type yarn"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_what_this_engine_can_t_compute_stops_the_start(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = build_tiny_checkpoint(tmp_path)
    edit_config(folder, **changes)
    with pytest.raises(StartError, match=message):
        LlamaConfig.read(folder)


def test_a_config_without_a_size_stops_the_start_and_names_it(tmp_path: Path) -> None:
    folder = build_tiny_checkpoint(tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(StartError, match="num_hidden_layers"):
        LlamaConfig.read(folder)
    path.unlink()
    with pytest.raises(StartError, match="can't be read"):
        LlamaConfig.read(folder)
