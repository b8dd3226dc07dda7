"""Page tags inside SGLang: hooks into its allocators, its table of rows and its scheduler. SGLang alone loads this.

Entry point `pagegate-page-tags` of the group `sglang.srt.plugins`; nothing happens unless PAGEGATE_PAGE_TAGS=1. Ahead
of each forward pass every page that a request of the batch reads or writes is compared with the tag that the request
was given (page_guard.py), where the pools are and on the stream of the pass, whatever is scheduled meanwhile. A request
that holds a foreign page writes to the padding page instead, its token of that pass is discarded, and it is aborted
alone; its foreign pages are neither freed nor cached.

SGLang only logs a plugin that fails and serves on without it. So this one says in /metrics and /server_info that it is
active, once it has seen that all its hooks are in place; whoever needs tags asks for that line (attach.py). What it
knows stands in `_HOOKS` and in `_refusal`. Anything else is refused, which shows as the missing line.
"""

import logging
import os
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from backends.page_tags import ABORT_MESSAGE, ABORT_STATUS, ABORT_TYPE, ACTIVE_METRIC
from backends.sglang.page_guard import PageGuard, Ranks, Verdict
from backends.sglang.page_steps import Writes

_SWITCH = "PAGEGATE_PAGE_TAGS"
# For tests: a request whose id begins with this has its last page freed under it, at its third token.
_FAULT = "PAGEGATE_PAGE_TAGS_FAULT"
_FAULT_AT_TOKEN = 3

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

    hooks = _HOOKS.get(sglang.__version__)
    if hooks is None:
        raise PluginRefused(f"page tags know SGLang {', '.join(_HOOKS)}, not {sglang.__version__}")
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def _guard_of(holder: object) -> PageGuard | None:
    guard = getattr(holder, "_pagegate_page_guard", None)
    assert guard is None or isinstance(guard, PageGuard)
    return guard


def _start(original: _Call, scheduler: Any, *arguments: Any, **options: Any) -> None:
    """The scheduler stands and its pools are empty: from here on pages are guarded, or it is said why not."""
    original(scheduler, *arguments, **options)
    allocator, rows = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
    if refusal := _refusal(scheduler, allocator, rows):
        log.error("page tags are NOT active: %s", refusal)
        return
    ranks = None
    if scheduler.server_args.tp_size > 1:
        ranks = Ranks(scheduler.tp_group.device_group, scheduler.tp_group.cpu_group)
    guard = PageGuard(
        rows.req_to_token, pages=allocator.size // allocator.page_size, page_tokens=allocator.page_size, ranks=ranks
    )
    guard.rehearse()
    for holder in (scheduler, allocator, rows):
        holder._pagegate_page_guard = guard  # noqa: SLF001 - our own attribute
    scheduler._pagegate_page_tag_metrics = _Metrics()  # noqa: SLF001 - our own attribute
    log.info("page tags are active: %d pages of %d tokens", guard.pages, allocator.page_size)


def _refusal(scheduler: Any, allocator: Any, rows: Any) -> str | None:
    """Why this scheduler can't be guarded; None if it can."""
    import sglang  # noqa: PLC0415 - as in register
    from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: PLC0415 - as in register

    arguments = scheduler.server_args
    device = rows.req_to_token.device.type
    if missing := set(_HOOKS[sglang.__version__]) - set(HookRegistry._patched):  # noqa: SLF001 - nothing else says it
        return f"SGLang did not apply the hooks on {', '.join(sorted(missing))}"
    # By name: a subclass keeps its pages in its own way.
    kinds = (type(allocator).__name__, type(rows).__name__)
    if kinds[0] not in _KNOWN_ALLOCATORS or kinds[1] not in _KNOWN_ROWS:
        return f"{kinds[0]} and {kinds[1]} are not known"
    if device not in ("cpu", "cuda"):
        return f"pools on {device} are not known"
    if arguments.pp_size > 1 or arguments.dp_size > 1 or arguments.speculative_algorithm is not None:
        return "pipeline and data parallelism and speculative decoding are not known"
    return None


_KNOWN_ALLOCATORS = frozenset({"PagedTokenToKVPoolAllocator", "TokenToKVPoolAllocator"})
_KNOWN_ROWS = frozenset({"ReqToTokenPool", "DecodeReqToTokenPool"})


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


def _internal_state(original: _Call, scheduler: Any, *arguments: Any, **options: Any) -> Any:
    """What /server_info says of this scheduler."""
    answer = original(scheduler, *arguments, **options)
    guard = _guard_of(scheduler)
    answer.internal_state["page_tags"] = {
        "active": guard is not None,
        "pages": 0 if guard is None else guard.pages,
        "pairs_checked": 0 if guard is None else guard.pairs_checked,
        "requests_aborted": 0 if guard is None else guard.quarantine.requests_aborted,
        "pages_quarantined": 0 if guard is None else len(guard.quarantine),
    }
    return answer


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
    # 0.5.17 has a flag, 0.5.23 a list that is there only while it gathers.
    gathers = not getattr(allocator, "is_not_in_free_group", allocator.free_group is None)
    original(allocator, free_index if guard is None or gathers else guard.released(free_index))


