"""Model search: filters, exact pages, both item shapes."""

from dataclasses import replace

import pytest
from starlette.types import ASGIApp

from api.app import create_app
from tests.api.exchange import get
from tests.fakes import ACCOUNT, CARD, MODEL, Fakes

SEARCH = f"/client/v4/accounts/{ACCOUNT}/ai/models/search"


async def test_an_item_says_limits_and_prices_exactly(app: ASGIApp) -> None:
    answer = await get(app, SEARCH)
    (item,) = answer.json["result"]
    assert (item["name"], item["source"], item["task"]["name"]) == (MODEL, 1, "Text Generation")
    assert item["created_at"] == "2026-09-21 14:13:20.000"
    properties = {entry["property_id"]: entry["value"] for entry in item["properties"]}
    assert properties["context_window"] == "8192"
    assert properties["precision_kv_cache"] == "bfloat16"
    assert properties["price"] == [
        {"unit": "per M input tokens", "price": 0.95, "currency": "USD"},
        {"unit": "per M cached input tokens", "price": 0.16, "currency": "USD"},
        {"unit": "per M output tokens", "price": 4, "currency": "USD"},
    ]
    assert answer.json["success"] is True


async def test_ids_never_change(app: ASGIApp) -> None:
    first, second = (await get(app, SEARCH)).json["result"], (await get(app, SEARCH)).json["result"]
    assert first[0]["id"] == second[0]["id"]


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("search=TINY", 1),
        ("search=nothing", 0),
        ("task=Text%20Generation", 1),
        ("task=Translation", 0),
        ("author=test", 1),
        ("author=other", 0),
        ("source=1", 1),
        ("source=2", 0),
        ("hide_experimental=true&include_deprecated=true", 1),
        ("unknown=x", 1),
    ],
)
async def test_filters(app: ASGIApp, query: str, count: int) -> None:
    assert len((await get(app, f"{SEARCH}?{query}")).json["result"]) == count


async def test_pages_are_exact(fakes: Fakes) -> None:
    fakes.cards = [replace(CARD, id=f"@cf/test/model-{index}") for index in range(5)]
    app = create_app(fakes.services)
    names = []
    for page, count in ((1, 2), (2, 2), (3, 1), (4, 0)):
        answer = (await get(app, f"{SEARCH}?page={page}&per_page=2")).json
        names += [item["name"] for item in answer["result"]]
        assert answer["result_info"] == {
            "page": page,
            "per_page": 2,
            "count": count,
            "total_count": 5,
            "total_pages": 3,
        }
    assert names == [card.id for card in fakes.cards]


@pytest.mark.parametrize("query", ["page=0", "per_page=0", "per_page=1001", "page=x", "source=3", "format=xml"])
async def test_a_bad_query_is_named(app: ASGIApp, query: str) -> None:
    answer = await get(app, f"{SEARCH}?{query}")
    assert (answer.status, answer.json["errors"][0]["code"]) == (400, 5006)
    assert f"'/{query.partition('=')[0]}'" in answer.json["errors"][0]["message"]


async def test_the_openrouter_shape(app: ASGIApp) -> None:
    (item,) = (await get(app, f"{SEARCH}?format=openrouter")).json["result"]["data"]
    assert (item["id"], item["context_length"], item["pricing"]["prompt"]) == (MODEL, 8192, "0.00000095")


async def test_a_model_without_a_price_is_shown_without_one(fakes: Fakes) -> None:
    fakes.price_book.prices = {}
    app = create_app(fakes.services)
    (item,) = (await get(app, SEARCH)).json["result"]
    assert "price" not in {entry["property_id"] for entry in item["properties"]}
    assert (await get(app, f"{SEARCH}?format=openrouter")).json["result"]["data"][0]["pricing"] is None
