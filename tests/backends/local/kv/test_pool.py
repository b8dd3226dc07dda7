import pytest
import torch

from backends.local.kv.pool import FP8, KVPool, stored_dtype
from backends.local.precision import KVPrecision

SMALL = {"layers": 2, "page_size": 4, "kv_heads": 3, "head_size": 64}


def filled(dtype: torch.dtype, stored: torch.dtype) -> tuple[KVPool, torch.Tensor]:
    """A pool of 8 pages and what layer 1 was given for pages 5 and 2."""
    pool = KVPool(**SMALL, pages=8, dtype=dtype, stored=stored)
    given = torch.randn(8, 6, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
    slots = torch.tensor([20, 21, 22, 23, 8, 9, 10, 11])
    pool.store(1, slots, given.flatten(1))
    return pool, given


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("stored", [None, torch.bfloat16, FP8])
def test_pages_give_back_what_was_stored_to_within_their_type(dtype: torch.dtype, stored: torch.dtype | None) -> None:
    pool, given = filled(dtype, stored or dtype)
    keys, values = pool.fetch(1, torch.tensor([5, 2]), 1)
    assert keys.dtype == values.dtype == dtype
    wanted = given.transpose(0, 1)[None]
    tolerance = {FP8: 2**-4, torch.bfloat16: 2**-8}.get(pool.stored, 0.0)
    torch.testing.assert_close(keys, wanted[:, :3], rtol=tolerance, atol=tolerance * 2**-5)
    torch.testing.assert_close(values, wanted[:, 3:], rtol=tolerance, atol=tolerance * 2**-5)
    untouched, _ = pool.fetch(0, torch.tensor([5, 2]), 1)
    assert not untouched.any()


def test_fp8_holds_at_least_1_9_times_the_tokens_of_bf16_in_the_same_bytes_with_its_scales() -> None:
    shape = {"layers": 30, "page_size": 16, "kv_heads": 3, "head_size": 64}
    wide, narrow = (KVPool.page_bytes(**shape, stored=stored) for stored in (torch.bfloat16, FP8))
    assert (1 << 30) // narrow >= 1.9 * ((1 << 30) // wide)


@pytest.mark.parametrize("stored", [torch.bfloat16, FP8])
def test_a_page_takes_the_bytes_it_is_counted_with(stored: torch.dtype) -> None:
    pool = KVPool(**SMALL, pages=8, dtype=torch.bfloat16, stored=stored)
    scale_bytes = 0 if pool.scales is None else pool.scales.nbytes
    assert pool.values.nbytes + scale_bytes == 8 * KVPool.page_bytes(**SMALL, stored=stored)


def test_the_stored_type_is_the_model_s_own_unless_told_otherwise() -> None:
    assert stored_dtype(KVPrecision.AUTO, torch.float64) == torch.float64
    assert stored_dtype(KVPrecision.BF16, torch.float64) == torch.bfloat16
    assert stored_dtype(KVPrecision.FP8_E4M3, torch.float64) == FP8