def _clear(original: _Call, allocator: Any) -> None:
    original(allocator)
    guard = _guard_of(allocator)
    if guard is not None:
        guard.cleared()
        _withhold(allocator, guard)


def _withhold(allocator: Any, guard: PageGuard) -> None:
    """Take quarantined pages off the free lists."""
    if not len(guard.quarantine):
        return
    allocator.merge_and_sort_free()
    free = allocator.free_pages
    usable = guard.quarantine.usable(free.tolist())
    allocator.free_pages = torch.tensor(usable, dtype=free.dtype, device=free.device)


def _take_rows(original: _Call, pool: Any, need_size: int) -> list[int] | None:
    """Rows that nobody has yet."""
    rows: list[int] | None = original(pool, need_size)
    _begin_rows(pool, rows or ())
    return rows


def _take_rows_of_requests(original: _Call, pool: Any, requests: Any) -> list[int] | None:
    """Rows of requests, some of which may have theirs already."""
    new = [position for position, request in enumerate(requests) if _row_of(request) is None]
    rows: list[int] | None = original(pool, requests)
    if rows is not None:
        _begin_rows(pool, [rows[position] for position in new])
    return rows


def _begin_rows(pool: Any, rows: Sequence[int]) -> None:
    guard = _guard_of(pool)
    if guard is not None:
        for row in rows:
            guard.row_taken(row)


def _write(original: _Call, pool: Any, indices: tuple[Any, Any], values: Tensor) -> None:
    """One row's run of positions, or one position of each of many rows."""
    original(pool, indices, values)
    guard = _guard_of(pool)
    if guard is None:
        return
    rows, positions = indices
    if isinstance(positions, slice):
        assert positions.step is None, "SGLang writes runs of positions"
        guard.written_run(int(rows), positions.start or 0, positions.stop)
    else:
        guard.written(rows, positions, positions + 1)


def _write_indices(original: _Call, *arguments: Any, **options: Any) -> None:
    """Whole rows of a batch of prompts; on a GPU by a kernel that goes past `ReqToTokenPool.write`."""
    original(*arguments, **options)
    given = signature(original).bind(*arguments, **options).arguments
    guard = _guard_of(given["req_to_token_pool"])
    if guard is not None:
        ends = given["seq_lens_tensor"]
        guard.written(given["req_pool_indices_tensor"], torch.zeros_like(ends), ends)


def _resolve_inputs(original: _Call, batch: Any, *arguments: Any, **options: Any) -> None:
    """SGLang calls this on the stream of the pass, right before the pass, whoever runs it."""
    original(batch, *arguments, **options)
    guard = _guard_of(batch.req_to_token_pool)
    mode = batch.forward_mode
    if guard is None or not batch.reqs or not (mode.is_decode() or mode.is_extend()):
        return
    rows, lengths, slots = batch.req_pool_indices, batch.seq_lens, batch.out_cache_loc
    if mode.is_decode():
        batch._pagegate_verdict = guard.check_decode(rows, lengths, slots)  # noqa: SLF001 - our own attribute
    else:
        counts = torch.tensor(batch.extend_lens, dtype=torch.int64, pin_memory=rows.is_cuda)
        writes = Writes(slots, counts.to(rows.device, non_blocking=True).cumsum(0))
        batch._pagegate_verdict = guard.check(rows, lengths, writes)  # noqa: SLF001 - our own attribute
    guard.count(batch.seq_lens_cpu)


def _run_batch(original: _Call, scheduler: Any, batch: Any, *arguments: Any, **options: Any) -> Any:
    """The verdict goes with the pass's result, since SGLang keeps only a copy of the batch."""
    if _guard_of(scheduler) is None:
        return original(scheduler, batch, *arguments, **options)
    _inject_faults(scheduler, batch)
    batch._pagegate_verdict = None  # noqa: SLF001 - our own attribute
    result = original(scheduler, batch, *arguments, **options)
    result._pagegate_verdict = batch._pagegate_verdict  # noqa: SLF001 - our own attribute
    return result


def _process_result(original: _Call, scheduler: Any, batch: Any, result: Any, *arguments: Any, **options: Any) -> Any:
    """Before any token of the pass leaves."""
    guard = _guard_of(scheduler)
    verdict: Verdict | None = getattr(result, "_pagegate_verdict", None)
    if guard is None or verdict is None:
        return original(scheduler, batch, result, *arguments, **options)
    for position in verdict.failed():
        _stop(scheduler, guard, batch.reqs[position])
        if result.copy_done is not None:
            result.copy_done.synchronize()
        tokens = getattr(result, "next_token_ids", None)  # an embedding's pass has none
        if tokens is not None:
            # What it was is not kept either.
            tokens[position] = 0
    answer = original(scheduler, batch, result, *arguments, **options)
    scheduler._pagegate_page_tag_metrics.report(guard)  # noqa: SLF001 - our own attribute
    return answer


