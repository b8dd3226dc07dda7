"""Sums by tag and end user: they are those of the requests, whoever asks for what."""

from collections import defaultdict
from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from billing.attribution import read_tags, tag_word, tags_text
from billing.audit import violations
from billing.errors import UsageQueryUnsupported
from billing.price_book import set_price
from billing.rollups import DAY_NS
from billing.store import UsageStore
from billing.summaries import EVERYTHING, GroupBy, UsageFilter, UsageSummary
from billing.tables import attributed_usage
from tenancy.database import Database
from tests.billing.builders import ACCOUNT, KEY, MODEL, OTHER_ACCOUNT, price
from tests.billing.rows import event_row, post_rows, wipe
from tests.examples import examples
from tests.tenancy.conftest import over_both_databases

pytestmark = over_both_databases
DAYS = 4
requests = st.fixed_dictionaries(
    {
        "account_id": st.sampled_from([ACCOUNT, OTHER_ACCOUNT]),
        "model": st.sampled_from([MODEL, "@cf/test/other"]),
        "key_id": st.sampled_from([KEY, "d" * 32]),
        "started_at_ns": st.integers(0, DAYS * DAY_NS - 1),
        "end_user": st.sampled_from([None, "ada", "Ada"]),
        "tags": st.dictionaries(st.sampled_from(["team", "env"]), st.sampled_from(["a", "A", 'q"', ""])).map(tags_text),
    }
)


def _ask(database: Database, by: GroupBy = GroupBy.NONE, days: int = DAYS, **only: str) -> UsageSummary:
    return UsageStore(database).usage_summary(ACCOUNT, 0, days * DAY_NS, by, UsageFilter(**only))


def _groups(summary: UsageSummary) -> dict[str, int]:
    return {group.key: group.totals.requests for group in summary.groups}


def _tagged(database: Database, *tags: Mapping[str, str]) -> None:
    rows = (event_row(id=f"r{number}", tags=tags_text(one)) for number, one in enumerate(tags))
    post_rows(database, *rows)


@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(requests, max_size=25))
def test_every_sum_is_that_of_its_requests(database: Database, listed: list[dict[str, object]]) -> None:
    wipe(database)
    rows = [event_row(id=f"r{number}", **row) for number, row in enumerate(listed)]
    post_rows(database, *rows)
    post_rows(database, *rows)  # harmless
    mine = [row for row in rows if row["account_id"] == ACCOUNT]
    by_user: defaultdict[str, int] = defaultdict(int)
    by_tag: defaultdict[str, int] = defaultdict(int)
    store = UsageStore(database)
    for row in mine:
        by_user[row["end_user"] or ""] += 1
        event = store.request_record(ACCOUNT, row["id"])
        assert (event.end_user, event.tags) == (row["end_user"], row["tags"])
        words = [tag_word(*pair) for pair in read_tags(row["tags"]).items()] or [""]
        for word in words:
            by_tag[word] += 1
    users, tags = _ask(database, GroupBy.END_USER), _ask(database, GroupBy.TAG)
    assert (_groups(users), _groups(tags)) == (by_user, by_tag)
    assert users.totals == tags.totals == store.usage_summary(ACCOUNT, 0, DAYS * DAY_NS).totals
    for tag in by_tag.keys() - {""}:
        assert _ask(database, tag=tag).totals.requests == by_tag[tag] == len(_log(database, UsageFilter(tag=tag)))
        assert sum(_groups(_ask(database, GroupBy.DAY, tag=tag)).values()) == by_tag[tag]
    for user in by_user.keys() - {""}:
        assert len(_log(database, UsageFilter(end_user=user))) == by_user[user]
        of_model = _ask(database, GroupBy.MODEL, end_user=user)
        assert of_model.totals.requests == sum(_groups(of_model).values()) == by_user[user]
    with database.write() as connection:
        if not connection.exec_driver_sql("SELECT count(*) FROM prices").scalar():
            set_price(connection, price())
    assert violations(database) == []


