"""Sums of usage by tag and by end user, by UTC day, kept in the transaction that posts the events.

Beside rollups.py, so that requests without either cost nothing here. A request with two tags counts for both: sums by
tag overlap, and what has no tag is told from the sums of all (kind "tagged" counts each tagged request once).
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, Final

import sqlalchemy as sa

from billing.attribution import read_tags, tag_word
from billing.errors import UsageQueryUnsupported
from billing.rollups import DAY_NS, SUMMED, add_sums
from billing.summaries import (
    GROUPS_MAX,
    GroupBy,
    SeriesPoint,
    UsageFilter,
    UsageGroup,
    UsageSummary,
    UsageTotals,
    summarise,
)
from billing.tables import attributed_usage, usage_events
from tenancy.database import Database
from tenancy.key_groups import in_project, project_of

TAG: Final = "tag"
TAGGED: Final = "tagged"
END_USER: Final = "end_user"
_KEYS: Final = ("account_id", "kind", "name", "period_start_ns", "model", "key_id")
_GROUPED: Final = {GroupBy.MODEL: "model", GroupBy.KEY: "key_id", GroupBy.TAG: "name", GroupBy.END_USER: "name"}
_KIND_OF_GROUPS: Final = {GroupBy.TAG: TAG, GroupBy.END_USER: END_USER}
_GROUPS: Final = frozenset({*_GROUPED, GroupBy.NONE, GroupBy.PROJECT, GroupBy.DAY})


def add_attributed(connection: sa.Connection, rows: Sequence[dict[str, Any]]) -> None:
    """rows: of usage_events, new ones. In the caller's write transaction."""
    sums: dict[tuple[Any, ...], list[int]] = {}
    for row in rows:
        for kind, name in _attributions(row["end_user"], row["tags"]):
            day_ns = row["started_at_ns"] // DAY_NS * DAY_NS
            key = (row["account_id"], kind, name, day_ns, row["model"], row["key_id"])
            into = sums.setdefault(key, [0] * (1 + len(SUMMED)))
            into[0] += 1
            for index, summed in enumerate(SUMMED, start=1):
                into[index] += row[summed]
    if sums:
        add_sums(connection, attributed_usage, _KEYS, sums)


def is_attributed(group_by: GroupBy, only: UsageFilter) -> bool:
    """Whether a question is about tags or end users."""
    return group_by in _KIND_OF_GROUPS or only.tag is not None or only.end_user is not None


def summarise_attributed(  # noqa: PLR0917 - called in one place, by UsageStore
    database: Database, account_id: str, from_ns: int, to_ns: int, group_by: GroupBy, only: UsageFilter
) -> UsageSummary:
    """As summaries.summarise, of whole UTC days. Grouped by tag or end user, the group "" is what has none.

    Raises UsageQueryUnsupported: what is not summed apart can't be told.
    """
    kind = _kind(from_ns, to_ns, group_by, only)
    table = attributed_usage.c
    conditions = [
        table.account_id == account_id,
        table.period_start_ns >= from_ns,
        table.period_start_ns < to_ns,
        *_matching(account_id, only),
    ]
    named = only.tag if only.tag is not None else only.end_user
    if named is not None:
        conditions.append(table.name == named)
    key = _group_key(account_id, group_by).label("group_key")
    query = (
        sa.select(key, *_sums())
        .where(table.kind == kind, *conditions)
        .group_by(sa.text("group_key"))
        .order_by(sa.text("group_key"))
        .limit(GROUPS_MAX + 1)
    )
    with database.read() as connection:
        rows = connection.execute(query).all()
        # Each request once, also where it has several tags.
        found = _totals(connection, TAGGED if kind == TAG and named is None else kind, conditions)
    groups = tuple(UsageGroup(str(row[0]), UsageTotals(*map(int, row[1:]))) for row in rows[:GROUPS_MAX])
    truncated = len(rows) > GROUPS_MAX
    if group_by is GroupBy.NONE:
        return UsageSummary(found, ())
    if group_by in _KIND_OF_GROUPS and named is None:
        plain = UsageFilter(model=only.model, key_id=only.key_id, project_id=only.project_id)
        everything = summarise(database, account_id, from_ns, to_ns, GroupBy.NONE, plain).totals
        without = everything - found
        groups = (UsageGroup("", without), *groups) if without.requests else groups
        found = everything
    return UsageSummary(found, groups, truncated)


