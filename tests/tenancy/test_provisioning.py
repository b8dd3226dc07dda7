"""Opening accounts, issuing keys, and what each deed refuses."""

import json
import threading
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from tenancy import provisioning
from tenancy.audit_log import read_audit_log
from tenancy.claims import Meter
from tenancy.database import Database
from tenancy.errors import AccountNotFound, KeyNotFound, NameTaken, QuotaNotFound, ScopeMissing
from tenancy.keys import ALLOWED_SCOPES, ApiKey, KeyKind, check_format, hash_key
from tenancy.principal import OPERATOR_SCOPES, Scope
from tenancy.provisioning import ProvisioningInvalid, bootstrap
from tenancy.quotas import LIMIT_MAX, Plan, Quota
from tenancy.rule_setters import RuleSetter
from tenancy.store import QUOTAS_MAX, TenancyStore
from tenancy.tables import accounts, api_keys
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import PEPPER, over_both_databases

pytestmark = over_both_databases

_NOBODY = "0" * 32


def _everything_stored(database: Database) -> str:
    with database.read() as connection:
        rows = [*connection.execute(sa.select(accounts)), *connection.execute(sa.select(api_keys))]
    return repr(rows)


class TestBootstrap:
    def test_the_first_start_opens_an_account_with_both_keys(self, database: Database, clock: SettableClock) -> None:
        made = bootstrap(database, PEPPER, clock=clock)
        assert made is not None
        assert (made.account.name, made.account.concurrency, made.account.credit_limit_nano) == ("default", None, None)
        assert made.inference_key.key.scopes == {Scope.AI_RUN, Scope.AI_READ, Scope.USAGE_READ}
        assert made.admin_key.key.scopes == {
            Scope.AI_READ,
            Scope.USAGE_READ,
            Scope.ACCOUNT_ADMIN,
            Scope.OPERATOR_READ,
            Scope.OPERATOR_WRITE,
        }
        assert check_format(made.inference_key.text).startswith("pgi_live_")
        assert check_format(made.admin_key.text).startswith("pga_live_")

    def test_later_starts_change_nothing(self, database: Database, clock: SettableClock) -> None:
        bootstrap(database, PEPPER, clock=clock)
        before = _everything_stored(database)
        assert bootstrap(database, PEPPER, clock=clock) is None
        assert _everything_stored(database) == before

    def test_an_operators_own_account_counts_as_the_first(self, database: Database, clock: SettableClock) -> None:
        provisioning.open_account(database, "mine", clock=clock)
        assert bootstrap(database, PEPPER, clock=clock) is None


class TestAccounts:
    def test_an_account_is_read_back_as_it_was_opened(self, database: Database, clock: SettableClock) -> None:
        opened = provisioning.open_account(database, "acme", concurrency=3, credit_limit_nano=0, clock=clock)
        assert provisioning.get_account(database, opened.id) == opened
        assert provisioning.list_accounts(database) == [opened]

    def test_a_name_is_taken_once(self, database: Database, clock: SettableClock) -> None:
        provisioning.open_account(database, "acme", clock=clock)
        with pytest.raises(NameTaken):
            provisioning.open_account(database, "acme", clock=clock)
        assert len(provisioning.list_accounts(database)) == 1

    @pytest.mark.parametrize("name", ["", "  ", "two\nlines", "\x1b[31m", "x" * 101])
    def test_a_name_must_be_one_printable_line(self, database: Database, clock: SettableClock, name: str) -> None:
        with pytest.raises(ProvisioningInvalid):
            provisioning.open_account(database, name, clock=clock)

    @pytest.mark.parametrize(("concurrency", "credit_limit_nano"), [(0, None), (-1, None), (None, -1), (None, 2**63)])
    def test_a_limit_below_the_least_is_refused(
        self,
        database: Database,
        clock: SettableClock,
        concurrency: int | None,
        credit_limit_nano: int | None,
    ) -> None:
        account = provisioning.open_account(database, "acme", clock=clock)
        with pytest.raises(ProvisioningInvalid):
            provisioning.set_limits(database, account.id, concurrency=concurrency, credit_limit_nano=credit_limit_nano)
        assert provisioning.get_account(database, account.id) == account

    def test_limits_are_replaced(self, database: Database, clock: SettableClock) -> None:
        account = provisioning.open_account(database, "acme", concurrency=3, clock=clock)
        changed = provisioning.set_limits(database, account.id, concurrency=None, credit_limit_nano=7)
        assert (changed.concurrency, changed.credit_limit_nano) == (None, 7)

    def test_an_unknown_account_is_not_found(self, database: Database) -> None:
        with pytest.raises(AccountNotFound):
            provisioning.get_account(database, _NOBODY)
        with pytest.raises(AccountNotFound):
            provisioning.set_limits(database, _NOBODY, concurrency=1, credit_limit_nano=None)
        with pytest.raises(AccountNotFound):
            provisioning.set_suspended(database, _NOBODY, suspended=True)
        with pytest.raises(AccountNotFound):
            provisioning.list_keys(database, _NOBODY)


