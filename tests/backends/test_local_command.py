"""The local engine's command line, read by the engine's own parser."""

from pathlib import Path

import pytest

from backends.engine_tables import Launch, Weights
from backends.local.precision import KVPrecision, WeightPrecision
from backends.local.settings import EngineSettings, parse_settings
from backends.local_command import embedded_launch, local_command
from backends.settings import BackendSettings
from backends.topology import Model
from tests.backends.test_topology import model

BOTH = Weights(checkpoint="/m", precision="fp8", decode_precision="int4")


def parsed(launch: Launch, weights: Weights = BOTH, **fields: object) -> EngineSettings:
    command = local_command(Model.model_validate(model(**fields)), weights, launch)
    assert command[1:3] == ("-m", "backends.local.server")
    return parse_settings(command[3:])


def test_precisions_of_the_file_reach_the_engine() -> None:
    settings = parsed(Launch(program="local", port=30000))
    assert (settings.prefill_weights, settings.decode_weights) == (WeightPrecision.FP8, WeightPrecision.INT4)
    assert settings.kv_cache_dtype is KVPrecision.FP8_E4M3


def test_without_a_second_copy_both_phases_use_the_first() -> None:
    settings = parsed(Launch(program="local", port=30000), Weights(checkpoint="/m", precision="bf16"))
    assert settings.prefill_weights is settings.decode_weights is WeightPrecision.BF16


@pytest.mark.parametrize("dtype", ["auto", "bf16", "fp8_e4m3"])
def test_the_embedded_engine_is_sized_by_the_settings(dtype: str, tmp_path: Path) -> None:
    backends = BackendSettings.model_validate({"kv_cache_dtype": dtype, "kv_cache_bytes": 1 << 20, "threads": 2})
    settings = parsed(embedded_launch(backends, tmp_path, "127.0.0.1", 30000))
    assert settings.kv_cache_dtype == dtype
    assert (settings.kv_cache_bytes, settings.threads) == (1 << 20, 2)
    assert settings.kernel_cache == tmp_path / "kernels"