def attributed_series(  # noqa: PLR0917 - called in one place, by UsageStore
    database: Database,
    account_id: str,
    from_ns: int,
    to_ns: int,
    split_by: GroupBy,
    keys: Sequence[str],
    only: UsageFilter,
) -> list[SeriesPoint]:
    """By UTC day, the named groups and all others together, as summaries.series. Split by tag there are no others: what
    the named tags do not come to can't be told from sums that overlap.

    Raises UsageQueryUnsupported as summarise_attributed.
    """
    kind = _kind(from_ns, to_ns, split_by, only)
    table = attributed_usage.c
    named = only.tag if only.tag is not None else only.end_user
    conditions = [
        table.account_id == account_id,
        table.period_start_ns >= from_ns,
        table.period_start_ns < to_ns,
        *_matching(account_id, only),
    ]
    fixed = [] if named is None else [table.name == named]
    key = sa.null() if split_by is GroupBy.NONE else _group_key(account_id, split_by)
    with database.read() as connection:
        told = _by_day(connection, [table.kind == kind, *fixed, *conditions], key)
        # Each request once, also where it has several tags.
        marked = _by_day(connection, [table.kind == (TAGGED if kind == TAG else kind), *conditions], sa.null())
    if named is None and split_by in _KIND_OF_GROUPS:
        plain = UsageFilter(model=only.model, key_id=only.key_id, project_id=only.project_id)
        days = summarise(database, account_id, from_ns, to_ns, GroupBy.DAY, plain).groups
        for group in days:
            day_ns = group.starts_at_ns(GroupBy.DAY)
            told[day_ns, ""] = group.totals - marked.get((day_ns, None), UsageTotals())
    points: dict[tuple[int, str | None], UsageTotals] = {}
    for (day_ns, name), totals in told.items():
        shown = name if name in keys else None
        if shown is None and kind == TAG and named is None:
            continue
        points[day_ns, shown] = points.get((day_ns, shown), UsageTotals()) + totals
    return [SeriesPoint(day_ns, shown, totals) for (day_ns, shown), totals in points.items() if totals.requests]


def spent_by_end_user(  # noqa: PLR0917 - called in one place, for a budget
    connection: sa.Connection,
    account_id: str,
    end_user: str,
    from_ns: int,
    to_ns: int,
    conditions: Sequence[sa.ColumnElement[bool]],
) -> int:
    """What an end user's requests that began in [from_ns, to_ns) cost, in nano-USD. conditions: on attributed_usage."""
    table = attributed_usage.c
    query = sa.select(sa.func.coalesce(sa.func.sum(table.cost_nano), 0)).where(
        table.account_id == account_id,
        table.kind == END_USER,
        table.name == end_user,
        table.period_start_ns >= from_ns,
        table.period_start_ns < to_ns,
        *conditions,
    )
    return int(connection.scalar(query) or 0)


