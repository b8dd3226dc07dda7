"""Several ranks run the same batches and each checks its own book: what one finds, all act on."""

import multiprocessing
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from backends.sglang.page_guard import PageGuard, Ranks

RANKS = 2
PAGE = 4
Seen = tuple[int, list[int], list[int], list[int]]


def _rank(number: int, meeting: str, answers: "SimpleQueue[Seen]") -> None:
    """Two requests in rows 1 and 2 on pages 1 and 2; on rank 0 alone, page 2 is lost."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=RANKS)
    group = dist.group.WORLD
    assert group is not None
    row_slots = torch.zeros((3, 2 * PAGE), dtype=torch.int32)
    guard = PageGuard(row_slots, pages=4, page_tokens=PAGE, ranks=Ranks(group, group))
    guard.rehearse()
    for row in (1, 2):
        slots = torch.arange(row * PAGE, (row + 1) * PAGE)
        guard.handed_out(slots)
        row_slots[row, :PAGE] = slots.to(torch.int32)
        guard.written_run(row, 0, PAGE)
    if number == 0:
        guard.released(torch.tensor([2]))
    writes = row_slots[1:, PAGE - 1].to(torch.int64)
    failed = guard.check_decode(torch.tensor([1, 2]), torch.tensor([PAGE, PAGE]), writes).failed()
    answers.put((number, failed, writes.tolist(), guard.contain(2, PAGE)))
    dist.destroy_process_group()


@pytest.mark.load
@pytest.mark.timeout(120)
def test_a_page_that_one_rank_has_lost_stops_the_request_on_all(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    answers: SimpleQueue[Seen] = spawn.SimpleQueue()
    processes = [spawn.Process(target=_rank, args=(n, str(tmp_path / "meeting"), answers)) for n in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        assert process.exitcode == 0
    seen = sorted(answers.get() for _ in processes)
    # Position 1 is the request in row 2; its write goes to padding, and page 2 is in quarantine on both.
    assert seen == [(0, [1], [2 * PAGE - 1, 0], [2]), (1, [1], [2 * PAGE - 1, 0], [2])]