@pytest.mark.load
@settings(max_examples=examples(10), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(requests, max_size=25), st.lists(st.sampled_from(["", "ada", "team=a", MODEL, KEY]), unique=True))
def test_a_series_adds_up_to_the_sums_and_its_days_are_those_of_the_requests(
    database: Database, listed: list[dict[str, object]], keys: list[str]
) -> None:
    wipe(database)
    post_rows(database, *(event_row(id=f"r{number}", **row) for number, row in enumerate(listed)))
    store = UsageStore(database)
    asked: list[tuple[GroupBy, dict[str, str]]] = [
        (GroupBy.END_USER, {}),
        (GroupBy.END_USER, {"model": MODEL}),
        (GroupBy.TAG, {}),
        (GroupBy.MODEL, {"end_user": "ada"}),
        (GroupBy.KEY, {"tag": "team=a"}),
        (GroupBy.NONE, {"tag": "team=a"}),
        (GroupBy.TAG, {"tag": "team=a"}),
    ]
    for by, only in asked:
        summary = store.usage_summary(ACCOUNT, 0, DAYS * DAY_NS, by, UsageFilter(**only))
        points = store.usage_series(ACCOUNT, 0, DAYS * DAY_NS, GroupBy.DAY, by, keys, UsageFilter(**only))
        assert len({(point.starts_at_ns, point.key) for point in points}) == len(points)
        assert {point.key for point in points} <= {*keys, None}
        for group in summary.groups:
            if group.key in keys:
                assert sum(one.totals.cost_nano for one in points if one.key == group.key) == group.totals.cost_nano
        if by is not GroupBy.TAG or only:  # tags overlap: what is not named is not told
            assert sum(one.totals.requests for one in points) == summary.totals.requests
        for day in range(DAYS):
            that = store.usage_summary(ACCOUNT, day * DAY_NS, (day + 1) * DAY_NS, by, UsageFilter(**only))
            told = {one.key: one.totals for one in points if one.starts_at_ns == day * DAY_NS and one.key is not None}
            assert told == {group.key: group.totals for group in that.groups if group.key in keys}


def _log(database: Database, only: UsageFilter) -> list[str]:
    return [event.id for event in UsageStore(database).recent_requests(ACCOUNT, 1_000, only=only)]


def test_a_request_with_two_tags_counts_for_both_and_once_in_the_total(database: Database) -> None:
    _tagged(database, {"team": "a", "env": "x"}, {"team": "a"}, {})
    summary = _ask(database, GroupBy.TAG)
    assert _groups(summary) == {"": 1, "env=x": 1, "team=a": 2}
    assert summary.totals.requests == 3


def test_the_log_finds_a_tag_and_nothing_that_only_looks_like_it(database: Database) -> None:
    _tagged(database, {"team": "a"}, {"team": "A"}, {"x": '{"team":"a"}'}, {'x"team': "a"}, {"b": "c", "team": "a"})
    assert sorted(_log(database, UsageFilter(tag="team=a"))) == ["r0", "r4"]


@pytest.mark.parametrize(
    ("by", "only"),
    [
        (GroupBy.HOUR, {"tag": "a=b"}),
        (GroupBy.OUTCOME, {"end_user": "ada"}),
        (GroupBy.TAG, {"end_user": "ada"}),
        (GroupBy.NONE, {"end_user": "ada", "tag": "a=b"}),
        (GroupBy.TAG, {"outcome": "finished"}),
        (GroupBy.END_USER, {"endpoint": "chat"}),
    ],
)
def test_what_is_not_summed_apart_is_refused_and_not_guessed(
    database: Database, by: GroupBy, only: dict[str, str]
) -> None:
    with pytest.raises(UsageQueryUnsupported):
        _ask(database, by, DAYS, **only)


def test_a_part_of_a_day_is_refused(database: Database) -> None:
    with pytest.raises(UsageQueryUnsupported, match="midnights"):
        UsageStore(database).usage_summary(ACCOUNT, 0, DAY_NS - 1, GroupBy.TAG, EVERYTHING)


def test_sums_that_are_not_those_of_the_requests_are_found(database: Database) -> None:
    with database.write() as connection:
        set_price(connection, price())
    _tagged(database, {"team": "a"})
    assert violations(database) == []
    with database.write() as connection:
        connection.execute(attributed_usage.update().where(attributed_usage.c.kind == "tag").values(requests=2))
    assert violations(database) == [
        f"the day that begins at 0: account {ACCOUNT}'s sums by tag and end user are not those of its requests"
    ]
