"""What an API server is asked for: paths, verbs and bodies, and what an operator reads when it refuses."""

import pytest

from backends.drivers.kubernetes import KubernetesSwitch
from backends.errors import BackendError
from tests.backends.drivers.cluster import TOKEN, StandIn, client_of, cluster

ENGINE = "/apis/apps/v1/namespaces/pagegate/statefulsets/engine-a/scale"


async def test_an_engine_is_started_by_a_merge_patch_of_its_scale() -> None:
    stand_in = StandIn({ENGINE: 0})
    async with cluster(stand_in) as client:
        switch = KubernetesSwitch(lambda: client, "statefulset", "engine-a", None)
        assert not await switch.runs()
        assert await switch.said() == "statefulset/engine-a is scaled to 0"
        await switch.on()
        assert await switch.runs()
        assert await switch.said() == ""
    patch = next(asked for asked in stand_in.asked if asked.verb == "PATCH")
    assert patch.path == ENGINE
    assert patch.content_type == "application/merge-patch+json"
    assert patch.body == {"spec": {"replicas": 1}}
    assert {asked.authorization for asked in stand_in.asked} == {f"Bearer {TOKEN}"}


async def test_a_stop_returns_when_no_pod_is_left() -> None:
    stand_in = StandIn({ENGINE: 1}, lingering=3)
    async with cluster(stand_in) as client:
        await KubernetesSwitch(lambda: client, "statefulset", "engine-a", None, check_s=0.001).off()
    assert stand_in.wished[ENGINE] == 0
    assert stand_in.lingering == 0
    assert [asked.verb for asked in stand_in.asked] == ["PATCH", "GET", "GET", "GET", "GET"]


async def test_a_deployment_in_another_namespace_has_its_own_path() -> None:
    path = "/apis/apps/v1/namespaces/gpus/deployments/engine/scale"
    stand_in = StandIn({path: 0})
    async with cluster(stand_in) as client:
        await KubernetesSwitch(lambda: client, "deployment", "engine", "gpus").on()
    assert stand_in.wished == {path: 1}


async def test_a_refusal_is_said_with_the_workload_and_the_server_s_words() -> None:
    async with cluster(StandIn({ENGINE: 0}, refuses=403)) as client:
        switch = KubernetesSwitch(lambda: client, "statefulset", "engine-a", None)
        with pytest.raises(BackendError, match="statefulset/engine-a: not yours"):
            await switch.on()


async def test_a_workload_that_is_not_there_is_an_error_and_not_asleep() -> None:
    async with cluster(StandIn({})) as client:
        with pytest.raises(BackendError, match="not found"):
            await KubernetesSwitch(lambda: client, "statefulset", "engine-b", None).runs()


async def test_a_server_that_is_away_is_said_so() -> None:
    client = client_of("http://127.0.0.1:9")
    with pytest.raises(BackendError, match="can't be asked"):
        await KubernetesSwitch(lambda: client, "statefulset", "engine-a", None).runs()
    await client.close()
