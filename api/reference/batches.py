"""What the routes of files and batches answer, in both dialects. Pure shapes."""

from typing import Final

from api.console.batches import BatchesOfAllQuery
from api.openai.batches import BatchesQuery
from api.openai.files import FilesQuery
from api.reference.document import Good, Told, answer
from api.reference.errors import BODY, KEY, PATH, QUERY, STORES, Errors
from api.reference.generated import envelope
from api.reference.shapes import (
    COUNT,
    FLAG,
    INSTANT,
    TEXT,
    UNIX_SECONDS,
    Shape,
    listed,
    or_null,
    record,
    ref,
)
from api.workers_ai.batch import BatchListQuery
from gateway.errors import (
    BatchesFull,
    BatchInvalid,
    BatchNotCancellable,
    BatchNotFound,
    QueueFull,
    StoredFileInvalid,
    StoredFileNotFound,
    StoredFilesFull,
)

_OBJECT: Final[Shape] = {"type": "object"}
_MOMENT: Final = or_null(UNIX_SECONDS)

BATCH_SCHEMAS: Final[dict[str, Shape]] = {
    "OperatedBatch": record(
        id=TEXT,
        account_id=TEXT,
        key_id=TEXT,
        form=TEXT,
        endpoint=TEXT,
        model=TEXT,
        state=TEXT,
        lines=COUNT,
        succeeded=COUNT,
        failed=COUNT,
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        created_at=INSTANT,
        expires_at=INSTANT,
        owner=or_null(TEXT),
    ),
    "File": record(
        id=TEXT,
        object={"const": "file"},
        bytes=COUNT,
        created_at=UNIX_SECONDS,
        expires_at=UNIX_SECONDS,
        filename=TEXT,
        purpose=TEXT,
        status=TEXT,
    ),
    "Batch": record(
        id=TEXT,
        object={"const": "batch"},
        endpoint=TEXT,
        model=or_null(TEXT),
        errors=or_null(record(object={"const": "list"}, data=listed(_OBJECT))),
        input_file_id=or_null(TEXT),
        completion_window=TEXT,
        status=TEXT,
        output_file_id=or_null(TEXT),
        error_file_id=or_null(TEXT),
        created_at=UNIX_SECONDS,
        in_progress_at=_MOMENT,
        expires_at=_MOMENT,
        finalizing_at=_MOMENT,
        completed_at=_MOMENT,
        failed_at=_MOMENT,
        expired_at=_MOMENT,
        cancelling_at=_MOMENT,
        cancelled_at=_MOMENT,
        request_counts=record(total=COUNT, completed=COUNT, failed=COUNT),
        usage=record(input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT),
        metadata=or_null(_OBJECT),
    ),
    "QueuedBatch": record(
        {"responses": listed(_OBJECT), "usage": _OBJECT},
        request_id=TEXT,
        model=TEXT,
        status=TEXT,
        created_at=INSTANT,
        expires_at=INSTANT,
        kept_until=or_null(INSTANT),
        requests=record(total=COUNT, succeeded=COUNT, failed=COUNT),
    ),
}
_ASKED: Final[Errors] = (*KEY, *PATH, *STORES)


def _page(name: str) -> Shape:
    return record(
        object={"const": "list"}, data=listed(ref(name)), first_id=or_null(TEXT), last_id=or_null(TEXT), has_more=FLAG
    )


def _told(schema: Shape, *errors: type[Exception], query: type | None = None) -> Told:
    asked: Errors = QUERY if query is not None else ()
    return Told("Batches", (answer(schema),), (*_ASKED, *asked, *errors), query=query)


UPLOAD: Final = _told(ref("File"), QueueFull, StoredFileInvalid, StoredFilesFull)
FILES: Final = _told(_page("File"), StoredFileInvalid, StoredFileNotFound, query=FilesQuery)
FILE: Final = _told(ref("File"), StoredFileNotFound)
CONTENT: Final = Told(
    "Batches",
    (Good({"application/octet-stream": {"type": "string"}}, description="JSON lines."),),
    (*_ASKED, StoredFileNotFound),
)
FILE_DELETED: Final = _told(record(id=TEXT, object={"const": "file"}, deleted={"const": True}), StoredFileNotFound)
BATCH_MADE: Final = _told(ref("Batch"), *BODY, StoredFileNotFound, BatchInvalid, BatchesFull)
BATCHES: Final = _told(_page("Batch"), BatchNotFound, BatchInvalid, query=BatchesQuery)
BATCH: Final = _told(ref("Batch"), BatchNotFound)
BATCH_CANCELLED: Final = _told(ref("Batch"), BatchNotFound, BatchNotCancellable)
QUEUED: Final = _told(
    envelope(
        listed(ref("QueuedBatch")),
        result_info=record(count=COUNT, per_page=COUNT, has_more={"enum": [0, 1]}),
    ),
    BatchNotFound,
    query=BatchListQuery,
)
OF_ALL: Final = Told(
    "Operation",
    (answer(record(batches=listed(ref("OperatedBatch")))),),
    (*KEY, *STORES, *QUERY),
    query=BatchesOfAllQuery,
)
CANCELLED_BY_OPERATOR: Final = Told(
    "Operation",
    (answer(ref("OperatedBatch")),),
    (*KEY, *STORES, BatchNotFound, BatchNotCancellable),
)
QUEUED_ONE: Final = _told(envelope(_OBJECT), BatchNotFound)
QUEUED_CANCELLED: Final = _told(envelope(ref("QueuedBatch")), BatchNotFound, BatchNotCancellable)
