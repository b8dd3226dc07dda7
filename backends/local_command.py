"""The command line of the local engine. Pure; the engine's own process reads it (local/settings.py).

Here, and not in the engine's package, because whoever launches an engine must not import it: it brings torch.
"""

import sys
from pathlib import Path

from backends.engine_tables import Launch, Role, Weights
from backends.halves import Handover
from backends.settings import BackendSettings
from backends.topology import Model


def local_command(
    model: Model, weights: Weights, launch: Launch, role: Role = "unified", handover: Handover | None = None
) -> tuple[str, ...]:
    """Unified, or a half with its `handover`. It leaves when its standard input closes, and outlives no launcher."""
    cache = [] if "--kv-cache-dtype" in launch.extra else ["--kv-cache-dtype", model.kv_cache_dtype]
    half: list[str] = []
    if handover is not None:
        half = ["--role", role]
        if handover.bootstrap_port is not None:
            half += ["--disaggregation-bootstrap-port", str(handover.bootstrap_port)]
    sized = [] if launch.running_requests_max is None else ["--max-running-requests", str(launch.running_requests_max)]
    return (
        *(launch.python, "-m", "backends.local.server"),
        *("--model-path", weights.checkpoint),
        *("--served-model-name", model.id),
        *("--host", launch.host),
        *("--port", str(launch.port)),
        *("--prefill-weights", weights.precision),
        *("--decode-weights", weights.decode_precision or weights.precision),
        *("--page-size", str(model.page_tokens)),
        *("--context-length", str(model.limits.context_tokens)),
        *cache,
        *sized,
        *half,
        *launch.extra,
        "--exit-with-parent",
    )


def embedded_launch(
    settings: BackendSettings, cache_dir: Path, host: str, port: int, *, encoder: tuple[Path, str] | None = None
) -> Launch:
    """How the embedded engine is started: with this process's interpreter, by the settings of `[engine]`.

    What it compiles for this machine is kept in `cache_dir`. encoder: folder and public id of an embedding model that
    it serves as well.
    """
    extra = ["--kv-cache-bytes", str(settings.kv_cache_bytes), "--kv-cache-dtype", settings.kv_cache_dtype]
    extra += ["--kernel-cache", str(cache_dir / "kernels")]
    if settings.threads is not None:
        extra += ["--threads", str(settings.threads)]
    if encoder is not None:
        extra += ["--embedding-model-path", str(encoder[0]), "--embedding-model-name", encoder[1]]
    return Launch(
        program="local",
        python=str(Path(sys.executable)),
        host=host,
        port=port,
        running_requests_max=settings.running_requests_max,
        extra=tuple(extra),
    )
