"""From a checkpoint to an engine: in how many threads, in which order, how long, and what goes wrong is said."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from backends.local.errors import StartError
from backends.local.loading import EngineLoader
from backends.local.read_ahead import read_ahead
from backends.local.settings import EngineSettings


@pytest.fixture(autouse=True)
def threads() -> Iterator[int]:
    """As many as before, afterwards."""
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def settings(folder: Path, threads: int | None = 1) -> EngineSettings:
    return EngineSettings(model_path=folder, served_model_name="tiny", kv_cache_bytes=1 << 20, threads=threads)


def test_weights_that_were_begun_are_not_read_again_and_each_part_is_told(tiny_checkpoint: Path) -> None:
    loader = EngineLoader(settings(tiny_checkpoint))
    loader.begin({"process": 1.0, "imports": 2.0})
    first = loader.load()
    assert list(loader.seconds) == ["process", "imports", "kernels", "weights", "pool", "warm_up", "total"]
    assert loader.seconds["total"] >= 3.0
    second = loader.load()
    assert list(loader.seconds) == ["kernels", "weights", "pool", "warm_up", "total"]
    assert loader.seconds["total"] >= loader.seconds["weights"] + loader.seconds["warm_up"]
    assert first is not second
    assert first.totals.generated_tokens == second.totals.generated_tokens == 0


def test_what_was_compiled_for_one_engine_serves_the_next(tiny_checkpoint: Path) -> None:
    loader = EngineLoader(settings(tiny_checkpoint))
    kernels = [loader.load()._runner._model._kernels for _ in range(2)]
    assert kernels[0] is kernels[1]


@pytest.mark.parametrize("wanted", [None, 1, 2])
def test_the_engine_computes_with_the_threads_that_are_set_whatever_read_its_weights(
    tiny_checkpoint: Path, threads: int, wanted: int | None
) -> None:
    EngineLoader(settings(tiny_checkpoint, wanted)).load()
    assert torch.get_num_threads() == (wanted or threads)


def test_a_folder_that_can_t_be_served_is_told_by_whoever_waits_for_the_engine(tmp_path: Path) -> None:
    loader = EngineLoader(settings(tmp_path))
    loader.begin({})
    with pytest.raises(StartError, match="can't be read"):
        loader.load()


def test_reading_ahead_asks_for_nothing_that_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("nowhere")
    read_ahead(tmp_path)
    read_ahead(tmp_path / "nowhere")


def test_a_command_line_is_read_before_torch_is_there() -> None:
    program = "import sys, backends.local.server; sys.exit('torch' in sys.modules or 'starlette' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
