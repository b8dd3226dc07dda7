"""Models that an operator has switched off for everybody, while the deployment still has them.

The command line switches; every gateway asks twice a second (api/wiring.py) and refuses what is off. Knows no model:
an id that no gateway serves may be off as well, before it is deployed.
"""

import time
from collections.abc import Callable
from typing import Final

import sqlalchemy as sa

from tenancy import audit_log
from tenancy.audit_log import COMMAND_LINE, Actor
from tenancy.database import Database, insert_missing
from tenancy.provisioning import MODEL_ID, ProvisioningInvalid
from tenancy.tables import disabled_models

_DISABLED_MAX: Final = 1_000


def disabled_model_ids(database: Database) -> frozenset[str]:
    with database.read() as connection:
        return frozenset(connection.scalars(sa.select(disabled_models.c.model).limit(_DISABLED_MAX)))


def set_model_disabled(
    database: Database,
    model: str,
    *,
    disabled: bool,
    by: Actor = COMMAND_LINE,
    clock: Callable[[], int] = time.time_ns,
) -> None:
    """Every process heeds it within a second; running answers end normally. Raises ProvisioningInvalid."""
    if MODEL_ID.fullmatch(model) is None:
        raise ProvisioningInvalid("A model's id has 1 to 200 characters, without spaces.")
    with database.write() as connection:
        if disabled:
            count = sa.select(sa.func.count()).select_from(disabled_models)
            if (connection.scalar(count) or 0) >= _DISABLED_MAX:
                raise ProvisioningInvalid(f"At most {_DISABLED_MAX} models are switched off.")
            row = {"model": model, "disabled_at_ns": clock()}
            changed = insert_missing(connection, disabled_models, [row])
        else:
            changed = connection.execute(disabled_models.delete().where(disabled_models.c.model == model)).rowcount
        if changed:
            action = "model.disable" if disabled else "model.enable"
            audit_log.record(connection, at_ns=clock(), by=by, account_id=None, action=action, subject=model)
