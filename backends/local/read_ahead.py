"""Has the system read what a start needs next, before it is asked for page by page. server.py calls it first of all."""

import os
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path


def read_ahead(checkpoint: Path) -> None:
    """Weights and torch's library, into the page cache: some 700 MB, which mapped files would fetch in small pieces.

    Returns at once; without effect where they are there already, or where the system takes no such advice.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for path in _files(checkpoint):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)


def _files(checkpoint: Path) -> Iterator[Path]:
    torch = find_spec("torch")
    if torch is not None and torch.origin is not None:
        yield Path(torch.origin).parent / "lib" / "libtorch_cpu.so"
    yield from checkpoint.glob("*.safetensors")
