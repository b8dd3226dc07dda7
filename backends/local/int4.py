"""INT4 weights: 64 neighbours of a row share a scale and a middle. `weights.py` multiplies by them.

    weight   scale * (level - 8) + middle, level in 0 … 15, scale and middle in bfloat16

That is the form which torch's kernel takes (`_weight_int4pack_mm_for_cpu`). For each group, of the ranges a little
narrower than its own, the one with the least squared error is taken: the ends are cut, the rest is finer. A middle of
its own, not a whole number of levels, is worth a fifth of the error (measured on the default model).

Pure functions of tensors.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 64
"""Weights to a scale. It divides 576, the default model's width, as 128 doesn't; 32 is the block of the Q4_1 file which
that model comes from, and would reproduce that file's grid instead of measuring a quantisation."""
LEVEL_MAX = 15
LEVEL_MIDDLE = 8
RANGES = (1.0, 0.95, 0.9, 0.85)
"""Shares of a group's range to try."""


@dataclass(frozen=True, slots=True)
class Int4Weight:
    levels: Tensor
    """[rows, columns / 2] uint8: even columns in the low four bits, odd ones in the high."""
    scales: Tensor
    """[rows, groups] bfloat16."""
    middles: Tensor
    """[rows, groups] bfloat16."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.levels.shape[0], 2 * self.levels.shape[1]

    @property
    def nbytes(self) -> int:
        return self.levels.nbytes + self.scales.nbytes + self.middles.nbytes

    def unpacked(self) -> Tensor:
        """[rows, columns] of levels, uint8."""
        return torch.stack((self.levels & LEVEL_MAX, self.levels >> 4), -1).flatten(1)

    def widened(self, dtype: torch.dtype) -> Tensor:
        """The weights themselves, [rows, columns]."""
        rows, columns = self.shape
        steps = self.unpacked().view(rows, -1, GROUP).float() - LEVEL_MIDDLE
        wide = torch.addcmul(self.middles[..., None].float(), steps, self.scales[..., None].float())
        return wide.view(rows, columns).to(dtype)


def quantise(weight: Tensor) -> Int4Weight:
    """[rows, columns], columns divisible by `GROUP`."""
    rows, columns = weight.shape
    assert columns % GROUP == 0
    groups = weight.float().view(rows, -1, GROUP)
    lowest, highest = groups.amin(-1), groups.amax(-1)
    levels, scales, middles = _quantise_range(groups, lowest, highest, 1.0)
    error = _squared_error(groups, levels, scales, middles)
    for share in RANGES[1:]:
        tried = _quantise_range(groups, lowest, highest, share)
        tried_error = _squared_error(groups, *tried)
        better = tried_error < error
        levels = torch.where(better[..., None], tried[0], levels)
        scales, middles = torch.where(better, tried[1], scales), torch.where(better, tried[2], middles)
        error = torch.where(better, tried_error, error)
    pairs = levels.to(torch.uint8).view(rows, -1, 2)
    return Int4Weight(pairs[..., 0] | (pairs[..., 1] << 4), scales.bfloat16(), middles.bfloat16())


def _quantise_range(groups: Tensor, lowest: Tensor, highest: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """Levels, scales and middles, the latter two already rounded to what will be stored."""
    scales = ((highest - lowest) * (share / LEVEL_MAX)).bfloat16().float()
    middles = ((lowest + highest) / 2 + scales / 2).bfloat16().float()
    # A group of equal weights has no range: its middle says it all, and any scale does.
    scales = torch.where(scales > 0, scales, 1.0)
    levels = torch.round((groups - middles[..., None]) / scales[..., None]).add_(LEVEL_MIDDLE).clamp_(0, LEVEL_MAX)
    return levels, scales, middles


def _squared_error(groups: Tensor, levels: Tensor, scales: Tensor, middles: Tensor) -> Tensor:
    wide = torch.addcmul(middles[..., None], levels - LEVEL_MIDDLE, scales[..., None])
    return wide.sub_(groups).square_().sum(-1)
