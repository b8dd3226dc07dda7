"""Page tags inside SGLang: what its allocators and its table of rows are made to report, and where. plugin.py uses it.

Every path by which pages are handed out, given back or written into a row comes by one of these hooks: prompts, decode
steps, the prefix cache's de-duplication, a decode half's room for a prompt that comes from elsewhere, pages that come
back from host memory, a flush. Where they are in each version of SGLang stands in `POOL_HOOKS`, at the end.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from backends.sglang.page_guard import PageGuard

_Call = Callable[..., Any]
_ATTRIBUTE = "_pagegate_page_guard"


def give(holder: object, guard: PageGuard) -> None:
    """From now on the holder's pages are guarded."""
    setattr(holder, _ATTRIBUTE, guard)


def guard_of(holder: object) -> PageGuard | None:
    """Of an allocator, a table of rows or a scheduler; None if it is not guarded, or not yet."""
    guard = getattr(holder, _ATTRIBUTE, None)
    assert guard is None or isinstance(guard, PageGuard)
    return guard


def row_of(request: Any) -> int | None:
    """Its row in SGLang's table; in 0.5.23 the request's own record of its cache has it."""
    row = request.req_pool_idx if hasattr(request, "req_pool_idx") else request.kv.req_pool_idx
    return None if row is None else int(row)


def _hand_out(original: _Call, allocator: Any, *arguments: Any, **options: Any) -> Tensor | None:
    slots: Tensor | None = original(allocator, *arguments, **options)
    guard = guard_of(allocator)
    if guard is not None and slots is not None:
        guard.handed_out(slots)
    return slots


def _release_pages(original: _Call, allocator: Any, *page_ids: Tensor) -> None:
    guard = guard_of(allocator)
    original(allocator, *(page_ids if guard is None else [guard.released(pages) for pages in page_ids]))


def _release_tokens(original: _Call, allocator: Any, free_index: Tensor) -> None:
    """Pages of one token. While frees are gathered into a group nothing is freed yet; its end comes by here again."""
    guard = guard_of(allocator)
    # 0.5.17 has a flag, 0.5.23 a list that is there only while it gathers.
    gathers = not getattr(allocator, "is_not_in_free_group", allocator.free_group is None)
    original(allocator, free_index if guard is None or gathers else guard.released(free_index))


def _clear(original: _Call, allocator: Any) -> None:
    original(allocator)
    guard = guard_of(allocator)
    if guard is not None:
        guard.cleared()
        withhold(allocator, guard)


def withhold(allocator: Any, guard: PageGuard) -> None:
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
    new = [position for position, request in enumerate(requests) if row_of(request) is None]
    rows: list[int] | None = original(pool, requests)
    if rows is not None:
        _begin_rows(pool, [rows[position] for position in new])
    return rows


def _begin_rows(pool: Any, rows: Sequence[int]) -> None:
    guard = guard_of(pool)
    if guard is not None:
        for row in rows:
            guard.row_taken(row)


def _write(original: _Call, pool: Any, indices: tuple[Any, Any], values: Tensor) -> None:
    """One row's run of positions, or one position of each of many rows."""
    original(pool, indices, values)
    guard = guard_of(pool)
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
    guard = guard_of(given["req_to_token_pool"])
    if guard is not None:
        ends = given["seq_lens_tensor"]
        guard.written(given["req_pool_indices_tensor"], torch.zeros_like(ends), ends)


_ALLOCATORS = "sglang.srt.mem_cache.allocator"
_ROWS = "sglang.srt.mem_cache.memory_pool.ReqToTokenPool"
_DECODE_ROWS = "sglang.srt.disaggregation.decode.DecodeReqToTokenPool"
_IN_BOTH: dict[str, _Call] = {
    f"{_ROWS}.write": _write,
    f"{_DECODE_ROWS}.write": _write,
    f"{_DECODE_ROWS}.alloc": _take_rows_of_requests,
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
# By SGLang's version. A version is known when its allocators, its tables of rows and the order of its streams have been
# read and its tests have run; a newer one is refused until then.
POOL_HOOKS: dict[str, dict[str, _Call]] = {
    "0.5.17": _IN_BOTH | {f"{_ROWS}.alloc": _take_rows_of_requests},
    "0.5.23": _IN_BOTH | {f"{_ROWS}.alloc_rows": _take_rows},
}
