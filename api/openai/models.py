"""GET …/models and …/models/{id}: the models that can be called, with the limits that are enforced and their prices."""

import time
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from api.auth import permitted
from api.price_texts import pricing
from api.services import Services
from billing.errors import PriceUnavailable
from billing.price_book import Price
from gateway.catalogue import ModelCard
from tenancy.principal import Scope


class ModelRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def all_models(self, request: Request) -> Response:
        """Every callable model: one without a price is not, so it is left out. Engines may be up or down."""
        await permitted(request, self._services, Scope.AI_READ)
        at_ns = time.time_ns()
        models = []
        for card in self._services.catalogue.all():
            if card.retired(at_ns) or card.id in self._services.catalogue.disabled:
                continue
            try:
                price = self._services.price_book.price_in_force(card.price_id, at_ns)
            except PriceUnavailable:
                continue
            models.append(_model(card, price))
        return _json({"object": "list", "data": models})

    async def retrieve(self, request: Request) -> Response:
        """One model, by its id with slashes raw or encoded."""
        await permitted(request, self._services, Scope.AI_READ)
        at_ns = time.time_ns()
        card = self._services.catalogue.in_service(request.path_params["model"], at_ns)
        return _json(_model(card, self._services.price_book.price_in_force(card.price_id, at_ns)))


def _model(card: ModelCard, price: Price) -> dict[str, Any]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": card.owned_by,
        "context_length": card.context_tokens,
        "max_output_length": card.output_tokens_max,
        "pricing": pricing(price),
        "precisions": dict(card.precisions),
        **({} if card.retires_on is None else {"deprecation_date": card.retires_on}),
        **({"quality": dict(card.quality)} if card.quality else {}),
    }


def _json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
