"""Users, members and invitations over both databases: what each deed does, and what it refuses to whom."""

import pytest

from tenancy import people, provisioning
from tenancy.audit_log import COMMAND_LINE, Actor, ActorKind, read_audit_log
from tenancy.database import Database
from tenancy.errors import (
    AccountNotFound,
    LinkInvalid,
    MemberNotFound,
    MembershipConflict,
    NameTaken,
    RightMissing,
    UserNotFound,
)
from tenancy.keys import KeyKind
from tenancy.leaked_keys import Finding, revoke_leaked
from tenancy.people import INVITATION_NS
from tenancy.people_store import PeopleStore
from tenancy.provisioning import ProvisioningInvalid
from tenancy.roles import RIGHTS, Role
from tenancy.sign_in import hash_token, make_sign_in_link
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import PEPPER, over_both_databases
from tests.tenancy.people import add_user, open_account

pytestmark = over_both_databases

_NOBODY = "0" * 32
_ADMIN = RIGHTS[Role.ADMIN]


def _set(database: Database, clock: SettableClock, account_id: str, user_id: str, role: Role | None) -> None:
    people.set_member(database, account_id, user_id, role, by=COMMAND_LINE, clock=clock)


class TestUsers:
    def test_an_address_is_one_users_however_it_is_written(self, database: Database, clock: SettableClock) -> None:
        user = add_user(database, clock, " Ann@Example.com ")
        assert user.email == "ann@example.com"
        assert people.find_user(database, "ANN@example.com") == user
        with pytest.raises(NameTaken):
            add_user(database, clock, "ann@example.COM")

    @pytest.mark.parametrize("email", ["", "ann", "a b@c", "@c", "a@", "a@b@c", f"a@{'x' * 190}", "a@b\x00"])
    def test_what_is_no_address_is_refused(self, database: Database, clock: SettableClock, email: str) -> None:
        with pytest.raises(ProvisioningInvalid):
            people.add_user(database, email=email, name="Ann", by=COMMAND_LINE, clock=clock)

    def test_a_name_is_one_printable_line(self, database: Database, clock: SettableClock) -> None:
        for name in ("", "  ", "a\nb", "x" * 101):
            with pytest.raises(ProvisioningInvalid):
                people.add_user(database, email="a@b", name=name, by=COMMAND_LINE, clock=clock)

    def test_unknown_users_are_not_found(self, database: Database, clock: SettableClock) -> None:
        with pytest.raises(UserNotFound):
            people.find_user(database, "nobody@example.com")
        with pytest.raises(UserNotFound):
            people.change_user(database, _NOBODY, disabled=True, by=COMMAND_LINE, clock=clock)

    def test_the_first_operator_is_made_once_and_owns_the_first_account(
        self, database: Database, clock: SettableClock
    ) -> None:
        account_id = open_account(database, clock)
        user = people.dashboard_user(database, clock=clock)
        assert people.dashboard_user(database, clock=clock) == user
        assert user.operator
        assert people.role_in(database, account_id, user.id) is Role.OWNER
        people.change_user(database, user.id, disabled=True, by=COMMAND_LINE, clock=clock)
        other = add_user(database, clock, "op@example.com", operator=True)
        assert people.dashboard_user(database, clock=clock) == other


class TestMembers:
    def test_a_member_has_a_role_in_this_account_alone(self, database: Database, clock: SettableClock) -> None:
        acme, other = open_account(database, clock), open_account(database, clock, "other")
        user = add_user(database, clock)
        _set(database, clock, acme, user.id, Role.VIEWER)
        _set(database, clock, acme, user.id, Role.DEVELOPER)
        assert [(member.user, member.role) for member in people.list_members(database, acme)] == [
            (user, Role.DEVELOPER)
        ]
        assert people.list_members(database, other) == []
        assert people.role_in(database, other, user.id) is None
        assert [(one.account_id, one.account_name) for one in people.list_memberships(database, user.id)] == [
            (acme, "acme")
        ]

    def test_the_last_owner_stays(self, database: Database, clock: SettableClock) -> None:
        acme = open_account(database, clock)
        ann, bob = add_user(database, clock), add_user(database, clock, "bob@example.com")
        _set(database, clock, acme, ann.id, Role.OWNER)
        for role in (None, Role.ADMIN):
            with pytest.raises(MembershipConflict):
                _set(database, clock, acme, ann.id, role)
        _set(database, clock, acme, bob.id, Role.OWNER)
        _set(database, clock, acme, ann.id, None)
        assert people.role_in(database, acme, ann.id) is None

    def test_an_owner_who_may_not_sign_in_is_no_other_owner(self, database: Database, clock: SettableClock) -> None:
        acme = open_account(database, clock)
        ann, bob = add_user(database, clock), add_user(database, clock, "bob@example.com")
        for user in (ann, bob):
            _set(database, clock, acme, user.id, Role.OWNER)
        people.change_user(database, bob.id, disabled=True, by=COMMAND_LINE, clock=clock)
        with pytest.raises(MembershipConflict):
            _set(database, clock, acme, ann.id, None)
        _set(database, clock, acme, bob.id, None)
        assert people.role_in(database, acme, ann.id) is Role.OWNER

    def test_an_admin_neither_touches_owners_nor_adds_strangers(self, database: Database, clock: SettableClock) -> None:
        acme = open_account(database, clock)
        ann, bob, eve = (add_user(database, clock, f"{name}@example.com") for name in ("ann", "bob", "eve"))
        _set(database, clock, acme, ann.id, Role.OWNER)
        _set(database, clock, acme, bob.id, Role.VIEWER)

        def as_admin(user_id: str, role: Role | None) -> None:
            people.set_member(database, acme, user_id, role, rights=_ADMIN, by=COMMAND_LINE, clock=clock)

        as_admin(bob.id, Role.BILLING)
        with pytest.raises(RightMissing):
            as_admin(ann.id, Role.ADMIN)
        with pytest.raises(RightMissing):
            as_admin(bob.id, Role.OWNER)
        # Whether there is such a user elsewhere is not told.
        for stranger in (eve.id, _NOBODY):
            with pytest.raises(MemberNotFound):
                as_admin(stranger, Role.VIEWER)
        as_admin(bob.id, None)
        assert people.role_in(database, acme, bob.id) is None

    def test_unknown_accounts_and_users_are_refused(self, database: Database, clock: SettableClock) -> None:
        acme, user = open_account(database, clock), add_user(database, clock)
        with pytest.raises(AccountNotFound):
            _set(database, clock, _NOBODY, user.id, Role.VIEWER)
        with pytest.raises(AccountNotFound):
            people.list_members(database, _NOBODY)
        with pytest.raises(UserNotFound):
            _set(database, clock, acme, _NOBODY, Role.VIEWER)
        with pytest.raises(MemberNotFound):
            _set(database, clock, acme, user.id, None)


