"""Who may be named to start an engine that is attached to by url."""

from typing import Any

import pytest
from pydantic import ValidationError

from backends.managed import Managed

WEIGHTS = {"path": "/m", "precision": "bf16", "digest": f"sha256:{'0' * 64}"}


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({}, "exactly one of systemd and kubernetes"),
        ({"systemd": "a.service", "kubernetes": "deployment/a"}, "exactly one of systemd and kubernetes"),
        ({"systemd": "a.service", "namespace": "b"}, "namespace is of a workload"),
        ({"systemd": "--now.service"}, "pattern"),
        ({"systemd": "a.timer"}, "pattern"),
        ({"kubernetes": "daemonset/a"}, "pattern"),
        ({"kubernetes": "deployment/A_b"}, "pattern"),
        ({"kubernetes": "deployment/a", "namespace": "-b"}, "pattern"),
    ],
)
def test_what_can_t_be_meant_is_refused(table: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Managed.model_validate(table)


def test_a_workload_is_a_kind_and_a_name() -> None:
    managed = Managed(kubernetes="statefulset/engine-a", namespace="gpus")
    assert managed.workload == ("statefulset", "engine-a")
    assert Managed(systemd="pagegate-engine@a.service").systemd == "pagegate-engine@a.service"
