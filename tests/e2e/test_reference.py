"""The API's document against the running service: schemathesis sends all routes what it allows and what it forbids.

The same requests in every run, but for the names of what the service made; others, and more of them, in a search.
"""

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.e2e.service import Service
from tests.examples import examples, time_for

RUN_S_MAX = time_for(280)
# What the document can't say, so that a request it allows may be refused: fields that contradict each other, schemas
# that don't compile, periods that end before they begin, keys that no longer work, addresses that are none, files
# that hold something else.
_BOUND_BY_MORE = (
    "(completions|responses|run|run/{model}|embeddings|usage|costs|latency|keys|rotate|invitations|webhooks|"
    "limits|files|batches|projects|projects/{project_id}|service_accounts|service_accounts/{service_account_id})$"
)
CONFIG = """
seed = {seed}
generation.max-examples = {examples}
generation.database = "none"
phases.stateful.enabled = false
phases.examples.enabled = false
headers = {{ Authorization = "Bearer {api_key}" }}

[[operations]]
include-path-regex = "^/console/"
headers = {{ Authorization = "Bearer {admin_key}" }}

[[operations]]
include-path-regex = "{bound_by_more}"
checks.positive_data_acceptance.enabled = false

# A request without a key is a 400 here, as Workers AI's clients expect it, and not the 401 of everywhere else.
[[operations]]
include-path-regex = "^/client/v4/(user|accounts/{{account_id}}/(tokens|ai/(run|models|tasks|authors|usage|batches)))"
checks.ignored_auth.enabled = false
checks.missing_required_header.enabled = false

# Their bodies have dozens of fields: drawn at random, not one by one.
[[operations]]
include-tag = "Inference"
phases.coverage.enabled = false
"""


@pytest.mark.load
@pytest.mark.search
@pytest.mark.timeout(RUN_S_MAX + 20)  # half a minute on a quiet machine
async def test_no_request_finds_the_document_wrong(service: Service, tmp_path: Path) -> None:
    document = (await service.send("GET", "/openapi.json")).json()
    _fill_in(document, {"account_id": service.account_id, "model": service.model})
    # Whoever suspends its own account would be refused from there on.
    opened = await service.post("/console/v1/accounts", {"name": "other"}, key=service.admin_key)
    for parameter in document["paths"]["/console/v1/accounts/{account_id}"]["patch"]["parameters"]:
        if parameter["name"] == "account_id":
            parameter["schema"] = {"const": opened.json()["id"]}
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    seed = 1 if settings().derandomize else random.randrange(1 << 32)
    config = CONFIG.format(
        seed=seed,
        examples=examples(4),
        api_key=service.api_key,
        admin_key=service.admin_key,
        bound_by_more=_BOUND_BY_MORE.replace("\\", "\\\\"),
    )
    (tmp_path / "schemathesis.toml").write_text(config)
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("schemathesis"),
        f"--config-file={tmp_path / 'schemathesis.toml'}",
        "run",
        tmp_path / "openapi.json",
        f"--url={service.base_url}",
        # Another prefix for what is under /v1, by the same code.
        "--exclude-path-regex=/ai/v1/",
        cwd=tmp_path,
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
    assert process.returncode == 0, f"seed {seed}: {said.decode(errors='replace')[-8000:]}"


def _fill_in(document: dict[str, Any], values: dict[str, str]) -> None:
    """Names that the document leaves open, because it is the same for every account."""
    for operations in document["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                if parameter.get("required") and parameter["name"] in values:
                    parameter["schema"] = {"const": values[parameter["name"]]}
            if "Inference" not in operation["tags"]:
                continue
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            if "model" in body.get("properties", {}):
                body["properties"]["model"] = {"const": values["model"]}
