"""How figures read: plain decimals, no rounding to nothing, the exact value beside, UTC said."""

import re

import pytest
from markupsafe import Markup

from api.dashboard import figures


def _text(markup: str) -> str:
    assert isinstance(markup, Markup)
    return Markup(re.sub(r"<[^>]*>", "", markup)).unescape()


@pytest.mark.parametrize(
    ("nano", "text", "exact"),
    [
        (0, "$0.00", "0"),
        (1, "<$0.01", "0.000000001"),
        (9_999_999, "<$0.01", "0.009999999"),
        (10_000_000, "$0.01", "0.01"),
        (1_234_567_891_234, "$1,234.57", "1234.567891234"),
        (-2_500_000_000, "−$2.50", "-2.5"),
        (-1, ">−$0.01", "-0.000000001"),
    ],
)
def test_money_is_in_cents_with_the_exact_amount_under_the_pointer(nano: int, text: str, exact: str) -> None:
    shown = figures.usd(nano)
    assert _text(shown) == text
    assert f'value="{exact}" title="${exact}"' in shown


@pytest.mark.parametrize(
    ("nano", "text"),
    [(600_000_000, "$0.60"), (1, "$0.000000001"), (2_346_000, "$0.002346"), (-5_000_000_000, "−$5.00")],
)
def test_a_price_has_every_digit_and_two_at_least(nano: int, text: str) -> None:
    assert _text(figures.usd_exact(nano)) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (9_999, "9,999"), (12_345, "12.3 k"), (771_234, "771 k"), (1_000_000, "1.0 M"), (25 * 10**8, "2.5 B")],
)
def test_large_counts_are_short_and_exact_underneath(number: int, text: str) -> None:
    assert _text(figures.compact(number)) == text
    assert f'value="{number}"' in figures.compact(number)


def test_what_is_not_there_is_a_dash_and_never_a_zero() -> None:
    for show in (figures.usd, figures.usd_exact, figures.count, figures.neurons, figures.milliseconds, figures.instant):
        assert _text(show(None)) == "–"


@pytest.mark.parametrize(("micro", "text"), [(0, "0.0"), (1, "<0.1"), (12_340_000, "12.3"), (1_495_400_000, "1,495")])
def test_neurons_are_whole_or_have_one_decimal(micro: int, text: str) -> None:
    assert _text(figures.neurons(micro)) == text


@pytest.mark.parametrize(("ms", "text"), [(0, "0 ms"), (9_999, "9,999 ms"), (12_345, "12.3 s")])
def test_times_are_in_milliseconds_or_seconds(ms: int, text: str) -> None:
    assert _text(figures.milliseconds(ms)) == text


def test_an_instant_says_that_it_is_utc() -> None:
    shown = figures.instant(1_800_000_000_123_456_789)
    assert _text(shown) == "2027-01-15 08:00:00 UTC"
    assert 'datetime="2027-01-15T08:00:00.123456Z"' in shown


def test_an_audit_entrys_detail_is_read_without_brackets() -> None:
    assert figures.facts('{"hard":true,"key_id":null,"limit_nano":5}') == "hard yes, limit nano 5"


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "–"), (59.4, "59 s"), (600, "10 min"), (7_200, "2 h"), (400_000, "5 days")]
)
def test_waits_are_in_the_unit_that_people_say(seconds: float | None, text: str) -> None:
    assert figures.seconds_text(seconds) == text
