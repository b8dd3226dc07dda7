from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from backends.local.errors import StartError
from backends.local.weights import Checkpoint, Linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_equals_the_plain_one_up_to_rounding(dtype: torch.dtype, rows: int, *, biased: bool) -> None:
    torch.manual_seed(1)
    weight, given = torch.randn(48, 64).to(dtype), torch.randn(rows, 64).to(dtype)
    bias = torch.randn(48).to(dtype) if biased else None
    wanted = torch.nn.functional.linear(given.double(), weight.double(), None if bias is None else bias.double())
    got = Linear(weight, bias)(given)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wanted, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


def test_tensors_are_found_across_files(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2, 3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b.weight": torch.zeros(4, 3)}, tmp_path / "model-00002-of-00002.safetensors")
    checkpoint = Checkpoint(tmp_path, torch.float32)
    assert checkpoint.linear("a", "b")(torch.ones(1, 3)).tolist() == [[3, 3, 0, 0, 0, 0]]


def test_a_missing_tensor_stops_the_start_and_is_named(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(StartError, match=r"no tensor b\.weight"):
        Checkpoint(tmp_path, torch.float32).tensor("b.weight")


def test_a_folder_without_weights_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="no safetensors"):
        Checkpoint(tmp_path, torch.float32)
