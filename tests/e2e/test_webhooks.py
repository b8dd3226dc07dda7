"""A budget that fills up is announced to the account's own receiver while the service runs."""

import ipaddress
from pathlib import Path

from billing.budgets import BudgetPeriod
from tests.billing.webhooks.receiver import running_receiver
from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually
from tests.e2e.dialects import CHAT
from tests.e2e.service import running_service


async def test_a_used_up_budget_is_announced_once_and_in_order(
    tmp_path: Path, checkpoint: Path, engine: ScriptedEngine
) -> None:
    async with running_receiver(tmp_path) as receiver:
        billing = {
            "webhook_networks": [ipaddress.ip_network("127.0.0.0/8")],
            "webhook_authorities": receiver.authorities,
        }
        async with running_service(tmp_path / "home", checkpoint, engine, billing=billing) as service:
            webhooks = f"/console/v1/accounts/{service.account_id}/webhooks"
            added = await service.send("POST", webhooks, {"url": receiver.url}, key=service.admin_key)
            assert (added.status, added.headers["cache-control"]) == (201, "no-store")
            endpoint_id, receiver.secret = added.json()["id"], added.json()["secret"]
            answer = await service.post(CHAT.path(service), CHAT.body(service))
            cost = int((await service.record(answer.headers["x-request-id"]))["cost_nano"])
            service.services.budgets.add(service.account_id, 4 * cost, BudgetPeriod.TOTAL)
            await service.services.holds.credit.refresh()
            while (await service.post(CHAT.path(service), CHAT.body(service))).status == 200:
                pass
            await eventually(lambda: len(receiver.bodies) >= 3, within_s=15, what="three announcements")
            assert [body["data"]["threshold_percent"] for body in receiver.bodies] == [50, 80, 100]
            listed = await service.console(f"/accounts/{service.account_id}/webhooks")
            assert [one["id"] for one in listed["webhooks"]] == [endpoint_id]
            assert receiver.secret not in str(listed)
            statuses = [
                (await service.send("DELETE", f"{webhooks}/{endpoint_id}", key=service.admin_key)).status
                for _ in range(2)
            ]
            assert statuses == [204, 404]


async def test_a_url_inside_is_refused(tmp_path: Path, checkpoint: Path, engine: ScriptedEngine) -> None:
    async with running_service(tmp_path / "home", checkpoint, engine) as service:
        webhooks = f"/console/v1/accounts/{service.account_id}/webhooks"
        for url in ("https://127.0.0.1/hook", "http://example.com/", "https://169.254.169.254/latest"):
            answer = await service.send("POST", webhooks, {"url": url}, key=service.admin_key)
            assert (answer.status, answer.json()["code"]) == (400, "webhook_invalid")