def _stop(scheduler: Any, guard: PageGuard, request: Any) -> None:
    """Ends it in whichever phase it is in; nothing of it goes into the prefix cache, and no token to anybody."""
    from sglang.srt.managers.schedule_batch import (  # type: ignore[import-not-found]  # noqa: PLC0415  as in register
        FINISH_ABORT,
    )

    if request.finished() or getattr(request, "_pagegate_stopped", False):
        return  # by an earlier verdict: the next pass was under way then
    request._pagegate_stopped = True  # noqa: SLF001 - our own attribute
    reason = FINISH_ABORT(ABORT_MESSAGE, ABORT_STATUS, ABORT_TYPE)
    request.skip_radix_cache_insert = True
    request.discard_output_reason = reason  # 0.5.23: a prompt's last chunk looks here
    request.to_finish = reason
    request.finished_len = len(request.output_ids)
    if scheduler.disaggregation_mode.value == "prefill":
        request.disagg_kv_sender.abort()  # decode must not get its pages
    row = _row_of(request)
    new = [] if row is None else guard.contain(row, request.kv.kv_allocated_len)
    _withhold(scheduler.token_to_kv_pool_allocator, guard)
    log.error("page tags: request %s stopped, pages %s quarantined", request.rid, new)


def _row_of(request: Any) -> int | None:
    """Its row in SGLang's table; in 0.5.23 the request's own record of its cache has it."""
    row = request.req_pool_idx if hasattr(request, "req_pool_idx") else request.kv.req_pool_idx
    return None if row is None else int(row)


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
            row = scheduler.req_to_token_pool.req_to_token[_row_of(request)]
            last = row[request.kv.kv_allocated_len - 1 :][:1].to(torch.int64)
            if allocator.page_size == 1:
                allocator.free(last)
            else:
                allocator._release_page_ids(last // allocator.page_size)  # noqa: SLF001 - as if it were gone


_ALLOCATORS = "sglang.srt.mem_cache.allocator"
_CHECKER = "sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker"
_ROWS = "sglang.srt.mem_cache.memory_pool.ReqToTokenPool"
_DECODE_ROWS = "sglang.srt.disaggregation.decode.DecodeReqToTokenPool"
_SCHEDULER = "sglang.srt.managers.scheduler"
_IN_BOTH: dict[str, _Call] = {
    f"{_SCHEDULER}.Scheduler.__init__": _start,
    f"{_SCHEDULER}.Scheduler.run_batch": _run_batch,
    f"{_SCHEDULER}.Scheduler.process_batch_result": _process_result,
    f"{_SCHEDULER}.Scheduler.get_internal_state": _internal_state,
    f"{_SCHEDULER}.resolve_forward_inputs": _resolve_inputs,
    f"{_CHECKER}._check_full_pool": _check_pool,
    f"{_ROWS}.write": _write,
    f"{_DECODE_ROWS}.write": _write,
    "sglang.srt.mem_cache.allocation.write_cache_indices": _write_indices,
    f"{_ALLOCATORS}.paged.PagedTokenToKVPoolAllocator.alloc": _hand_out,
    f"{_ALLOCATORS}.paged.PagedTokenToKVPoolAllocator.alloc_extend": _hand_out,
    f"{_ALLOCATORS}.paged.PagedTokenToKVPoolAllocator.alloc_decode": _hand_out,
    f"{_ALLOCATORS}.paged.PagedTokenToKVPoolAllocator._release_page_ids": _release_pages,
    f"{_ALLOCATORS}.paged.PagedTokenToKVPoolAllocator.clear": _clear,
    f"{_ALLOCATORS}.token.TokenToKVPoolAllocator.alloc": _hand_out,
    f"{_ALLOCATORS}.token.TokenToKVPoolAllocator.free": _release_tokens,
    f"{_ALLOCATORS}.token.TokenToKVPoolAllocator.clear": _clear,
}
# By SGLang's version: where the hooks go. A version is known when its allocators, its tables of rows and the order of
# its streams have been read and its tests have run; a newer one is refused until then.
_HOOKS: dict[str, dict[str, _Call]] = {
    "0.5.17": _IN_BOTH | {f"{_ROWS}.alloc": _take_rows_of_requests, f"{_DECODE_ROWS}.alloc": _take_rows_of_requests},
    "0.5.23": _IN_BOTH | {f"{_ROWS}.alloc_rows": _take_rows, f"{_DECODE_ROWS}.alloc": _take_rows_of_requests},
}
