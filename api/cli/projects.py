"""`pagegate projects`: open, rename, archive and restore an account's projects, and bind them to models. Thin.

Keys are issued in a project (`keys issue --project`); limits, budgets and usage take `--project` too.
The deeds are tenancy/projects.py's.
"""

from typing import Annotated, Any

import typer

from api.cli.accounts import AccountId, ModelIds, chosen_models
from api.cli.session import AsJson, open_session, print_record, print_rows, time_text
from tenancy import projects
from tenancy.accounts import Project

app = typer.Typer(help="Divide an account into projects.", no_args_is_help=True)

ProjectId = Annotated[str, typer.Argument(help="The project's id, as `projects list` shows it.", show_default=False)]


@app.command("list")
def list_command(account_id: AccountId, *, as_json: AsJson = False) -> None:
    """List an account's projects. The default one has the account's id."""
    with open_session() as session:
        rows = [_fields(project) for project in projects.list_projects(session.database, account_id)]
    print_rows("Projects", rows, columns=("id", "name", "created_at", "archived_at", "models"), as_json=as_json)


@app.command("open")
def open_command(
    account_id: AccountId,
    name: Annotated[str, typer.Argument(help="A name that no other project of the account has.")],
    *,
    model: Annotated[
        list[str] | None, typer.Option(help="Its keys may use this and no other; repeatable.", show_default="any")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Open a project."""
    with open_session() as session:
        _print(projects.open_project(session.database, account_id, name, models=model or None), as_json=as_json)


@app.command("rename")
def rename_command(account_id: AccountId, project_id: ProjectId, name: str, *, as_json: AsJson = False) -> None:
    """Give a project another name. Its id stays."""
    with open_session() as session:
        _print(projects.change_project(session.database, account_id, project_id, name=name), as_json=as_json)


@app.command("set-models")
def set_models_command(
    account_id: AccountId, project_id: ProjectId, models: ModelIds, *, as_json: AsJson = False
) -> None:
    """All that the project's keys may use, whatever their own lists say. It holds within a second."""
    with open_session() as session:
        bound = projects.set_models(session.database, account_id, project_id, chosen_models(models))
    _print(bound, as_json=as_json)


@app.command("archive")
def archive_command(account_id: AccountId, project_id: ProjectId, *, as_json: AsJson = False) -> None:
    """Refuse the project's keys, within a second, until it is restored. Running requests end normally."""
    with open_session() as session:
        _print(projects.change_project(session.database, account_id, project_id, archived=True), as_json=as_json)


@app.command("restore")
def restore_command(account_id: AccountId, project_id: ProjectId, *, as_json: AsJson = False) -> None:
    """Take an archived project back."""
    with open_session() as session:
        _print(projects.change_project(session.database, account_id, project_id, archived=False), as_json=as_json)


def _fields(project: Project) -> dict[str, Any]:
    return {
        "id": project.id,
        "account_id": project.account_id,
        "name": project.name,
        "created_at": time_text(project.created_at_ns),
        "archived_at": time_text(project.archived_at_ns),
        "models": None if project.models is None else list(project.models),
    }


def _print(project: Project, *, as_json: bool) -> None:
    print_record("Project", _fields(project), as_json=as_json)
