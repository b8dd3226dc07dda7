"""Compiles `native.c` with the machine's own C compiler, once: the result is kept under a name that says what it is of.

The name is a digest of source, flags, compiler and processor: a folder that several machines share holds one file for
each. Without a compiler, or with one that fails, there is no library and the engine computes in torch.
"""

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

SOURCE = Path(__file__).with_name("native.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared", "-w")
COMPILE_SECONDS_MAX = 60.0


def built_library(folder: Path) -> Path | None:
    """The library in `folder`, compiled if it is not there; None where that is not possible."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        log.info("kernels_not_compiled", reason="no C compiler")
        return None
    command = [compiler, *FLAGS]
    libraries = []
    openmp = _loaded_openmp()
    if openmp is not None:
        command.append("-fopenmp")
        # By path, and that of the one which torch has loaded: a second one would bring a second set of threads.
        libraries.append(str(openmp))
    try:
        path = folder / f"{_digest(command)}.so"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _compile(command, libraries, path)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        log.warning("kernels_not_compiled", reason=detail[-500:])
        return None
    return path


def _compile(command: list[str], libraries: list[str], path: Path) -> None:
    """Whole or not at all: two engines that start at once must not read each other's half."""
    descriptor, partial = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    os.close(descriptor)
    try:
        full = [*command, str(SOURCE), "-o", partial, *libraries, "-lm"]
        subprocess.run(full, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS_MAX)  # noqa: S603  the compiler's path, our own flags and files
        Path(partial).replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(partial).unlink()


def _digest(command: list[str]) -> str:
    version = subprocess.run([command[0], "--version"], check=True, capture_output=True, timeout=COMPILE_SECONDS_MAX)  # noqa: S603  as above
    whole = hashlib.sha256(SOURCE.read_bytes())
    for part in (" ".join(command).encode(), version.stdout, platform.machine().encode(), _processor()):
        whole.update(b"\0" + part)
    return whole.hexdigest()[:32]


def _processor() -> bytes:
    """What `-march=native` looks at, as far as the kernel tells; elsewhere the platform's own word."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
        return b"\n".join(sorted({line for line in lines if line.startswith((b"flags", b"Features", b"model"))}))
    return platform.processor().encode()


def _loaded_openmp() -> Path | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.rpartition(" ")[2]
            if "libgomp" in Path(path).name:
                return Path(path)
    return None
