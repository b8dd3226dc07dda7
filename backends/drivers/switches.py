"""Makes the switch of an engine from what the deployment file says of its manager. One for a process."""

from collections.abc import Callable
from typing import Any

from backends.drivers.managed import Switch
from backends.drivers.systemd import SystemdSwitch
from backends.errors import BackendError
from backends.managed import Managed


class Switches:
    """Of all engines; workloads of a cluster share one client, which is opened when the first is asked."""

    def __init__(self) -> None:
        self._client: Any = None  # lightkube's, which is an extra

    def of(self, managed: Managed) -> Switch:
        if managed.systemd is not None:
            return SystemdSwitch(managed.systemd)
        try:
            # Not everybody who serves has the extra.
            from backends.drivers.kubernetes import KubernetesSwitch, open_cluster  # noqa: PLC0415
        except ModuleNotFoundError as error:
            return _Missing(f"the Python package {error.name} is not installed: it needs pagegate[kubernetes]")
        return KubernetesSwitch(lambda: self._cluster(open_cluster), *managed.workload, managed.namespace)

    def _cluster(self, opened: Callable[[], Any]) -> Any:
        if self._client is None:
            self._client = opened()
        return self._client

    async def close(self) -> None:
        """Connections to the cluster's API end."""
        if self._client is not None:
            await self._client.close()
            self._client = None


class _Missing:
    """Implements Switch where its client is not installed."""

    def __init__(self, why: str) -> None:
        self._why = why

    async def on(self) -> None:
        raise BackendError(self._why)

    async def off(self) -> None:
        raise BackendError(self._why)

    async def runs(self) -> bool:
        raise BackendError(self._why)

    async def said(self) -> str:
        return self._why
