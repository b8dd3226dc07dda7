"""…/files: upload, list, look at, read and delete the files that batches are made of and the ones that they make."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any, BinaryIO, ClassVar, Final, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from api.auth import permitted
from api.console.schemas import read_query
from api.departure import ClientGone
from api.openai.batch_input import read_object
from api.services import Services
from gateway.batches.files import PART_BYTES, StoredFile
from gateway.batches.settings import BatchSettings
from gateway.errors import QueueFull, StoredFileInvalid
from tenancy.errors import TenancyUnavailable
from tenancy.principal import Principal, Scope

_FILENAME_CHARACTERS_MAX: Final = 255
_FIELDS_MAX: Final = 8
# Files lie on the disk while they arrive: a gibibyte of them at the default bound, of one account a quarter.
_UPLOADS_MAX: Final = 16
_UPLOADS_OF_ACCOUNT_MAX: Final = 4
_EXPIRES_S: Final = (3_600, 30 * 86_400)


class FilesQuery(BaseModel):
    """Values arrive as text, so this one is not strict."""

    purpose: str | None = None
    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"


class FileUpload(BaseModel):
    """The multipart form, for the document of the routes; the form itself is read field by field."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore")

    file: Annotated[str, Field(json_schema_extra={"format": "binary"})]
    purpose: Literal["batch"]


class FileRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._files = services.batching.files
        self._settings: BatchSettings = services.settings.batches
        self._uploads: Counter[str] = Counter()

    async def upload(self, request: Request) -> Response:
        """A file of requests for a batch: JSON lines, in a multipart form with `file` and `purpose=batch`."""
        principal = await permitted(request, self._services, Scope.AI_RUN)
        account_id = principal.account_id
        if self._uploads.total() >= _UPLOADS_MAX or self._uploads[account_id] >= _UPLOADS_OF_ACCOUNT_MAX:
            raise QueueFull("Too many files are being uploaded already.", retry_after_s=5)
        self._uploads[account_id] += 1
        try:
            return _json(file_object(await self._receive(request, principal)))
        finally:
            self._uploads[account_id] -= 1
            if not self._uploads[account_id]:
                del self._uploads[account_id]

    async def _receive(self, request: Request, principal: Principal) -> StoredFile:
        form = await _read_form(request)
        try:
            return await self._store(principal, form)
        finally:
            await form.close()

    async def _store(self, principal: Principal, form: FormData) -> StoredFile:
        uploaded = form.get("file")
        if form.get("purpose") != "batch":
            raise StoredFileInvalid("purpose must be batch.", param="purpose")
        if not isinstance(uploaded, UploadFile) or uploaded.size is None:
            raise StoredFileInvalid("file must be a file: send it as multipart/form-data.")
        kept_s = _kept_s(form, self._settings.file_kept_seconds)
        size, bounds = uploaded.size, self._settings
        if size > bounds.file_bytes_max:
            raise StoredFileInvalid(f"A file has at most {bounds.file_bytes_max} bytes.")
        await run_in_threadpool(_check_lines, uploaded.file, bounds.lines_max)
        name = (uploaded.filename or "batch.jsonl").replace("\0", "")[-_FILENAME_CHARACTERS_MAX:]
        call, account_id = self._services.database.call, principal.account_id
        file = await call(self._files.begin, account_id, name, "batch", size, kept_s)
        try:
            await self._add_parts(file, uploaded)
        except BaseException:
            # Else it would count against the account's share until it is swept.
            with suppress(TenancyUnavailable):
                await call(self._files.drop, account_id, file.id)
            raise
        return file

    async def _add_parts(self, file: StoredFile, uploaded: UploadFile) -> None:
        call, number = self._services.database.call, 0
        while part := await uploaded.read(PART_BYTES):
            await call(self._files.add_part, file.id, number, part)
            number += 1
        await call(self._files.finish, file.account_id, file.id)

    async def all_files(self, request: Request) -> Response:
        """The account's files, the newest first."""
        principal = await permitted(request, self._services, Scope.AI_RUN)
        query = read_query(FilesQuery, request)
        found, more = await self._services.database.call(
            lambda: self._files.page(
                principal.account_id,
                purpose=query.purpose,
                after=query.after,
                limit=query.limit,
                newest_first=query.order == "desc",
            )
        )
        return _json(listing([file_object(file) for file in found], more=more))

    async def retrieve(self, request: Request) -> Response:
        """What is known of a file."""
        return _json(file_object(await self._find(request)))

    async def content(self, request: Request) -> Response:
        """What is in it."""
        file = await self._find(request)
        return StreamingResponse(
            self._answers(file) if file.batch_id else self._parts(file), media_type="application/octet-stream"
        )

    async def delete(self, request: Request) -> Response:
        """Delete a file and what is in it. A batch that has begun goes on: it has the lines that it needs."""
        principal = await permitted(request, self._services, Scope.AI_RUN)
        file_id = request.path_params["file_id"]
        await self._services.database.call(self._files.delete, principal.account_id, file_id)
        return _json({"id": file_id, "object": "file", "deleted": True})

    async def _find(self, request: Request) -> StoredFile:
        principal = await permitted(request, self._services, Scope.AI_RUN)
        return await self._services.database.call(self._files.get, principal.account_id, request.path_params["file_id"])

    async def _parts(self, file: StoredFile) -> AsyncIterator[bytes]:
        number = 0
        while part := await self._services.database.call(self._files.part, file, number):
            yield part
            number += 1

    async def _answers(self, file: StoredFile) -> AsyncIterator[bytes]:
        after = -1
        while True:
            lines, after = await self._services.database.call(self._files.answers, file, after)
            if not lines:
                return
            yield lines


def file_object(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at_ns // 1_000_000_000,
        "expires_at": file.expires_at_ns // 1_000_000_000,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def listing(data: list[dict[str, Any]], *, more: bool) -> dict[str, Any]:
    ids = [one["id"] for one in data] or [None]
    return {"object": "list", "data": data, "first_id": ids[0], "last_id": ids[-1], "has_more": more}


async def _read_form(request: Request) -> FormData:
    """Large files lie on the disk meanwhile. Raises StoredFileInvalid for what is no form."""
    try:
        return await request.form(max_files=1, max_fields=_FIELDS_MAX, max_part_size=_FILENAME_CHARACTERS_MAX)
    except HTTPException as error:
        raise StoredFileInvalid(f"The form can't be read: {error.detail}") from None
    except ClientDisconnect:
        raise ClientGone from None


def _kept_s(form: FormData, otherwise: int) -> int:
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return otherwise
    least, most = _EXPIRES_S
    if anchor != "created_at" or not isinstance(seconds, str) or not seconds.isascii() or not seconds.isdigit():
        raise StoredFileInvalid("expires_after has the anchor created_at and whole seconds.", param="expires_after")
    if len(seconds) > 9 or not least <= int(seconds) <= most:
        raise StoredFileInvalid(f"expires_after.seconds lies in {least}..{most}.", param="expires_after")
    return int(seconds)


def _check_lines(content: BinaryIO, lines_max: int) -> None:
    """Each line is a JSON object. What the objects must say is checked when a batch is made of them."""
    lines = 0
    for number, line in enumerate(content, start=1):
        if not line.strip():
            continue
        lines += 1
        if lines > lines_max:
            raise StoredFileInvalid(f"A file for a batch has at most {lines_max} lines.")
        fields = read_object(line)
        if isinstance(fields, str):
            raise StoredFileInvalid(f"The file must be JSON lines, an object on each. Line {number}: {fields}")
    if not lines:
        raise StoredFileInvalid("The file is empty.")
    content.seek(0)


def _json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
