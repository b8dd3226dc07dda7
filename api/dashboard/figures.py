"""Figures as people read them: money, neurons, counts, times. Pure; the templates' filters.

Each is one `data` or `time` element whose `value` or `datetime` is exact, so that nothing is lost by rounding, and
tests compare what a page says with what the API says. All times are UTC, and say so.
"""

from datetime import UTC, datetime, timedelta
from typing import Final

import orjson
from markupsafe import Markup, escape

from billing.money import NANO_PER_USD, neurons_decimal, round_half_up, usd_decimal

_CENT_NANO: Final = NANO_PER_USD // 100
_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_ABSENT: Final = Markup('<span class="absent" title="none">–</span>')


def usd(nano: int | None) -> Markup:
    """Whole cents; what is less than one says so. The exact amount is in `value`, and appears under the pointer."""
    if nano is None:
        return _ABSENT
    exact = usd_decimal(nano)
    sign = "−" if nano < 0 else ""
    if 0 < abs(nano) < _CENT_NANO:
        text = f"{'>' if nano < 0 else '<'}{sign}$0.01"
    else:
        cents = round_half_up(abs(nano), _CENT_NANO)
        text = f"{sign}${cents // 100:,}.{cents % 100:02}"
    return _data(text, exact, f"${exact}", "usd")


def usd_exact(nano: int | None) -> Markup:
    """Every digit: for one request, and prices."""
    if nano is None:
        return _ABSENT
    exact = usd_decimal(nano)
    whole, _, part = exact.removeprefix("-").partition(".")
    return _data(f"{'−' if nano < 0 else ''}${whole}.{part:0<2}", exact, "", "usd")


def count(number: int | None) -> Markup:
    return _ABSENT if number is None else _data(f"{number:,}", str(number), "", "count")


def compact(number: int | None) -> Markup:
    """1.2 M; the exact count appears under the pointer."""
    if number is None:
        return _ABSENT
    text = f"{number:,}"
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= 10 * size or (number >= size and unit != "k"):
            tenths = round_half_up(number * 10, size)
            text = f"{tenths // 10:,}.{tenths % 10} {unit}" if tenths < 1_000 else f"{tenths // 10:,} {unit}"
            break
    return _data(text, str(number), f"{number:,}" if text != f"{number:,}" else "", "count")


def neurons(micro: int | None) -> Markup:
    """Whole neurons, or one decimal of few."""
    if micro is None:
        return _ABSENT
    exact = neurons_decimal(micro)
    tenths = round_half_up(micro, 100_000)
    text = f"{round_half_up(micro, 1_000_000):,}" if micro >= 100_000_000 else f"{tenths // 10}.{tenths % 10}"
    if 0 < micro < 100_000:
        text = "<0.1"
    return _data(text, exact, exact, "neurons")


def femto(amount: int) -> Markup:
    """Millionths of a nano-USD, every digit: a line of one request's cost."""
    whole, part = divmod(abs(amount), NANO_PER_USD * 1_000_000)
    digits = f"{whole}.{part:015}".rstrip("0").rstrip(".")
    return _data(f"{'−' if amount < 0 else ''}${digits}", f"{'-' if amount < 0 else ''}{digits}", "", "usd")


def rate(per_s: float | None) -> Markup:
    return _ABSENT if per_s is None else _data(f"{per_s:.1f} /s", f"{per_s:.3f}", "", "rate")


def percent(share: float) -> Markup:
    return _data(f"{share * 100:.1f} %", f"{share:.4f}", "", "share")


def facts(detail: str) -> str:
    """An audit entry's detail in words: names and values, without the brackets."""
    told = orjson.loads(detail)
    return ", ".join(f"{name.replace('_', ' ')} {_word(value)}" for name, value in told.items() if value is not None)


def permille(value: int | None) -> Markup:
    return _ABSENT if value is None else _data(f"{value // 10}.{value % 10} %", str(value), "", "share")


def milliseconds(value: int | None) -> Markup:
    if value is None:
        return _ABSENT
    text = f"{value:,} ms" if value < 10_000 else f"{value // 1000:,}.{value % 1000 // 100} s"
    return _data(text, str(value), f"{value:,} ms" if value >= 10_000 else "", "ms")


def instant(at_ns: int | None) -> Markup:
    """2026-11-29 18:04:05 UTC."""
    if at_ns is None:
        return _ABSENT
    moment = _moment(at_ns)
    exact = moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
    return Markup('<time datetime="{}">{} <abbr title="Coordinated Universal Time">UTC</abbr></time>').format(
        exact, moment.strftime("%Y-%m-%d %H:%M:%S")
    )


def day(at_ns: int | None) -> Markup:
    """The UTC day in which it lies."""
    if at_ns is None:
        return _ABSENT
    text = _moment(at_ns).strftime("%Y-%m-%d")
    return Markup('<time datetime="{}">{}</time>').format(text, text)


def step_text(at_ns: int, length_ns: int) -> str:
    """When a step of a chart begins; its day alone where steps are days."""
    moment = _moment(at_ns)
    return moment.strftime("%Y-%m-%d") if length_ns >= 86_400_000_000_000 else moment.strftime("%Y-%m-%d %H:%M")


def seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7_200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3_600:.0f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"


def _word(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _moment(at_ns: int) -> datetime:
    return _EPOCH + timedelta(microseconds=at_ns // 1_000)


def _data(text: str, value: str, title: str, kind: str) -> Markup:
    shown = Markup(' title="{}"').format(title) if title else Markup("")
    return Markup('<data class="{}" value="{}"{}>{}</data>').format(kind, value, shown, escape(text))


FILTERS: Final = {
    "usd": usd,
    "usd_exact": usd_exact,
    "femto": femto,
    "count": count,
    "compact": compact,
    "neurons": neurons,
    "permille": permille,
    "milliseconds": milliseconds,
    "rate": rate,
    "percent": percent,
    "instant": instant,
    "day": day,
    "seconds": seconds_text,
    "facts": facts,
}
