"""Deeds on users and members: each is one write transaction, and an entry of the audit log.

Called by the command line, the console and the dashboard. `rights` are those of whoever asks (roles.py); the command
line has all of them. Signing in is sign_in.py's.
"""

from collections.abc import Callable
from contextlib import suppress

import sqlalchemy as sa

from tenancy import audit_log
from tenancy.audit_log import Actor, ActorKind
from tenancy.database import Database
from tenancy.errors import KeyNotFound, LinkInvalid, MemberNotFound, MembershipConflict, NameTaken, RightMissing
from tenancy.people_store import OneTimeLink, PeopleStore
from tenancy.provisioning import ProvisioningInvalid
from tenancy.roles import NO_RIGHTS, Right, Role, loses_power_to_invite, may_change_member, rights_of
from tenancy.sign_in import hash_token, new_token
from tenancy.store import TenancyStore
from tenancy.users import USER_NAME_CHARACTERS_MAX, Member, Membership, User, new_user_id, normal_email

ALL_RIGHTS = frozenset(Right)
FIRST_USER_EMAIL = "operator@localhost"
INVITATION_NS = 72 * 3_600 * 1_000_000_000
_INVITATIONS_MAX = 100  # open ones of one account


def add_user(
    database: Database,
    *,
    email: str,
    name: str,
    password_hash: str | None = None,
    operator: bool = False,
    by: Actor,
    clock: Callable[[], int],
) -> User:
    """Raises NameTaken, ProvisioningInvalid."""
    user = _new_user(email, name, operator=operator, has_password=password_hash is not None, now_ns=clock())
    with database.write() as connection:
        PeopleStore(connection).add_user(user, password_hash)
        audit_log.record(
            connection,
            at_ns=user.created_at_ns,
            by=by,
            account_id=None,
            action="user.add",
            subject=user.id,
            email=user.email,
            operator=operator,
        )
    return user


def change_user(
    database: Database,
    user_id: str,
    *,
    operator: bool | None = None,
    disabled: bool | None = None,
    by: Actor,
    clock: Callable[[], int],
) -> User:
    """What is None stays. A disabled user's sessions end, and the open invitations of each account that the user may no
    longer invite to: nobody else may know who holds them. Raises UserNotFound.
    """
    values = {name: value for name, value in (("operator", operator), ("disabled", disabled)) if value is not None}
    with database.write() as connection:
        audit_log.wait_turn(connection)  # before any row is held that one who has the turn may want
        store = PeopleStore(connection)
        before = store.user(user_id)
        store.update_user(user_id, **values)
        if before.operator and (disabled or operator is False):
            store.end_invitations()
        if disabled:
            store.end_sessions(user_id)
            for membership in store.memberships(user_id):
                if loses_power_to_invite(membership.role, None):
                    store.end_invitations(membership.account_id)
        audit_log.record(
            connection, at_ns=clock(), by=by, account_id=None, action="user.change", subject=user_id, **values
        )
        return store.user(user_id)


def set_password(database: Database, user_id: str, password_hash: str, *, by: Actor, clock: Callable[[], int]) -> None:
    """Every session of the user ends, whoever holds it."""
    with database.write() as connection:
        store = PeopleStore(connection)
        store.update_user(user_id, password_hash=password_hash)
        store.end_sessions(user_id)
        audit_log.record(connection, at_ns=clock(), by=by, account_id=None, action="user.set_password", subject=user_id)


def list_users(database: Database) -> list[User]:
    with database.read() as connection:
        return PeopleStore(connection).users()


def find_user(database: Database, email: str) -> User:
    """Raises UserNotFound."""
    with database.read() as connection:
        return PeopleStore(connection).user_by_email(email.strip().lower())


def list_members(database: Database, account_id: str) -> list[Member]:
    """Raises AccountNotFound."""
    with database.read() as connection:
        TenancyStore(connection).account(account_id)
        return PeopleStore(connection).members(account_id)


def list_memberships(database: Database, user_id: str) -> list[Membership]:
    with database.read() as connection:
        return PeopleStore(connection).memberships(user_id)


def role_in(database: Database, account_id: str, user_id: str) -> Role | None:
    with database.read() as connection:
        return PeopleStore(connection).role(account_id, user_id)


def set_member(
    database: Database,
    account_id: str,
    user_id: str,
    role: Role | None,
    *,
    rights: frozenset[Right] = ALL_RIGHTS,
    by: Actor,
    clock: Callable[[], int],
) -> None:
    """Make a user a member, change the role, or with None end the membership.

    Who may no longer invite has perhaps kept an invitation to come back by: the account's open ones end.
    Raises AccountNotFound, UserNotFound, MemberNotFound, RightMissing, MembershipConflict.
    """
    with database.write() as connection:
        audit_log.wait_turn(connection)  # of two owners who remove each other the second is the last one
        store = PeopleStore(connection)
        TenancyStore(connection).account(account_id)
        before = store.role(account_id, user_id)
        if before is None and (role is None or rights != ALL_RIGHTS):
            raise MemberNotFound("There is no such member in this account.")
        _check_change(rights, before, role)
        if before is Role.OWNER and role is not Role.OWNER and not store.has_another_owner(account_id, user_id):
            raise MembershipConflict("An account keeps at least one owner: appoint another one first.")
        if role is None:
            store.remove_member(account_id, user_id)
        else:
            store.user(user_id)
            store.set_member(account_id, user_id, role, clock())
        ended = store.end_invitations(account_id) if loses_power_to_invite(before, role) else 0
        audit_log.record(
            connection,
            at_ns=clock(),
            by=by,
            account_id=account_id,
            action="member.remove" if role is None else "member.set",
            subject=user_id,
            before=None if before is None else before.value,
            after=None if role is None else role.value,
            **({"invitations_ended": ended} if ended else {}),
        )


