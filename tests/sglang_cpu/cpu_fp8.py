"""For tests: lets SGLang keep an FP8 KV cache on a CPU without AMX. A plugin of its own, loaded by SGLang alone.

SGLang gates `--kv-cache-dtype fp8_e4m3` on AMX because of its fast kernel; the pool itself stores by a cast and the
plain torch attention reads by another, without scales. The gate asks the platform, so while the pools are configured
the platform says that it is no CPU.
"""

from collections.abc import Callable
from typing import Any

_MODULE = "sglang.srt.mem_cache.kv_cache_configurator"


class _NotCpu:
    """The platform, except for one answer."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def is_cpu(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)


def register() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import (  # type: ignore[import-not-found]  # noqa: PLC0415  SGLang's own environment has it, ours has not
        HookRegistry,
        HookType,
    )

    HookRegistry.register(f"{_MODULE}.KVCacheConfigurator.configure", _configure, HookType.AROUND)


def _configure(original: Callable[..., Any], configurator: Any, **options: Any) -> Any:
    from sglang.srt.mem_cache import (  # type: ignore[import-not-found]  # noqa: PLC0415  as above
        kv_cache_configurator,
    )

    platform = kv_cache_configurator.current_platform
    kv_cache_configurator.current_platform = _NotCpu(platform)
    try:
        return original(configurator, **options)
    finally:
        kv_cache_configurator.current_platform = platform
