import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.local.kv.fp8 import SCALE_BIAS, dequantise, quantise

SIZE = 64
STEP = 2**-4
"""Half a step of three bits of mantissa, as a share of the value."""
SMALLEST = 2**-10
"""Half the smallest step, as a share of the scale."""


@given(
    seed=st.integers(0, 2**32 - 1),
    magnitude=st.integers(-60, 60),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
)
def test_no_value_is_off_by_more_than_half_a_step(seed: int, magnitude: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    given = (torch.randn(5, 3, SIZE, generator=generator).exp() * 2.0**magnitude).to(dtype)
    given = given * torch.randint(-1, 2, given.shape, generator=generator)
    values, scales = quantise(given)
    got = dequantise(values, scales, torch.float64)
    unit = torch.ldexp(torch.ones_like(scales, dtype=torch.float64), scales.int() - SCALE_BIAS)[..., None]
    wanted = given.double()
    assert bool(((got - wanted).abs() <= torch.maximum(wanted.abs() * STEP, unit * SMALLEST)).all())


def test_a_row_s_largest_value_uses_the_upper_half_of_the_range() -> None:
    given = torch.tensor([[1.0, 448.0], [0.1, 449.0], [3e-30, 0.0], [1e30, -3.0]])
    values, _ = quantise(given)
    largest = values.view(torch.float8_e4m3fn).float().abs().amax(-1)
    assert bool((largest <= 448).all())
    assert bool((largest >= 224).all())


def test_a_row_of_zeros_stays_one() -> None:
    values, scales = quantise(torch.zeros(2, SIZE))
    assert dequantise(values, scales, torch.bfloat16).tolist() == [[0.0] * SIZE] * 2


def test_what_is_read_is_exact_in_bfloat16_and_can_be_stored_again_unchanged() -> None:
    given = torch.randn(100, SIZE, generator=torch.Generator().manual_seed(1)).bfloat16()
    values, scales = quantise(given)
    narrow, wide = (dequantise(values, scales, dtype) for dtype in (torch.bfloat16, torch.float64))
    assert torch.equal(narrow.double(), wide)
    assert torch.equal(dequantise(*quantise(narrow), torch.float64), wide)


@pytest.mark.parametrize("neighbour", [1e-6, 1e6])
def test_a_row_s_bytes_do_not_depend_on_its_neighbours(neighbour: float) -> None:
    given = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(2))
    alone = quantise(given[1:2])
    beside = quantise(torch.stack((torch.full((SIZE,), neighbour), given[1])))
    assert torch.equal(alone[0][0], beside[0][1])
    assert torch.equal(alone[1][0], beside[1][1])
