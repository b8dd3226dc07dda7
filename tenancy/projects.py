"""Deeds on an account's projects: open, rename, archive, bind to models; each one transaction with its audit entry.

Called by the command line and the console. The default project is always there and keeps its name.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import sqlalchemy as sa

from tenancy import audit_log
from tenancy.accounts import DEFAULT_PROJECT_NAME, Project, new_project_id
from tenancy.audit_log import COMMAND_LINE, Actor
from tenancy.database import Database
from tenancy.names import name_taken, taken_named
from tenancy.provisioning import ProvisioningInvalid, check_models, check_name
from tenancy.store import PROJECTS_MAX, TenancyStore


def list_projects(database: Database, account_id: str) -> list[Project]:
    """The default one first. Raises AccountNotFound."""
    with database.read() as connection:
        return TenancyStore(connection).projects(account_id)


def get_project(database: Database, account_id: str, project_id: str) -> Project:
    """Raises AccountNotFound, ProjectNotFound."""
    with database.read() as connection:
        return TenancyStore(connection).project(account_id, project_id)


def open_project(
    database: Database,
    account_id: str,
    name: str,
    *,
    models: Iterable[str] | None = None,
    by: Actor = COMMAND_LINE,
    clock: Callable[[], int] = time.time_ns,
) -> Project:
    """models: as set_models. Raises AccountNotFound, NameTaken, ProvisioningInvalid."""
    check_name(name)
    chosen = None if models is None else check_models(models)
    with database.write() as connection:
        store = TenancyStore(connection)
        others = store.projects(account_id)
        if len(others) > PROJECTS_MAX:
            raise ProvisioningInvalid(f"An account has at most {PROJECTS_MAX} projects beside its default one.")
        _refuse_taken(name, others)
        project = Project(new_project_id(), account_id, name, clock(), models=chosen)
        with taken_named("project", name):
            store.add_project(project)
        told = {} if chosen is None else {"models": " ".join(chosen)}
        _log(connection, project, "project.open", by, clock, name=name, **told)
        return project


@dataclass(frozen=True, slots=True)
class Binding:
    """models: all that any key of the project may use; None: whatever the account may."""

    models: Iterable[str] | None


def change_project(
    database: Database,
    account_id: str,
    project_id: str,
    *,
    name: str | None = None,
    archived: bool | None = None,
    binding: Binding | None = None,
    by: Actor = COMMAND_LINE,
    clock: Callable[[], int] = time.time_ns,
) -> Project:
    """Rename it, archive it or take it back, bind it to models: all of these or none. None leaves things as they are.

    The keys of an archived project are refused within a second; its usage stays. Raises ProjectNotFound, NameTaken,
    ProvisioningInvalid.
    """
    if name is not None:
        check_name(name)
    chosen = None if binding is None else _chosen(binding.models)
    if project_id == account_id and (name, archived) != (None, None):
        raise ProvisioningInvalid("The default project keeps its name and is never archived.")
    with database.write() as connection:
        store = TenancyStore(connection)
        before = store.project(account_id, project_id)
        if name is not None and name != before.name:
            _refuse_taken(name, store.projects(account_id))
            with taken_named("project", name):
                store.update_project(account_id, project_id, name=name)
            _log(connection, before, "project.rename", by, clock, name=name)
        if archived is not None and archived != (before.archived_at_ns is not None):
            store.update_project(account_id, project_id, archived_at_ns=clock() if archived else None)
            _log(connection, before, "project.archive" if archived else "project.restore", by, clock)
        if binding is not None:
            store.set_models(account_id, project_id, chosen)
            words = None if chosen is None else " ".join(chosen)
            _log(connection, before, "project.set_models", by, clock, models=words)
        return store.project(account_id, project_id)


def set_models(
    database: Database,
    account_id: str,
    project_id: str,
    models: Iterable[str] | None,
    *,
    by: Actor = COMMAND_LINE,
    clock: Callable[[], int] = time.time_ns,
) -> Project:
    """All that any key of the project may use, within a second; None: whatever the account may.

    A key's own list and the account's narrow it. Raises ProjectNotFound, ProvisioningInvalid.
    """
    return change_project(database, account_id, project_id, binding=Binding(models), by=by, clock=clock)


def _chosen(models: Iterable[str] | None) -> tuple[str, ...] | None:
    return None if models is None else check_models(models)


def _refuse_taken(name: str, others: list[Project]) -> None:
    if name == DEFAULT_PROJECT_NAME or any(other.name == name for other in others):
        raise name_taken("project", name)


def _log(
    connection: sa.Connection,
    project: Project,
    action: str,
    by: Actor,
    clock: Callable[[], int],
    **detail: str | None,
) -> None:
    audit_log.record(
        connection, at_ns=clock(), by=by, account_id=project.account_id, action=action, subject=project.id, **detail
    )
