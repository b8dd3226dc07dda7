from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from backends.local.int4 import GROUP, LEVEL_MAX, quantise
from backends.local.int4_cache import FILE_NAME, Int4Cache
from backends.local.weights import INT4_ROWS_MAX, Int4Linear


def weight(rows: int = 48, columns: int = 192, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_no_weight_inside_the_chosen_range_is_off_by_more_than_half_a_level() -> None:
    given = weight().float()
    quantised = quantise(given)
    wide = quantised.widened(torch.float32)
    scales = quantised.scales.float().repeat_interleave(GROUP, 1)
    levels = quantised.unpacked()
    inside = (levels > 0) & (levels < LEVEL_MAX)
    assert bool(((wide - given).abs() <= 0.5001 * scales)[inside].all())
    assert inside.float().mean() > 0.9


def test_the_whole_error_is_less_than_with_the_whole_range() -> None:
    given = weight(256, 576).float()
    groups = given.view(256, -1, GROUP)
    lowest, highest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = (highest - lowest) / LEVEL_MAX
    plain = (torch.round((groups - lowest) / scales) * scales + lowest).view_as(given)
    assert (quantise(given).widened(torch.float32) - given).norm() < 0.97 * (plain - given).norm()


def test_a_group_of_equal_weights_is_exact() -> None:
    given = torch.cat((torch.zeros(3, GROUP), torch.full((3, GROUP), -0.75)), 1)
    wide = quantise(given).widened(torch.float32)
    torch.testing.assert_close(wide[:, :GROUP], given[:, :GROUP])
    torch.testing.assert_close(wide[:, GROUP:], given[:, GROUP:], rtol=2**-8, atol=0.0)


def test_it_takes_less_than_a_third_of_bfloat16() -> None:
    given = weight(512, 576)
    assert quantise(given).nbytes < 0.3 * given.nbytes


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, INT4_ROWS_MAX, INT4_ROWS_MAX + 1, 40])
def test_either_kernel_multiplies_by_the_same_weights_up_to_the_product_s_own_rounding(
    rows: int, *, biased: bool
) -> None:
    quantised = quantise(weight())
    given = weight(rows, 192, seed=2)
    bias = weight(1, 48, seed=3)[0] if biased else None
    wanted = given.double() @ quantised.widened(torch.float64).t() + (0.0 if bias is None else bias.double())
    got = Int4Linear(quantised, torch.bfloat16, bias)(given)
    assert got.dtype == torch.bfloat16
    error = (got.double() - wanted).norm() / wanted.norm()
    rounding = (wanted.bfloat16().double() - wanted).norm() / wanted.norm()
    assert error < 2 * rounding, "no other precision above the border than below it"


def test_other_types_than_bfloat16_get_the_same_weights() -> None:
    quantised = quantise(weight())
    given = weight(3, 192, seed=2).double()
    torch.testing.assert_close(
        Int4Linear(quantised, torch.float64)(given), given @ quantised.widened(torch.float64).t()
    )


class Source:
    """A checkpoint's file, and how often its weight was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "model.safetensors"
        self.asked = 0
        self.write(1)

    def write(self, seed: int) -> None:
        save_file({"w": weight(seed=seed)}, self.path)
        self._seed = seed

    def load(self) -> Tensor:
        cache = Int4Cache(self.folder, [self.path])
        got = cache.weight("w", self._read).widened(torch.float32)
        cache.save()
        assert torch.equal(got, quantise(weight(seed=self._seed)).widened(torch.float32))
        return got

    def _read(self) -> Tensor:
        self.asked += 1
        return weight(seed=self._seed)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path)


def test_weights_are_quantised_once_and_then_read(source: Source) -> None:
    source.load()
    source.load()
    assert source.asked == 1
    assert sorted(path.name for path in source.folder.iterdir()) == [FILE_NAME, "model.safetensors"]


def test_another_checkpoint_s_weights_are_not_taken(source: Source) -> None:
    source.load()
    source.write(2)
    source.load()
    source.load()
    assert source.asked == 2


@pytest.mark.parametrize("kept", [0, 4, 200, -1])
def test_a_torn_file_is_made_again(source: Source, kept: int) -> None:
    source.load()
    path = source.folder / FILE_NAME
    path.write_bytes(path.read_bytes()[:kept])
    source.load()
    source.load()
    assert source.asked == 2


def test_a_folder_that_can_t_be_written_to_costs_no_more_than_time(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr("backends.local.int4_cache.tempfile.mkstemp", refuse)
    source.load()
    source.load()
    assert source.asked == 2
