"""A process that owns the units of a data folder as a gateway does, and does nothing else: to be killed.

    python -m tests.e2e.owner SETTINGS_AS_JSON

It starts in a third of a gateway's time, and its store, keeper and drivers are the gateway's own.
"""

import asyncio
import sys

from prometheus_client import CollectorRegistry

from api.launched import launched_units
from api.lifecycle import open_keeper, unit_store, utc_now
from api.place import own_place
from api.settings import Settings
from backends.connections import open_session
from backends.drivers.processes import Ports
from backends.drivers.switches import Switches
from backends.topology import read_deployment
from gateway.lifecycle.metrics import Starts
from gateway.lifecycle.start_times import StartTimes
from tenancy.database import open_database


async def _own(settings: Settings) -> None:
    database, session = open_database(settings.database_url), open_session()
    assert settings.deployment is not None, "it says what there is to own"
    with own_place(settings.home) as place:
        keeper = open_keeper(
            settings,
            database,
            unit_store(settings, database),
            StartTimes(database),
            place=place,
            heard=lambda _: None,
            started=Starts(CollectorRegistry()),
        )
        deployment = read_deployment(settings.deployment)
        keeper.want(launched_units(deployment, settings, session, Ports(), Switches(), place=place, at=utc_now()))
        await keeper.run()


if __name__ == "__main__":
    asyncio.run(_own(Settings.model_validate_json(sys.argv[1])))
