"""Page tags inside SGLang: hooks into its allocators, its table of rows and its scheduler. SGLang alone loads this.

Entry point `pagegate-page-tags` of the group `sglang.srt.plugins`; nothing happens unless PAGEGATE_PAGE_TAGS=1. Before
each forward pass every page that a request of the batch reads or writes is compared with the tag that the request was
given (page_guard.py). A request that holds a foreign page is aborted alone: its row is pointed at the padding page, its
token of that step is discarded, its pages are neither freed nor cached.

SGLang only logs a plugin that fails and serves on without it. So this one says in /metrics that it is active, once it
has seen that all its hooks are in place; whoever needs tags asks for that line (attach.py). Known are: SGLang 0.5.23,
one rank, pools on the CPU, no prefill/decode pair. Anything else is refused, which shows as the missing line.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backends.page_tags import ACTIVE_METRIC
from backends.sglang.page_guard import PADDING_PAGE, PageGuard

_KNOWN_VERSIONS = frozenset({"0.5.23"})
_SWITCH = "PAGEGATE_PAGE_TAGS"
# For tests: a request whose id begins with this has its last page freed under it, at its third token.
_FAULT = "PAGEGATE_PAGE_TAGS_FAULT"
_FAULT_AT_TOKEN = 3
_ATTRIBUTE = "_pagegate_page_guard"
_ABORT_STATUS = 500
_ABORT_TYPE = "integrity_abort"
_ABORT_MESSAGE = "a cache page changed hands under this request (page tags)"

_Call = Callable[..., Any]
log = logging.getLogger(__name__)


class PluginRefused(RuntimeError):
    """The plugin does not know how to guard this server; SGLang logs it, and the server stays without tags."""


def register() -> None:
    """Called by SGLang in each of its processes. Raises PluginRefused for a version whose hook points are not known."""
    if os.environ.get(_SWITCH) != "1":  # noqa: TID251 - SGLang's process, which our settings don't reach
        return
    import sglang  # type: ignore[import-not-found]  # noqa: PLC0415  SGLang's own environment has it, ours has not
    from sglang.srt.plugins.hook_registry import (  # type: ignore[import-not-found]  # noqa: PLC0415  as above
        HookRegistry,
        HookType,
    )

    if sglang.__version__ not in _KNOWN_VERSIONS:
        raise PluginRefused(f"page tags know SGLang {', '.join(sorted(_KNOWN_VERSIONS))}, not {sglang.__version__}")
    for target, hook in _HOOKS.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def _guard_of(holder: object) -> PageGuard | None:
    guard = getattr(holder, _ATTRIBUTE, None)
    assert guard is None or isinstance(guard, PageGuard)
    return guard


def _start(original: _Call, scheduler: Any, *arguments: Any, **options: Any) -> None:
    """The scheduler stands and its pools are empty: from here on pages are guarded, or it is said why not."""
    original(scheduler, *arguments, **options)
    allocator, rows = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
    if refusal := _refusal(scheduler, allocator, rows):
        log.error("page tags are NOT active: %s", refusal)
        return
    guard = PageGuard(
        pages=allocator.size // allocator.page_size,
        page_tokens=allocator.page_size,
        rows=rows.req_to_token.shape[0],
        row_tokens=rows.req_to_token.shape[1],
    )
    for holder in (scheduler, allocator, rows):
        setattr(holder, _ATTRIBUTE, guard)
    scheduler._pagegate_page_tag_metrics = _Metrics()  # noqa: SLF001 - our own attribute
    log.info("page tags are active: %d pages of %d tokens", guard.table.total_pages - 1, guard.page_tokens)


def _refusal(scheduler: Any, allocator: Any, rows: Any) -> str | None:
    """Why this scheduler can't be guarded; None if it can."""
    from sglang.srt.mem_cache.allocator.paged import (  # type: ignore[import-not-found]  # noqa: PLC0415  as in register
        PagedTokenToKVPoolAllocator,
    )
    from sglang.srt.mem_cache.allocator.token import (  # type: ignore[import-not-found]  # noqa: PLC0415  as in register
        TokenToKVPoolAllocator,
    )
    from sglang.srt.mem_cache.memory_pool import (  # type: ignore[import-not-found]  # noqa: PLC0415  as in register
        ReqToTokenPool,
    )
    from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: PLC0415 - as in register

    arguments = scheduler.server_args
    ranks = (arguments.tp_size, arguments.pp_size, arguments.dp_size)
    if missing := set(_HOOKS) - set(HookRegistry._patched):  # noqa: SLF001 - nothing else says what was applied
        return f"SGLang did not apply the hooks on {', '.join(sorted(missing))}"
    if type(allocator) not in (PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator) or type(rows) is not ReqToTokenPool:
        return f"{type(allocator).__name__} and {type(rows).__name__} are not known"
    if rows.req_to_token.device.type != "cpu":
        return f"pools on {rows.req_to_token.device.type} are not known"
    if ranks != (1, 1, 1) or arguments.disaggregation_mode != "null" or arguments.speculative_algorithm is not None:
        return "several ranks, pairs and speculative decoding are not known"
    return None


