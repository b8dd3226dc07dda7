"""Which SGLang the page-tag plugin takes on, and how it says no. SGLang is not here: its modules are stand-ins."""

import sys
from collections.abc import Callable
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from backends.sglang import plugin
from backends.sglang.pool_hooks import POOL_HOOKS


class HookType(Enum):
    AROUND = "around"


class HookRegistry:
    """What SGLang's does, as far as the plugin knows it."""

    registered: dict[str, Callable[..., Any]]
    _patched: set[str]

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], kind: HookType) -> None:
        assert kind is HookType.AROUND
        cls.registered[target] = hook


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A version that is known, with the plugin switched on."""
    module = ModuleType("sglang")
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    vars(module)["__version__"] = "0.5.23"
    vars(registry).update(HookRegistry=HookRegistry, HookType=HookType)
    HookRegistry.registered, HookRegistry._patched = {}, set()
    monkeypatch.setitem(sys.modules, "sglang", module)
    for name in ("sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setenv("PAGEGATE_PAGE_TAGS", "1")
    return module


class PagedTokenToKVPoolAllocator:
    size, page_size = 64, 16


class ReqToTokenPool:
    req_to_token = torch.zeros((2, 32), dtype=torch.int32)


class SlidingWindowAllocator(PagedTokenToKVPoolAllocator):
    pass


def scheduler(**arguments: Any) -> Any:
    known = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "speculative_algorithm": None}
    return SimpleNamespace(server_args=SimpleNamespace(**(known | arguments)))


def refusal(allocator: Any = None, **arguments: Any) -> str | None:
    HookRegistry._patched = set(plugin._HOOKS["0.5.23"])
    return plugin._refusal(scheduler(**arguments), allocator or PagedTokenToKVPoolAllocator(), ReqToTokenPool())


@pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])
def test_a_known_version_gets_all_hooks_of_its_table(sglang: ModuleType, version: str) -> None:
    vars(sglang)["__version__"] = version
    plugin.register()
    assert set(POOL_HOOKS[version]) < set(HookRegistry.registered) == set(plugin._HOOKS[version])


def test_an_unknown_version_is_refused_and_nothing_is_hooked(sglang: ModuleType) -> None:
    vars(sglang)["__version__"] = "0.5.24"
    with pytest.raises(plugin.PluginRefused, match=r"know SGLang 0\.5\.17, 0\.5\.23, not 0\.5\.24"):
        plugin.register()
    assert HookRegistry.registered == {}


def test_nothing_happens_unless_it_is_switched_on(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEGATE_PAGE_TAGS")
    plugin.register()
    assert HookRegistry.registered == {}


def test_known_pools_are_guarded_on_one_rank_and_on_several(sglang: ModuleType) -> None:
    assert refusal() is None
    assert refusal(tp_size=8) is None


def test_what_is_not_known_is_refused_and_named(sglang: ModuleType) -> None:
    assert "SlidingWindowAllocator" in (refusal(SlidingWindowAllocator()) or "")
    assert "pipeline" in (refusal(pp_size=2) or "")
    assert "speculative" in (refusal(speculative_algorithm="EAGLE") or "")


def test_a_hook_that_sglang_did_not_apply_is_noticed(sglang: ModuleType) -> None:
    missing = "sglang.srt.managers.scheduler.resolve_forward_inputs"
    HookRegistry._patched = set(plugin._HOOKS["0.5.23"]) - {missing}
    why = plugin._refusal(scheduler(), PagedTokenToKVPoolAllocator(), ReqToTokenPool())
    assert why == f"SGLang did not apply the hooks on {missing}"
