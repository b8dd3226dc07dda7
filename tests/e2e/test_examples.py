"""Every example of the page for clients runs against a service as it stands there."""

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from tests.e2e.service import Service
from tests.engines import ROOT
from tests.node_packages import node_folder

PAGE = ROOT / "deploy" / "docs" / "clients.md"
EXAMPLES = re.findall(r"^```(sh|python|js)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
RUN_S_MAX = 60


@pytest.mark.timeout(800)  # the first one in JavaScript installs the packages
@pytest.mark.parametrize(
    ("language", "code"), EXAMPLES, ids=[f"{number}-{language}" for number, (language, _) in enumerate(EXAMPLES)]
)
async def test_an_example_says_what_the_model_says(service: Service, tmp_path: Path, language: str, code: str) -> None:
    folder = await asyncio.to_thread(node_folder) if language == "js" else tmp_path
    command = {
        "sh": ["sh", "-euc", code],
        "python": [sys.executable, "-c", code],
        "js": ["node", "--input-type=module", "--eval", code],
    }[language]
    given = {
        "BASE_URL": service.base_url,
        "ACCOUNT_ID": service.account_id,
        "API_KEY": service.api_key,
        "MODEL": service.model,
    }
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={**os.environ, **given},  # noqa: TID251  a child's, not ours
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(RUN_S_MAX):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, said.decode(errors="replace")[-3000:]
    assert b"w0" in said, "the first word of the scripted engine"


def test_the_page_has_examples_in_every_language() -> None:
    assert {language for language, _ in EXAMPLES} == {"sh", "python", "js"}
    assert len(EXAMPLES) >= 7