def wrong_attributed(connection: sa.Connection) -> Iterator[str]:
    """Sentences on days whose sums are not those of their requests, for audit.py. A day of an account is read whole."""
    events, table = usage_events.c, attributed_usage.c
    marked = sa.or_(events.tags.is_not(None), events.end_user.is_not(None))
    day = (events.started_at_ns // DAY_NS * DAY_NS).label("day")
    days = sa.union(
        sa.select(events.account_id, day).where(marked), sa.select(table.account_id, table.period_start_ns)
    ).subquery()
    wanted = sa.select(days).order_by(*days.c)
    for account_id, day_ns in connection.execute(wanted).all():
        of_day = (
            events.account_id == account_id,
            events.started_at_ns >= day_ns,
            events.started_at_ns < day_ns + DAY_NS,
        )
        expected: dict[tuple[str, ...], list[int]] = {}
        columns = (events.end_user, events.tags, events.model, events.key_id, *(events[name] for name in SUMMED))
        for row in connection.execute(sa.select(*columns).where(*of_day, marked)):
            for attributed in _attributions(row[0], row[1]):
                into = expected.setdefault((*attributed, row[2], row[3]), [0] * (1 + len(SUMMED)))
                into[:] = [into[0] + 1, *(was + more for was, more in zip(into[1:], row[4:], strict=True))]
        columns = (table.kind, table.name, table.model, table.key_id, table.requests, *(table[name] for name in SUMMED))
        kept = connection.execute(
            sa.select(*columns).where(table.account_id == account_id, table.period_start_ns == day_ns)
        )
        if expected != {tuple(row[:4]): list(row[4:]) for row in kept}:
            yield (
                f"the day that begins at {day_ns}: account {account_id}'s sums by tag and end user "
                "are not those of its requests"
            )


def _attributions(end_user: str | None, tags: str | None) -> Iterator[tuple[str, str]]:
    """(kind, name) of each sum that a request counts for."""
    if end_user is not None:
        yield END_USER, end_user
    if tags is not None:
        yield TAGGED, ""
        for name, content in read_tags(tags).items():
            yield TAG, tag_word(name, content)


def _kind(from_ns: int, to_ns: int, group_by: GroupBy, only: UsageFilter) -> str:
    named = {kind for kind, name in ((TAG, only.tag), (END_USER, only.end_user)) if name is not None}
    kinds = named | ({_KIND_OF_GROUPS[group_by]} if group_by in _KIND_OF_GROUPS else set())
    if len(kinds) > 1:
        raise UsageQueryUnsupported("Sums are kept by tag or by end user, not by both together.")
    if group_by not in _GROUPS or only.endpoint is not None or only.outcome is not None:
        raise UsageQueryUnsupported("Tags and end users are told apart by model, key, project and day alone.")
    if from_ns % DAY_NS or to_ns % DAY_NS:
        raise UsageQueryUnsupported("Tags and end users are summed by day: from and to must be midnights, UTC.")
    (kind,) = kinds
    return kind


def _matching(account_id: str, only: UsageFilter) -> Iterator[sa.ColumnElement[bool]]:
    table = attributed_usage.c
    if only.model is not None:
        yield table.model == only.model
    if only.key_id is not None:
        yield table.key_id == only.key_id
    if only.project_id is not None:
        yield in_project(table.key_id, account_id, only.project_id)


def _group_key(account_id: str, group_by: GroupBy) -> sa.ColumnElement[Any]:
    table = attributed_usage.c
    if group_by is GroupBy.DAY:
        return table.period_start_ns // DAY_NS
    if group_by is GroupBy.PROJECT:
        return project_of(table.key_id, account_id)
    return table[_GROUPED[group_by]] if group_by in _GROUPED else sa.literal("")


def _totals(connection: sa.Connection, kind: str, conditions: Sequence[sa.ColumnElement[bool]]) -> UsageTotals:
    query = sa.select(*_sums()).where(attributed_usage.c.kind == kind, *conditions)
    return UsageTotals(*map(int, connection.execute(query).one()))


def _by_day(
    connection: sa.Connection, conditions: Sequence[sa.ColumnElement[bool]], key: sa.ColumnElement[Any]
) -> dict[tuple[int, str | None], UsageTotals]:
    """By day and key; a key of NULL is None."""
    day = attributed_usage.c.period_start_ns.label("day")
    query = (
        sa.select(day, key.label("series_key"), *_sums())
        .where(*conditions)
        .group_by(sa.text("day"), sa.text("series_key"))
        .order_by(sa.text("day"))
    )
    return {(int(row[0]), row[1]): UsageTotals(*map(int, row[2:])) for row in connection.execute(query)}


def _sums() -> list[sa.ColumnElement[int]]:
    return [sa.func.coalesce(sa.func.sum(attributed_usage.c[one.name]), 0) for one in fields(UsageTotals)]