class _Metrics:
    """Lines of SGLang's own /metrics."""

    def __init__(self) -> None:
        # SGLang depends on it; imported late, since SGLang says first where the processes' numbers are gathered.
        from prometheus_client import Counter, Gauge  # noqa: PLC0415 - see above

        self._checked = Counter("pagegate:page_tags_pairs_checked", "Pages compared with the tags of their requests.")
        self._aborted = Counter("pagegate:page_tags_requests_aborted", "Requests stopped because of a foreign page.")
        self._quarantined = Gauge(
            "pagegate:page_tags_pages_quarantined", "Pages out of circulation.", multiprocess_mode="livemax"
        )
        Gauge(ACTIVE_METRIC, "1 while pages are guarded.", multiprocess_mode="livemax").set(1)
        self._pairs = self._requests = 0

    def report(self, guard: PageGuard) -> None:
        self._checked.inc(guard.pairs_checked - self._pairs)
        self._aborted.inc(guard.quarantine.requests_aborted - self._requests)
        self._quarantined.set(len(guard.quarantine))
        self._pairs, self._requests = guard.pairs_checked, guard.quarantine.requests_aborted


def _hand_out(original: _Call, allocator: Any, *arguments: Any, **options: Any) -> Tensor | None:
    slots: Tensor | None = original(allocator, *arguments, **options)
    guard = _guard_of(allocator)
    if guard is not None and slots is not None:
        guard.handed_out(slots)
    return slots


def _release_pages(original: _Call, allocator: Any, *page_ids: Tensor) -> None:
    guard = _guard_of(allocator)
    original(allocator, *(page_ids if guard is None else [guard.released(pages) for pages in page_ids]))


def _release_tokens(original: _Call, allocator: Any, free_index: Tensor) -> None:
    """Pages of one token. While frees are gathered into a group nothing is freed yet; its end comes by here again."""
    guard = _guard_of(allocator)
    if guard is None or allocator.free_group is not None:
        original(allocator, free_index)
    else:
        original(allocator, guard.released(free_index))


def _clear(original: _Call, allocator: Any) -> None:
    original(allocator)
    guard = _guard_of(allocator)
    if guard is not None:
        guard.cleared()
        _withhold(allocator, guard)


def _withhold(allocator: Any, guard: PageGuard) -> None:
    """Take quarantined pages off the free lists."""
    allocator.merge_and_sort_free()
    pages = allocator.free_pages.tolist()
    allocator.free_pages = torch.tensor(guard.quarantine.usable(pages), dtype=allocator.free_pages.dtype)


def _take_rows(original: _Call, pool: Any, need_size: int) -> list[int] | None:
    rows: list[int] | None = original(pool, need_size)
    guard = _guard_of(pool)
    if guard is not None and rows:
        guard.rows_taken(rows)
    return rows


def _write(original: _Call, pool: Any, indices: tuple[Any, Any], values: Tensor) -> None:
    original(pool, indices, values)
    guard = _guard_of(pool)
    if guard is None:
        return
    rows, positions = indices
    if isinstance(positions, slice):
        assert positions.step is None, "SGLang writes runs of positions"
        positions = torch.arange(positions.start or 0, positions.stop)
        rows = torch.full_like(positions, int(rows))
    if len(positions):
        guard.written(rows.to(torch.int64), positions.to(torch.int64), values)


