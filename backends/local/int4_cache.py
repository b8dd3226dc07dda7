"""INT4 weights on disk, beside the checkpoint that they were made from: quantising takes longer than reading.

One safetensors file whose metadata names the SHA-256 of the checkpoint's files and the format. Whatever does not match
or can't be read whole is made again; a folder that can't be written to costs a slower start and nothing else. The file
is written beside its place, synced and renamed, so that two engines that start at once do not meet.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from backends.local.int4 import GROUP, Int4Weight, quantise

log = structlog.get_logger(__name__)

FILE_NAME = f"int4-group{GROUP}.cache"
"""Not *.safetensors: the checkpoint's own files are found by that ending."""
FORMAT = "1"
PARTS = ("levels", "scales", "middles")


class Int4Cache:
    def __init__(self, folder: Path, sources: Sequence[Path]) -> None:
        """`sources` are the files that the weights come from."""
        self._path = folder / FILE_NAME
        self._metadata = {"source_sha256": _digest(sources), "format": FORMAT}
        self._weights = self._read()
        self._grown = False

    def weight(self, name: str, source: Callable[[], Tensor]) -> Int4Weight:
        """The quantised weight of that name; made from `source`, [rows, columns], if it is not there."""
        if name not in self._weights:
            self._weights[name] = quantise(source())
            self._grown = True
        return self._weights[name]

    def save(self) -> None:
        """Write what was made, if anything was, and forget all of it."""
        if self._grown:
            try:
                self._write()
            except OSError as error:
                log.warning("int4_weights_not_kept", path=str(self._path), reason=str(error))
        self._weights, self._grown = {}, False

    def _read(self) -> dict[str, Int4Weight]:
        try:
            with safe_open(self._path, framework="pt") as file:
                if file.metadata() != self._metadata:
                    return {}
                names = {key.rpartition(".")[0] for key in file.keys()}  # noqa: SIM118  it is no mapping
                return {name: Int4Weight(*(file.get_tensor(f"{name}.{part}") for part in PARTS)) for name in names}
        except (OSError, SafetensorError):
            return {}

    def _write(self) -> None:
        tensors = {
            f"{name}.{part}": getattr(weight, part).contiguous()
            for name, weight in self._weights.items()
            for part in PARTS
        }
        descriptor, partial = tempfile.mkstemp(dir=self._path.parent, prefix=f".{FILE_NAME}.")
        os.close(descriptor)
        try:
            save_file(tensors, partial, metadata=self._metadata)
            _sync(Path(partial))
            Path(partial).replace(self._path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                Path(partial).unlink()


def _digest(sources: Sequence[Path]) -> str:
    whole = hashlib.sha256()
    for path in sorted(sources):
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