class TestKeys:
    def test_a_keys_text_is_nowhere_in_the_database(self, database: Database, clock: SettableClock) -> None:
        account = provisioning.open_account(database, "acme", clock=clock)
        issued = provisioning.issue_key(database, PEPPER, account.id, name="ci", kind=KeyKind.INFERENCE, clock=clock)
        stored = _everything_stored(database)
        assert issued.text[9:49] not in stored
        assert hash_key(issued.text, PEPPER) in stored
        assert issued.text not in repr(issued)

    def test_a_key_has_all_usual_scopes_of_its_kind_unless_told(self, database: Database, clock: SettableClock) -> None:
        account = provisioning.open_account(database, "acme", clock=clock)
        issued = provisioning.issue_key(database, PEPPER, account.id, name="ops", kind=KeyKind.ADMIN, clock=clock)
        assert issued.key.scopes == ALLOWED_SCOPES[KeyKind.ADMIN] - OPERATOR_SCOPES
        assert provisioning.list_keys(database, account.id) == [issued.key]

    @pytest.mark.parametrize(
        ("kind", "scope"),
        [
            (KeyKind.INFERENCE, Scope.ACCOUNT_ADMIN),
            (KeyKind.INFERENCE, Scope.OPERATOR_READ),
            (KeyKind.ADMIN, Scope.AI_RUN),
        ],
    )
    def test_no_key_both_infers_and_administers(
        self, database: Database, clock: SettableClock, kind: KeyKind, scope: Scope
    ) -> None:
        account = provisioning.open_account(database, "acme", clock=clock)
        with pytest.raises(ProvisioningInvalid):
            provisioning.issue_key(database, PEPPER, account.id, name="x", kind=kind, scopes=[scope], clock=clock)
        assert provisioning.list_keys(database, account.id) == []

    def test_a_key_without_any_scope_is_refused(self, database: Database, clock: SettableClock) -> None:
        account = provisioning.open_account(database, "acme", clock=clock)
        with pytest.raises(ProvisioningInvalid):
            provisioning.issue_key(database, PEPPER, account.id, name="x", kind=KeyKind.ADMIN, scopes=[], clock=clock)

    def test_an_expiry_lies_ahead(self, database: Database, clock: SettableClock) -> None:
        account = provisioning.open_account(database, "acme", clock=clock)
        with pytest.raises(ProvisioningInvalid):
            provisioning.issue_key(
                database,
                PEPPER,
                account.id,
                name="x",
                kind=KeyKind.ADMIN,
                expires_at_ns=clock.now_ns,
                clock=clock,
            )

    def test_revoking_again_keeps_the_first_time(self, database: Database, clock: SettableClock) -> None:
        account = provisioning.open_account(database, "acme", clock=clock)
        key = provisioning.issue_key(database, PEPPER, account.id, name="x", kind=KeyKind.INFERENCE, clock=clock).key
        revoked_at_ns = clock.now_ns
        provisioning.revoke_key(database, account.id, key.id, clock=clock)
        clock.advance_s(60)
        assert provisioning.revoke_key(database, account.id, key.id, clock=clock).revoked_at_ns == revoked_at_ns

    def test_enabling_does_not_undo_a_revocation(self, database: Database, clock: SettableClock) -> None:
        account = provisioning.open_account(database, "acme", clock=clock)
        key = provisioning.issue_key(database, PEPPER, account.id, name="x", kind=KeyKind.INFERENCE, clock=clock).key
        provisioning.revoke_key(database, account.id, key.id, clock=clock)
        assert provisioning.set_key_disabled(database, account.id, key.id, disabled=False).revoked_at_ns is not None

    def test_another_accounts_key_is_as_unknown_as_none(self, database: Database, clock: SettableClock) -> None:
        owner = provisioning.open_account(database, "owner", clock=clock)
        other = provisioning.open_account(database, "other", clock=clock)
        key = provisioning.issue_key(database, PEPPER, owner.id, name="x", kind=KeyKind.INFERENCE, clock=clock).key
        messages = []
        for key_id in (key.id, _NOBODY):
            with pytest.raises(KeyNotFound) as refusal:
                provisioning.revoke_key(database, other.id, key_id, clock=clock)
            messages.append(refusal.value.message)
            with pytest.raises(KeyNotFound):
                provisioning.set_key_disabled(database, other.id, key_id, disabled=True)
        assert len(set(messages)) == 1
        assert provisioning.list_keys(database, owner.id) == [key]


