"""What the console's routes read from their queries. Values arrive as text."""

import re
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError, WithJsonSchema
from starlette.requests import Request

from api.body import input_invalid
from api.errors import InputInvalid
from billing.attribution import END_USER_CHARS_MAX
from billing.summaries import GroupBy
from tenancy.provisioning import LIST_MAX, MODEL_ID, REGION_NAME

_SECOND_NS: Final = 1_000_000_000
# The year 2262 is the first that a signed 64-bit count of nanoseconds does not hold whole: a period around an instant
# before it also ends within.
_INSTANT_NS_MAX: Final = 9_214_646_400 * _SECOND_NS - 1
_UNIX_SECONDS: Final = re.compile(r"\d{1,10}", re.ASCII)
_CURSOR: Final = re.compile(r"(\d{1,19})\.([0-9a-f-]{36})", re.ASCII)
_SOURCE_CURSOR: Final = re.compile(r"(\d{1,19})\.([ -~]{1,200})", re.ASCII)


def _instant_ns(value: object) -> object:
    """Unix seconds, or ISO 8601; a time without an offset is UTC."""
    if type(value) is int:
        return value * _SECOND_NS
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
    if not 0 <= instant_ns <= _INSTANT_NS_MAX:
        raise ValueError("must lie between 1970 and 2261.")
    return instant_ns


_INSTANT_SHAPE: Final = {
    "anyOf": [
        {"type": "integer", "minimum": 0, "maximum": _INSTANT_NS_MAX // _SECOND_NS, "description": "Unix seconds."},
        {"type": "string", "pattern": "^[0-9]{1,9}$"},
        {"type": "string", "format": "date-time", "pattern": "^(19[789]|20)"},
        {"type": "string", "format": "date", "pattern": "^(19[789]|20)"},
    ]
}
# The instant of a cursor has 19 digits until the year 2262.
_CURSOR_SHAPE: Final = {"type": "string", "pattern": r"^[0-8][0-9]{0,17}\.[0-9a-f-]{36}$"}
_SOURCE_CURSOR_SHAPE: Final = {"type": "string", "pattern": r"^[0-8][0-9]{0,17}\.[ -~]{1,200}$"}

Name = Annotated[str, Field(min_length=1, max_length=200)]
# What such names may be is checked where they are kept; the document shows it.
ModelId = Annotated[Name, WithJsonSchema({"type": "string", "pattern": f"^{MODEL_ID.pattern}$"})]
RegionName = Annotated[Name, WithJsonSchema({"type": "string", "pattern": f"^{REGION_NAME.pattern}$"})]
ModelList = Annotated[list[ModelId], Field(min_length=1, max_length=LIST_MAX)]
Cursor = Annotated[tuple[int, str] | None, BeforeValidator(_cursor), WithJsonSchema(_CURSOR_SHAPE)]
SourceCursor = Annotated[tuple[int, str] | None, BeforeValidator(_source_cursor), WithJsonSchema(_SOURCE_CURSOR_SHAPE)]
Instant = Annotated[int, BeforeValidator(_instant_ns), AfterValidator(_in_range), WithJsonSchema(_INSTANT_SHAPE)]
Tag = Annotated[str, Field(min_length=2, max_length=400, pattern=r"^[^=]{1,64}=")]
EndUser = Annotated[str, Field(min_length=1, max_length=END_USER_CHARS_MAX)]


class UsageQuery(BaseModel):
    from_ns: Instant | None = Field(default=None, alias="from")
    to_ns: Instant | None = Field(default=None, alias="to")
    group_by: GroupBy = GroupBy.NONE
    model: Name | None = None
    key: Name | None = None
    project: Name | None = None
    endpoint: Name | None = None
    outcome: Name | None = None
    tag: Tag | None = None
    end_user: EndUser | None = None


class LatencyQuery(BaseModel):
    from_ns: Instant | None = Field(default=None, alias="from")
    to_ns: Instant | None = Field(default=None, alias="to")
    model: Name | None = None


class CostsQuery(UsageQuery):
    group_by: Literal[
        GroupBy.DAY, GroupBy.MODEL, GroupBy.KEY, GroupBy.PROJECT, GroupBy.TAG, GroupBy.END_USER, GroupBy.NONE
    ] = GroupBy.DAY


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
    tag: Tag | None = None
    end_user: EndUser | None = None


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


def read_query(schema: type[Query], request: Request) -> Query:
    """Raises InputInvalid, also for a parameter that is given twice: two servers could read two things."""
    return parse_query(schema, once_each(request))


def once_each(request: Request) -> dict[str, str]:
    """The query's parameters. Raises InputInvalid."""
    values: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name in values:
            raise InputInvalid((name,), "is given twice.")
        values[name] = value
    return values


def parse_query(schema: type[Query], parameters: dict[str, Any]) -> Query:
    """Raises InputInvalid."""
    try:
        return schema.model_validate(parameters)
    except ValidationError as error:
        raise input_invalid(error) from None
