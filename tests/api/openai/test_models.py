"""The list of models: callable ones, with enforced limits and exact prices."""

from dataclasses import replace
from urllib.parse import quote

import pytest
from starlette.types import ASGIApp

from api.app import create_app
from tests.api.exchange import get
from tests.fakes import ACCOUNT, CARD, MODEL, OTHER_ACCOUNT, Fakes, principal

PREFIXES = ["/v1", f"/client/v4/accounts/{ACCOUNT}/ai/v1"]
EXPECTED = {
    "id": MODEL,
    "object": "model",
    "created": 1_790_000_000,
    "owned_by": "test",
    "context_length": 8192,
    "max_output_length": 4096,
    "pricing": {"prompt": "0.00000095", "completion": "0.000004", "input_cache_read": "0.00000016"},
    "precisions": {"weights": "bfloat16", "kv_cache": "bfloat16"},
}


@pytest.mark.parametrize("prefix", PREFIXES)
class TestModels:
    async def test_are_listed(self, app: ASGIApp, prefix: str) -> None:
        answer = await get(app, f"{prefix}/models")
        assert answer.json == {"object": "list", "data": [EXPECTED]}

    @pytest.mark.parametrize("spelled", [MODEL, quote(MODEL, safe="@"), quote(MODEL, safe="")])
    async def test_are_found_however_their_id_is_spelled(self, app: ASGIApp, prefix: str, spelled: str) -> None:
        assert (await get(app, f"{prefix}/models/{spelled}")).json == EXPECTED

    async def test_say_what_their_precisions_were_measured_to_do(self, fakes: Fakes, prefix: str) -> None:
        fakes.cards = [replace(CARD, quality={"top-1 agreement with bf16, GSM8K": "0.97"})]
        (model,) = (await get(create_app(fakes.services), f"{prefix}/models")).json["data"]
        assert model == EXPECTED | {"quality": {"top-1 agreement with bf16, GSM8K": "0.97"}}

    async def test_unknown_ones_are_not_found(self, app: ASGIApp, prefix: str) -> None:
        answer = await get(app, f"{prefix}/models/@cf/no/such")
        assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")

    async def test_without_a_price_are_not_callable_and_not_listed(self, fakes: Fakes, prefix: str) -> None:
        fakes.cards = [CARD, replace(CARD, id="@cf/test/unpriced")]
        app = create_app(fakes.services)
        assert [model["id"] for model in (await get(app, f"{prefix}/models")).json["data"]] == [MODEL]
        assert (await get(app, f"{prefix}/models/@cf/test/unpriced")).status == 503

    async def test_need_a_key_that_may_read(self, app: ASGIApp, fakes: Fakes, prefix: str) -> None:
        assert (await get(app, f"{prefix}/models", key=None)).status == 401
        fakes.authenticator.keys["bare"] = principal()
        assert (await get(app, f"{prefix}/models", key="bare")).status == 403


async def test_another_account_sees_nothing(app: ASGIApp) -> None:
    answer = await get(app, f"/client/v4/accounts/{OTHER_ACCOUNT}/ai/v1/models")
    assert (answer.status, answer.json["errors"][0]["code"]) == (403, 10000)
