"""Lets the torchvision of PyPI, which is built for CUDA, be imported beside a torch that is not.

Its compiled part can't load, so `torchvision::nms` is undefined and torchvision's own registration of a fake for it
raises. Declaring the operators just before torchvision is imported is all that is needed; a text model calls none.
Installed into SGLang's environment by install.sh and imported at its start by a .pth file.
"""

import contextlib
import importlib.abc
import sys


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; it only notices that torchvision is about to be imported."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch  # noqa: PLC0415 - seconds, which only those pay who import torchvision

            for name in ("nms", "qnms"):
                with contextlib.suppress(RuntimeError):  # declared already
                    torch.library.define(
                        f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    )


sys.meta_path.insert(0, _BeforeTorchvision())
