"""Usage queries: sums that add up, half-open periods, no look into another account, and contradictions found."""

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from billing.errors import UsageNotFound
from billing.price_book import set_price
from billing.rollups import DAY_NS, HOUR_NS
from billing.store import UsageStore
from billing.summaries import MINUTE_NS, GroupBy, UsageFilter, UsageTotals
from tenancy import provisioning
from tenancy.database import Database
from tenancy.keys import KeyKind
from tenancy.projects import change_project, open_project
from tests.billing.builders import ACCOUNT, OTHER_ACCOUNT, price
from tests.billing.rows import add_key, event_row, post_rows, wipe
from tests.examples import examples
from tests.tenancy.conftest import PEPPER, over_both_databases

pytestmark = over_both_databases

_ALL = (0, 2**62)
PROJECT = "d" * 32
KEY_OF_PROJECT = "2" * 32
# On, just before and just behind the boundaries of minutes, hours and days.
_instants = st.builds(
    lambda unit, number, off: max(0, unit * number + off),
    st.sampled_from([DAY_NS, HOUR_NS, MINUTE_NS]),
    st.integers(0, 60),
    st.integers(-2, 2),
)


@pytest.fixture
def store(database: Database) -> UsageStore:
    return UsageStore(database)


@pytest.fixture
def keys(database: Database) -> None:
    """One key in a project, one in the account's default one. What a third word used is in the default one too."""
    add_key(database, KEY_OF_PROJECT, project_id=PROJECT)
    add_key(database, "1" * 32)