class TestRotation:
    def _issue(self, database: Database, clock: SettableClock, **options: Any) -> tuple[str, ApiKey]:
        account = provisioning.open_account(database, "acme", clock=clock)
        values: dict[str, Any] = {"name": "ci", "kind": KeyKind.INFERENCE, "clock": clock} | options
        return account.id, provisioning.issue_key(database, PEPPER, account.id, **values).key

    def _ends(self, database: Database, account_id: str, key_id: str) -> int | None:
        (key,) = (key for key in provisioning.list_keys(database, account_id) if key.id == key_id)
        return key.expires_at_ns

    def test_the_successor_may_do_the_same_and_shares_the_lineage(
        self, database: Database, clock: SettableClock
    ) -> None:
        account_id, old = self._issue(
            database, clock, scopes=[Scope.AI_RUN], models=["@cf/a/b"], networks=["192.0.2.0/24", "2001:db8::/32"]
        )
        second = provisioning.rotate_key(database, PEPPER, account_id, old.id, grace_s=60, clock=clock).key
        third = provisioning.rotate_key(database, PEPPER, account_id, second.id, grace_s=60, clock=clock).key
        for key in (second, third):
            assert (key.name, key.scopes, key.models, key.networks) == (old.name, old.scopes, old.models, old.networks)
            assert key.lineage_id == old.id
        assert len({old.key_hash, second.key_hash, third.key_hash}) == 3

    def test_the_old_key_ends_with_the_grace(self, database: Database, clock: SettableClock) -> None:
        account_id, old = self._issue(database, clock)
        provisioning.rotate_key(database, PEPPER, account_id, old.id, grace_s=60, clock=clock)
        assert self._ends(database, account_id, old.id) == clock.now_ns + 60 * 10**9

    def test_a_grace_never_lengthens_the_old_keys_own_life(self, database: Database, clock: SettableClock) -> None:
        ends_ns = clock.now_ns + 30 * 10**9
        account_id, old = self._issue(database, clock, expires_at_ns=ends_ns)
        clock.advance_s(10)
        new = provisioning.rotate_key(database, PEPPER, account_id, old.id, grace_s=60, clock=clock).key
        assert self._ends(database, account_id, old.id) == ends_ns
        assert new.expires_at_ns == clock.now_ns + 30 * 10**9, "as long as the old one had"
        provisioning.rotate_key(database, PEPPER, account_id, old.id, grace_s=3600, clock=clock)
        assert self._ends(database, account_id, old.id) == ends_ns, "rotated twice"

    @pytest.mark.parametrize("state", ["revoked", "disabled", "expired"])
    def test_a_key_that_does_not_work_can_not_be_rotated(
        self, database: Database, clock: SettableClock, state: str
    ) -> None:
        account_id, old = self._issue(database, clock, expires_at_ns=clock.now_ns + 10**9)
        if state == "revoked":
            provisioning.revoke_key(database, account_id, old.id, clock=clock)
        elif state == "disabled":
            provisioning.set_key_disabled(database, account_id, old.id, disabled=True)
        else:
            clock.advance_s(1)
        with pytest.raises(ProvisioningInvalid):
            provisioning.rotate_key(database, PEPPER, account_id, old.id, grace_s=60, clock=clock)
        assert len(provisioning.list_keys(database, account_id)) == 1

    def test_the_successor_of_a_key_that_ends_as_late_as_can_be_ends_then_too(
        self, database: Database, clock: SettableClock
    ) -> None:
        account_id, old = self._issue(database, clock, expires_at_ns=2**63 - 1)
        clock.advance_s(1)
        issued = provisioning.rotate_key(database, PEPPER, account_id, old.id, grace_s=60, clock=clock)
        assert issued.key.expires_at_ns == 2**63 - 1

    @pytest.mark.parametrize("grace_s", [-1, provisioning.GRACE_S_MAX + 1])
    def test_a_grace_has_bounds(self, database: Database, clock: SettableClock, grace_s: int) -> None:
        account_id, old = self._issue(database, clock)
        with pytest.raises(ProvisioningInvalid):
            provisioning.rotate_key(database, PEPPER, account_id, old.id, grace_s=grace_s, clock=clock)

    def test_another_accounts_key_is_as_unknown_as_none(self, database: Database, clock: SettableClock) -> None:
        _, key = self._issue(database, clock)
        other = provisioning.open_account(database, "other", clock=clock)
        for key_id in (key.id, _NOBODY):
            with pytest.raises(KeyNotFound):
                provisioning.rotate_key(database, PEPPER, other.id, key_id, grace_s=0, clock=clock)

    @pytest.mark.parametrize(
        "bounds",
        [
            {"models": []},
            {"models": ["a b"]},
            {"models": ["x" * 201]},
            {"models": [str(n) for n in range(101)]},
            {"networks": []},
            {"networks": ["192.0.2.1/24"]},
            {"networks": ["anywhere"]},
        ],
    )
    def test_a_bound_that_can_not_be_is_refused(
        self, database: Database, clock: SettableClock, bounds: dict[str, list[str]]
    ) -> None:
        with pytest.raises(ProvisioningInvalid):
            self._issue(database, clock, **bounds)


