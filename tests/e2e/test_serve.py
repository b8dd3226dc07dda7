"""`pagegate serve` with its embedded engine, as processes that are started, stopped and killed."""

import asyncio
import re
import socket
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from api.settings import Settings
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.deployments import model, write_deployment
from tests.e2e.process import START_S_MAX, ServeProcess, lives, serve_process
from tests.e2e.service import price_deployed
from tests.engines import build_tiny_checkpoint, free_port, real_model_path

pytestmark = pytest.mark.engine
MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"
LONG = {"model": MODEL, "messages": [{"role": "user", "content": "go on"}], "max_tokens": 1500, "temperature": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


async def ready(process: ServeProcess) -> dict[str, str]:
    await eventually(process.is_ready, within_s=START_S_MAX, what="a ready service")
    return process.bootstrap()


async def chat(
    session: aiohttp.ClientSession, base: dict[str, str], body: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {base['api_key']}"}
    async with session.post(base["base_url"] + "/v1/chat/completions", json=body, headers=headers) as response:
        return response.status, await response.json()


async def test_the_first_start_makes_all_it_needs_and_the_second_finds_it(
    tmp_path: Path, checkpoint: Path, session: aiohttp.ClientSession
) -> None:
    home = tmp_path / "home"
    with serve_process(home, checkpoint) as process:
        first = await ready(process)
        assert set(first) == {"base_url", "account_id", "api_key", "admin_key"}
        assert stat.S_IMODE((home / "bootstrap.json").stat().st_mode) == 0o600
        assert first["base_url"] == process.base_url
        await eventually(lambda: "Stop with Ctrl-C" in process.log, what="the printed lines")
        assert first["api_key"] not in process.log
        status, answer = await chat(session, first, LONG | {"max_tokens": 5})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 5)
        process.terminate()
        assert process.exit_code(30) == 0
    with serve_process(home, checkpoint) as process:
        second = await ready(process)
        assert {**second, "base_url": ""} == {**first, "base_url": ""}
        record = process.get(f"/console/v1/accounts/{first['account_id']}/requests/{answer['id']}", first["admin_key"])
        assert record["outcome"] == "finished"


async def test_a_killed_engine_ends_its_stream_with_an_error_is_started_again_and_nobody_pays(
    tmp_path: Path, checkpoint: Path, session: aiohttp.ClientSession
) -> None:
    with serve_process(tmp_path / "home", checkpoint) as process:
        base = await ready(process)
        headers = {"Authorization": f"Bearer {base['api_key']}"}
        url = base["base_url"] + "/v1/chat/completions"
        async with session.post(url, json=LONG | {"stream": True}, headers=headers) as response:
            seen = b""
            while seen.count(b"data: ") < 20:
                seen += await response.content.readany()
            engine = process.engine()
            assert engine is not None
            engine.kill()
            seen += await response.content.read()
        assert b'"error"' in seen.split(b"\n\n")[-2]
        assert b"[DONE]" not in seen
        assert b'"finish_reason":"stop"' not in seen
        request_id = orjson.loads(seen.split(b"\n\n")[0].removeprefix(b"data: "))["id"]
        record = process.get(f"/console/v1/accounts/{base['account_id']}/requests/{request_id}", base["admin_key"])
        assert (record["outcome"], record["cost_nano"]) == ("upstream_failed", 0)
        assert record["completion_tokens"] >= 1

        # A request that comes meanwhile waits for the new engine.
        status, answer = await chat(session, base, LONG | {"max_tokens": 3})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
        assert process.get("/console/v1/invariants", base["admin_key"])["ok"] is True


def tokens_on_record(home: Path) -> int:
    """The most that the spool says of an answer that still runs: chunks may all come before its second record."""
    spool = b"".join(path.read_bytes() for path in (home / "spool").iterdir())
    told = re.findall(rb'"t":"P"[^}]*"counts":\[\d+,\d+,(\d+)', spool)
    return max(map(int, told), default=0)


def begun(home: Path) -> int:
    """How many requests were dispatched, by the spool."""
    return sum(path.read_bytes().count(b'"t":"B"') for path in (home / "spool").iterdir())


async def test_a_killed_gateway_leaves_no_orphan_and_settles_what_was_open_at_its_next_start(
    tmp_path: Path, checkpoint: Path, session: aiohttp.ClientSession
) -> None:
    home = tmp_path / "home"
    with serve_process(home, checkpoint, PAGEGATE_GATEWAY__PROGRESS_INTERVAL_S="0.02") as process:
        base = await ready(process)
        headers = {"Authorization": f"Bearer {base['api_key']}"}
        url = base["base_url"] + "/v1/chat/completions"
        received = 0
        async with session.post(url, json=LONG | {"stream": True}, headers=headers) as response:
            async for line in response.content:
                if line.startswith(b"data: "):
                    request_id = orjson.loads(line.removeprefix(b"data: "))["id"]
                    received += 1
                if received == 40:
                    break
            await eventually(lambda: tokens_on_record(home) > 0, what="a record of what was made")
            engine = process.engine()
            assert engine is not None
            process.kill()
        await eventually(lambda: not lives(engine), within_s=START_S_MAX, what="an end of the engine")
    with serve_process(home, checkpoint) as process:
        base = await ready(process)
        record = process.get(f"/console/v1/accounts/{base['account_id']}/requests/{request_id}", base["admin_key"])
        assert (record["outcome"], record["usage_source"]) == ("cancelled", "recovered")
        assert 1 <= record["completion_tokens"] <= LONG["max_tokens"]
        assert record["cost_nano"] > 0
        assert process.get("/console/v1/invariants", base["admin_key"])["ok"] is True


async def test_shutdown_stops_long_answers_as_cancelled_and_records_them(
    tmp_path: Path, checkpoint: Path, session: aiohttp.ClientSession
) -> None:
    home = tmp_path / "home"
    with serve_process(home, checkpoint, PAGEGATE_DRAIN_SECONDS_MAX="0.1") as process:
        base = await ready(process)
        headers = {"Authorization": f"Bearer {base['api_key']}"}
        url = base["base_url"] + "/v1/chat/completions"
        whole = asyncio.create_task(chat(session, base, LONG))
        async with session.post(url, json=LONG | {"stream": True}, headers=headers) as response:
            first = await response.content.readline()
            await eventually(lambda: begun(home) == 2, what="a record that both have begun")
            await response.content.readuntil(b"\n\n")
            process.terminate()
            rest = await response.content.read()
        assert process.exit_code(30) == 0
        assert b'"generation_cut_off"' in rest
        assert b"[DONE]" not in rest
        status, answer = await whole
        assert (status, answer["error"]["code"]) == (502, "generation_cut_off")
    with serve_process(home, checkpoint) as process:
        await ready(process)
        request_id = orjson.loads(first.removeprefix(b"data: "))["id"]
        record = process.get(f"/console/v1/accounts/{base['account_id']}/requests/{request_id}", base["admin_key"])
        assert (record["outcome"], record["cost_nano"] > 0) == ("cancelled", True)


async def test_a_taken_port_is_one_sentence_and_makes_nothing(tmp_path: Path, checkpoint: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        home = tmp_path / "home"
        with serve_process(home, checkpoint, PAGEGATE_PORT=str(port)) as process:
            assert process.exit_code(60) == 1
            assert process.log.strip() == (
                f"pagegate: Port {port} of 127.0.0.1 is taken: stop what listens there or set PAGEGATE_PORT."
            )
        assert not home.exists()


async def test_a_malformed_setting_is_one_sentence(tmp_path: Path, checkpoint: Path) -> None:
    with serve_process(tmp_path / "home", checkpoint, PAGEGATE_PORTT="1") as process:
        assert process.exit_code(60) == 1
        assert process.log.startswith("pagegate: PAGEGATE_PORTT")
        assert "Traceback" not in process.log


async def test_a_data_folder_that_cant_be_used_is_one_sentence(tmp_path: Path, checkpoint: Path) -> None:
    (occupied := tmp_path / "file").write_bytes(b"")
    with serve_process(tmp_path / "home", checkpoint, PAGEGATE_HOME=str(occupied)) as process:
        assert process.exit_code(60) == 1
        assert process.log.strip() == (
            f"pagegate: The data folder {occupied} can't be used (File exists): mend it or set PAGEGATE_HOME."
        )


async def test_a_database_that_is_none_is_said_to_be_none(tmp_path: Path, checkpoint: Path) -> None:
    (home := tmp_path / "home").mkdir()
    (home / "pagegate.db").write_bytes(bytes(range(256)) * 64)
    with serve_process(home, checkpoint, PAGEGATE_EMBEDDING_MODEL_ID="") as process:
        assert process.exit_code(60) == 1
        assert process.log.strip() == "pagegate: The database can't be used: file is not a database."


async def test_a_data_folder_serves_one_process_at_a_time(tmp_path: Path, checkpoint: Path) -> None:
    home = tmp_path / "home"
    with serve_process(home, checkpoint) as first:
        await ready(first)
        with serve_process(home, checkpoint) as second:
            assert second.exit_code(60) == 1
            assert f"Another process serves from this data folder: {home}" in second.log
            assert "Traceback" not in second.log.removeprefix(first.log)


async def output_of(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(60):
        said, _ = await process.communicate()
    assert process.returncode == 0, said
    return said.decode()


async def test_the_real_model_knows_the_capital_of_france_by_the_printed_lines(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    variables = {"PAGEGATE_ENGINE__KV_CACHE_BYTES": str(128 << 20)}
    with serve_process(tmp_path / "home", real_model_path(), **variables) as process:
        base = await ready(process)
        await eventually(lambda: "Stop with Ctrl-C" in process.log, what="the printed lines")
        printed = re.findall(r"^curl (?:.*\\\n)+.*$", process.log, re.MULTILINE)
        assert len(printed) == 2
        for command in printed:
            said = await output_of("bash", "-c", f"curl -s {command.removeprefix('curl ')}")
            pieces = [orjson.loads(event.removeprefix("data: ")) for event in said.split("\n\n")[:-2]]
            text = "".join(
                piece.get("response") or "".join(c["delta"].get("content") or "" for c in piece.get("choices", []))
                for piece in pieces
            )
            assert "Paris" in text
        scripts = re.findall(r"^# .* with Python .*\n((?:.+\n)+)", process.log, re.MULTILINE)
        assert len(scripts) == 2
        for script in scripts:
            assert "Paris" in await output_of(sys.executable, "-c", script)
        embed = {"model": "@cf/sentence-transformers/all-minilm-l6-v2", "input": ["Paris", "a capital"]}
        headers = {"Authorization": f"Bearer {base['api_key']}"}
        async with session.post(base["base_url"] + "/v1/embeddings", json=embed, headers=headers) as response:
            assert response.status == 200
            vectors = [row["embedding"] for row in (await response.json())["data"]]
        assert [len(vector) for vector in vectors] == [384, 384]


def launched(checkpoint: Path, *names: str) -> list[dict[str, Any]]:
    """A model a name, each on a local engine of its own."""
    weights = {"checkpoint": str(checkpoint), "precision": "bf16"}
    return [
        model(
            checkpoint,
            id=name,
            price="some-price",
            replicas=[
                {
                    "name": f"engine-{name}",
                    "weights": weights,
                    "launch": {
                        "program": "local",
                        "python": sys.executable,
                        "port": free_port(),
                        "extra": ["--kv-cache-bytes", str(4 << 20), "--threads", "1"],
                    },
                }
            ],
        )
        for name in names
    ]


async def test_local_engines_of_a_deployment_file_are_started_and_stopped_as_the_file_changes(
    tmp_path: Path, checkpoint: Path, session: aiohttp.ClientSession
) -> None:
    one, two = launched(checkpoint, "one", "two")
    file = write_deployment(tmp_path / "deployment.toml", one)
    with serve_process(tmp_path / "home", checkpoint, PAGEGATE_DEPLOYMENT=str(file)) as process:
        base = await ready(process)
        price_deployed(Settings.model_validate({"home": process.home, "cache_dir": tmp_path, "deployment": file}))
        await eventually_async(lambda: answers(session, base, "one"), within_s=START_S_MAX, what="a priced model")
        [first] = process.engines()
        write_deployment(file, two)
        process.hang_up()
        await eventually_async(lambda: answers(session, base, "two"), within_s=START_S_MAX, what="the other model")
        await eventually(lambda: not first.is_running(), within_s=20, what="an engine that has left")
        [second] = process.engines()
        assert second.pid != first.pid
        assert not await answers(session, base, "one")
        file.write_text("nothing that could be served")
        process.hang_up()
        await eventually(lambda: "the deployment stays as it was" in process.log, within_s=20, what="the reason")
        assert await answers(session, base, "two")


async def test_a_local_pair_of_a_deployment_file_answers_and_comes_back_when_a_half_was_killed(
    tmp_path: Path, checkpoint: Path, session: aiohttp.ClientSession
) -> None:
    [one] = launched(checkpoint, "paired")
    half = {name: one["replicas"][0][name] for name in ("weights", "launch")}
    pair = {
        "name": "p",
        "bootstrap_port": free_port(),
        "prefill": half | {"launch": half["launch"] | {"port": free_port()}},
        "decode": half | {"launch": half["launch"] | {"port": free_port()}},
    }
    file = write_deployment(tmp_path / "deployment.toml", one | {"replicas": [], "pairs": [pair]})
    with serve_process(tmp_path / "home", checkpoint, PAGEGATE_DEPLOYMENT=str(file)) as process:
        base = await ready(process)
        price_deployed(Settings.model_validate({"home": process.home, "cache_dir": tmp_path, "deployment": file}))
        await eventually_async(lambda: answers(session, base, "paired"), within_s=START_S_MAX, what="a priced model")
        status, answer = await chat(session, base, LONG | {"model": "paired", "max_tokens": 8})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 8)
        again = (await chat(session, base, LONG | {"model": "paired", "max_tokens": 8}))[1]
        assert again["choices"][0]["message"]["content"] == answer["choices"][0]["message"]["content"]
        [prefill] = [engine for engine in process.engines() if "prefill" in engine.cmdline()]
        prefill.kill()
        await eventually(lambda: len(process.engines()) == 2, within_s=30, what="a half that is started again")
        await eventually_async(
            lambda: answers(session, base, "paired"), within_s=START_S_MAX, what="a pair that answers again"
        )
        state = process.get("/console/v1/invariants", base["admin_key"])
        assert (state["ok"], state["kv_pages_held"]) == (True, 0)


async def answers(session: aiohttp.ClientSession, base: dict[str, str], name: str) -> bool:
    return (await chat(session, base, LONG | {"model": name, "max_tokens": 2}))[0] == 200
