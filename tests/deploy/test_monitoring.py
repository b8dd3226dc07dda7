"""Every metric that a rule, a panel or an autoscaler asks for is one that a gateway shows."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import DEPLOY, documents
from tests.doubles.engine import ScriptedEngine
from tests.e2e.dialects import CHAT
from tests.e2e.service import running_service
from tests.engines import build_tiny_checkpoint
from tests.stores import ValkeyServer

RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((DEPLOY / "monitoring" / "rules.yaml").read_text())["groups"]
    for rule in group["rules"]
]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
DASHBOARD = json.loads((DEPLOY / "monitoring" / "dashboard.json").read_text())
# Of a metric with buckets there are samples by other names.
_OF_A_HISTOGRAM = re.compile(r"_(bucket|sum|count)$")


def _expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in RULES)
    yield from (target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"])
    yield from (one["query"]["query"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query")
    for document in documents("kubernetes"):
        for metric in document["spec"].get("metrics", ()) if document["kind"] == "HorizontalPodAutoscaler" else ():
            if metric["type"] != "Resource":
                yield metric[metric["type"].lower()]["metric"]["name"]


def _asked() -> set[str]:
    names = {name for text in _expressions() for name in re.findall(r"\b(?:pagegate|kv|process)_\w+", text)}
    return {_OF_A_HISTOGRAM.sub("", name) for name in names}


@pytest.mark.stores
async def test_every_metric_that_is_asked_for_is_shown(tmp_path: Path) -> None:
    checkpoint = build_tiny_checkpoint(tmp_path / "tiny")
    with ValkeyServer() as valkey:
        shared: dict[str, Any] = {"meters_url": valkey.url, "pages_url": valkey.url}
        async with (
            ScriptedEngine() as engine,
            running_service(tmp_path / "home", checkpoint, engine, **shared) as service,
        ):
            assert (await service.post(CHAT.path(service), CHAT.body(service))).status == 200
            text = (await service.send("GET", "/metrics")).body.decode()
    shown = set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))
    assert _asked() - RECORDED - shown == set()
    assert len(_asked()) > 25, "the expressions were read"


def test_an_alert_says_how_grave_it_is_and_what_has_happened() -> None:
    alerts = [rule for rule in RULES if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) > 10
    for rule in alerts:
        assert rule["labels"]["severity"] in {"page", "warn"}
        assert rule["annotations"]["summary"].endswith(".")


def test_panels_do_not_overlap() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