class TestSummary:
    def test_an_account_without_usage_has_zeros(self, store: UsageStore) -> None:
        summary = store.usage_summary(ACCOUNT, *_ALL, GroupBy.MODEL)
        assert (summary.totals, summary.groups) == (UsageTotals(), ())

    def test_a_period_is_half_open(self, store: UsageStore, database: Database) -> None:
        post_rows(database, *(event_row(id=f"r{at}", started_at_ns=at) for at in (9, 10, 19, 20)))
        assert store.usage_summary(ACCOUNT, 10, 20).totals.requests == 2

    def test_days_are_utc_days(self, store: UsageStore, database: Database) -> None:
        post_rows(
            database,
            event_row(id="last", started_at_ns=20 * DAY_NS - 1),
            event_row(id="first", started_at_ns=20 * DAY_NS),
            event_row(id="again", started_at_ns=21 * DAY_NS - 1),
        )
        groups = store.usage_summary(ACCOUNT, *_ALL, GroupBy.DAY).groups
        assert [(group.key, group.totals.requests) for group in groups] == [("19", 1), ("20", 2)]

    def test_another_accounts_usage_is_not_in_it(self, store: UsageStore, database: Database) -> None:
        post_rows(database, event_row(), event_row(id="foreign", account_id=OTHER_ACCOUNT))
        assert store.usage_summary(ACCOUNT, *_ALL).totals.requests == 1

    def test_more_groups_than_are_told_are_in_the_totals(
        self, store: UsageStore, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("billing.summaries.GROUPS_MAX", 2)
        post_rows(database, *(event_row(id=f"r{number}", model=f"@cf/m{number}") for number in range(3)))
        summary = store.usage_summary(ACCOUNT, *_ALL, GroupBy.MODEL)
        assert (summary.totals.requests, len(summary.groups), summary.truncated) == (3, 2, True)
        assert not store.usage_summary(ACCOUNT, *_ALL, GroupBy.KEY).truncated

    @pytest.mark.load
    @pytest.mark.usefixtures("keys")
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(40))
    @given(
        rows=st.lists(
            st.fixed_dictionaries(
                {
                    "account_id": st.sampled_from([ACCOUNT, OTHER_ACCOUNT]),
                    "model": st.sampled_from(["@cf/a", "@cf/b"]),
                    "key_id": st.sampled_from(["1" * 32, KEY_OF_PROJECT, "playground"]),
                    "endpoint": st.sampled_from(["chat", "run"]),
                    "outcome": st.sampled_from(["finished", "refused"]),
                    "started_at_ns": _instants,
                    "prompt_tokens": st.integers(0, 10**6),
                    "completion_tokens": st.integers(0, 10**6),
                    "cost_nano": st.integers(0, 10**15),
                    "neurons_micro": st.integers(0, 10**15),
                },
            ),
            max_size=20,
        ),
        group_by=st.sampled_from([by for by in GroupBy if by not in {GroupBy.NONE, GroupBy.TAG, GroupBy.END_USER}]),
        period=st.tuples(_instants, _instants),
        only=st.builds(
            UsageFilter,
            model=st.sampled_from([None, "@cf/a"]),
            key_id=st.sampled_from([None, "1" * 32]),
            endpoint=st.sampled_from([None, "chat"]),
            outcome=st.sampled_from([None, "finished"]),
            project_id=st.sampled_from([None, PROJECT, ACCOUNT]),
        ),
    )
    def test_groups_add_up_to_the_totals_and_to_the_rows(
        self,
        database: Database,
        rows: list[dict[str, Any]],
        group_by: GroupBy,
        period: tuple[int, int],
        only: UsageFilter,
    ) -> None:
        wipe(database)
        if rows:
            post_rows(database, *(event_row(id=f"r{number}", **row) for number, row in enumerate(rows)))
        store = UsageStore(database)
        summary = store.usage_summary(ACCOUNT, *period, group_by, only)
        wanted = {name: value for name, value in asdict(only).items() if value is not None}
        for row in rows:
            row["project_id"] = PROJECT if row["key_id"] == KEY_OF_PROJECT else ACCOUNT
        mine = [
            row
            for row in rows
            if row["account_id"] == ACCOUNT
            and period[0] <= row["started_at_ns"] < period[1]
            and all(row[name] == value for name, value in wanted.items())
        ]
        assert summary.totals == store.usage_summary(ACCOUNT, *period, only=only).totals
        for field in ("prompt_tokens", "completion_tokens", "cost_nano", "neurons_micro"):
            assert getattr(summary.totals, field) == sum(row[field] for row in mine)
            assert getattr(summary.totals, field) == sum(getattr(group.totals, field) for group in summary.groups)
        assert summary.totals.requests == len(mine)
        lengths = {GroupBy.DAY: DAY_NS, GroupBy.HOUR: HOUR_NS, GroupBy.MINUTE: MINUTE_NS}
        column = {GroupBy.KEY: "key_id", GroupBy.PROJECT: "project_id"}.get(group_by, group_by.value)
        keys = {str(row["started_at_ns"] // lengths[group_by]) if group_by in lengths else row[column] for row in mine}
        assert {group.key for group in summary.groups} == keys


class TestRecords:
    def test_a_record_is_found_by_its_own_account_alone(self, store: UsageStore, database: Database) -> None:
        post_rows(database, event_row())
        assert store.request_record(ACCOUNT, "request-1").cost_nano == 1_010_000
        messages = []
        for account_id, request_id in ((OTHER_ACCOUNT, "request-1"), (ACCOUNT, "unknown")):
            with pytest.raises(UsageNotFound) as refusal:
                store.request_record(account_id, request_id)
            messages.append(refusal.value.message)
        assert len(set(messages)) == 1

    def test_pages_show_each_request_once_newest_first(self, store: UsageStore, database: Database) -> None:
        # Several began in the same nanosecond: the id decides, and no page boundary loses one.
        post_rows(database, *(event_row(id=f"r{number:02}", started_at_ns=number // 4) for number in range(22)))
        post_rows(database, event_row(id="foreign", account_id=OTHER_ACCOUNT, started_at_ns=3))
        seen: list[str] = []
        before: tuple[int, str] | None = None
        while page := store.recent_requests(ACCOUNT, 5, before):
            assert len(page) <= 5
            seen += [event.id for event in page]
            before = (page[-1].started_at_ns, page[-1].id)
        assert seen == [f"r{number:02}" for number in reversed(range(22))]

    def test_a_period_is_read_page_by_page_and_no_request_is_lost_or_told_twice(
        self, store: UsageStore, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("billing.store._PAGE_MAX", 3)
        post_rows(database, *(event_row(id=f"r{number:02}", started_at_ns=number // 4) for number in range(22)))
        post_rows(database, event_row(id="foreign", account_id=OTHER_ACCOUNT, started_at_ns=3))
        assert [event.id for event in store.requests_between(ACCOUNT, 1, 5)] == [
            f"r{number:02}" for number in range(4, 20)
        ]

    @pytest.mark.parametrize("limit", [-1, 0, 10**9])
    def test_a_page_is_bounded(self, store: UsageStore, database: Database, limit: int) -> None:
        post_rows(database, *(event_row(id=f"r{number:04}") for number in range(1_001)))
        assert 1 <= len(store.recent_requests(ACCOUNT, limit)) <= 1_000


class TestViolations:
    @pytest.fixture(autouse=True)
    def _price(self, database: Database) -> None:
        with database.write() as connection:
            set_price(connection, price())

    def test_right_rows_have_none(self, store: UsageStore, database: Database) -> None:
        post_rows(
            database,
            event_row(),
            event_row(id="r2", charged=False, outcome="upstream_failed", cost_nano=0, neurons_micro=0),
            event_row(id="r3", charged=False, outcome="refused", cost_nano=0, neurons_micro=0, price_version=None),
        )
        assert store.violations() == []

    @pytest.mark.load
    @pytest.mark.parametrize(
        ("values", "found"),
        [
            ({"cost_nano": 1_010_001}, "its tokens come to 1010000"),
            ({"cost_nano": 0}, "its tokens come to 1010000"),
            ({"neurons_micro": 1}, "its tokens come to 1010000"),
            ({"completion_tokens": 511}, "its tokens come to 5120000"),
            ({"charged": False}, "its tokens come to 0"),
            ({"cached_tokens": 11}, "cached tokens are no part"),
            ({"reasoning_tokens": 101}, "reasoning tokens are no part"),
            ({"price_version": 9}, "there is no price of version 9"),
            ({"price_version": None}, "its tokens come to 0"),
        ],
    )
    def test_each_kind_of_contradiction_is_named(
        self, store: UsageStore, database: Database, values: dict[str, Any], found: str
    ) -> None:
        post_rows(database, event_row(id="right"), event_row(id="wrong", **values))
        violations = store.violations()
        assert violations
        assert all(text.startswith("request wrong: ") for text in violations)
        assert any(found in text for text in violations)

    @pytest.mark.load
    def test_all_rows_are_looked_at_and_at_most_a_hundred_named(self, store: UsageStore, database: Database) -> None:
        post_rows(database, *(event_row(id=f"r{number:05}") for number in range(5_500)))
        assert store.violations() == []
        post_rows(database, *(event_row(id=f"s{number:05}", cost_nano=1) for number in range(150)))
        assert len(store.violations()) == 100


def test_a_renamed_project_and_a_rotated_key_lose_nothing_of_what_they_used(database: Database) -> None:
    now_ns = 1_795_867_200 * 10**9
    account = provisioning.open_account(database, "acme", clock=lambda: now_ns).id
    project = open_project(database, account, "search", clock=lambda: now_ns).id
    before = provisioning.issue_key(
        database, PEPPER, account, name="k", kind=KeyKind.INFERENCE, project_id=project, clock=lambda: now_ns
    ).key.id
    used = {"account_id": account, "started_at_ns": now_ns}
    post_rows(database, event_row(id="r1", key_id=before, **used), event_row(id="r2", key_id=before, **used))
    change_project(database, account, project, name="find", clock=lambda: now_ns)
    after = provisioning.rotate_key(database, PEPPER, account, before, grace_s=60, clock=lambda: now_ns).key
    post_rows(database, event_row(id="r3", key_id=after.id, **used))
    store = UsageStore(database)

    def summed(by: GroupBy, **only: str) -> dict[str, int]:
        summary = store.usage_summary(account, now_ns - DAY_NS, now_ns + DAY_NS, by, UsageFilter(**only))
        assert summary.totals.requests == sum(group.totals.requests for group in summary.groups) == 3
        return {group.key: group.totals.requests for group in summary.groups}

    assert summed(GroupBy.PROJECT) == {project: 3}
    assert summed(GroupBy.PROJECT, project_id=project) == {project: 3}
    assert summed(GroupBy.KEY) == {before: 2, after.id: 1}
    assert after.lineage == before  # under which its limits and budgets go on
