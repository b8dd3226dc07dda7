"""What sleep gives back and what waking costs: SGLang on a GPU under `pagegate serve`, in both depths of sleep.

    python3 -m benchmarks.h200.sleep OUT [--depths stopped released] [--rounds 3] [--memory 0.8] [--cpu]
        [--engine-python PYTHON] [--engine-path FOLDERS]

Two models with FP8 weights, an FP8 cache, pages of 64 and page tags, each launched by the gateway from a deployment
file with [models.serverless] and with most of the GPU for itself. A round of the first: a greedy stream wakes it, the
same is asked again of the engine that is awake, a crowd is served, an operator orders sleep. Then both are asked in
turn, so that each must put the other to sleep. Times are a client's, memory is the GPU's own figure, and every answer
should be the first one's. --memory: SGLang's share of the GPU. --engine-python and --engine-path: interpreter and
PYTHONPATH of the server, where it has an environment of its own. --cpu: a rehearsal with a tiny shape, where only
`stopped` can be had.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp

from api.settings import Settings
from benchmarks.h200.shapes import SHAPES, write_shape
from tests.e2e.process import ServeProcess, serve_process
from tests.e2e.service import price_deployed
from tests.engines import free_port
from tests.migrated import copy_migrated

FIRST, SECOND = "first", "second"
PAGE_TOKENS = 64
PROMPT_TOKENS, OUTPUT_TOKENS, CROWD = 2000, 48, 16
WAKE_S_MAX = 240.0
SLEEP_S_MAX = 60.0
HEAD = "depth     round  first token  asked again  asleep after  MiB awake  MiB asleep"


async def main(
    out: Path, depths: Sequence[str], *, rounds: int, memory: float, engine: tuple[str, str], cpu: bool
) -> None:
    print(HEAD, flush=True)
    for depth in depths:
        file = out / f"{depth}.toml"
        file.write_text(_deployment(out, depth, memory, engine, cpu=cpu))
        timeout = aiohttp.ClientTimeout(total=WAKE_S_MAX)
        with _gateway(out, depth, file) as gateway:
            async with aiohttp.ClientSession(timeout=timeout) as session:
                words = SHAPES["tiny" if cpu else "8b"]["vocab_size"]
                sleeper = _Sleeper(gateway, session, depth, words, cpu=cpu)
                await sleeper.rounds(rounds)
                await sleeper.turns(rounds)


class _Sleeper:
    """One gateway, and the models behind it that sleep and wake."""

    def __init__(
        self, gateway: ServeProcess, session: aiohttp.ClientSession, depth: str, words: int, *, cpu: bool
    ) -> None:
        known = gateway.bootstrap()
        self._session = session
        self._base, self._depth, self._cpu = gateway.base_url, depth, cpu
        self._api, self._admin = _bearer(known["api_key"]), _bearer(known["admin_key"])
        self._prompt = " ".join(f"t{300 + 7919 * place % (words - 300)}" for place in range(PROMPT_TOKENS))

    async def rounds(self, count: int) -> None:
        said = None
        for number in range(count):
            woken, text = await self._stream(FIRST)
            said = said or text
            again, repeated = await self._stream(FIRST)
            crowd = await asyncio.gather(*(self._stream(FIRST) for _ in range(CROWD)))
            answers = {said, text, repeated, *(answer for _, answer in crowd)}
            awake = self._memory()
            tags = await self._tags()
            began = time.monotonic()
            await self._order_sleep()
            await self._until_first_sleeps()
            slept = time.monotonic() - began
            print(
                f"{self._depth:9} {number:5}  {woken:9.2f} s  {again * 1e3:8.0f} ms  {slept:10.2f} s"
                f"  {awake:9}  {self._memory():10}   {len(answers)} different answers; {tags}",
                flush=True,
            )

    async def turns(self, count: int) -> None:
        answers: dict[str, set[str]] = {FIRST: set(), SECOND: set()}
        for number in range(count):
            for model in (SECOND, FIRST):
                woken, text = await self._stream(model)
                answers[model].add(text)
                print(
                    f"{self._depth:9} {number:5}  {woken:9.2f} s  for the {model} of two in turn {self._memory():9}"
                    f"   {len(answers[model])} different answers",
                    flush=True,
                )

    async def _stream(self, model: str) -> tuple[float, str]:
        """Seconds until the first token, and what the whole answer says."""
        body = {
            "model": model,
            "prompt": self._prompt,
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "stream": True,
        }
        began, first, text = time.monotonic(), 0.0, ""
        async with self._session.post(self._base + "/v1/completions", json=body, headers=self._api) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {await answer.text()}")
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(line.decode())
                for choice in event.get("choices", ()):
                    first = first or (time.monotonic() - began if choice["text"] else 0.0)
                    text += choice["text"]
        return first, text

    async def _order_sleep(self) -> None:
        body = {"model": FIRST, "order": "sleep", "depth": self._depth}
        async with self._session.post(
            self._base + "/console/v1/units/orders", json=body, headers=self._admin
        ) as answer:
            answer.raise_for_status()

    async def _until_first_sleeps(self) -> None:
        async with asyncio.timeout(SLEEP_S_MAX):
            while True:
                async with self._session.get(self._base + "/console/v1/units", headers=self._admin) as answer:
                    units = (await answer.json())["units"]
                if any((unit["model"], unit["state"]) == (FIRST, "asleep") for unit in units):
                    return
                await asyncio.sleep(0.05)

    async def _tags(self) -> str:
        """What the engine says of its page tags: compared, and stopped for them."""
        async with self._session.get(f"http://127.0.0.1:{PORTS[FIRST]}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        found = [line for line in lines if line.startswith("pagegate:page_tags_") and "_total" in line]
        return ", ".join(line.removeprefix("pagegate:page_tags_") for line in found)

    def _memory(self) -> int:
        """MiB of the GPU in use."""
        if self._cpu:
            return 0
        asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return int(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()[0])


PORTS = {model: free_port() for model in (FIRST, SECOND)}


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@contextlib.contextmanager
def _gateway(out: Path, depth: str, file: Path) -> Iterator[ServeProcess]:
    home = out / f"gateway-{depth}"
    copy_migrated(home)
    price_deployed(Settings.model_validate({"home": home, "cache_dir": out, "deployment": file}))
    variables = {
        "PAGEGATE_DEPLOYMENT": str(file),
        "PAGEGATE_GATEWAY__QUEUE_WAIT_SECONDS_MAX": str(WAKE_S_MAX),
        "PYTHONPATH": ":".join(sys.path[1:]),
    }
    with serve_process(home, out, **variables) as gateway:
        _wait_for_address(gateway)
        yield gateway


def _wait_for_address(gateway: ServeProcess) -> None:
    deadline = time.monotonic() + WAKE_S_MAX
    while not gateway.is_ready():
        if time.monotonic() > deadline:
            raise RuntimeError(gateway.log[-3000:])
        time.sleep(0.1)


def _deployment(out: Path, depth: str, memory: float, engine: tuple[str, str], *, cpu: bool) -> str:
    """engine: its interpreter and PYTHONPATH."""
    shape = "tiny" if cpu else "8b"
    checkpoint = write_shape(shape, out / "shapes")
    flags = ["--load-format", "dummy", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
    if cpu:
        flags += ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", "bfloat16"]
    else:
        flags += ["--attention-backend", "fa3", "--mm-feature-transport", "cpu", "--disable-prefill-cuda-graph"]
        flags += ["--disable-flashinfer-autotune"]
    environment = {
        name: value for name, value in os.environ.items()  # noqa: TID251 - the server's is this benchmark's
        if not name.startswith(("PAGEGATE_", "BASH_FUNC")) and value
    } | {"PYTHONPATH": engine[1]}  # fmt: skip
    sizes = "total_tokens_max = 16384" if cpu else f"memory_fraction = {memory}"
    quantization = "" if cpu else ', quantization = "fp8"'
    variables = ", ".join(f"{json.dumps(name)} = {json.dumps(value)}" for name, value in environment.items())
    models = [
        f"""
