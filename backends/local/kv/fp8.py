"""FP8 keys and values: e4m3 with one power of two per token and head.

    stored value   float8_e4m3fn: sign, 4 bits of exponent, 3 of mantissa; largest 448; as bytes
    stored scale   one byte b per row of a head: the value is what was stored times 2 ** (b - 127)   (the OCP MX E8M0)

A scale per token is final when its token is written: a scale per page would have to requantise the page's older tokens
whenever a larger one came. A power of two costs no precision, since e4m3 is itself a floating-point format: it only
moves the row's largest value under 448. And it makes reading exact: 4 significant bits times a power of two is a
bfloat16, so every reader gets the same numbers, whatever it multiplies in.

Error bound, tested: half a step of e4m3, |x - x'| <= max(2^-4 |x|, 2^-10 * scale).
"""

import torch
from torch import Tensor

SCALE_BIAS = 127
"""What a scale's byte is above its exponent."""
_MANTISSA_MAX = 0.875
"""448 is 0.875 * 2^9 in `frexp`'s terms."""
_EXPONENT_MAX = 9


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[…, head size] to the stored bytes of its values, of the same shape, and of its scales, […]; both uint8."""
    wide = rows.float()
    mantissas, exponents = torch.frexp(wide.abs().amax(-1))
    # The smallest power of two that brings the largest value to 448 or less.
    exponents = exponents - _EXPONENT_MAX + (mantissas > _MANTISSA_MAX)
    exponents = exponents.clamp(1 - SCALE_BIAS, SCALE_BIAS)
    values = torch.ldexp(wide, -exponents[..., None]).to(torch.float8_e4m3fn)
    return values.view(torch.uint8), (exponents + SCALE_BIAS).to(torch.uint8)


def dequantise(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What `quantise` stored, in `dtype`; exact in bfloat16 and wider types."""
    wide = values.view(torch.float8_e4m3fn).float()
    return torch.ldexp(wide, scales[..., None].int() - SCALE_BIAS).to(dtype)
