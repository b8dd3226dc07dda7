"""The vendors' JavaScript packages, installed once from the lock file into the cache, outside any checkout."""

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from backends.checkpoints import default_cache_dir

SOURCES = Path(__file__).parent / "node_clients"
INSTALL_S_MAX = 600


def node_folder() -> Path:
    """A folder with the packages and today's scripts. Fails with a sentence where node or npm is missing."""
    for program in ("node", "npm"):
        assert shutil.which(program), f"{program} is missing: the JavaScript clients' tests need Node.js 18 or newer"
    lock = (SOURCES / "package-lock.json").read_bytes()
    cache = default_cache_dir(os.environ)  # noqa: TID251  tests stand where api/settings.py would
    folder = cache / "node-clients" / hashlib.sha256(lock).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for source in SOURCES.iterdir():
            shutil.copy(source, folder / source.name)
        if not (folder / ".installed").exists():
            _install(folder)
            (folder / ".installed").touch()
    return folder


def _install(folder: Path) -> None:
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S_MAX, check=False)
    assert done.returncode == 0, f"`{' '.join(command)}` failed: {done.stderr[-2000:]}"
