"""An engine as a workload of Kubernetes, a StatefulSet or Deployment of one pod: its subresource `scale` is set.

Its service account needs `get` and `patch` on statefulsets/scale or deployments/scale (deploy/kubernetes/engines).
Needs the extra `kubernetes`; imported only where a deployment file names a workload.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import httpx2
from lightkube import ApiError, AsyncClient
from lightkube.core.exceptions import ConfigError
from lightkube.resources.apps_v1 import DeploymentScale, StatefulSetScale
from lightkube.types import PatchType

from backends.errors import BackendError

T = TypeVar("T")

_ASK_S_MAX: Final = 10.0
# A pod ends within its terminationGracePeriodSeconds, in which its answers end, and a while for the kubelet.
_STOP_S_MAX: Final = 900.0
_CHECK_S: Final = 1.0
_KINDS: Final[dict[str, type[StatefulSetScale] | type[DeploymentScale]]] = {
    "statefulset": StatefulSetScale,
    "deployment": DeploymentScale,
}


def open_cluster() -> AsyncClient:
    """By the pod's service account, else as kubectl would be. Raises BackendError."""
    try:
        return AsyncClient(timeout=httpx2.Timeout(_ASK_S_MAX))
    except ConfigError as error:
        raise BackendError(f"no cluster is known: {error}") from error


class KubernetesSwitch:
    """Implements Switch. client: called at each use, since there may be no cluster yet. namespace: None for its own.
    check_s: between two looks while it stops.
    """

    def __init__(
        self,
        client: Callable[[], AsyncClient],
        kind: str,
        name: str,
        namespace: str | None,
        *,
        check_s: float = _CHECK_S,
    ) -> None:
        self._client = client
        self._kind = _KINDS[kind]
        self._name = name
        self._namespace = namespace
        self._what = f"{kind}/{name}"
        self._check_s = check_s

    async def on(self) -> None:
        await self._scale_to(1)

    async def off(self) -> None:
        await self._scale_to(0)
        try:
            async with asyncio.timeout(_STOP_S_MAX):
                while await self._pods():  # noqa: ASYNC110 - what the API server counts is no event here
                    await asyncio.sleep(self._check_s)
        except TimeoutError as error:
            raise BackendError(f"{self._what} still has a pod after {_STOP_S_MAX:g} s") from error

    async def runs(self) -> bool:
        """Is it to have a pod? Whether that has been scheduled is asked of the engine."""
        scale = await self._call(self._client().get(self._kind, self._name, namespace=self._namespace))
        return scale.spec is not None and (scale.spec.replicas or 0) > 0

    async def said(self) -> str:
        return f"{self._what} is scaled to 0" if not await self.runs() else ""

    async def _pods(self) -> int:
        scale = await self._call(self._client().get(self._kind, self._name, namespace=self._namespace))
        return scale.status.replicas if scale.status is not None else 0

    async def _scale_to(self, replicas: int) -> None:
        body = {"spec": {"replicas": replicas}}
        await self._call(
            self._client().patch(self._kind, self._name, body, namespace=self._namespace, patch_type=PatchType.MERGE)
        )

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(_ASK_S_MAX):
                return await call
        except ApiError as error:
            raise BackendError(f"Kubernetes refuses {self._what}: {error}") from error
        except (httpx2.HTTPError, ConfigError, TimeoutError, OSError) as error:
            raise BackendError(f"Kubernetes can't be asked about {self._what}: {error!r}") from error
