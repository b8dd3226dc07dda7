import random

import pytest
import torch
from torch import Tensor

from backends.local.attention import Extent, attend_decode, attend_prompt, lay_out
from backends.local.kv.pool import KVPool

KV_HEADS, GROUP, SIZE, PAGE = 2, 3, 8, 4
LAYER = 1


def dense(queries: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """Plain causal attention of one sequence's new tokens over all of its keys, in float64."""
    keys, values = (one.repeat_interleave(GROUP, dim=1) for one in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries, keys) / SIZE**0.5
    hidden = torch.arange(keys.shape[0])[None, :] > torch.arange(start, start + len(queries))[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


@pytest.mark.parametrize(
    ("decode", "prefill"),
    [
        ([9], []),
        ([13, 9, 1], []),
        ([2000, 1500, 40, 3, 3], []),
        ([], [(7, 7)]),
        ([], [(23, 5), (6, 6), (4, 1)]),
        ([17, 4], [(30, 12), (8, 8)]),
    ],
)
def test_paged_attention_equals_dense_attention(decode: list[int], prefill: list[tuple[int, int]]) -> None:
    torch.manual_seed(3)
    extents = [(length, 1) for length in decode] + prefill
    numbers = list(range(sum(-(-length // PAGE) for length, _ in extents) + 3))
    random.Random(5).shuffle(numbers)
    pool = KVPool(layers=2, pages=len(numbers), page_size=PAGE, kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.float64)
    laid: list[Extent] = []
    contents: list[Tensor] = []
    for length, count in extents:
        pages = [numbers.pop() for _ in range(-(-length // PAGE))]
        both = torch.randn(length, 2 * KV_HEADS, SIZE, dtype=torch.float64)
        slots = torch.tensor([pages[at // PAGE] * PAGE + at % PAGE for at in range(length)])
        pool.store(LAYER, slots[: length - count], both[: length - count].flatten(1))
        laid.append(Extent(pages, length, count))
        contents.append(both)
    layout = lay_out(laid[: len(decode)], laid[len(decode) :], PAGE, torch.float64)
    new = torch.cat([both[extent.start :] for both, extent in zip(contents, laid, strict=True)])
    pool.store(LAYER, layout.slots, new.flatten(1))
    queries = torch.randn(len(new), KV_HEADS * GROUP, SIZE, dtype=torch.float64)

    outputs = [] if layout.decode is None else [attend_decode(queries, pool, LAYER, layout.decode)]
    got = torch.cat(outputs + [attend_prompt(queries, pool, LAYER, chunk) for chunk in layout.prefill])

    parts = torch.split(queries, [extent.count for extent in laid])
    wanted = torch.cat(
        [
            dense(part, both[:, :KV_HEADS], both[:, KV_HEADS:], extent.start)
            for part, both, extent in zip(parts, contents, laid, strict=True)
        ]
    )
    torch.testing.assert_close(got, wanted)


def test_one_long_sequence_does_not_pad_the_short_ones() -> None:
    pages = list(range(1000))
    layout = lay_out([Extent(pages, 4000, 1), Extent(pages, 40, 1), Extent(pages, 30, 1)], [], PAGE, torch.float32)
    assert layout.decode is not None
    assert [group.rows for group in layout.decode.groups] == [1, 2]
    assert layout.decode.groups[1].length == 40
