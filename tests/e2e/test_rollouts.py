"""A new revision of a model beside the old one: who is served by which, what is recorded of it, and how it ends."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.doubles.engine import ScriptedEngine
from tests.doubles.script import Refusal
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.deployments import MODEL, model, write_deployment
from tests.e2e.dialects import CHAT
from tests.e2e.service import Service, running_service
from tests.engines import free_port

# Followed within a second; a busy machine gets more.
FOLLOWED_S_MAX = 30.0
ROLLOUT = {"revision": "int4", "share_percent": 30, "requests_min": 20}


@dataclass(frozen=True)
class Tried:
    service: Service
    old: ScriptedEngine
    new: ScriptedEngine
    file: Path

    async def ask(self, session: str, **fields: Any) -> int:
        body = CHAT.body(self.service, **fields) | {"model": MODEL}
        headers = {"x-session-affinity": session}
        return (await self.service.post("/v1/chat/completions", body, headers=headers)).status

    async def ask_many(self, count: int, *, said: str = "s") -> set[int]:
        return set(await asyncio.gather(*(self.ask(f"{said}{number}", max_tokens=2) for number in range(count))))

    @property
    def served(self) -> tuple[int, int]:
        """By the old revision and by the new one."""
        return len(self.old.requests), len(self.new.requests)

    async def rollout(self) -> dict[str, Any]:
        [row] = (await self.service.console("/rollouts"))["rollouts"]
        assert isinstance(row, dict)
        return row

    async def decide(self, action: str, **fields: Any) -> dict[str, Any]:
        body = {"model": MODEL, "action": action, **fields}
        answer = await self.service.post("/console/v1/rollouts", body, key=self.service.admin_key)
        assert answer.status == 200, answer.body
        return answer.json()

    def names(self) -> list[str]:
        return [replica.id for replica in self.service.services.fleet.of(MODEL).replicas]

    async def is_left_to(self, name: str) -> None:
        await eventually(lambda: self.names() == [name], within_s=FOLLOWED_S_MAX, what=f"{name} alone")


def deployed(checkpoint: Path, old: ScriptedEngine, new: ScriptedEngine, **rollout: Any) -> dict[str, Any]:
    weights = {"checkpoint": "/weights", "precision": "int4"}
    replicas: list[ScriptedEngine | dict[str, Any]] = [
        old,
        {"url": new.url, "weights": weights, "revision": "int4"},
    ]
    return model(checkpoint, replicas=replicas, rollout=ROLLOUT | rollout)


@contextlib.asynccontextmanager
async def trying(tmp_path: Path, checkpoint: Path, **rollout: Any) -> AsyncIterator[Tried]:
    async with ScriptedEngine() as old, ScriptedEngine() as new:
        file = write_deployment(tmp_path / "d.toml", deployed(checkpoint, old, new, **rollout))
        soon: dict[str, Any] = {
            "gateway": {"poll_interval_idle_s": 0.1, "rollout_interval_s": 0.1},
        }
        async with running_service(tmp_path / "home", checkpoint, old, deployment=file, **soon) as service:
            fleet = service.services.fleet.of(MODEL)
            await eventually(
                lambda: all(replica.known for replica in fleet.replicas), within_s=FOLLOWED_S_MAX, what="both revisions"
            )
            yield Tried(service, old, new, file)


async def test_each_conversation_stays_on_its_revision_and_records_say_which_it_was(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with trying(tmp_path, checkpoint) as tried:
        assert await tried.ask_many(60) == {200}
        old, new = tried.served
        assert 3 <= new <= 33, "about 30 % of 60 conversations"
        assert await tried.ask_many(60) == {200}
        assert tried.served == (2 * old, 2 * new)
        records = await tried.service.records()
        told = Counter((row["deployment"], row["precisions"].partition(",")[0]) for row in records)
        assert sorted((precision, count) for (_, precision), count in told.items()) == [
            ("prefill_weights=bf16", 2 * old),
            ("prefill_weights=int4", 2 * new),
        ]
        assert len({deployment for deployment, _ in told}) == 2
        assert len({request.body["cache_salt"] for request in tried.old.requests + tried.new.requests}) == 2
        rollout = await tried.rollout()
        assert (rollout["state"], rollout["share_percent"]) == ("running", 30)

        async def counted() -> bool:
            seen = await tried.rollout()
            return (seen["old"]["requests"], seen["new"]["requests"]) == (2 * old, 2 * new)

        await eventually_async(counted, within_s=FOLLOWED_S_MAX, what="all of them counted")
        found = {finding["measure"]: finding for finding in (await tried.rollout())["findings"]}
        assert list(found) == ["errors", "answer_by_token"], "none of them was a stream"
        assert found["answer_by_token"]["old"] > 0
        assert found["answer_by_token"]["new"] > 0
        await tried.decide("share", share_percent=0)
        split = tried.service.services.trials.by_model[MODEL]
        await eventually(lambda: split.standing.share_bp == 0, within_s=FOLLOWED_S_MAX, what="another share")
        assert await tried.ask_many(20) == {200}
        assert tried.served == (2 * old + 20, 2 * new)


async def test_a_revision_that_fails_is_taken_back_by_itself_and_stays_so_over_a_reload(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with trying(tmp_path, checkpoint, share_percent=50) as tried:
        tried.new.steer(refuse=Refusal(500))
        assert await tried.ask_many(60) == {200, 502}
        await tried.is_left_to("r0")
        rollout = await tried.rollout()
        assert (rollout["state"], rollout["verdict"]) == ("rolled_back", None)
        assert rollout["why"].startswith("errors: 0.00 % → ")
        await tried.service.services.reload()
        assert tried.names() == ["r0"]
        before = len(tried.new.requests)
        assert await tried.ask_many(20) == {200}
        assert len(tried.new.requests) == before
        text = (await tried.service.send("GET", "/metrics", key=tried.service.admin_key)).body.decode()
        assert f'pagegate_rollout_state{{model="{MODEL}",revision="int4",state="rolled_back"}} 1.0' in text
        assert f'pagegate_rollout_share{{model="{MODEL}",revision="stable"}} 1.0' in text


async def test_a_revision_whose_engine_never_starts_is_taken_back_by_itself_and_the_old_one_serves_throughout(
    tmp_path: Path, checkpoint: Path, engine: ScriptedEngine
) -> None:
    launch = {"program": "local", "python": "/bin/false", "port": free_port()}
    broken = {"launch": launch, "weights": {"checkpoint": "/weights", "precision": "int4"}, "revision": "int4"}
    file = write_deployment(
        tmp_path / "d.toml", model(checkpoint, replicas=[engine, broken], rollout=ROLLOUT | {"share_percent": 100})
    )
    soon: dict[str, Any] = {
        "gateway": {"poll_interval_idle_s": 0.1, "rollout_interval_s": 0.1},
        "lifecycle": {"poll_interval_s": 0.05, "start_backoff_seconds": 0.2, "start_failures_max": 3},
    }
    async with running_service(tmp_path / "home", checkpoint, engine, deployment=file, **soon) as service:
        tried = Tried(service, engine, engine, file)
        fleet = service.services.fleet.of(MODEL)
        await eventually(lambda: fleet.replicas[0].known, within_s=FOLLOWED_S_MAX, what="the old revision")
        answers: set[int] = set()
        async with asyncio.timeout(2 * FOLLOWED_S_MAX):
            while len(tried.names()) > 1:
                answers |= await tried.ask_many(3, said=f"{len(engine.requests)} ")
        assert await tried.ask_many(3) | answers == {200}
        rollout = await tried.rollout()
        assert (rollout["state"], rollout["cause"]) == ("rolled_back", "never_started")
        assert rollout["why"] == "it never started: r1 (3 times): r1 ended with exit code 1"
        assert rollout["new"] == {"requests": 0, "errors": 0}
        text = (await service.send("GET", "/metrics", key=service.admin_key)).body.decode()
        assert f'pagegate_rollout_never_started{{model="{MODEL}",revision="int4"}} 1.0' in text
        assert f'pagegate_unit_failures_total{{model="{MODEL}"}} 3.0' in text
        units = service.services.lifecycle.store
        await eventually(lambda: units.all() == [], within_s=FOLLOWED_S_MAX, what="a unit that is given up")
        log = [entry["action"] for entry in (await service.console("/audit"))["entries"]]
        assert log.count("rollout.roll_back") == 1


async def test_a_promoted_revision_serves_all_and_a_stream_on_the_old_one_ends_well(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with trying(tmp_path, checkpoint) as tried:
        tried.old.steer(itl_ms=40)  # for six seconds: it still runs when the promotion has been followed
        body = CHAT.body(tried.service, max_tokens=150, stream=True) | {"model": MODEL}
        streams: list[aiohttp.ClientResponse] = []
        async with contextlib.AsyncExitStack() as stack:
            while not tried.old.live:
                asked = body | {"messages": [{"role": "user", "content": f"hello {len(streams)}"}]}
                opened = tried.service.open_stream("/v1/chat/completions", asked)
                streams.append(await stack.enter_async_context(opened))
            refused = await tried.service.post(
                "/console/v1/rollouts", {"model": MODEL, "action": "share"}, key=tried.service.admin_key
            )
            assert refused.status == 409
            await tried.decide("promote", unseen=True)
            await tried.is_left_to("r1")
            assert tried.old.live, "what runs on the old revision goes on"
            old, new = tried.served
            assert await tried.ask_many(10, said="later ") == {200}
            assert tried.served == (old, new + 10)
            assert b"data: [DONE]" in await streams[-1].read()


async def test_a_revision_that_is_full_lends_to_the_other_or_has_its_requests_wait_as_the_file_says(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with trying(tmp_path, checkpoint, share_percent=100, when_full="wait") as tried:
        tried.new.running_max = 1
        tried.new.steer(itl_ms=10)
        fleet = tried.service.services.fleet.of(MODEL)

        def is_small() -> bool:
            gate = fleet.gate(fleet.replicas[1])
            return gate is not None and gate.limits.running_max == 1

        await eventually(is_small, within_s=FOLLOWED_S_MAX, what="a report of the smaller engine")
        assert await tried.ask_many(3) == {200}
        assert tried.served == (0, 3)
        write_deployment(tried.file, deployed(checkpoint, tried.old, tried.new, share_percent=100))
        await tried.service.services.reload()
        tried.new.steer(itl_ms=500)  # the first one is inside when the others come
        assert await tried.ask_many(3) == {200}
        assert tried.served[0] > 0


async def test_a_revision_that_is_down_takes_no_share(tmp_path: Path, checkpoint: Path) -> None:
    async with trying(tmp_path, checkpoint, share_percent=100, when_full="wait") as tried:
        replica = tried.service.services.fleet.of(MODEL).replicas[1]
        tried.new.steer(ready=False, loads="error")
        await eventually(lambda: not replica.known, within_s=FOLLOWED_S_MAX, what="a revision that is found down")
        assert await tried.ask_many(5) == {200}
        assert tried.served == (5, 0)
