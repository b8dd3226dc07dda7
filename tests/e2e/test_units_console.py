"""The console's routes of units, over a running gateway."""

from gateway.lifecycle.states import Unit, Wish
from tests.doubles.waiting import eventually_async
from tests.e2e.service import Service


async def test_an_operator_sees_units_and_gives_orders_and_nobody_else_does(service: Service) -> None:
    service.services.lifecycle.store.add([(Unit("m", "a"), Wish.AWAKE)])
    [unit] = (await service.console("/units"))["units"]
    assert (unit["model"], unit["unit"], unit["state"], unit["wish"]) == ("m", "a", "asleep", "awake")
    order = {"model": "m", "order": "drain"}
    ordered = await service.post("/console/v1/units/orders", order, key=service.admin_key)
    assert (ordered.status, ordered.json()["units"][0]["wish"]) == (200, "held")
    unknown = await service.post("/console/v1/units/orders", order | {"unit": "b"}, key=service.admin_key)
    assert unknown.status == 404
    wrong = await service.post("/console/v1/units/orders", order | {"order": "shout"}, key=service.admin_key)
    assert wrong.status == 400
    assert (await service.post("/console/v1/units/orders", order)).status == 403
    assert (await service.send("GET", "/console/v1/units")).status == 403
    assert [entry["action"] for entry in (await service.console("/audit?limit=1"))["entries"]] == ["unit.held"]


async def test_the_capacity_of_a_model_says_how_its_units_stand(service: Service) -> None:
    service.services.lifecycle.store.add([(Unit(service.model, "a"), Wish.ASLEEP)])

    async def is_shown() -> bool:
        (model,) = (await service.console("/capacity"))["models"]
        return [(unit["unit"], unit["state"]) for unit in model["units"]] == [("a", "asleep")]

    await eventually_async(is_shown, what="a unit in the capacity")
