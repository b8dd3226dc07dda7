"""For tests: lets SGLang's prefill side hand pages over without a GPU. A plugin of its own, loaded by SGLang alone.

Mooncake's sender takes page indices that are still on their way from a GPU, behind a CUDA event; on a CPU there is no
event to make. Told that it can't take those, SGLang copies the indices first.
"""

from collections.abc import Callable
from typing import Any

_DISAGGREGATION = "sglang.srt.managers.scheduler.Scheduler.init_disaggregation"


def register() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import (  # type: ignore[import-not-found]  # noqa: PLC0415  SGLang's own environment has it, ours has not
        HookRegistry,
        HookType,
    )

    HookRegistry.register(_DISAGGREGATION, _start, HookType.AROUND)


def _start(original: Callable[..., Any], scheduler: Any) -> Any:
    if scheduler.server_args.disaggregation_mode == "prefill":
        from sglang.srt.disaggregation.mooncake.conn import (  # type: ignore[import-not-found]  # noqa: PLC0415  as above
            MooncakeKVSender,
        )

        MooncakeKVSender.supports_host_tensor_indices = False
    return original(scheduler)
