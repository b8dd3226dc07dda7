"""What the console's routes read from their queries. Values arrive as text."""

import re
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError

from api.body import input_invalid
from billing.summaries import GroupBy

_SECOND_NS: Final = 1_000_000_000
_UNIX_SECONDS: Final = re.compile(r"\d{1,10}", re.ASCII)
_CURSOR: Final = re.compile(r"(\d{1,19})\.([0-9a-f-]{36})", re.ASCII)
_SOURCE_CURSOR: Final = re.compile(r"(\d{1,19})\.([ -~]{1,200})", re.ASCII)


def _instant_ns(value: object) -> object:
    """Unix seconds, or ISO 8601; a time without an offset is UTC."""
    if not isinstance(value, str):
        return value
    if _UNIX_SECONDS.fullmatch(value):
        return int(value) * _SECOND_NS
    try:
        # A plus sign that was not percent-encoded arrives as a space.
        moment = datetime.fromisoformat(value.replace(" ", "+") if "T" in value else value)
    except ValueError:
        raise ValueError("must be Unix seconds or an ISO 8601 time.") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    since = moment - datetime.fromtimestamp(0, UTC)
    return (since.days * 86_400 + since.seconds) * _SECOND_NS + since.microseconds * 1_000


def instant_ns(text: str) -> int:
    """As `Instant`, of one text. Raises ValueError."""
    value = _instant_ns(text)
    assert isinstance(value, int), "a text becomes an integer or raises"
    return _in_range(value)


def _cursor(value: object) -> object:
    return _parsed_cursor(_CURSOR, value)


def _source_cursor(value: object) -> object:
    return _parsed_cursor(_SOURCE_CURSOR, value)


def _parsed_cursor(pattern: re.Pattern[str], value: object) -> object:
    if not isinstance(value, str):
        return value
    found = pattern.fullmatch(value)
    if found is None or int(found[1]) >= 2**63:
        raise ValueError("must be the `next` of an earlier page.")
    return int(found[1]), found[2]


def _in_range(instant_ns: int) -> int:
    if not 0 <= instant_ns < 2**63:
        raise ValueError("must lie between 1970 and 2262.")
    return instant_ns


Name = Annotated[str, Field(min_length=1, max_length=200)]
Cursor = Annotated[tuple[int, str] | None, BeforeValidator(_cursor)]
SourceCursor = Annotated[tuple[int, str] | None, BeforeValidator(_source_cursor)]
Instant = Annotated[int, BeforeValidator(_instant_ns), AfterValidator(_in_range)]


class UsageQuery(BaseModel):
    from_ns: Instant | None = Field(default=None, alias="from")
    to_ns: Instant | None = Field(default=None, alias="to")
    group_by: GroupBy = GroupBy.NONE
    model: Name | None = None
    key: Name | None = None
    project: Name | None = None
    endpoint: Name | None = None
    outcome: Name | None = None


class LatencyQuery(BaseModel):
    from_ns: Instant | None = Field(default=None, alias="from")
    to_ns: Instant | None = Field(default=None, alias="to")


class CostsQuery(UsageQuery):
    group_by: Literal[GroupBy.DAY, GroupBy.MODEL, GroupBy.KEY, GroupBy.PROJECT, GroupBy.NONE] = GroupBy.DAY


class RequestsQuery(BaseModel):
    """from: how far back a filter looks."""

    limit: Annotated[int, Field(ge=1, le=1_000)] = 50
    before: Cursor = None
    from_ns: Instant = Field(default=0, alias="from")
    model: Name | None = None
    key: Name | None = None
    project: Name | None = None
    endpoint: Name | None = None
    outcome: Name | None = None


class StatementQuery(BaseModel):
    limit: Annotated[int, Field(ge=1, le=1_000)] = 50
    before: SourceCursor = None


class InvoiceFormat(StrEnum):
    JSON = "json"
    HTML = "html"
    PDF = "pdf"
    CSV = "csv"


class InvoiceQuery(BaseModel):
    format: InvoiceFormat = InvoiceFormat.JSON


class BudgetsQuery(BaseModel):
    at_ns: Instant | None = Field(default=None, alias="at")


Query = TypeVar("Query", bound=BaseModel)


def parse_query(schema: type[Query], parameters: dict[str, Any]) -> Query:
    """Raises InputInvalid."""
    try:
        return schema.model_validate(parameters)
    except ValidationError as error:
        raise input_invalid(error) from None
