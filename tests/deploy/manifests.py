"""What stands in deploy's YAML files, read once for several tests."""

from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"


def documents(folder: str) -> list[dict[str, Any]]:
    """Every document of the Kubernetes manifests that the kustomization names."""
    resources = yaml.safe_load((DEPLOY / folder / "kustomization.yaml").read_text())["resources"]
    return [document for name in resources for document in yaml.safe_load_all((DEPLOY / folder / name).read_text())]


def only(found: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (document,) = [one for one in found if one["kind"] == kind and one["metadata"]["name"] == name]
    return document