class TestQuotas:
    def test_limits_are_read_back_and_replaced(self, database: Database, clock: SettableClock) -> None:
        account = provisioning.open_account(database, "acme", clock=clock)
        provisioning.set_quota(database, account.id, Meter.REQUESTS_PER_MINUTE, 5)
        provisioning.set_quota(database, account.id, Meter.REQUESTS_PER_MINUTE, 6)
        provisioning.set_quota(database, account.id, Meter.REQUESTS_PER_MINUTE, 7, model="m")
        assert provisioning.list_quotas(database, account.id) == [
            Quota(Meter.REQUESTS_PER_MINUTE, 6),
            Quota(Meter.REQUESTS_PER_MINUTE, 7, model="m"),
        ]
        provisioning.remove_quota(database, account.id, Meter.REQUESTS_PER_MINUTE)
        with pytest.raises(QuotaNotFound):
            provisioning.remove_quota(database, account.id, Meter.REQUESTS_PER_MINUTE)
        assert len(provisioning.list_quotas(database, account.id)) == 1

    def test_an_account_replaces_its_own_limit_and_leaves_the_operators(
        self, database: Database, clock: SettableClock
    ) -> None:
        account = provisioning.open_account(database, "acme", clock=clock)
        project_id = account.id
        meter, own = Meter.REQUESTS_PER_MINUTE, RuleSetter.ACCOUNT
        provisioning.set_quota(database, account.id, meter, 5, project_id=project_id)
        for limit in (900, 800):
            provisioning.set_quota(database, account.id, meter, limit, project_id=project_id, setter=own)
        of_operator = Quota(meter, 5, project_id=project_id)
        assert provisioning.list_quotas(database, account.id) == [
            Quota(meter, 800, project_id=project_id, set_by=own),
            of_operator,
        ]
        provisioning.remove_quota(database, account.id, meter, project_id=project_id, remover=own)
        with pytest.raises(ScopeMissing, match="by the operator"):
            provisioning.remove_quota(database, account.id, meter, project_id=project_id, remover=own)
        assert provisioning.list_quotas(database, account.id) == [of_operator]
        for deed in (
            partial(provisioning.set_quota, limit=5, setter=own),
            partial(provisioning.remove_quota, remover=own),
        ):
            with pytest.raises(ScopeMissing, match="whole account"):
                deed(database, account.id, meter)
        set_by = [json.loads(entry.detail)["set_by"] for entry in read_audit_log(database, account.id, 4)]
        assert set_by == ["account", "account", "account", "operator"]

    def test_a_keys_limit_is_its_lineages(self, database: Database, clock: SettableClock) -> None:
        account = provisioning.open_account(database, "acme", clock=clock)
        first = provisioning.issue_key(database, PEPPER, account.id, name="x", kind=KeyKind.INFERENCE, clock=clock).key
        second = provisioning.rotate_key(database, PEPPER, account.id, first.id, grace_s=0, clock=clock).key
        quota = provisioning.set_quota(database, account.id, Meter.TOKENS_PER_DAY, 5, key_id=second.id)
        assert quota.key_id == first.id

    @pytest.mark.parametrize("limit", [0, -1, LIMIT_MAX + 1])
    def test_a_limit_has_bounds(self, database: Database, clock: SettableClock, limit: int) -> None:
        account = provisioning.open_account(database, "acme", clock=clock)
        with pytest.raises(ProvisioningInvalid):
            provisioning.set_quota(database, account.id, Meter.REQUESTS_PER_DAY, limit)

    def test_an_account_has_so_many_limits_at_most(self, database: Database, clock: SettableClock) -> None:
        account = provisioning.open_account(database, "acme", clock=clock)
        with database.write() as connection:
            for number in range(QUOTAS_MAX):
                TenancyStore(connection).set_quota(account.id, Quota(Meter.REQUESTS_PER_DAY, 1, model=f"m{number}"))
        with pytest.raises(ProvisioningInvalid):
            provisioning.set_quota(database, account.id, Meter.REQUESTS_PER_DAY, 1)
        provisioning.set_quota(database, account.id, Meter.REQUESTS_PER_DAY, 2, model="m0")

    def test_another_accounts_key_and_an_unknown_account_are_not_found(
        self, database: Database, clock: SettableClock
    ) -> None:
        owner, other = (provisioning.open_account(database, name, clock=clock) for name in ("owner", "other"))
        key = provisioning.issue_key(database, PEPPER, owner.id, name="x", kind=KeyKind.INFERENCE, clock=clock).key
        with pytest.raises(KeyNotFound):
            provisioning.set_quota(database, other.id, Meter.REQUESTS_PER_DAY, 1, key_id=key.id)
        for deed in (
            lambda: provisioning.set_quota(database, _NOBODY, Meter.REQUESTS_PER_DAY, 1),
            lambda: provisioning.list_quotas(database, _NOBODY),
            lambda: provisioning.set_plan(database, _NOBODY, Plan.FREE),
        ):
            with pytest.raises(AccountNotFound):
                deed()

    def test_turns_are_read_back_and_kept_in_their_ranges(self, database: Database, clock: SettableClock) -> None:
        account = provisioning.open_account(database, "acme", clock=clock)
        assert (account.tier, account.weight_percent) == (0, 100)
        changed = provisioning.set_turns(database, account.id, tier=2, weight_percent=250)
        assert (changed.tier, changed.weight_percent) == (2, 250)
        for tier, weight in ((-1, 100), (10, 100), (0, 0), (0, 10_001)):
            with pytest.raises(ProvisioningInvalid):
                provisioning.set_turns(database, account.id, tier=tier, weight_percent=weight)

    def test_regions_are_read_back_and_noted_and_can_be_lifted(self, database: Database, clock: SettableClock) -> None:
        account = provisioning.open_account(database, "acme", clock=clock)
        assert account.regions is None
        bound = provisioning.set_regions(database, account.id, ["eu-west", "eu-north", "eu-west"], clock=clock)
        assert bound.regions == ("eu-north", "eu-west")
        assert provisioning.set_regions(database, account.id, None, clock=clock).regions is None
        told = [(entry.action, entry.detail) for entry in read_audit_log(database, account.id, limit=2)]
        assert told == [
            ("account.set_regions", '{"regions":null}'),
            ("account.set_regions", '{"regions":"eu-north eu-west"}'),
        ]
        for wrong in ([], ["EU"], ["eu west"], ["x" * 64], [f"r{number}" for number in range(1000)]):
            with pytest.raises(ProvisioningInvalid):
                provisioning.set_regions(database, account.id, wrong)

    def test_a_plan_is_read_back(self, database: Database, clock: SettableClock) -> None:
        account = provisioning.open_account(database, "acme", clock=clock)
        assert account.plan is Plan.PAID
        assert provisioning.set_plan(database, account.id, Plan.FREE).plan is Plan.FREE


def test_processes_that_start_first_together_open_one_account(database: Database, clock: SettableClock) -> None:
    made: list[provisioning.Bootstrap | None] = []
    threads = [threading.Thread(target=lambda: made.append(bootstrap(database, PEPPER, clock=clock))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result is None for result in made].count(False) == 1
    assert len(provisioning.list_accounts(database)) == 1
