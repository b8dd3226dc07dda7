"""GET …/models: what can be used, at which price, in which precision."""

import time

from starlette.responses import Response

from api.dashboard.access import Visit
from api.dashboard.pages import Pages
from billing.errors import PriceUnavailable
from billing.price_book import Price
from gateway.catalogue import ModelCard


class ModelPages:
    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    async def page(self, visit: Visit) -> Response:
        now_ns = time.time_ns()

        def price(card: ModelCard) -> Price | None:
            try:
                return visit.services.price_book.price_in_force(card.price_id, now_ns)
            except PriceUnavailable:
                return None

        up = {fleet.model: fleet.up for fleet in visit.services.fleet.all()}
        models = [(card, price(card), up.get(card.id, False)) for card in visit.services.catalogue.all()]
        return self._pages.page(visit, "models.html.j2", here="models", title="Models", as_of_ns=now_ns, models=models)
