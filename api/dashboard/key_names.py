"""What keys and projects are called: records hold their ids, and names are read when a page is made."""

from typing import Final

from api.dashboard.access import Visit
from tenancy import provisioning
from tenancy.projects import list_projects

# Usage of the playground belongs to no key.
PLAYGROUND: Final = "playground"


async def key_names(visit: Visit) -> dict[str, str]:
    """By key id, the playground's too."""
    database = visit.services.database
    keys = await database.call(provisioning.list_keys, database, visit.account_id)
    return {PLAYGROUND: "Playground"} | {key.id: key.name for key in keys}


async def project_names(visit: Visit) -> dict[str, str]:
    """By project id; the default project's is the account's."""
    database = visit.services.database
    found = await database.call(list_projects, database, visit.account_id)
    return {project.id: project.name for project in found}
