"""What keys are called: records hold their ids, and names are read when a page is made."""

from typing import Final

from api.dashboard.access import Visit
from tenancy import provisioning

# Usage of the playground belongs to no key.
PLAYGROUND: Final = "playground"


async def key_names(visit: Visit) -> dict[str, str]:
    """By key id, the playground's too."""
    database = visit.services.database
    keys = await database.call(provisioning.list_keys, database, visit.account_id)
    return {PLAYGROUND: "Playground"} | {key.id: key.name for key in keys}