class TestInvitations:
    def test_whoever_follows_one_joins_once(self, database: Database, clock: SettableClock) -> None:
        acme = open_account(database, clock)
        token = people.invite(database, acme, "Bob@example.com", Role.BILLING, by=COMMAND_LINE, clock=clock)
        user = people.accept_invitation(database, token, name="Bob", password_hash="h", clock=clock)
        assert (user.email, user.has_password, user.operator) == ("bob@example.com", True, False)
        assert people.role_in(database, acme, user.id) is Role.BILLING
        with pytest.raises(LinkInvalid):
            people.accept_invitation(database, token, name="Eve", password_hash="h", clock=clock)

    def test_a_user_that_exists_joins_only_when_signed_in(self, database: Database, clock: SettableClock) -> None:
        acme, ann = open_account(database, clock), add_user(database, clock)
        token = people.invite(database, acme, ann.email, Role.ADMIN, by=COMMAND_LINE, clock=clock)
        with pytest.raises(NameTaken):
            people.accept_invitation(database, token, name="Eve", password_hash="h", clock=clock)
        people.accept_invitation(database, token, user_id=ann.id, clock=clock)
        assert people.role_in(database, acme, ann.id) is Role.ADMIN

    def test_one_that_expired_or_never_was_is_refused(self, database: Database, clock: SettableClock) -> None:
        acme = open_account(database, clock)
        token = people.invite(database, acme, "bob@example.com", Role.VIEWER, by=COMMAND_LINE, clock=clock)
        clock.now_ns += INVITATION_NS
        for invalid in (token, "nonsense"):
            with pytest.raises(LinkInvalid):
                people.accept_invitation(database, invalid, name="Bob", password_hash="h", clock=clock)

    def test_open_ones_are_bounded(
        self, database: Database, clock: SettableClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(people, "_INVITATIONS_MAX", 2)
        acme = open_account(database, clock)
        for number in range(2):
            people.invite(database, acme, f"b{number}@c", Role.VIEWER, by=COMMAND_LINE, clock=clock)
        with pytest.raises(ProvisioningInvalid):
            people.invite(database, acme, "b@c", Role.VIEWER, by=COMMAND_LINE, clock=clock)
        clock.now_ns += INVITATION_NS
        people.invite(database, acme, "b@c", Role.VIEWER, by=COMMAND_LINE, clock=clock)

    def test_an_admin_appoints_no_owner_this_way(self, database: Database, clock: SettableClock) -> None:
        acme = open_account(database, clock)
        with pytest.raises(RightMissing):
            people.invite(database, acme, "bob@c", Role.OWNER, rights=_ADMIN, by=COMMAND_LINE, clock=clock)

    @pytest.mark.parametrize(
        ("before", "after", "stand"),
        [
            (Role.ADMIN, None, 0),
            (Role.ADMIN, Role.VIEWER, 0),
            (Role.OWNER, Role.ADMIN, 0),
            (Role.ADMIN, Role.OWNER, 1),
            (Role.DEVELOPER, None, 1),
        ],
    )
    def test_open_ones_end_with_a_members_right_to_invite(
        self, database: Database, clock: SettableClock, before: Role, after: Role | None, stand: int
    ) -> None:
        acme, other = open_account(database, clock), open_account(database, clock, "other")
        ann, bob = add_user(database, clock), add_user(database, clock, "bob@example.com")
        _set(database, clock, acme, ann.id, Role.OWNER)
        _set(database, clock, acme, bob.id, before)
        token, elsewhere = (
            people.invite(database, account_id, "eve@c", Role.VIEWER, by=COMMAND_LINE, clock=clock)
            for account_id in (acme, other)
        )
        _set(database, clock, acme, bob.id, after)
        with database.read() as connection:
            store = PeopleStore(connection)
            assert (store.link(hash_token(token)) is not None) == bool(stand)
            assert store.link(hash_token(elsewhere)) is not None
        (entry,) = read_audit_log(database, acme, limit=1)
        assert ('"invitations_ended":1' in entry.detail) == (not stand)

    @pytest.mark.parametrize("change", [{"operator": False}, {"disabled": True}])
    def test_open_ones_of_all_accounts_end_with_an_operator(
        self, database: Database, clock: SettableClock, change: dict[str, bool]
    ) -> None:
        accounts = open_account(database, clock), open_account(database, clock, "other")
        bob = add_user(database, clock, "bob@example.com", operator=True)
        tokens = [
            people.invite(database, account_id, "eve@c", Role.OWNER, by=COMMAND_LINE, clock=clock)
            for account_id in accounts
        ]
        own = make_sign_in_link(database, add_user(database, clock), by=COMMAND_LINE, clock=clock)
        people.change_user(database, bob.id, operator=True, by=COMMAND_LINE, clock=clock)
        with database.read() as connection:
            assert all(PeopleStore(connection).link(hash_token(token)) for token in tokens)
        people.change_user(database, bob.id, **change, by=COMMAND_LINE, clock=clock)
        with database.read() as connection:
            store = PeopleStore(connection)
            assert not any(store.link(hash_token(token)) for token in tokens)
            assert store.link(hash_token(own)) is not None

    @pytest.mark.parametrize("found_by_a_scanner", [False, True])
    @pytest.mark.parametrize("kind", KeyKind)
    def test_open_ones_end_with_a_key_that_administers(
        self, database: Database, clock: SettableClock, kind: KeyKind, *, found_by_a_scanner: bool
    ) -> None:
        acme, other = open_account(database, clock), open_account(database, clock, "other")
        issued = provisioning.issue_key(database, PEPPER, acme, name="k", kind=kind, clock=clock)
        token, elsewhere = (
            people.invite(database, account_id, "eve@c", Role.ADMIN, by=COMMAND_LINE, clock=clock)
            for account_id in (acme, other)
        )
        if found_by_a_scanner:
            assert revoke_leaked(database, PEPPER, [Finding(issued.text, "somewhere")], clock=clock) == [True]
        else:
            provisioning.revoke_key(database, acme, issued.key.id, clock=clock)
        with database.read() as connection:
            store = PeopleStore(connection)
            assert (store.link(hash_token(token)) is None) == (kind is KeyKind.ADMIN)
            assert store.link(hash_token(elsewhere)) is not None

    def test_open_ones_end_where_a_disabled_user_could_invite(self, database: Database, clock: SettableClock) -> None:
        acme, other = open_account(database, clock), open_account(database, clock, "other")
        bob = add_user(database, clock, "bob@example.com")
        _set(database, clock, acme, bob.id, Role.ADMIN)
        _set(database, clock, other, bob.id, Role.VIEWER)
        ended, stands = (
            people.invite(database, account_id, "eve@c", Role.VIEWER, by=COMMAND_LINE, clock=clock)
            for account_id in (acme, other)
        )
        people.change_user(database, bob.id, disabled=True, by=COMMAND_LINE, clock=clock)
        with database.read() as connection:
            store = PeopleStore(connection)
            assert store.link(hash_token(ended)) is None
            assert store.link(hash_token(stands)) is not None


def test_every_deed_says_who_did_it_and_no_secret(database: Database, clock: SettableClock) -> None:
    acme = open_account(database, clock)
    ann = add_user(database, clock)
    by = Actor(ActorKind.USER, ann.id)
    people.set_member(database, acme, ann.id, Role.OWNER, by=by, clock=clock)
    token = people.invite(database, acme, "bob@example.com", Role.VIEWER, by=by, clock=clock)
    people.set_password(database, ann.id, "canary-hash", by=by, clock=clock)
    entries = read_audit_log(database, None)
    assert [entry.action for entry in reversed(entries)] == [
        "account.open",
        "user.add",
        "member.set",
        "member.invite",
        "user.set_password",
    ]
    assert {(entry.actor_kind, entry.actor_id) for entry in entries[:3]} == {("user", ann.id)}
    assert token not in repr(entries)
    assert "canary" not in repr(entries)


def test_a_disabled_user_loses_every_session(database: Database, clock: SettableClock) -> None:
    user = add_user(database, clock)
    with database.write() as connection:
        PeopleStore(connection).add_session("t" * 64, user.id, clock())
    people.change_user(database, user.id, disabled=True, by=COMMAND_LINE, clock=clock)
    with database.read() as connection:
        assert PeopleStore(connection).session("t" * 64) is None
