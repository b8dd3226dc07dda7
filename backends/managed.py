"""Who starts and stops an engine that is attached to by url: systemd on this machine, or Kubernetes. Pure values.

The table `managed` of an engine in the deployment file; read by topology.py, carried out by drivers/managed.py.

    [models.replicas.managed]
    systemd = "pagegate-engine@a.service"
"""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

_Service = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9@._:\\-]{0,248}\.service$")]
_Workload = Annotated[
    str, StringConstraints(pattern=r"^(statefulset|deployment)/[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")
]
_Namespace = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]


class Managed(BaseModel):
    """Exactly one of systemd and kubernetes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    systemd: _Service | None = Field(default=None, description="A unit of this machine: it is started and stopped.")
    kubernetes: _Workload | None = Field(
        default=None,
        description="statefulset/NAME or deployment/NAME, of this engine alone: it is scaled to 1 and 0.",
    )
    namespace: _Namespace | None = Field(default=None, description="Of the workload; left out: the gateway's own.")

    @model_validator(mode="after")
    def _one_manager(self) -> Self:
        if (self.systemd is None) == (self.kubernetes is None):
            raise ValueError("exactly one of systemd and kubernetes starts the engine")
        if self.namespace is not None and self.kubernetes is None:
            raise ValueError("namespace is of a workload of Kubernetes")
        return self

    @property
    def workload(self) -> tuple[str, str]:
        """Kind and name."""
        assert self.kubernetes is not None, "asked of a workload"
        kind, _, name = self.kubernetes.partition("/")
        return kind, name