def invite(
    database: Database,
    account_id: str,
    email: str,
    role: Role,
    *,
    rights: frozenset[Right] = ALL_RIGHTS,
    by: Actor,
    clock: Callable[[], int],
) -> str:
    """The token of a link that makes whoever follows it a member, once, within three days. Nothing is mailed.

    Whether a user with this address exists is not told. Raises AccountNotFound, RightMissing, ProvisioningInvalid.
    """
    address = _email(email)
    token, now_ns = new_token(), clock()
    with database.write() as connection:
        audit_log.wait_turn(connection)  # behind whoever takes the right to invite, and all open invitations with it
        store = PeopleStore(connection)
        TenancyStore(connection).account(account_id)
        _check_change(rights & _rights_now(connection, account_id, by), None, role)
        store.sweep_links(now_ns)
        if store.count_invitations(account_id, now_ns) >= _INVITATIONS_MAX:
            raise ProvisioningInvalid(f"An account has at most {_INVITATIONS_MAX} open invitations.")
        store.add_link(OneTimeLink(hash_token(token), None, account_id, address, role, now_ns, now_ns + INVITATION_NS))
        audit_log.record(
            connection,
            at_ns=now_ns,
            by=by,
            account_id=account_id,
            action="member.invite",
            subject=address,
            role=role.value,
        )
    return token


def count_invitations(database: Database, account_id: str, *, clock: Callable[[], int]) -> int:
    """How many are open."""
    with database.read() as connection:
        return PeopleStore(connection).count_invitations(account_id, clock())


def withdraw_invitations(database: Database, account_id: str, *, by: Actor, clock: Callable[[], int]) -> int:
    """End the account's open ones: nobody joins by their links any more. Returns how many there were."""
    with database.write() as connection:
        audit_log.wait_turn(connection)  # as change_user
        ended = PeopleStore(connection).end_invitations(account_id)
        if ended:
            audit_log.record(
                connection,
                at_ns=clock(),
                by=by,
                account_id=account_id,
                action="member.withdraw_invitations",
                subject=account_id,
                invitations_ended=ended,
            )
    return ended


def accept_invitation(
    database: Database,
    token: str,
    *,
    user_id: str | None = None,
    name: str = "",
    password_hash: str | None = None,
    clock: Callable[[], int],
) -> User:
    """A user that exists joins, or one is made for the invited address.

    Raises LinkInvalid, NameTaken (the address has a user: who must sign in first), ProvisioningInvalid.
    """
    now_ns = clock()
    with database.write() as connection:
        audit_log.wait_turn(connection)  # of two who follow it at once the second finds it used
        store = PeopleStore(connection)
        link = store.link(hash_token(token))
        if link is None or link.account_id is None or link.expires_at_ns <= now_ns:
            raise LinkInvalid("This link was used already, has expired, or never was.")
        assert link.email is not None and link.role is not None, "an invitation names whom it invites as what"  # noqa: PT018 - one invariant
        if user_id is None:
            user = _new_user(link.email, name, operator=False, has_password=password_hash is not None, now_ns=now_ns)
            store.add_user(user, password_hash)
        else:
            user = store.user(user_id)
            if store.role(link.account_id, user_id) is not None:
                raise NameTaken("You are a member of this account already.")
        store.use_link(link.token_hash)
        store.set_member(link.account_id, user.id, link.role, now_ns)
        audit_log.record(
            connection,
            at_ns=now_ns,
            by=Actor(audit_log.ActorKind.USER, user.id),
            account_id=link.account_id,
            action="member.join",
            subject=user.id,
            role=link.role.value,
            invited=link.email,
        )
    return user


def dashboard_user(database: Database, *, clock: Callable[[], int]) -> User:
    """The operator that `pagegate dashboard` signs in where nobody was named: the first one, made if there is none.

    Whoever can run the command owns the database, so this opens no new door.
    """
    for user in list_users(database):
        if user.operator and not user.disabled:
            return user
    user = add_user(
        database, email=FIRST_USER_EMAIL, name="Operator", operator=True, by=audit_log.COMMAND_LINE, clock=clock
    )
    with database.read() as connection:
        accounts = TenancyStore(connection).accounts()
    if accounts:
        set_member(database, accounts[0].id, user.id, Role.OWNER, by=audit_log.COMMAND_LINE, clock=clock)
    return user


def _check_change(rights: frozenset[Right], before: Role | None, after: Role | None) -> None:
    if not may_change_member(rights, before=before, after=after):
        raise RightMissing("Your role in this account does not allow this.")


def _rights_now(connection: sa.Connection, account_id: str, by: Actor) -> frozenset[Right]:
    """What is left to whoever began a deed. An operator's key, of another account, was looked at before."""
    if by.kind is ActorKind.USER:
        store = PeopleStore(connection)
        user = store.user(by.id)
        return NO_RIGHTS if user.disabled else rights_of(store.role(account_id, by.id), operator=user.operator)
    if by.kind is ActorKind.KEY:
        with suppress(KeyNotFound):
            return NO_RIGHTS if TenancyStore(connection).key(account_id, by.id).revoked_at_ns else ALL_RIGHTS
    return ALL_RIGHTS


def _new_user(email: str, name: str, *, operator: bool, has_password: bool, now_ns: int) -> User:
    if not name.strip() or len(name) > USER_NAME_CHARACTERS_MAX or not name.isprintable():
        raise ProvisioningInvalid(f"A name is one line of 1 to {USER_NAME_CHARACTERS_MAX} printable characters.")
    return User(new_user_id(), _email(email), name.strip(), operator, False, has_password, now_ns)


def _email(text: str) -> str:
    email = normal_email(text)
    if email is None:
        raise ProvisioningInvalid("That is no email address.")
    return email
