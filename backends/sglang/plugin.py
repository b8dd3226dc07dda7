"""Page tags inside SGLang: hooks into its scheduler, and with pool_hooks.py into its pools. SGLang alone loads this.

Entry point `pagegate-page-tags` of the group `sglang.srt.plugins`; nothing happens unless PAGEGATE_PAGE_TAGS=1. Ahead
of each forward pass every page that a request of the batch reads or writes is compared with the tag that the request
was given (page_guard.py), where the pools are and on the stream of the pass, whatever is scheduled meanwhile. A request
that holds a foreign page writes to the padding page instead, its token of that pass is discarded, and it is aborted
alone; its foreign pages are neither freed nor cached.

SGLang only logs a plugin that fails and serves on without it. So this one says in /metrics and /server_info that it is
active, once it has seen that all its hooks are in place; whoever needs tags asks for that line (attach.py). What it
knows stands in `POOL_HOOKS` and in `_refusal`. Anything else is refused, which shows as a line that is missing or 0.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from backends.page_tags import ABORT_MESSAGE, ABORT_STATUS, ABORT_TYPE, ACTIVE_METRIC
from backends.sglang.page_guard import PageGuard, Ranks, Verdict
from backends.sglang.page_steps import Writes
from backends.sglang.pool_hooks import POOL_HOOKS, give, guard_of, row_of, withhold

_SWITCH = "PAGEGATE_PAGE_TAGS"
# For tests: a request whose id begins with this has its last page freed under it, at its third token, or before its
# prompt is computed where it is only computed for another server.
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


def _start(original: _Call, scheduler: Any, *arguments: Any, **options: Any) -> None:
    """The scheduler stands and its pools are empty: from here on pages are guarded, or it is said why not."""
    original(scheduler, *arguments, **options)
    allocator, rows = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
    refusal = _refusal(scheduler, allocator, rows)
    _say_whether_active(active=refusal is None)
    if refusal is not None:
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
        give(holder, guard)
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


def _say_whether_active(*, active: bool) -> None:
    from prometheus_client import Gauge  # noqa: PLC0415 - as in _Metrics

    # Of several ranks' the least: one that is not guarded is enough.
    Gauge(ACTIVE_METRIC, "1 while pages are guarded.", multiprocess_mode="livemin").set(int(active))


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
        self._pairs = self._requests = 0

    def report(self, guard: PageGuard) -> None:
        self._checked.inc(guard.pairs_checked - self._pairs)
        self._aborted.inc(guard.quarantine.requests_aborted - self._requests)
        self._quarantined.set(len(guard.quarantine))
        self._pairs, self._requests = guard.pairs_checked, guard.quarantine.requests_aborted


def _internal_state(original: _Call, scheduler: Any, *arguments: Any, **options: Any) -> Any:
    """What /server_info says of this scheduler."""
    answer = original(scheduler, *arguments, **options)
    guard = guard_of(scheduler)
    answer.internal_state["page_tags"] = {
        "active": guard is not None,
        "pages": 0 if guard is None else guard.pages,
        "pairs_checked": 0 if guard is None else guard.pairs_checked,
        "requests_aborted": 0 if guard is None else guard.quarantine.requests_aborted,
        "pages_quarantined": 0 if guard is None else len(guard.quarantine),
    }
    return answer


def _resolve_inputs(original: _Call, batch: Any, *arguments: Any, **options: Any) -> None:
    """SGLang calls this on the stream of the pass, right before the pass, whoever runs it."""
    original(batch, *arguments, **options)
    guard = guard_of(batch.req_to_token_pool)
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
    if guard_of(scheduler) is None:
        return original(scheduler, batch, *arguments, **options)
    _inject_faults(scheduler, batch)
    batch._pagegate_verdict = None  # noqa: SLF001 - our own attribute
    result = original(scheduler, batch, *arguments, **options)
    result._pagegate_verdict = batch._pagegate_verdict  # noqa: SLF001 - our own attribute
    return result


def _process_result(original: _Call, scheduler: Any, batch: Any, result: Any, *arguments: Any, **options: Any) -> Any:
    """Before any token of the pass leaves."""
    guard = guard_of(scheduler)
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
    row = row_of(request)
    new = [] if row is None else guard.contain(row, request.kv.kv_allocated_len)
    withhold(scheduler.token_to_kv_pool_allocator, guard)
    log.error("page tags: request %s stopped, pages %s quarantined", request.rid, new)


def _check_pool(original: _Call, checker: Any, *arguments: Any, **options: Any) -> tuple[bool, str]:
    """SGLang stops the server when free and used pages don't add up. With pages in quarantine they can't."""
    leaks, message = original(checker, *arguments, **options)
    guard = guard_of(checker.token_to_kv_pool_allocator)
    return bool(leaks) and not (guard is not None and len(guard.quarantine)), message


def _inject_faults(scheduler: Any, batch: Any) -> None:
    prefix = os.environ.get(_FAULT)  # noqa: TID251 - as in register
    if not prefix:
        return
    allocator = scheduler.token_to_kv_pool_allocator
    at_token = 0 if scheduler.disaggregation_mode.value == "prefill" else _FAULT_AT_TOKEN
    for request in batch.reqs:
        if request.rid.startswith(prefix) and len(request.output_ids) == at_token and not request.to_finish:
            row = scheduler.req_to_token_pool.req_to_token[row_of(request)]
            last = row[request.kv.kv_allocated_len - 1 :][:1].to(torch.int64)
            if allocator.page_size == 1:
                allocator.free(last)
            else:
                allocator._release_page_ids(last // allocator.page_size)  # noqa: SLF001 - as if it were gone


_CHECKER = "sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker"
_SCHEDULER = "sglang.srt.managers.scheduler"
_SCHEDULER_HOOKS: dict[str, _Call] = {
    f"{_SCHEDULER}.Scheduler.__init__": _start,
    f"{_SCHEDULER}.Scheduler.run_batch": _run_batch,
    f"{_SCHEDULER}.Scheduler.process_batch_result": _process_result,
    f"{_SCHEDULER}.Scheduler.get_internal_state": _internal_state,
    f"{_SCHEDULER}.resolve_forward_inputs": _resolve_inputs,
    f"{_CHECKER}._check_full_pool": _check_pool,
}
_HOOKS = {version: _SCHEDULER_HOOKS | hooks for version, hooks in POOL_HOOKS.items()}
