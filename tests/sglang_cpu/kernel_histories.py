"""Random histories through page_steps.py and page_kernels.py side by side: after each step both books must be equal.

    python -m tests.sglang_cpu.kernel_histories cpu|cuda [HISTORIES]

On a GPU it runs the kernels themselves; on the CPU Triton's interpreter runs them (TRITON_INTERPRET=1). Ends with 1 and
says where, if they differ.
"""

import random
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from backends.sglang import page_kernels, page_steps
from backends.sglang.page_steps import Book, Writes

ROWS = 6
STEPS = 6


class Twins:
    """The same book twice: [0] is kept by the steps, [1] by the kernels."""

    def __init__(self, device: str, page_tokens: int, pages: int, row_tokens: int) -> None:
        self.device = device
        columns = -(-row_tokens // page_tokens)
        self.books = [
            Book(
                # Some close to the end of their generations.
                tags=torch.tensor([0, *(random.choice([0, 1, 2, 3, -2, -1]) for _ in range(pages))], dtype=torch.int32),
                row_slots=torch.zeros((ROWS, row_tokens), dtype=torch.int32),
                told_pages=torch.zeros((ROWS, columns), dtype=torch.int32),
                told_tags=torch.zeros((ROWS, columns), dtype=torch.int32),
                page_tokens=page_tokens,
            )
        ]
        tags, row_slots, told_pages, told_tags = (tensor.clone().to(device) for tensor in self.books[0][:4])
        self.books.append(Book(tags, row_slots, told_pages, told_tags, page_tokens))

    def both(self, deed: Callable[[Book, int], Tensor | None]) -> None:
        """deed(book, side): its results, and the books after it, must be equal."""
        results = [deed(self.books[0], 0), deed(self.books[1], 1)]
        for mine, theirs in zip((*self.books[0][:4], results[0]), (*self.books[1][:4], results[1]), strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                assert torch.equal(mine, theirs.cpu()), (mine, theirs)

    def on(self, side: int, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device="cpu" if side == 0 else self.device)


def history(device: str, page_tokens: int) -> None:
    """Rows are written, pages handed out and released; then a batch is checked, of prompts or of single tokens."""
    pages, row_tokens = random.choice([(9, 8 * page_tokens), (700, 300 * page_tokens)])
    twins, of = Twins(device, page_tokens, pages, row_tokens), (page_steps, page_kernels)
    for _ in range(STEPS):
        rows = random.sample(range(ROWS), random.randrange(1, ROWS))
        some = random.sample(range(1, pages + 1), random.randrange(1, pages))
        columns = random.randrange(1, row_tokens // page_tokens + 1)
        starts = [random.randrange(columns * page_tokens) for _ in rows]
        ends = [random.randrange(start, columns * page_tokens + 1) for start in starts]
        given = {row: random.choices(range(pages + 1), k=columns) for row in rows}
        slots = [page * page_tokens + i for page in some for i in range(random.choice([1, page_tokens]))]

        def hand_out(book: Book, side: int, slots: list[int] = slots) -> None:
            of[side].hand_out(book, twins.on(side, slots))

        def release(book: Book, side: int, some: list[int] = some) -> None:
            of[side].release(book, twins.on(side, some[: len(some) // 2]))

        def record(
            book: Book,
            side: int,
            rows: list[int] = rows,
            given: dict[int, list[int]] = given,
            spans: tuple[list[int], list[int]] = (starts, ends),
        ) -> None:
            for row in rows:
                pages_of = twins.on(side, given[row])[:, None] * book.page_tokens
                run = (pages_of + torch.arange(book.page_tokens, device=pages_of.device)).flatten()
                book.row_slots[row, : len(run)] = run.to(torch.int32)
            of[side].record(book, *(twins.on(side, numbers) for numbers in (rows, *spans)))

        def check(book: Book, side: int, rows: list[int] = rows, ends: list[int] = ends) -> Tensor:
            lengths = [max(1, end) for end in ends]
            counts = [1 if seed % 2 else length for seed, length in zip(rows, lengths, strict=True)]
            places = [
                book.row_slots[row, length - count : length].to(torch.int64)
                for row, length, count in zip(rows, lengths, counts, strict=True)
            ]
            writes = Writes(torch.cat(places), twins.on(side, counts).cumsum(0))
            if rows[0] % 3 == 0:
                writes.slots[-1] += 1
            failed: Tensor = of[side].check(book, twins.on(side, rows), twins.on(side, lengths), writes)
            of[side].redirect(writes, failed)
            return torch.cat([failed.to(torch.int64), writes.slots])

        for deed in (hand_out, record, check, release, check):
            twins.both(deed)


def main(device: str, histories: int) -> None:
    random.seed(1)
    for number in range(histories):
        history(device, [1, 16, 64][number % 3])
    sys.stdout.write(f"equal in {histories} histories on {device}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 30)
