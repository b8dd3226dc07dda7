"""Uploads are bounded in number, and one that breaks off leaves nothing behind that would count against its account."""

import asyncio
import io
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request

from api.openai.files import FileRoutes
from api.services import Services
from gateway.batches.files import FileStore, StoredFile
from gateway.batches.settings import BatchSettings
from gateway.errors import QueueFull
from tenancy.database import open_database
from tenancy.errors import TenancyUnavailable
from tenancy.principal import Principal
from tests.doubles.waiting import eventually
from tests.tenancy.conftest import migrated_file

__all__ = ["migrated_file"]

ACCOUNT = "a" * 32


async def test_an_upload_that_the_database_refused_is_dropped(
    migrated_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(migrated_file, tmp_path / "pagegate.db")
    database = open_database(f"sqlite:///{tmp_path}/pagegate.db")
    files = FileStore(database, clock=time.time_ns, account_bytes_max=1_024)
    settings = SimpleNamespace(batches=BatchSettings())
    services = SimpleNamespace(database=database, batching=SimpleNamespace(files=files), settings=settings)
    routes = FileRoutes(cast("Services", services))
    principal = cast("Principal", SimpleNamespace(account_id=ACCOUNT))
    content = b'{"a": "' + b"b" * 1_000 + b'"}\n'

    def form() -> FormData:
        uploaded = UploadFile(io.BytesIO(content), size=len(content), filename="a\0.jsonl")
        return FormData([("purpose", "batch"), ("file", uploaded)])

    def away(*_: object) -> None:
        raise TenancyUnavailable("away", retry_after_s=1)

    try:
        with monkeypatch.context() as patched:
            patched.setattr(files, "add_part", away)
            with pytest.raises(TenancyUnavailable):
                await routes._store(principal, form())
        file = await routes._store(principal, form())  # there is room for one alone
        assert files.part(file, 0) == content
        assert file.filename == "a.jsonl"
    finally:
        database.close()


async def test_an_account_uploads_a_few_files_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    held, begun = asyncio.Event(), []

    async def permitted(*_: object) -> object:
        return SimpleNamespace(account_id=ACCOUNT)

    async def receive(*_: object) -> StoredFile:
        begun.append(1)
        await held.wait()
        return StoredFile("file-a", ACCOUNT, "batch", "a", 1, True, None, None, 0, 0)

    monkeypatch.setattr("api.openai.files.permitted", permitted)
    settings = SimpleNamespace(batches=BatchSettings())
    routes = FileRoutes(cast("Services", SimpleNamespace(batching=SimpleNamespace(files=None), settings=settings)))
    monkeypatch.setattr(routes, "_receive", receive)
    request = cast("Request", None)
    running = [asyncio.create_task(routes.upload(request)) for _ in range(4)]
    await eventually(lambda: len(begun) == 4, what="four uploads")
    with pytest.raises(QueueFull):
        await routes.upload(request)
    held.set()
    await asyncio.gather(*running)
    await routes.upload(request)
