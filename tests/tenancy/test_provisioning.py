"""Opening accounts, issuing keys, and what each deed refuses."""

import pytest
import sqlalchemy as sa

from tenancy import provisioning
from tenancy.database import Database
from tenancy.errors import AccountNotFound, KeyNotFound, NameTaken
from tenancy.keys import ALLOWED_SCOPES, KeyKind, check_format, hash_key
from tenancy.principal import Scope
from tenancy.provisioning import ProvisioningInvalid, bootstrap
from tenancy.tables import accounts, api_keys
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import PEPPER

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

    def test_a_key_has_all_scopes_of_its_kind_unless_told(self, database: Database, clock: SettableClock) -> None:
        account = provisioning.open_account(database, "acme", clock=clock)
        issued = provisioning.issue_key(database, PEPPER, account.id, name="ops", kind=KeyKind.ADMIN, clock=clock)
        assert issued.key.scopes == ALLOWED_SCOPES[KeyKind.ADMIN]
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
