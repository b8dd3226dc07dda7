"""The image is built in stages, runs as nobody in particular, and is sent what it copies. Nothing builds it here."""

import fnmatch
import re

import yaml

from api.settings import load_settings
from tests.deploy.manifests import DEPLOY

ROOT = DEPLOY.parent
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text()


def test_the_last_stage_compiles_nothing_and_runs_as_a_user_of_its_own() -> None:
    *_, last = re.split(r"(?m)^FROM ", DOCKERFILE)
    assert DOCKERFILE.count("\nFROM ") == 3
    assert "pip install" not in last
    assert "USER 10001:10001" in last
    assert 'ENTRYPOINT ["pagegate"]' in last


def test_what_is_copied_exists_and_is_sent_to_the_builder() -> None:
    copied = [
        source
        for line in DOCKERFILE.splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    ]
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(source == part or fnmatch.fnmatch(source, f"{part}/*") for part in sent), source


def test_the_composed_gateways_settings_are_ours_and_its_root_is_read_only() -> None:
    compose = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())
    gateway = compose["services"]["gateway"]
    variables = {
        name: re.sub(r"\$\{\w+:[?-]([^}]*)\}", "http://e", value) for name, value in gateway["environment"].items()
    }
    variables |= {"PAGEGATE_MODEL_ID": "m", "PAGEGATE_DATABASE_URL": "postgresql+psycopg://h/d"}
    settings = load_settings({"PAGEGATE_HOME": "/data", "PAGEGATE_CACHE_DIR": "/cache", **variables})
    assert settings.workers == 2
    assert float(gateway["stop_grace_period"].removesuffix("s")) > settings.drain_seconds_max
    assert gateway["read_only"] is True
    assert (ROOT / "deploy/docker" / gateway["build"]["context"]).resolve() == ROOT
    assert set(gateway["depends_on"]) <= set(compose["services"])
    assert set(gateway["secrets"]) <= set(compose["secrets"])