def _run_batch(original: _Call, scheduler: Any, batch: Any, *arguments: Any, **options: Any) -> Any:
    guard = _guard_of(scheduler)
    if guard is None or not batch.reqs:
        return original(scheduler, batch, *arguments, **options)
    _inject_faults(scheduler, batch)
    requests, row_slots = batch.reqs, scheduler.req_to_token_pool.req_to_token
    rows = [request.kv.req_pool_idx for request in requests]
    stale = guard.stale_columns(rows, [request.kv.kv_allocated_len for request in requests], row_slots)
    for position, columns in stale.items():
        new = guard.contain(rows[position], columns, row_slots)
        _padding_writes(batch, position)
        _abort(requests[position])
        log.error("page tags: request %s stopped, pages %s quarantined", requests[position].rid, new)
    if stale:
        _withhold(scheduler.token_to_kv_pool_allocator, guard)
    result = original(scheduler, batch, *arguments, **options)
    for position in stale:
        if getattr(result, "next_token_ids", None) is not None:
            # It was computed from padding and is sent to nobody; what it was is not kept either.
            result.next_token_ids[position] = 0
    scheduler._pagegate_page_tag_metrics.report(guard)  # noqa: SLF001 - our own attribute
    return result


def _padding_writes(batch: Any, position: int) -> None:
    """What this request would store in this step goes to the padding page."""
    if batch.forward_mode.is_extend():
        first = sum(batch.extend_lens[:position])
        batch.out_cache_loc[first : first + batch.extend_lens[position]] = PADDING_PAGE
    else:
        batch.out_cache_loc[position] = PADDING_PAGE


def _abort(request: Any) -> None:
    """Ends it at the end of this step, whichever phase it is in; nothing of it goes into the prefix cache."""
    from sglang.srt.managers.schedule_batch import (  # type: ignore[import-not-found]  # noqa: PLC0415  as in register
        FINISH_ABORT,
    )

    reason = FINISH_ABORT(_ABORT_MESSAGE, _ABORT_STATUS, _ABORT_TYPE)
    request.skip_radix_cache_insert = True
    request.discard_output_reason = reason  # a prompt's last chunk looks here
    request.to_finish = reason  # decoding looks here


def _check_pool(original: _Call, checker: Any, *arguments: Any, **options: Any) -> tuple[bool, str]:
    """SGLang stops the server when free and used pages don't add up. With pages in quarantine they can't."""
    leaks, message = original(checker, *arguments, **options)
    guard = _guard_of(checker.token_to_kv_pool_allocator)
    return bool(leaks) and not (guard is not None and len(guard.quarantine)), message


def _inject_faults(scheduler: Any, batch: Any) -> None:
    prefix = os.environ.get(_FAULT)  # noqa: TID251 - as in register
    if not prefix:
        return
    allocator = scheduler.token_to_kv_pool_allocator
    for request in batch.reqs:
        if request.rid.startswith(prefix) and len(request.output_ids) == _FAULT_AT_TOKEN and not request.to_finish:
            row = scheduler.req_to_token_pool.req_to_token[request.kv.req_pool_idx]
            last = row[request.kv.kv_allocated_len - 1 :][:1].to(torch.int64)
            allocator.free_page_ids(last // allocator.page_size)


_ALLOCATORS = "sglang.srt.mem_cache.allocator"
_CHECKER = "sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker"
_HOOKS: dict[str, _Call] = {
    "sglang.srt.managers.scheduler.Scheduler.__init__": _start,
    "sglang.srt.managers.scheduler.Scheduler.run_batch": _run_batch,
    f"{_CHECKER}._check_full_pool": _check_pool,
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.alloc_rows": _take_rows,
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.write": _write,
    f"{_ALLOCATORS}.paged.PagedTokenToKVPoolAllocator.alloc": _hand_out,
    f"{_ALLOCATORS}.paged.PagedTokenToKVPoolAllocator.alloc_extend": _hand_out,
    f"{_ALLOCATORS}.paged.PagedTokenToKVPoolAllocator.alloc_decode": _hand_out,
    f"{_ALLOCATORS}.paged.PagedTokenToKVPoolAllocator._release_page_ids": _release_pages,
    f"{_ALLOCATORS}.paged.PagedTokenToKVPoolAllocator.clear": _clear,
    f"{_ALLOCATORS}.token.TokenToKVPoolAllocator.alloc": _hand_out,
    f"{_ALLOCATORS}.token.TokenToKVPoolAllocator.free": _release_tokens,
    f"{_ALLOCATORS}.token.TokenToKVPoolAllocator.clear": _clear,
}
