"""Times in queries, in every form people write them."""

import pytest

from api.console.schemas import UsageQuery, parse_query
from api.errors import InputInvalid

NEW_YEAR_NS = 1_767_225_600 * 10**9


@pytest.mark.parametrize(
    ("text", "instant_ns"),
    [
        ("1767225600", NEW_YEAR_NS),
        ("2026-01-01", NEW_YEAR_NS),
        ("2026-01-01T00:00:00Z", NEW_YEAR_NS),
        ("2026-01-01T01:00:00+01:00", NEW_YEAR_NS),
        ("2026-01-01T01:00:00 01:00", NEW_YEAR_NS),
        ("2026-01-01 00:00:00", NEW_YEAR_NS),
        ("2026-01-01T00:00:00.000001Z", NEW_YEAR_NS + 1_000),
        ("0", 0),
        ("9214646399", 9_214_646_399 * 10**9),
    ],
)
def test_an_instant(text: str, instant_ns: int) -> None:
    assert parse_query(UsageQuery, {"from": text}).from_ns == instant_ns


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "1e9", "1.5", "2026-13-01", "0001-01-01", "9999-12-31", "9" * 11, "9214646400"]
)
def test_no_instant(text: str) -> None:
    with pytest.raises(InputInvalid) as caught:
        parse_query(UsageQuery, {"from": text})
    assert caught.value.param == "from"
