"""The Kubernetes manifests are what the API takes, name each other rightly, and set what we have settings for."""

import re
import tomllib
from typing import Any

import kubernetes_validate
import pytest
import yaml

from api.settings import load_settings
from backends.topology import Deployment
from gateway.lifecycle.scaler import Decision
from gateway.lifecycle.scaling import Seen, Wished
from gateway.lifecycle.scaling_metrics import ScalingCollector
from gateway.lifecycle.sides import Side
from tests.deploy.manifests import DEPLOY, documents, only

MANIFESTS = documents("kubernetes")
SECRETS = {
    "PAGEGATE_DATABASE_URL": "postgresql+psycopg://h/d",
    "PAGEGATE_METERS_URL": "redis://h",
    "PAGEGATE_PAGES_URL": "redis://h",
}


@pytest.mark.parametrize("document", MANIFESTS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
@pytest.mark.parametrize("version", ["1.34", "1.37"])
def test_a_manifest_is_what_the_api_takes(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_every_manifest_is_named_in_the_kustomization() -> None:
    listed = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["resources"]
    there = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")} - {"kustomization.yaml"}
    assert set(listed) == there


def _pod() -> dict[str, Any]:
    pod: dict[str, Any] = only(MANIFESTS, "StatefulSet", "pagegate")["spec"]["template"]["spec"]
    return pod


def test_settings_of_the_pod_are_ours_and_can_be_kept() -> None:
    (container,) = _pod()["containers"]
    variables = dict(only(MANIFESTS, "ConfigMap", "pagegate")["data"])
    assert {one["name"] for one in container["env"]} == set(SECRETS), "whatever holds a password comes from the secret"
    settings = load_settings({"PAGEGATE_HOME": "/data", "PAGEGATE_CACHE_DIR": "/cache", **variables, **SECRETS})
    pause_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert _pod()["terminationGracePeriodSeconds"] > settings.drain_seconds_max + pause_s
    assert settings.sharers == only(MANIFESTS, "HorizontalPodAutoscaler", "pagegate")["spec"]["maxReplicas"]


def test_the_deployment_file_in_it_can_be_deployed() -> None:
    text = only(MANIFESTS, "ConfigMap", "pagegate-deployment")["data"]["deployment.toml"]
    (model,) = Deployment.model_validate(tomllib.loads(text)).models
    assert model.replicas[0].base_url == "http://engine-a:30000"


def test_the_pod_has_no_rights_and_writes_to_its_volumes_alone() -> None:
    pod = _pod()
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    context = container["securityContext"]
    assert (context["readOnlyRootFilesystem"], context["allowPrivilegeEscalation"]) == (True, False)
    assert context["capabilities"] == {"drop": ["ALL"]}
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/data", "/tmp", "/cache"}
    (claim,) = only(MANIFESTS, "StatefulSet", "pagegate")["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "data", "the durable record outlives its pod"


def test_what_is_named_is_there() -> None:
    pod = _pod()
    maps = {one["metadata"]["name"] for one in MANIFESTS if one["kind"] == "ConfigMap"}
    assert {one["configMapRef"]["name"] for one in pod["containers"][0]["envFrom"]} <= maps
    assert {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume} <= maps
    assert not [one for one in MANIFESTS if one["kind"] == "Secret"], "secrets are referred to, not kept here"
    labels = only(MANIFESTS, "StatefulSet", "pagegate")["spec"]["template"]["metadata"]["labels"]
    for kind, name in (("Service", "pagegate"), ("Service", "pagegate-pods")):
        assert only(MANIFESTS, kind, name)["spec"]["selector"] == labels
    for kind, field in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        assert only(MANIFESTS, kind, "pagegate")["spec"][field]["matchLabels"] == labels
    named = {volume["name"] for volume in pod["volumes"]} | {"data"}
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == named
    assert only(MANIFESTS, "StatefulSet", "pagegate")["spec"]["serviceName"] == "pagegate-pods"


def test_probes_and_scrapes_ask_routes_that_exist() -> None:
    (container,) = _pod()["containers"]
    probes = [container[name] for name in ("livenessProbe", "readinessProbe", "startupProbe")]
    asked = {probe["httpGet"]["path"] for probe in probes}
    asked.add(
        only(MANIFESTS, "StatefulSet", "pagegate")["spec"]["template"]["metadata"]["annotations"]["prometheus.io/path"]
    )
    served = set(re.findall(r'"GET", "(/[^"]+)"', (DEPLOY.parent / "api" / "app.py").read_text()))
    assert asked <= served


def test_the_component_that_scales_engines_fits_the_gateway_and_gives_no_more() -> None:
    folder = DEPLOY / "kubernetes" / "engines"
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())
    rights = [one for name in listed["resources"] for one in yaml.safe_load_all((folder / name).read_text())]
    for document in rights:
        kubernetes_validate.validate(document, "1.37", strict=True)
    (rule,) = only(rights, "Role", "pagegate-engines")["rules"]
    assert set(rule["verbs"]) == {"get", "patch"}
    assert all(resource.endswith("/scale") for resource in rule["resources"])
    (patch,) = (yaml.safe_load((folder / one["path"]).read_text()) for one in listed["patches"])
    assert only(MANIFESTS, patch["kind"], patch["metadata"]["name"])
    account = patch["spec"]["template"]["spec"]["serviceAccountName"]
    assert only(rights, "ServiceAccount", account)
    (subject,) = only(rights, "RoleBinding", "pagegate-engines")["subjects"]
    assert subject["name"] == account


def test_each_side_of_a_group_is_scaled_to_the_number_that_is_wished_of_it() -> None:
    folder = DEPLOY / "kubernetes" / "halves"
    (name,) = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    scalers = list(yaml.safe_load_all((folder / name).read_text()))
    for scaler in scalers:
        kubernetes_validate.validate(scaler, "1.34", strict=True)
        kubernetes_validate.validate(scaler, "1.37", strict=True)
    sides = {}
    for scaler in scalers:
        (metric,) = scaler["spec"]["metrics"]
        asked = metric["object"]
        assert only(MANIFESTS, "Service", asked["describedObject"]["name"])
        assert asked["target"] == {"type": "AverageValue", "averageValue": "1"}
        sides[scaler["spec"]["scaleTargetRef"]["name"]] = asked["metric"]
    # One sample a model and side: what is selected is one number, and a maximum or a sum of it the same.
    wished = {Side.PREFILL: Wished(3, "prompts wait"), Side.DECODE: Wished(2, "pages are short")}
    seen = Seen(1, 1, 1024, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 60.0)
    decision = Decision(dict.fromkeys(wished, seen), wished)
    samples = [
        sample
        for family in ScalingCollector({"m": decision}).collect()
        for sample in family.samples
        if sample.name == "pagegate_wished_replicas"
    ]
    found = {}
    for workload, metric in sides.items():
        assert metric["name"] == "pagegate_wished_replicas"
        matching = [one for one in samples if metric["selector"]["matchLabels"].items() <= one.labels.items()]
        found[workload] = [one.value for one in matching]
    assert found == {"prefill": [3], "decode": [2]}


def test_engines_are_scaled_to_the_number_that_is_wished() -> None:
    (metric,) = only(MANIFESTS, "HorizontalPodAutoscaler", "engine")["spec"]["metrics"]
    assert metric["object"]["metric"]["name"] == "pagegate_wished_replicas"
    assert metric["object"]["target"] == {"type": "AverageValue", "averageValue": "1"}