[[models]]
id = "{model}"
price = "{model}"
tokenizer = "{checkpoint}"
limits = {{ context_tokens = 8192, output_tokens_max = 4096 }}
kv_cache_dtype = "{"bf16" if cpu else "fp8_e4m3"}"
page_tokens = {PAGE_TOKENS}
page_tags = true
serverless = {{ idle_seconds = 86400, depth = "{depth}" }}
[[models.replicas]]
name = "{model}"
machine = "box"
memory_gib = 6
weights = {{ checkpoint = "{checkpoint}", precision = "{"bf16" if cpu else "fp8"}"{quantization} }}
[models.replicas.launch]
python = {json.dumps(engine[0])}
port = {port}
{sizes}
running_requests_max = 64
extra = {json.dumps(flags)}
environment = {{ {variables} }}
"""
        for model, port in PORTS.items()
    ]
    # Room for one of them, whatever the units.
    return "\n".join(["[[machines]]", 'name = "box"', "memory_gib = 10", *models])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--depths", nargs="+", default=["stopped", "released"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=float, default=0.8)
    parser.add_argument("--engine-python", default=sys.executable)
    parser.add_argument("--engine-path", default=":".join(sys.path[1:]))
    parser.add_argument("--cpu", action="store_true")
    chosen = parser.parse_args()
    asyncio.run(
        main(
            chosen.out.resolve(),
            ["stopped"] if chosen.cpu else chosen.depths,
            rounds=chosen.rounds,
            memory=chosen.memory,
            engine=(chosen.engine_python, chosen.engine_path),
            cpu=chosen.cpu,
        )
    )
