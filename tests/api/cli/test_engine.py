"""`pagegate engine command`, `up` and `check`, and `pagegate config check FILE`."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from api.cli import engine
from backends.topology import DeploymentInvalid
from tests.api.cli.conftest import Pagegate
from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually
from tests.engines import free_port

Answer = Callable[..., Any]
EXAMPLES = Path(__file__).parents[3] / "deploy" / "examples"
ATTACHED = """
[[models]]
id = "m"
price = "m"
tokenizer = "/m"
limits = {{ context_tokens = 1024, output_tokens_max = 1024 }}
kv_cache_dtype = "bf16"
page_tokens = 16
page_tags = true

[[models.replicas]]
name = "a"
url = "{url}"
weights = {{ checkpoint = "/m", precision = "bf16" }}
"""


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(engine.app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
async def running() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as double:
        yield double


class TestCommand:
    def test_prints_both_sides_of_a_pair(self) -> None:
        code, out = invoke("command", "@cf/zai-org/glm-5.2", "-d", str(EXAMPLES / "glm-5.2.toml"))
        assert code == 0
        assert out.count("-m sglang.launch_server") == 2
        assert "# a-prefill (prefill)" in out
        assert "--disaggregation-mode decode" in out

    def test_as_json_has_words_and_variables(self) -> None:
        code, out = invoke("command", "@cf/moonshotai/kimi-k2.6", "-d", str(EXAMPLES / "kimi-k2.6.toml"), "--json")
        assert code == 0
        [row] = json.loads(out)
        assert row["argv"][:3] == ["python3", "-m", "sglang.launch_server"]
        assert row["environment"]["SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"] == "256"

    def test_says_when_nothing_is_launched(self) -> None:
        code, out = invoke("command", "@cf/huggingfacetb/smollm2-135m-instruct", "-d", str(EXAMPLES / "local.toml"))
        assert code == 0
        assert "none is launched" in out


LAUNCHED = ATTACHED.replace('url = "{url}"', 'launch = {{ python = "{python}", port = 30000 }}').replace(
    "page_tags = true", "page_tags = false"
)
# Dies at its first start, then serves until it is told to end, and says goodbye.
ENGINE = """#!/bin/sh
trap 'echo drained >> {said}; exit 0' TERM
echo "start $SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION $3 $4 $5" >> {said}
if [ "$(wc -l < {said})" -eq 1 ]; then exit 3; fi
while :; do sleep 0.05; done
"""


class TestUp:
    @pytest.mark.load
    async def test_an_engine_is_started_again_when_it_dies_and_drained_at_a_stop(self, tmp_path: Path) -> None:
        said, stub, file = tmp_path / "said", tmp_path / "python", tmp_path / "d.toml"
        stub.write_text(ENGINE.format(said=said))
        stub.chmod(0o755)
        file.write_text(LAUNCHED.format(python=stub))
        command = [sys.executable, "-c", "from api.cli.engine import app; app()", "up", "m", "-d", str(file)]
        process = await asyncio.create_subprocess_exec(*command, "--log-dir", str(tmp_path / "logs"))
        try:
            await eventually(lambda: said.exists() and said.read_text().count("start") == 2, within_s=30)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(30):
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert said.read_text().splitlines() == ["start 256 --model-path /m --served-model-name"] * 2 + ["drained"]
        assert (tmp_path / "logs" / "a.log").exists()

    def test_an_engine_that_the_file_does_not_launch_is_refused(self) -> None:
        result = CliRunner().invoke(
            engine.app, ["up", "@cf/zai-org/glm-5.2", "-d", str(EXAMPLES / "glm-5.2.toml"), "--engine", "b"]
        )
        assert isinstance(result.exception, DeploymentInvalid)
        assert result.exception.message == "@cf/zai-org/glm-5.2 launches no engine named b"

    def test_engines_that_serve_itself_wakes_are_refused(self, tmp_path: Path) -> None:
        (file := tmp_path / "d.toml").write_text(LAUNCHED.format(python="python3") + "[models.serverless]\n")
        result = CliRunner().invoke(engine.app, ["up", "m", "-d", str(file)])
        assert isinstance(result.exception, DeploymentInvalid)
        assert result.exception.message == "m has [models.serverless]: `pagegate serve` starts and stops its engines"


class TestCheck:
    def test_an_engine_that_is_not_there_is_said_and_fails(self, tmp_path: Path) -> None:
        (path := tmp_path / "d.toml").write_text(ATTACHED.format(url=f"http://127.0.0.1:{free_port()}"))
        code, out = invoke("check", "m", "-d", str(path), "--within-s", "5")
        assert code == 1
        assert out.startswith("a: no connection to http://127.0.0.1:")

    async def test_contradictions_are_listed_by_engine(self, tmp_path: Path, running: ScriptedEngine) -> None:
        (path := tmp_path / "d.toml").write_text(ATTACHED.format(url=running.url))
        # In a thread of its own: the command has its own event loop, and the double lives on this one.
        code, out = await asyncio.to_thread(invoke, "check", "m", "-d", str(path), "--json")
        assert code == 1
        assert any("the plugin is not active" in sentence for sentence in json.loads(out)["a"])


class TestConfigCheck:
    def test_shows_the_engines_of_a_file(self, pagegate: Pagegate) -> None:
        code, out, _ = pagegate("config", "check", str(EXAMPLES / "glm-5.2.toml"))
        assert code == 0
        assert "a-prefill" in out
        assert "http://10.0.0.12:30000 (launched)" in out

    def test_says_which_engines_serve_itself_starts(self, pagegate: Pagegate, tmp_path: Path) -> None:
        (path := tmp_path / "d.toml").write_text(LAUNCHED.format(python="python3") + "[models.serverless]\n")
        assert "http://127.0.0.1:30000 (launched by serve)" in pagegate("config", "check", str(path))[1]

    def test_says_when_a_model_sleeps(self, pagegate: Pagegate, answer: Answer, tmp_path: Path) -> None:
        sleeps = """
