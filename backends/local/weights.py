"""From safetensors files to what a forward pass multiplies by. Model files ask for tensors by name.

`Linear` is the seam for weight formats: a model never looks inside. In bfloat16 on x86 the weight is reordered once
into oneDNN's blocked layout; measured on an AVX-512 machine, a product with one row then takes half the time.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from safetensors import safe_open
from torch import Tensor

from backends.local.errors import StartError


class Checkpoint:
    """The tensors of a folder's safetensors files, read when asked for."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self._files.update(dict.fromkeys(file.keys(), path))
        if not self._files:
            raise StartError(f"{folder} has no safetensors file.")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str) -> Tensor:
        path = self._files.get(name)
        if path is None:
            raise StartError(f"The checkpoint has no tensor {name}.")
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor.to(self._dtype)

    def linear(self, *prefixes: str) -> "Linear":
        """One product for several projections of the same input, their rows stacked."""
        weight = torch.cat([self.tensor(f"{prefix}.weight") for prefix in prefixes])
        biases = [self.tensor(f"{prefix}.bias") for prefix in prefixes if f"{prefix}.bias" in self]
        if biases and len(biases) != len(prefixes):
            raise StartError(f"Some, but not all, of {', '.join(prefixes)} have a bias.")
        return Linear(weight, torch.cat(biases) if biases else None)

    def names(self) -> Iterable[str]:
        return self._files.keys()


class Linear:
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self._packed else weight  # noqa: SLF001  the operator has no public name; inductor's freezing uses it too

    def __call__(self, rows: Tensor) -> Tensor:
        if self._packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")  # noqa: SLF001  as above
            return product
        return F.linear(rows, self._weight, self._bias)


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch has no annotation here
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001  it has no public name
    )
