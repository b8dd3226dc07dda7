"""Which keys count together: those of a lineage, rotated into each other, and those of a project.

A key keeps its lineage and its project for good, so what these used is what their keys used, and sums by key are all
that billing keeps. As conditions inside a query of one account, and as plain values. A word that is no key's id (the
playground's use has one) is a lineage of its own in the account's default project.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

import sqlalchemy as sa

from tenancy.tables import api_keys

_IDS_AT_ONCE: Final = 500  # databases bound the parameters of a statement


class KeyGroups(NamedTuple):
    """project_id: the account's id for its default project."""

    lineage_id: str
    project_id: str


def in_lineage(key_id: sa.ColumnElement[str], account_id: str, lineage_id: str) -> sa.ColumnElement[bool]:
    successors = sa.select(api_keys.c.id).where(
        api_keys.c.account_id == account_id, api_keys.c.lineage_id == lineage_id
    )
    return sa.or_(key_id == lineage_id, key_id.in_(successors))


def in_project(key_id: sa.ColumnElement[str], account_id: str, project_id: str) -> sa.ColumnElement[bool]:
    keys = sa.select(api_keys.c.id).where(api_keys.c.account_id == account_id)
    if project_id == account_id:
        return key_id.not_in(keys.where(api_keys.c.project_id.is_not(None)))
    return key_id.in_(keys.where(api_keys.c.project_id == project_id))


def project_of(key_id: sa.ColumnElement[str], account_id: str) -> sa.ColumnElement[Any]:
    found = sa.select(api_keys.c.project_id).where(api_keys.c.account_id == account_id, api_keys.c.id == key_id)
    return sa.func.coalesce(found.scalar_subquery(), account_id)


def read_groups(connection: sa.Connection, account_id: str, key_ids: Collection[str]) -> Mapping[str, KeyGroups]:
    """Of every one of the ids."""
    found = {key_id: KeyGroups(key_id, account_id) for key_id in key_ids}
    listed = sorted(found)
    for start in range(0, len(listed), _IDS_AT_ONCE):
        query = sa.select(api_keys.c.id, api_keys.c.lineage_id, api_keys.c.project_id).where(
            api_keys.c.account_id == account_id, api_keys.c.id.in_(listed[start : start + _IDS_AT_ONCE])
        )
        for row in connection.execute(query):
            found[row.id] = KeyGroups(row.lineage_id or row.id, row.project_id or account_id)
    return found
