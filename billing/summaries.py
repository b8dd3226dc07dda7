"""Sums of what an account used in a period, by what is asked for. The console and the command line read.

Whole days and hours of the period come from the rollups and the rest of it from the events themselves, so that a query
reads some thousand rows however many requests there were, and its sums are exact at any boundary.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Final

import orjson
import sqlalchemy as sa

from billing.rollups import DAY_NS, GRAINS_NS, HOUR_NS, ROLLUPS, SUMMED, view_for
from billing.tables import usage_events, usage_rollups
from tenancy.database import Database
from tenancy.key_groups import in_project, project_of

MINUTE_NS: Final = 60 * 1_000_000_000
GROUPS_MAX: Final = 10_000


class GroupBy(StrEnum):
    NONE = "none"
    MODEL = "model"
    DAY = "day"
    HOUR = "hour"
    MINUTE = "minute"
    KEY = "key"
    PROJECT = "project"
    ENDPOINT = "endpoint"
    OUTCOME = "outcome"
    TAG = "tag"
    END_USER = "end_user"


# The length of a group, for those that are times.
PERIODS_NS: Final = {GroupBy.DAY: DAY_NS, GroupBy.HOUR: HOUR_NS, GroupBy.MINUTE: MINUTE_NS}
_COLUMNS: Final = {
    GroupBy.MODEL: "model",
    GroupBy.KEY: "key_id",
    GroupBy.PROJECT: "key_id",  # a project's sums are those of its keys
    GroupBy.ENDPOINT: "endpoint",
    GroupBy.OUTCOME: "outcome",
}


@dataclass(frozen=True, slots=True)
class UsageFilter:
    """Only what is named; None is everything. project_id: the account's id for its default project.

    tag: one, as "team=search". Sums by tag and end user are attributed_usage.py's, not told here.
    """

    model: str | None = None
    key_id: str | None = None
    endpoint: str | None = None
    outcome: str | None = None
    project_id: str | None = None
    tag: str | None = None
    end_user: str | None = None


EVERYTHING: Final = UsageFilter()
_OF_FILTER: Final = {"project_id": "key_id"}  # the dimension that a filter needs told apart, if it is not its own name


@dataclass(frozen=True, slots=True)
class UsageTotals:
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cost_nano: int = 0
    neurons_micro: int = 0
    kv_page_ms: int = 0

    def __add__(self, other: "UsageTotals") -> "UsageTotals":
        return UsageTotals(*map(operator.add, _figures(self), _figures(other)))

    def __sub__(self, other: "UsageTotals") -> "UsageTotals":
        return UsageTotals(*map(operator.sub, _figures(self), _figures(other)))


def _figures(totals: UsageTotals) -> Iterator[int]:
    return (getattr(totals, one.name) for one in fields(UsageTotals))


@dataclass(frozen=True, slots=True)
class UsageGroup:
    """key: the value of what is grouped by; of a time, how many of its periods began since 1970, UTC."""

    key: str
    totals: UsageTotals

    def starts_at_ns(self, by: GroupBy) -> int:
        return int(self.key) * PERIODS_NS[by]


@dataclass(frozen=True, slots=True)
class UsageSummary:
    """truncated: there are more groups than are told; the totals are of all."""

    totals: UsageTotals
    groups: tuple[UsageGroup, ...]
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    """One period of one group. key: None for all groups that were not asked for by name."""

    starts_at_ns: int
    key: str | None
    totals: UsageTotals


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a period and where its sums are: a grain of the rollups, or None for the events."""

    grain: str | None
    from_ns: int
    to_ns: int


def summarise(  # noqa: PLR0917 - called in one place, by UsageStore
    database: Database,
    account_id: str,
    from_ns: int,
    to_ns: int,
    group_by: GroupBy = GroupBy.NONE,
    only: UsageFilter = EVERYTHING,
) -> UsageSummary:
    """Sums of what began in [from_ns, to_ns), and the same by group; groups add up to the totals."""
    view = view_of(group_by, only)
    stretches = cut_up(from_ns, to_ns, _grains(view, group_by))
    parts = [_sums(account_id, view, stretch, only, _group_key(account_id, group_by)) for stretch in stretches]
    if not parts:
        return UsageSummary(UsageTotals(), ())
    each = sa.union_all(*parts).subquery()
    sums = _summed(each)
    grouped = (
        sa.select(each.c.group_key, *sums)
        .group_by(each.c.group_key)
        .having(sa.func.sum(each.c.requests) > 0)
        .order_by(each.c.group_key)
        .limit(GROUPS_MAX + 1)
    )
    with database.read() as connection:
        rows = connection.execute(grouped).all()
        groups = tuple(UsageGroup(str(row[0]), UsageTotals(*map(int, row[1:]))) for row in rows[:GROUPS_MAX])
        truncated = len(rows) > GROUPS_MAX
        totals = (
            UsageTotals(*map(int, connection.execute(sa.select(*sums)).one()))
            if truncated
            else sum((group.totals for group in groups), UsageTotals())
        )
    return UsageSummary(totals, () if group_by is GroupBy.NONE else groups, truncated=truncated)


