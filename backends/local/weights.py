"""From safetensors files to what a forward pass multiplies by. Model files ask for tensors by name.

A product is the seam for weight formats: a model never looks inside. In bfloat16 on x86 the weight is reordered once
into oneDNN's blocked layout; measured on an AVX-512 machine, a product with one row then takes half the time.

FP8 weights are rounded to e4m3 when they are loaded and computed with in the model's type: torch's FP8 product takes
over a second for one of the default model's on a CPU. So FP8 here shows what the format does to the answers, and saves
neither time nor memory. INT4 saves both at few rows (`int4.py`). Embedding, norms and head keep the checkpoint's type
in all precisions, as they do in the quantised checkpoints that SGLang loads.
"""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from safetensors import safe_open
from torch import Tensor

from backends.local.errors import StartError
from backends.local.int4 import GROUP, Int4Weight
from backends.local.int4_cache import Int4Cache
from backends.local.kv.fp8 import dequantise, quantise
from backends.local.precision import WeightPrecision

INT4_ROWS_MAX = 8
"""Above, INT4 is slower than bfloat16 (benchmarks/README.md has the table)."""


class Product(Protocol):
    """Multiplies rows by a weight, [rows, columns] to [rows, outputs]."""

    @property
    def nbytes(self) -> int: ...

    def __call__(self, rows: Tensor) -> Tensor: ...


class Checkpoint:
    """The tensors of a folder's safetensors files, read when asked for; the files stay mapped until it goes."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.folder = folder
        self._dtype = dtype
        self._files: dict[str, Path] = {}
        self._opened: dict[Path, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            self._opened[path] = file = safe_open(path, framework="pt")
            self._files.update(dict.fromkeys(file.keys(), path))  # type: ignore[no-untyped-call]  # the library has no annotations
        if not self._files:
            raise StartError(f"{folder} has no safetensors file.")

    @property
    def paths(self) -> list[Path]:
        return sorted(set(self._files.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str) -> Tensor:
        """To be kept as it is, in a mapping of its own: one that it shared would keep all that was read through it."""
        with safe_open(self._path(name), framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor.to(self._dtype)

    def stacked(self, *prefixes: str) -> tuple[Tensor, Tensor | None]:
        """Copies of weight and bias of several projections of the same input, as of one."""
        weight = torch.cat([self._mapped(f"{prefix}.weight") for prefix in prefixes])
        biases = [self._mapped(f"{prefix}.bias") for prefix in prefixes if f"{prefix}.bias" in self]
        if biases and len(biases) != len(prefixes):
            raise StartError(f"Some, but not all, of {', '.join(prefixes)} have a bias.")
        return weight, torch.cat(biases) if biases else None

    def _mapped(self, name: str) -> Tensor:
        tensor: Tensor = self._opened[self._path(name)].get_tensor(name)
        return tensor.to(self._dtype)

    def _path(self, name: str) -> Path:
        path = self._files.get(name)
        if path is None:
            raise StartError(f"The checkpoint has no tensor {name}.")
        return path

    def linear(self, *prefixes: str) -> "Linear":
        """One product for several projections of the same input, their rows stacked."""
        return Linear(*self.stacked(*prefixes))

    def names(self) -> Iterable[str]:
        return self._files.keys()


class LayerWeights:
    """The layers' products in each precision that a phase asks for; one that both ask for is one copy. Layers may be
    made at once, in several threads.
    """

    def __init__(self, checkpoint: Checkpoint, precisions: Collection[WeightPrecision]) -> None:
        self.checkpoint = checkpoint
        self.precisions = sorted(set(precisions))
        quantised = WeightPrecision.INT4 in self.precisions
        self._int4 = Int4Cache(checkpoint.folder, checkpoint.paths) if quantised else None

    def product(self, precision: WeightPrecision, *prefixes: str) -> Product:
        weight, bias = self.checkpoint.stacked(*prefixes)
        if precision is WeightPrecision.BF16:
            return Linear(weight, bias)
        if precision is WeightPrecision.FP8:
            # A power of two for each output: e4m3 values then stay exact in bfloat16, and nothing is rounded twice.
            return Linear(dequantise(*quantise(weight), weight.dtype), bias)
        assert self._int4 is not None
        if weight.shape[1] % GROUP:
            raise StartError(f"INT4 needs a width divisible by {GROUP}, not {weight.shape[1]} as of {prefixes[0]}.")
        return Int4Linear(self._int4.weight("+".join(prefixes), lambda: weight), weight.dtype, bias)

    def loaded(self) -> None:
        """All products are made: keep on disk what had to be quantised."""
        if self._int4 is not None:
            self._int4.save()


class Linear:
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.nbytes = weight.nbytes
        self._bias = bias
        self._packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self._packed else weight  # noqa: SLF001  the operator has no public name; inductor's freezing uses it too

    def __call__(self, rows: Tensor) -> Tensor:
        if self._packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")  # noqa: SLF001  as above
            return product
        return F.linear(rows, self._weight, self._bias)


class Int4Linear:
    """Few rows are multiplied by the packed levels, more by the same weights widened to the model's type.

    Widened to bfloat16, a weight is off by at most 2^-9 of itself, so the two differ by less than the rounding of the
    product itself: which of them runs is a question of speed, not another precision.
    """

    def __init__(self, weight: Int4Weight, dtype: torch.dtype, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._wide = Linear(weight.widened(dtype), bias)
        self._packed = _can_pack_int4(weight, dtype)
        self.nbytes = self._wide.nbytes
        if self._packed:
            self._levels = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.unpacked().int(), 1)  # noqa: SLF001  torch's own kernel has no public name
            self._scales = torch.stack((weight.scales.t(), weight.middles.t()), -1).contiguous()
            self.nbytes += weight.nbytes

    def __call__(self, rows: Tensor) -> Tensor:
        if not self._packed or len(rows) > INT4_ROWS_MAX:
            return self._wide(rows)
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self._levels, GROUP, self._scales)  # noqa: SLF001  as above
        return product if self._bias is None else product.add_(self._bias)


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch has no annotation here
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001  it has no public name
    )


def _can_pack_int4(weight: Int4Weight, dtype: torch.dtype) -> bool:
    # The kernel takes outputs by sixteen.
    return (
        dtype == torch.bfloat16
        and weight.shape[0] % 16 == 0
        and hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
        and hasattr(torch.ops.aten, "_convert_weight_to_int4pack_for_cpu")
    )
