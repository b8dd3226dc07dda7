"""GET /console/v1/batches and POST …/{batch_id}/cancel: every account's batches, for operators."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from api.auth import permitted
from api.console.answers import json_answer
from api.console.schemas import read_query
from api.services import Services
from billing.instants import instant_text
from gateway.batches.batch import Batch
from tenancy.principal import Scope


class BatchesOfAllQuery(BaseModel):
    """ended: those too that are over."""

    model_config = ConfigDict(extra="forbid")

    account_id: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] | None = None
    ended: bool = False
    limit: Annotated[int, Field(ge=1, le=1_000)] = 100


class OperatorBatchRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._store = services.batching.store

    async def of_all(self, request: Request) -> Response:
        """Batches and background runs, the newest first."""
        await permitted(request, self._services, Scope.OPERATOR_READ)
        query = read_query(BatchesOfAllQuery, request)
        found = await self._services.database.call(
            lambda: self._store.newest(query.account_id, ended=query.ended, limit=query.limit)
        )
        return json_answer({"batches": [batch_fields(batch) for batch in found]})

    async def cancel(self, request: Request) -> Response:
        """What waits is not run any more; what runs ends, and is charged."""
        await permitted(request, self._services, Scope.OPERATOR_WRITE)
        call = self._services.database.call
        found = await call(self._store.find, request.path_params["batch_id"])
        batch = await call(self._store.cancel, found.account_id, found.id)
        self._services.batching.wake()
        return json_answer(batch_fields(batch))


def batch_fields(batch: Batch) -> dict[str, Any]:
    """For the command line too: nothing of what lines ask or say."""
    return {
        "id": batch.id,
        "account_id": batch.account_id,
        "key_id": batch.key_id,
        "form": batch.form.value,
        "endpoint": batch.endpoint,
        "model": batch.model,
        "state": batch.state.value,
        "lines": batch.lines,
        "succeeded": batch.succeeded,
        "failed": batch.failed,
        "prompt_tokens": batch.prompt_tokens,
        "completion_tokens": batch.completion_tokens,
        "stored_bytes": batch.stored_bytes,
        "created_at": instant_text(batch.created_at_ns),
        "expires_at": instant_text(batch.expires_at_ns),
        "owner": batch.owner,
    }
