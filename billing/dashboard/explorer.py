"""Usage by time and by one dimension, ready to be charted: the largest groups, all others as one, and it adds up.

Every figure comes from the queries that the console's API answers with (store.py): nothing here sums what they did not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from billing.attributed_usage import is_attributed
from billing.rollups import DAY_NS
from billing.store import UsageStore
from billing.summaries import PERIODS_NS, GroupBy, UsageFilter, UsageGroup, UsageTotals, view_of

TOP_MAX: Final = 8
# How far each step may reach, so that a chart has points that can be told apart, and a query rows that can be read.
REACH_NS: Final = {GroupBy.MINUTE: DAY_NS, GroupBy.HOUR: 31 * DAY_NS, GroupBy.DAY: 731 * DAY_NS}
# By hour, groups under a filter are in no rollup: their events are read one by one.
_UNROLLED_REACH_NS: Final = 7 * DAY_NS


class Measure(StrEnum):
    """What is charted."""

    COST = "cost"
    REQUESTS = "requests"
    TOKENS = "tokens"
    NEURONS = "neurons"

    def of(self, totals: UsageTotals) -> int:
        """In nano-USD, requests, tokens (in and out) or micro-neurons."""
        match self:
            case Measure.COST:
                return totals.cost_nano
            case Measure.REQUESTS:
                return totals.requests
            case Measure.TOKENS:
                return totals.prompt_tokens + totals.completion_tokens
            case Measure.NEURONS:
                return totals.neurons_micro


@dataclass(frozen=True, slots=True)
class Band:
    """One group of the chart and its row of the table. key: None is all others together. values: by step."""

    key: str | None
    totals: UsageTotals
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Exploration:
    """bands: the largest first, the others last; for each step their values add up to all that was used.

    steps_ns: when each begins. groups: every group, the largest first, for the table. others: how many are in the last
    band. truncated: there are more groups than are told. overlapping: groups are tags, which share requests: they
    come to more than the totals, and there is no band of others.
    """

    totals: UsageTotals
    steps_ns: tuple[int, ...]
    bands: tuple[Band, ...]
    groups: tuple[UsageGroup, ...]
    others: int
    truncated: bool
    overlapping: bool = False


def reach_fault(from_ns: int, to_ns: int, step: GroupBy, split_by: GroupBy, only: UsageFilter) -> str | None:
    """Why such a range can't be told in such steps, as a sentence; None if it can."""
    if is_attributed(split_by, only) and step is not GroupBy.DAY:
        return "Tags and end users are summed by day: choose steps of one day."
    reach_ns = REACH_NS[step]
    words = f"Steps of one {step.value} reach over at most {reach_ns // DAY_NS} days"
    if step is GroupBy.HOUR and view_of(split_by, only) == "all":
        reach_ns = _UNROLLED_REACH_NS
        words = "Steps of one hour reach over at most 7 days where groups are also filtered"
    if to_ns - from_ns <= reach_ns:
        return None
    return f"{words}: choose longer steps or a shorter range."


def explore(  # noqa: PLR0917 - where, whose, when, in what steps, by what, measured how, of what
    usage: UsageStore,
    account_id: str,
    from_ns: int,
    to_ns: int,
    step: GroupBy,
    split_by: GroupBy,
    measure: Measure,
    only: UsageFilter,
) -> Exploration:
    """split_by: a dimension, or NONE for one band of everything."""
    summary = usage.usage_summary(account_id, from_ns, to_ns, split_by, only)
    groups = sorted(summary.groups, key=lambda group: (-measure.of(group.totals), group.key))
    top = [group.key for group in groups[:TOP_MAX]]
    points = usage.usage_series(account_id, from_ns, to_ns, step, split_by, top, only)
    length_ns = PERIODS_NS[step]
    first_ns, last_ns = from_ns // length_ns * length_ns, (to_ns - 1) // length_ns * length_ns
    steps_ns = tuple(range(first_ns, last_ns + 1, length_ns))
    values: dict[str | None, dict[int, int]] = {}
    for point in points:
        values.setdefault(point.key, {})[point.starts_at_ns] = measure.of(point.totals)

    def band(key: str | None, totals: UsageTotals) -> Band:
        told = values.get(key, {})
        return Band(key, totals, tuple(told.get(start_ns, 0) for start_ns in steps_ns))

    bands = [band(group.key, group.totals) for group in groups[:TOP_MAX]]
    rest = summary.totals - sum((group.totals for group in groups[:TOP_MAX]), UsageTotals())
    others = len(groups) - len(bands)
    overlapping = split_by is GroupBy.TAG and only.tag is None
    if split_by is GroupBy.NONE or (others and not overlapping):
        bands.append(band(None, rest))
    return Exploration(summary.totals, steps_ns, tuple(bands), tuple(groups), others, summary.truncated, overlapping)


def cumulative(values: Sequence[int]) -> tuple[int, ...]:
    total, sums = 0, []
    for value in values:
        total += value
        sums.append(total)
    return tuple(sums)


def cache_hit_permille(totals: UsageTotals) -> int | None:
    """Of a thousand prompt tokens, how many came from the cache; None without any."""
    if not totals.prompt_tokens:
        return None
    return (1_000 * totals.cached_tokens + totals.prompt_tokens // 2) // totals.prompt_tokens
