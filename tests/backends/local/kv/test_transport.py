import pytest
import torch

from backends.local.kv.pool import FP8, KVPool
from backends.local.kv.transport import layout_of, pack, packed_bytes, unpack


def pool(stored: torch.dtype, pages: int = 8) -> KVPool:
    return KVPool(layers=3, pages=pages, page_size=4, kv_heads=2, head_size=8, dtype=torch.float32, stored=stored)


def filled(stored: torch.dtype) -> KVPool:
    source = pool(stored)
    generator = torch.Generator().manual_seed(3)
    for layer in range(3):
        source.store(layer, torch.arange(32), torch.randn(32, 32, generator=generator))
    return source


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, FP8])
def test_pages_arrive_as_they_left_wherever_they_go(stored: torch.dtype) -> None:
    source, target = filled(stored), pool(stored)
    data = pack(source, [5, 0, 7])
    assert len(data) == packed_bytes(source, 3)
    unpack(target, [1, 6, 2], bytearray(data), skip=0)
    for layer in range(3):
        for there, here in zip((1, 6, 2), (5, 0, 7), strict=True):
            for moved, kept in zip(
                target.fetch(layer, torch.tensor([there]), 1), source.fetch(layer, torch.tensor([here]), 1), strict=True
            ):
                assert torch.equal(moved, kept)


@pytest.mark.parametrize("stored", [torch.float32, FP8])
def test_pages_that_are_skipped_and_all_others_stay_as_they_are(stored: torch.dtype) -> None:
    source, target = filled(stored), pool(stored)
    unpack(target, [1, 6], bytearray(pack(source, [5, 0])), skip=1)
    assert not target.values[:, [0, 1, 2, 3, 4, 5, 7]].view(torch.uint8).any()
    assert torch.equal(target.values[:, 6].view(torch.uint8), source.values[:, 0].view(torch.uint8))


def test_a_copy_is_a_copy() -> None:
    source = filled(torch.float32)
    data = pack(source, [1])
    before = bytes(data)
    source.store(0, torch.arange(32), torch.zeros(32, 32))
    assert bytes(data) == before


def test_layouts_differ_where_bytes_could_not_be_read() -> None:
    assert layout_of(pool(torch.float32)) == layout_of(pool(torch.float32, pages=3))
    assert layout_of(pool(torch.float32)) != layout_of(pool(FP8))
