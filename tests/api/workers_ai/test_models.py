"""Model search: filters, exact pages, both item shapes; tasks and authors."""

from dataclasses import replace

import pytest
from starlette.types import ASGIApp

from api.app import create_app
from tests.api.exchange import get
from tests.fakes import ACCOUNT, CARD, MODEL, PRICE, Fakes, principal

SEARCH = f"/client/v4/accounts/{ACCOUNT}/ai/models/search"
TASKS = f"/client/v4/accounts/{ACCOUNT}/ai/tasks/search"
AUTHORS = f"/client/v4/accounts/{ACCOUNT}/ai/authors/search"


async def test_an_item_says_limits_and_prices_exactly(app: ASGIApp) -> None:
    answer = await get(app, SEARCH)
    (item,) = answer.json["result"]
    assert (item["name"], item["source"], item["task"]["name"]) == (MODEL, 1, "Text Generation")
    assert item["created_at"] == "2026-09-21 14:13:20.000"
    properties = {entry["property_id"]: entry["value"] for entry in item["properties"]}
    assert properties["context_window"] == "8192"
    assert (properties["max_input_tokens"], properties["max_output_tokens"]) == ("8191", "4096")
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
        ("search=ANSWERS%20tests", 1),
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


async def test_the_openrouter_shape_is_complete(app: ASGIApp) -> None:
    (item,) = (await get(app, f"{SEARCH}?format=openrouter")).json["result"]["data"]
    assert item == {
        "id": MODEL,
        "name": "tiny-instruct",
        "created": 1_790_000_000,
        "hugging_face_id": None,
        "context_length": 8192,
        "max_output_length": 4096,
        "input_modalities": ["text"],
        "output_modalities": ["text"],
        "pricing": {
            "prompt": "0.00000095",
            "completion": "0.000004",
            "internal_reasoning": "0.000004",
            "input_cache_read": "0.00000016",
            "input_cache_write": "0",
        },
        "supported_features": ["tools", "json_mode", "structured_outputs"],
        "supported_sampling_parameters": item["supported_sampling_parameters"],
    }
    assert {"temperature", "top_p", "stop", "seed", "max_tokens"} <= set(item["supported_sampling_parameters"])


async def test_the_openrouter_shape_prices_every_class(fakes: Fakes) -> None:
    fakes.price_book.prices = {MODEL: replace(PRICE, cached_input_nano_per_m=None, reasoning_nano_per_m=5_000_000_000)}
    answer = await get(create_app(fakes.services), f"{SEARCH}?format=openrouter")
    pricing = answer.json["result"]["data"][0]["pricing"]
    assert (pricing["internal_reasoning"], pricing["input_cache_read"]) == ("0.000005", "0.00000095")


async def test_the_openrouter_shape_has_the_same_pages(fakes: Fakes) -> None:
    fakes.cards = [replace(CARD, id=f"@cf/test/model-{index}") for index in range(3)]
    app = create_app(fakes.services)
    ids = []
    for page in (1, 2, 3):
        answer = (await get(app, f"{SEARCH}?format=openrouter&page={page}&per_page=2")).json
        ids += [item["id"] for item in answer["result"]["data"]]
        assert answer["result_info"]["total_count"] == 3
    assert ids == [card.id for card in fakes.cards]


async def test_tasks_and_authors_are_those_of_the_models(fakes: Fakes) -> None:
    fakes.cards = [CARD, replace(CARD, id="@cf/test/two"), replace(CARD, id="@cf/other/one", owned_by="other")]
    app = create_app(fakes.services)
    tasks, authors = (await get(app, TASKS)).json, (await get(app, AUTHORS)).json
    (item,) = (await get(app, f"{SEARCH}?per_page=1")).json["result"]
    assert tasks["result"] == [item["task"]]
    assert [author["name"] for author in authors["result"]] == ["test", "other"]
    assert len({author["id"] for author in authors["result"]}) == 2
    assert authors["result_info"] == {"page": 1, "per_page": 2, "count": 2, "total_count": 2, "total_pages": 1}
    for name in ("test", "other"):
        assert (await get(app, f"{SEARCH}?author={name}")).json["result_info"]["total_count"] >= 1


@pytest.mark.parametrize("path", [SEARCH, TASKS, AUTHORS])
async def test_a_key_that_may_not_read_is_refused(app: ASGIApp, fakes: Fakes, path: str) -> None:
    fakes.authenticator.keys["bare"] = principal()
    assert (await get(app, path, key="bare")).status == 403


async def test_a_model_without_a_price_is_shown_without_one(fakes: Fakes) -> None:
    fakes.price_book.prices = {}
    app = create_app(fakes.services)
    (item,) = (await get(app, SEARCH)).json["result"]
    assert "price" not in {entry["property_id"] for entry in item["properties"]}
    assert (await get(app, f"{SEARCH}?format=openrouter")).json["result"]["data"][0]["pricing"] is None
