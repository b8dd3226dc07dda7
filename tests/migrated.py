"""A database file at the newest revision: migrated once a process, then copied wherever a test needs one."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from tenancy.database import open_database
from tenancy.migrations import upgrade_schema


@functools.cache
def migrated_file() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="pagegate-migrated-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "migrated.db"
    database = open_database(f"sqlite:///{path}")
    upgrade_schema(database.engine)
    database.close()
    return path


def copy_migrated(home: Path) -> None:
    """Into a data folder that has no database yet; the folder is made where it is missing."""
    home.mkdir(mode=0o700, exist_ok=True)
    if not (home / "pagegate.db").exists():
        shutil.copy(migrated_file(), home / "pagegate.db")
