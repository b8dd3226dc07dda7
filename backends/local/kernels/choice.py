"""Which kernels an engine computes with: the compiled ones where they can be had and fit the model, else torch's."""

import tempfile
from pathlib import Path

import structlog
import torch

from backends.local.kernels.build import built_library
from backends.local.kernels.native import NativeKernels, Shape, supports
from backends.local.kernels.protocol import Kernels
from backends.local.kernels.torch_kernels import TorchKernels
from backends.local.kv.pool import FP8

log = structlog.get_logger(__name__)


def choose_kernels(shape: Shape, stored: torch.dtype, folder: Path | None) -> Kernels:
    """`stored` is what the pages hold. `folder` keeps what was compiled; without one it is compiled at each start, in a
    second or two.
    """
    if not supports(shape) or stored not in {torch.bfloat16, FP8}:
        return TorchKernels()
    with tempfile.TemporaryDirectory() as scratch:
        library = built_library(folder or Path(scratch))
        if library is None:
            return TorchKernels()
        try:
            return NativeKernels(library)
        except OSError as error:
            log.warning("kernels_not_loaded", reason=str(error))
            return TorchKernels()
