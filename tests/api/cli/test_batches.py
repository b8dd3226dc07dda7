"""`pagegate batches`."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gateway.batches.settings import BatchSettings
from gateway.batches.store import BatchStore
from tenancy.database import open_database
from tests.api.cli.conftest import Pagegate
from tests.gateway.batches.made import order

ACCOUNT = "a" * 32


def test_batches_are_listed_and_cancelled(answer: Callable[..., Any], pagegate: Pagegate, home: Path) -> None:
    database = open_database(f"sqlite:///{home}/pagegate.db")
    batch = BatchStore(database, BatchSettings(), clock=time.time_ns, told=lambda *_: None).create(ACCOUNT, order(3))
    database.close()
    [listed] = answer("batches", "list")
    assert (listed["id"], listed["state"], listed["lines"]) == (batch.id, "in_progress", 3)
    assert answer("batches", "list", "--account", "b" * 32) == []
    assert answer("batches", "cancel", batch.id)["state"] == "cancelling"
    code, _, err = pagegate("batches", "cancel", "batch_none")
    assert (code, "No batch found" in err) == (1, True)
