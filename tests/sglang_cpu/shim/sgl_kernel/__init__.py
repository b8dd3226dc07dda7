"""Stands in for sgl-kernel, which has no wheel for this CPU: what a dense text model needs, in plain torch.

Anything else raises when it is called, never silently. Installed into SGLang's environment by install.sh.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__version__ = "0.0.0+cpu.shim"
# So that importing a part of sgl_kernel is a ModuleNotFoundError, which SGLang expects, and no crash.
__path__: list[str] = []  # type: ignore[no-redef]  # every package has one; this one is emptied


def copy_all_layer_kv_cache_cpu(
    k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor], tgt_loc: Tensor, src_loc: Tensor
) -> None:
    for buffer in (*k_buffers, *v_buffers):
        buffer[tgt_loc] = buffer[src_loc]


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_arguments: object, **_options: object) -> None:
        raise NotImplementedError(f"the stand-in for sgl_kernel has no {name}")

    missing.__name__ = name
    return missing