def series(  # noqa: PLR0917 - called in one place, by UsageStore
    database: Database,
    account_id: str,
    from_ns: int,
    to_ns: int,
    period: GroupBy,
    split_by: GroupBy,
    keys: Sequence[str],
    only: UsageFilter = EVERYTHING,
) -> list[SeriesPoint]:
    """What began in [from_ns, to_ns), by period, and in each by the named keys of `split_by` and all others together.

    Its sums are those of `summarise` with the same filter. Periods of nothing are left out.
    """
    assert period in PERIODS_NS, "a series runs over time"
    view = view_of(split_by, only)

    def split(table: sa.Table, _at_ns: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        column = _dimension(table, account_id, split_by)
        if column is None:
            return sa.null()
        return sa.case((column.in_(keys), column), else_=sa.null())

    parts = [
        _sums(account_id, view, stretch, only, _group_key(account_id, period), split)
        for stretch in cut_up(from_ns, to_ns, _grains(view, period))
    ]
    if not parts:
        return []
    each = sa.union_all(*parts).subquery()
    query = (
        sa.select(each.c.group_key, each.c.split_key, *_summed(each))
        .group_by(each.c.group_key, each.c.split_key)
        .having(sa.func.sum(each.c.requests) > 0)
        .order_by(each.c.group_key)
        .limit(GROUPS_MAX)
    )
    with database.read() as connection:
        rows = connection.execute(query).all()
    return [SeriesPoint(int(row[0]) * PERIODS_NS[period], row[1], UsageTotals(*map(int, row[2:]))) for row in rows]


def view_of(group_by: GroupBy, only: UsageFilter) -> str:
    """The view of the rollups that tells apart what is grouped by and filtered."""
    named = {_OF_FILTER.get(name, name) for name, value in asdict(only).items() if value is not None}
    return view_for(named | ({_COLUMNS[group_by]} if group_by in _COLUMNS else set()))


def _grains(view: str, period: GroupBy) -> list[str]:
    """The rollups that can tell such periods apart, the longest first."""
    return [
        grain
        for grain, length_ns in sorted(GRAINS_NS.items(), key=lambda item: -item[1])
        if (grain, view) in ROLLUPS and length_ns <= PERIODS_NS.get(period, length_ns)
    ]


def _summed(each: sa.Subquery) -> list[sa.ColumnElement[int]]:
    return [sa.func.coalesce(sa.func.sum(each.c[one.name]), 0) for one in fields(UsageTotals)]


def cut_up(from_ns: int, to_ns: int, grains: Sequence[str]) -> Iterator[Stretch]:
    """The period cut up: whole periods of the first grain from its rollups, the two ends from the next ones."""
    if from_ns >= to_ns:
        return
    if not grains:
        yield Stretch(None, from_ns, to_ns)
        return
    length_ns = GRAINS_NS[grains[0]]
    first_ns, last_ns = -(-from_ns // length_ns) * length_ns, to_ns // length_ns * length_ns
    if first_ns >= last_ns:
        yield from cut_up(from_ns, to_ns, grains[1:])
        return
    yield from cut_up(from_ns, first_ns, grains[1:])
    yield Stretch(grains[0], first_ns, last_ns)
    yield from cut_up(last_ns, to_ns, grains[1:])


_Key = Callable[[sa.Table, sa.ColumnElement[Any]], sa.ColumnElement[Any]]


def _group_key(account_id: str, group_by: GroupBy) -> _Key:
    def key(table: sa.Table, at_ns: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        if group_by in PERIODS_NS:
            return at_ns // PERIODS_NS[group_by]
        column = _dimension(table, account_id, group_by)
        return sa.literal("") if column is None else column

    return key


def _dimension(table: sa.Table, account_id: str, by: GroupBy) -> sa.ColumnElement[Any] | None:
    """None for what is no dimension."""
    if by is GroupBy.PROJECT:
        return project_of(table.c.key_id, account_id)
    return table.c[_COLUMNS[by]] if by in _COLUMNS else None


def _sums(  # noqa: PLR0917 - whose, where, when, what of it, by what
    account_id: str, view: str, stretch: Stretch, only: UsageFilter, group: _Key, split: _Key | None = None
) -> sa.Select[Any]:
    table = usage_events if stretch.grain is None else usage_rollups
    at_ns = table.c.started_at_ns if stretch.grain is None else table.c.period_start_ns
    keys = [group(table, at_ns).label("group_key")]
    if split is not None:
        keys.append(split(table, at_ns).label("split_key"))
    requests = sa.func.count() if stretch.grain is None else sa.func.sum(table.c.requests)
    query = (
        sa.select(*keys, requests.label("requests"), *(sa.func.sum(table.c[name]).label(name) for name in SUMMED))
        .where(table.c.account_id == account_id, at_ns >= stretch.from_ns, at_ns < stretch.to_ns)
        .group_by(*(sa.text(key.name) for key in keys))
    )
    if stretch.grain is not None:
        query = query.where(table.c.view == view, table.c.grain == stretch.grain)
    return query.where(*matching(table, account_id, only))


def matching(table: sa.Table, account_id: str, only: UsageFilter) -> list[sa.ColumnElement[bool]]:
    """The filter as conditions on the account's events or rollups; of tags and end users, on events."""
    wanted = asdict(only)
    project_id, tag = wanted.pop("project_id"), wanted.pop("tag")
    conditions = [table.c[name] == value for name, value in wanted.items() if value is not None]
    if tag is not None:
        conditions.append(_has_tag(table.c.tags, tag))
    return conditions if project_id is None else [*conditions, in_project(table.c.key_id, account_id, project_id)]


def _has_tag(tags: sa.ColumnElement[str], tag: str) -> sa.ColumnElement[bool]:
    """By the tag's own text inside the object: quotes in a text are escaped, so nothing else reads like it."""
    name, _, content = tag.partition("=")
    pair = orjson.dumps({name: content}).decode()[1:-1]
    # Taken away it leaves another text; unlike LIKE, this heeds capitals everywhere.
    return sa.or_(*(sa.func.replace(tags, before + pair, "") != tags for before in ("{", ",")))