[models.serverless]
depth = "released"
idle_seconds = 600
schedules = [{ days = "mon-fri", from = "08:00", to = "18:00", replicas_min = 1 }]
"""
        managed = '\n[models.replicas.managed]\nsystemd = "pagegate-engine@a.service"\n'
        (path := tmp_path / "d.toml").write_text(ATTACHED.format(url="http://h") + managed + sleeps)
        said = "m sleeps (released) after 600 s idle, 0 to all replicas awake, at least 1 on mon-fri 08:00-18:00 UTC"
        assert said in pagegate("config", "check", str(path))[1]
        [model] = answer("config", "check", str(path))["models"]
        assert model["serverless"]["schedules"][0]["from"] == "08:00"

    def test_says_who_lives_on_which_machine(self, pagegate: Pagegate, tmp_path: Path) -> None:
        attached = ATTACHED.format(url="http://h").rstrip()
        (path := tmp_path / "d.toml").write_text(
            f'{attached}\nmachine = "box"\nmemory_gib = 1.5\n[[machines]]\nname = "box"\nmemory_gib = 8\n'
        )
        assert "box has 8 GiB for a of m (1.5 GiB)" in pagegate("config", "check", str(path))[1]

    def test_prints_the_whole_file_as_json(self, answer: Answer) -> None:
        [model] = answer("config", "check", str(EXAMPLES / "local.toml"))["models"]
        assert model["replicas"][0]["url"] == "http://127.0.0.1:30000/"

    @pytest.mark.parametrize("name", ["local.toml", "kimi-k2.6.toml", "glm-5.2.toml"])
    def test_the_shipped_examples_are_right(self, pagegate: Pagegate, name: str) -> None:
        assert pagegate("config", "check", str(EXAMPLES / name))[0] == 0

    def test_a_fault_is_one_line_and_exit_code_1(self, pagegate: Pagegate, tmp_path: Path) -> None:
        (path := tmp_path / "d.toml").write_text(ATTACHED.format(url="http://h").replace("tokens = 16", "tokens = 17"))
        code, _, err = pagegate("config", "check", str(path))
        assert code == 1
        assert err.startswith("pagegate: models[0].page_tokens: 17: ")
