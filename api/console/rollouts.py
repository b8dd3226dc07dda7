"""GET and POST /console/v1/rollouts: what is tried beside what, and what an operator decides of it."""

import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from api.auth import key_actor, permitted
from api.body import parse, read_body
from api.console.answers import json_answer
from api.services import Services
from gateway.errors import RolloutRefused
from gateway.rollouts import store
from gateway.rollouts.report import report
from tenancy.audit_log import Actor
from tenancy.principal import Scope


class RolloutBody(BaseModel):
    """share_percent: for the action share. score: for evaluated. unseen: promote what has served nothing yet."""

    model_config = ConfigDict(extra="forbid")

    model: Annotated[str, Field(min_length=1, max_length=200)]
    action: Literal["share", "promote", "abort", "start", "evaluated"]
    share_percent: Annotated[float, Field(ge=0, le=100)] | None = None
    score: float | None = None
    unseen: bool = False
    why: Annotated[str, Field(max_length=500)] = "an operator took it back"


class RolloutRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def all_rollouts(self, request: Request) -> Response:
        """Shares, what was seen of both revisions by all gateways, and what is found."""
        await permitted(request, self._services, Scope.OPERATOR_READ)
        return json_answer({"rollouts": await rollouts_of(self._services)})

    async def change(self, request: Request) -> Response:
        """Another share, the new revision for all, the old one for all, or once more from the beginning."""
        principal = await permitted(request, self._services, Scope.OPERATOR_WRITE)
        body = parse(RolloutBody, await read_body(request))
        await self._services.database.call(self._change, body, key_actor(principal))
        [row] = [row for row in await rollouts_of(self._services) if row["model"] == body.model]
        return json_answer(row)

    def _change(self, body: RolloutBody, by: Actor) -> None:
        database, model, at_ns = self._services.database, body.model, time.time_ns()
        if body.action == "share":
            if body.share_percent is None:
                raise RolloutRefused("share_percent says which share.")
            store.set_share(database, model, round(body.share_percent * 100), by=by, at_ns=at_ns)
        elif body.action == "promote":
            store.promote(database, model, by=by, at_ns=at_ns, unseen=body.unseen)
        elif body.action == "abort":
            store.roll_back(database, model, by=by, at_ns=at_ns, why=body.why)
        elif body.action == "start":
            store.start_again(database, model, by=by, at_ns=at_ns)
        else:
            if body.score is None:
                raise RolloutRefused("score says what the evaluation gave.")
            store.note_evaluation(database, model, body.score, by=by, at_ns=at_ns)


async def rollouts_of(services: Services) -> list[dict[str, Any]]:
    """For the dashboard too."""
    models = [trial.model for trial in services.trials.by_model.values()]
    return await services.database.call(report, services.database, models, time.time_ns())
